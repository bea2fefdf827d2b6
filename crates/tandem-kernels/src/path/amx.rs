//! Whether AMX's tiles of 8-bit integers can be used. The standard library's detection is not stable yet.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

use super::Amx;

/// Looks once, and asks the system for the tiles' registers, which a process has only after asking.
pub(super) fn amx() -> Amx {
    static AMX: OnceLock<Amx> = OnceLock::new();
    *AMX.get_or_init(|| match () {
        () if !has_tiles() => Amx::Absent,
        () if permitted() => Amx::Ready,
        () => Amx::Refused,
    })
}

/// Whether the CPU has the instructions.
fn has_tiles() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & (TILE | INT8) == TILE | INT8
}

/// Whether the system keeps the registers of a thread, and gives them to this process.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    /// From Linux's `asm/prctl.h`.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    /// The component of the tiles' contents; that of their shapes is 17.
    const DATA: libc::c_long = 18;
    const OSXSAVE: u32 = 1 << 27;
    #[target_feature(enable = "xsave")]
    fn kept() -> u64 {
        // SAFETY: register 0 always exists.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: the system uses `xsave`, so the CPU has `xgetbv`.
    let kept = __cpuid(1).ecx & OSXSAVE != 0 && unsafe { kept() } >> 17 & 3 == 3;
    // SAFETY: the call takes plain numbers, and changes only what this process may use.
    kept && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, DATA) } == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}
