//! Memory for weights: aligned, zeroed, in huge pages where the system has them.
//!
//! A decode step reads every weight once, so it runs at the speed of memory. With 4 KiB pages a good part of that goes
//! into address translation: huge pages were measured 1.3 to 1.6 times faster. One matrix of a small model is smaller
//! than one huge page, so buffers are cut from shared *slabs*. Memory that nobody wrote to is not resident.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Alignment of every buffer, in bytes: a cache line, and an AVX-512 register.
pub const ALIGN: usize = 64;

/// Size of a slab. Buffers larger than a quarter of this get a mapping of their own.
const SLAB: usize = 64 << 20;

/// The system had no memory for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("could not allocate {bytes} bytes for weights (hint: use a smaller model or a narrower format)")]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub bytes: usize,
}

/// An owned, zero-initialised, 64-byte aligned byte buffer.
pub struct HugeBuffer {
    start: *mut u8,
    len: usize,
    slab: Arc<Slab>,
}

// SAFETY: a buffer is the only owner of its bytes, like a `Box<[u8]>`.
unsafe impl Send for HugeBuffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for HugeBuffer {}

impl HugeBuffer {
    /// A buffer of `len` zero bytes.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub fn zeroed(len: usize) -> Result<HugeBuffer, OutOfMemory> {
        /// The slab that small buffers are cut from, and how much of it is given out.
        static CURRENT: Mutex<(Weak<Slab>, usize)> = Mutex::new((Weak::new(), 0));
        let error = OutOfMemory { bytes: len };
        let size = len.max(1).checked_next_multiple_of(ALIGN).ok_or(error)?;
        let (slab, offset) = if size > SLAB / 4 || cfg!(not(target_os = "linux")) {
            (Arc::new(Slab::new(size, true).ok_or(error)?), 0)
        } else {
            let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
            match current.0.upgrade() {
                Some(slab) if slab.len - current.1 >= size => {
                    let offset = current.1;
                    current.1 += size;
                    (slab, offset)
                }
                _ => {
                    let slab = Arc::new(Slab::new(SLAB, true).ok_or(error)?);
                    *current = (Arc::downgrade(&slab), size);
                    (slab, 0)
                }
            }
        };
        // SAFETY: `offset + size` bytes lie inside the slab: it was made or checked to hold them.
        Ok(HugeBuffer { start: unsafe { slab.start.add(offset) }, len, slab })
    }

    /// As [`HugeBuffer::zeroed`] in pages of the base size: to see what huge ones are worth.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub fn zeroed_in_small_pages(len: usize) -> Result<HugeBuffer, OutOfMemory> {
        let error = OutOfMemory { bytes: len };
        let size = len.max(1).checked_next_multiple_of(ALIGN).ok_or(error)?;
        let slab = Arc::new(Slab::new(size, false).ok_or(error)?);
        Ok(HugeBuffer { start: slab.start, len, slab })
    }

    /// Whether the system was asked for, and promised to try, huge pages.
    pub fn huge_pages(&self) -> bool {
        self.slab.huge
    }
}

impl std::ops::Deref for HugeBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that only this buffer owns, alive as long as `slab`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl std::ops::DerefMut for HugeBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and we are borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for HugeBuffer {
    fn drop(&mut self) {
        self.slab.release(self.start, self.len);
    }
}

impl std::fmt::Debug for HugeBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HugeBuffer").field("len", &self.len).field("huge_pages", &self.huge_pages()).finish()
    }
}

/// One allocation that buffers are cut from.
struct Slab {
    start: *mut u8,
    len: usize,
    huge: bool,
}

// SAFETY: a slab itself never touches its bytes; the buffers cut from it own disjoint parts.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

#[cfg(target_os = "linux")]
impl Slab {
    /// Size of a huge page on x86-64 and on most arm64 systems.
    const HUGE: usize = 2 << 20;

    /// In huge pages if `huge` and the system has them, else in pages of the base size.
    fn new(len: usize, huge: bool) -> Option<Slab> {
        let len = len.checked_next_multiple_of(Slab::HUGE)?;
        let mapped = len.checked_add(Slab::HUGE)?;
        // SAFETY: a fresh anonymous mapping, placed by the system.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let base = base.cast::<u8>();
        let head = base.align_offset(Slab::HUGE).min(Slab::HUGE);
        // SAFETY: `head <= HUGE`, so `head + len` lies inside the mapping; what is cut off is whole pages nobody uses.
        unsafe {
            let start = base.add(head);
            if head > 0 {
                libc::munmap(base.cast(), head);
            }
            if head < Slab::HUGE {
                libc::munmap(start.add(len).cast(), Slab::HUGE - head);
            }
            let advice = if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
            let taken = libc::madvise(start.cast(), len, advice) == 0;
            let huge = huge && taken;
            Some(Slab { start, len, huge })
        }
    }

    /// Gives the whole pages of a buffer that is being dropped back to the system.
    fn release(&self, start: *mut u8, len: usize) {
        // SAFETY: a plain query.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if !page.is_power_of_two() {
            return;
        }
        let skip = start.align_offset(page);
        let pages = len.saturating_sub(skip) / page * page;
        if pages > 0 {
            // SAFETY: these pages lie wholly inside the buffer, which nobody uses any more.
            unsafe { libc::madvise(start.add(skip).cast(), pages, libc::MADV_DONTNEED) };
        }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; every buffer cut from it held this slab and is gone.
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

#[cfg(not(target_os = "linux"))]
impl Slab {
    fn layout(len: usize) -> Option<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(len, ALIGN).ok()
    }

    fn new(len: usize, _: bool) -> Option<Slab> {
        // SAFETY: `len` is not 0.
        let start = unsafe { std::alloc::alloc_zeroed(Slab::layout(len)?) };
        (!start.is_null()).then_some(Slab { start, len, huge: false })
    }

    fn release(&self, _: *mut u8, _: usize) {}
}

#[cfg(not(target_os = "linux"))]
impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(layout) = Slab::layout(self.len) {
            // SAFETY: allocated in `new` with this layout.
            unsafe { std::alloc::dealloc(self.start, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_apart() {
        let mut buffers: Vec<_> =
            [0, 1, 63, 64, 4097, 100_000, SLAB / 4, SLAB / 4, SLAB / 4, SLAB / 4, SLAB / 4 + 1]
                .into_iter()
                .map(|len| HugeBuffer::zeroed(len).unwrap())
                .collect();
        for buffer in &buffers {
            assert_eq!(buffer.as_ptr().addr() % ALIGN, 0);
        }
        for (i, buffer) in buffers.iter_mut().enumerate() {
            assert!(buffer.iter().all(|&byte| byte == 0));
            buffer.fill(u8::try_from(i).unwrap() + 1);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            assert!(buffer.iter().all(|&byte| usize::from(byte) == i + 1));
        }
    }

    #[test]
    fn memory_of_a_dropped_buffer_does_not_come_back_dirty() {
        let mut keep = HugeBuffer::zeroed(100).unwrap();
        keep.fill(3);
        for _ in 0..3 {
            let mut buffer = HugeBuffer::zeroed(1 << 20).unwrap();
            assert!(buffer.iter().all(|&byte| byte == 0));
            buffer.fill(7);
        }
        assert!(keep.iter().all(|&byte| byte == 3));
    }

    #[test]
    fn absurd_sizes_are_errors() {
        for bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
            assert_eq!(HugeBuffer::zeroed(bytes).unwrap_err(), OutOfMemory { bytes });
        }
    }
}
