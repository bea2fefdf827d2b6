//! A thread team: fork, hand out the items of a parallel loop, join.
//!
//! A forward pass is some two hundred short parallel loops a token, each a few microseconds to a few hundred. So a
//! fork must cost well under a microsecond: workers *spin* for some tens of microseconds after each loop, and only then
//! park. An idle team uses no CPU; the next run wakes it. The caller waits in the same way for workers that are
//! still busy, so that an overloaded machine gets its core back.
//!
//! Each thread begins with a contiguous share of the items and takes them in order, since memory is read fastest front
//! to back; who is done helps the others. A run is joined when all items are *done*, not when all workers have been
//! there: a worker that the system has not scheduled yet is not waited for, its share is done by the others. (A worker
//! that sits on an item is, of course.) So a busy machine costs the team its share of the machine, not a scheduler's
//! time slice for every loop.
//!
//! A panic in an item is caught where it happens, so that the join always completes; the team is then *poisoned*: the
//! run resumes the panic on the caller, and every later run panics at once. Nobody waits for a thread that died.
//!
//! `Team` is deliberately not `Sync`: one thread owns it, and a closure that runs on the team cannot reach the team,
//! which makes nested or concurrent runs a type error.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::path::{Path, PathError};

/// How long a thread spins before it parks.
const SPIN: Duration = Duration::from_micros(60);

/// Why a team could not be built.
#[derive(Debug, thiserror::Error)]
pub enum TeamError {
    /// Zero threads, or more than [`Team::MAX_THREADS`].
    #[error("a thread team of {0} threads is not possible (hint: use 1 to {max})", max = Team::MAX_THREADS)]
    Threads(usize),
    /// The operating system refused a thread.
    #[error("could not start worker thread {worker} of {threads}: {source} (hint: use fewer threads)")]
    Spawn {
        /// Number of the worker that did not start.
        worker: usize,
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// `TANDEM_KERNELS` names a path that cannot run.
    #[error(transparent)]
    Path(#[from] PathError),
}

/// A value alone on its cache lines (two, since x86 prefetches lines in pairs).
#[repr(align(128))]
struct Padded<T>(T);

/// The closure of the current run, with its type and lifetime erased.
#[derive(Clone, Copy)]
struct Job {
    closure: *const (),
    call: unsafe fn(*const ()),
}

/// A thread that may be waiting: it spins, then parks.
#[derive(Default)]
struct Waiter {
    parked: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

impl Waiter {
    fn thread(&self) -> MutexGuard<'_, Option<Thread>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once `ready()`; spins first, then parks.
    fn wait(&self, ready: impl Fn() -> bool) {
        let mut start = None;
        loop {
            for _ in 0..64 {
                if ready() {
                    return;
                }
                std::hint::spin_loop();
            }
            if start.get_or_insert_with(Instant::now).elapsed() > SPIN {
                break;
            }
        }
        *self.thread() = Some(thread::current());
        loop {
            // SeqCst here and in `wake`: either the waker sees `parked`, or we see what it published.
            self.parked.store(true, Ordering::SeqCst);
            if ready() {
                self.parked.store(false, Ordering::SeqCst);
                return;
            }
            thread::park();
        }
    }

    /// To be called after what `ready` looks at was published with `SeqCst`.
    fn wake(&self) {
        if self.parked.load(Ordering::SeqCst)
            && self.parked.swap(false, Ordering::SeqCst)
            && let Some(thread) = &*self.thread()
        {
            thread.unpark();
        }
    }
}

/// The word that starts and ends a run: its number in the upper half, whether workers may no longer join it, and how
/// many are in it.
mod state {
    pub(super) const CLOSED: u64 = 1 << 31;

    pub(super) fn open(run: u32) -> u64 {
        u64::from(run) << 32
    }

    pub(super) fn run(state: u64) -> u32 {
        (state >> 32) as u32
    }

    pub(super) fn active(state: u64) -> u64 {
        state & (CLOSED - 1)
    }
}

struct Shared {
    state: Padded<AtomicU64>,
    /// Written by the caller while `state` is closed and nobody is active, read by workers that have joined.
    job: UnsafeCell<Job>,
    caller_waits: Padded<Waiter>,
    worker_waits: Vec<Padded<Waiter>>,
    /// What was taken of each share of the current run. Set while nobody is active, as `job` is.
    shares: Vec<Padded<AtomicUsize>>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written and read as it says, which `state` orders. The closure behind it is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: the raw pointers in `job` are used only as said above.
unsafe impl Send for Shared {}

impl Shared {
    fn state(&self) -> u64 {
        self.state.0.load(Ordering::SeqCst)
    }

    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.worker_waits[worker - 1].0.wait(|| state::run(self.state()) != seen);
            // The state first: if it is the last one, then `stop`, which was set before it, is seen.
            let state = self.state();
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            if state & state::CLOSED == 0 {
                // Join, unless the run was closed or another worker joined in between: then look again.
                let joined = (state, state + 1);
                if self
                    .state
                    .0
                    .compare_exchange(joined.0, joined.1, Ordering::SeqCst, Ordering::SeqCst)
                    .is_err()
                {
                    continue;
                }
                // SAFETY: we joined while the run was open, so the caller is inside `fork` and stays there until we
                // leave: the cell is written, and the closure is alive.
                let job = unsafe { *self.job.get() };
                // SAFETY: as above; `call` was made for the type of `closure`.
                self.guard(|| unsafe { (job.call)(job.closure) });
                let before = self.state.0.fetch_sub(1, Ordering::SeqCst);
                if before & state::CLOSED != 0 && state::active(before) == 1 {
                    self.caller_waits.0.wake();
                }
            }
            seen = state::run(state);
        }
    }

    fn panic(&self) -> MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` and keeps the first panic.
    fn guard(&self, f: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(f)) {
            self.panic().get_or_insert(panic);
        }
    }
}

/// A fixed set of threads that run parallel loops together. The thread that starts a run takes part in it.
pub struct Team {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    path: Path,
    run: Cell<u32>,
    poisoned: Cell<bool>,
    busy: Cell<bool>,
}

impl Team {
    /// The most threads that a team may have.
    pub const MAX_THREADS: usize = 1024;

    /// A team of `threads` threads (the caller is one of them) on the path of [`Path::detect`].
    ///
    /// # Errors
    /// If `threads` is 0 or more than [`Team::MAX_THREADS`], a thread does not start, or `TANDEM_KERNELS` names a
    /// path that cannot run here.
    pub fn new(threads: usize) -> Result<Team, TeamError> {
        Team::with_path(threads, Path::detect()?)
    }

    /// A team whose operations use `path`.
    ///
    /// # Errors
    /// As [`Team::new`].
    pub fn with_path(threads: usize, path: Path) -> Result<Team, TeamError> {
        if threads == 0 || threads > Team::MAX_THREADS {
            return Err(TeamError::Threads(threads));
        }
        unsafe fn nothing(_: *const ()) {}
        let shared = Arc::new(Shared {
            state: Padded(AtomicU64::new(state::CLOSED)),
            job: UnsafeCell::new(Job { closure: std::ptr::null(), call: nothing }),
            caller_waits: Padded(Waiter::default()),
            worker_waits: (1..threads).map(|_| Padded(Waiter::default())).collect(),
            shares: (0..threads).map(|_| Padded(AtomicUsize::new(0))).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        // On an error below, dropping `team` stops the workers that did start.
        let mut team = Team {
            shared,
            handles: Vec::with_capacity(threads - 1),
            path,
            run: Cell::new(0),
            poisoned: Cell::new(false),
            busy: Cell::new(false),
        };
        for worker in 1..threads {
            let shared = Arc::clone(&team.shared);
            let handle = thread::Builder::new()
                .name(format!("tandem-worker-{worker}"))
                .spawn(move || shared.work(worker))
                .map_err(|source| TeamError::Spawn { worker, threads, source })?;
            team.handles.push(handle);
        }
        Ok(team)
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// The kernel path that operations on this team use.
    pub fn path(&self) -> Path {
        self.path
    }

    /// Runs `f(worker)` once for every `worker` in `0..threads`, and returns when all are done. Calls run at the same
    /// time as far as threads are free; if one is not, another makes its call.
    ///
    /// # Panics
    /// Resumes the first panic of `f`, after all calls that began have ended (others may be left out); the team is then
    /// poisoned and every later run panics at once.
    pub fn run<F: Fn(usize) + Sync>(&self, f: F) {
        self.deal(self.threads(), 1, |range| range.for_each(&f));
    }

    /// Splits `items` evenly into one contiguous range a thread and runs `f(range)` on each that is not empty.
    ///
    /// # Panics
    /// As [`Team::run`].
    pub fn split<F: Fn(Range<usize>) + Sync>(&self, items: usize, f: F) {
        let parts = self.threads().min(items);
        self.deal(parts, 1, |range| range.for_each(|part| f(share(items, parts, part))));
    }

    /// Hands `0..items` out in ranges of at most `grain`. A thread takes one range after the other from a contiguous
    /// share of its own, and then from those of threads that are not done: for uneven work, or an uneven machine.
    ///
    /// # Panics
    /// As [`Team::run`].
    pub fn deal<F: Fn(Range<usize>) + Sync>(&self, items: usize, grain: usize, f: F) {
        assert!(
            !self.poisoned.get(),
            "this thread team is poisoned: a worker panicked in an earlier run (hint: build a new team)"
        );
        if items == 0 {
            return;
        }
        let grain = grain.max(1);
        if self.handles.is_empty() || items <= grain {
            self.shared.guard(|| f(0..items));
        } else {
            self.fork(items.div_ceil(grain), |range| {
                f(range * grain..items.min((range + 1).saturating_mul(grain)));
            });
        }
        if let Some(panic) = self.shared.panic().take() {
            self.poisoned.set(true);
            resume_unwind(panic);
        }
    }

    /// Calls `f(i)` for every `i` in `0..items`, here and on every worker that comes while there are some left; returns
    /// when all calls have ended.
    fn fork<F: Fn(usize) + Sync>(&self, items: usize, f: F) {
        unsafe fn call<F: Fn()>(closure: *const ()) {
            // SAFETY: `closure` is the `work` of the `fork` that made this job, which is still running.
            unsafe { (*closure.cast::<F>())() }
        }
        fn job<F: Fn()>(work: &F) -> Job {
            Job { closure: std::ptr::from_ref(work).cast(), call: call::<F> }
        }
        assert!(!self.busy.replace(true), "a run was started from within a run of the same thread team");
        self.run.set(self.run.get().wrapping_add(1));
        let shared = &*self.shared;
        let shares = &shared.shares;
        let whole = |i| share(items, shares.len(), i);
        // The last run is closed and nobody is active, so nobody takes of these.
        for (i, taken) in shares.iter().enumerate() {
            taken.0.store(whole(i).start, Ordering::Relaxed);
        }
        let arrived = Padded(AtomicUsize::new(0));
        let work = &|| {
            let first = arrived.0.fetch_add(1, Ordering::Relaxed);
            for i in (first..first + shares.len()).map(|i| i % shares.len()) {
                let end = whole(i).end;
                loop {
                    let item = shares[i].0.fetch_add(1, Ordering::Relaxed);
                    if item >= end {
                        break;
                    }
                    f(item);
                }
            }
        };
        // SAFETY: as nobody is active, nobody reads the cell.
        unsafe { *shared.job.get() = job(work) };
        shared.state.0.store(state::open(self.run.get()), Ordering::SeqCst);
        shared.worker_waits.iter().for_each(|waiter| waiter.0.wake());
        shared.guard(work);
        if state::active(shared.state.0.fetch_or(state::CLOSED, Ordering::SeqCst)) > 0 {
            shared.caller_waits.0.wait(|| state::active(shared.state()) == 0);
        }
        self.busy.set(false);
    }

    /// Runs `f(i, chunk)` for every chunk of `size` elements of `data` (the last may be shorter), dealt out to the
    /// threads `grain` chunks at a time.
    ///
    /// # Panics
    /// If `size` is 0; else as [`Team::run`].
    pub fn chunks_mut<T: Send, F: Fn(usize, &mut [T]) + Sync>(
        &self,
        data: &mut [T],
        size: usize,
        grain: usize,
        f: F,
    ) {
        let chunks = data.len().div_ceil(size);
        let data = SharedMut::new(data);
        self.deal(chunks, grain, |range| {
            for i in range {
                let start = i * size;
                // SAFETY: chunk `i` is handed out once, and chunks do not overlap.
                f(i, unsafe { data.slice(start..data.len().min(start + size)) });
            }
        });
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let next = state::open(self.run.get().wrapping_add(1)) | state::CLOSED;
        self.shared.state.0.store(next, Ordering::SeqCst);
        self.shared.worker_waits.iter().for_each(|waiter| waiter.0.wake());
        for handle in self.handles.drain(..) {
            // Panics of workers are caught in `guard`, so there is nothing to learn from the result.
            let _ = handle.join();
        }
    }
}

impl std::fmt::Debug for Team {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Team").field("threads", &self.threads()).field("path", &self.path).finish()
    }
}

/// The `worker`-th of `workers` contiguous, nearly equal parts of `0..items`.
pub fn share(items: usize, workers: usize, worker: usize) -> Range<usize> {
    let (each, extra) = (items / workers, items % workers);
    let start = worker * each + worker.min(extra);
    start..start + each + usize::from(worker < extra)
}

/// A mutable slice that several threads write at once, each its own part.
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it is a `&mut [T]` whose users promise, at each `slice`, that parts in use do not overlap.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedMut { start: slice.as_mut_ptr(), len: slice.len(), _slice: std::marker::PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The part `range`, which is checked to lie inside.
    ///
    /// # Safety
    /// No overlapping part may be in use while the returned one is.
    #[allow(clippy::mut_from_ref, reason = "handing out disjoint parts is what the type is for")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of {}", self.len);
        // SAFETY: the range lies inside the slice, and the caller keeps parts disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(panic: &(dyn Any + Send)) -> String {
        panic
            .downcast_ref::<String>()
            .cloned()
            .unwrap_or_else(|| (*panic.downcast_ref::<&str>().unwrap_or(&"something else")).to_owned())
    }

    #[test]
    fn every_worker_runs_once_a_run() {
        for threads in 1..=4 {
            let team = Team::new(threads).unwrap();
            let counts: Vec<_> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for _ in 0..500 {
                team.run(|worker| {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 500));
        }
    }

    #[test]
    fn a_parked_team_wakes() {
        let team = Team::new(3).unwrap();
        for pause in [0, 1, 20] {
            thread::sleep(Duration::from_millis(pause));
            let count = AtomicUsize::new(0);
            team.run(|_| {
                // A slow worker makes the caller park too.
                thread::sleep(Duration::from_millis(1));
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 3);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_after_the_others_ended_and_poisons() {
        for threads in 1..=3 {
            for culprit in 0..threads {
                let team = Team::new(threads).unwrap();
                let (began, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let panic = catch_unwind(AssertUnwindSafe(|| {
                    team.run(|worker| {
                        began.fetch_add(1, Ordering::Relaxed);
                        assert!(worker != culprit, "worker {worker} fell");
                        thread::sleep(Duration::from_millis(2));
                        ended.fetch_add(1, Ordering::Relaxed);
                    });
                }));
                assert_eq!(message(&*panic.unwrap_err()), format!("worker {culprit} fell"));
                assert_eq!(ended.into_inner() + 1, began.into_inner());
                let later = catch_unwind(AssertUnwindSafe(|| team.run(|_| ())));
                assert!(message(&*later.unwrap_err()).contains("poisoned"));
                let later = catch_unwind(AssertUnwindSafe(|| team.split(1, |_| ())));
                assert!(message(&*later.unwrap_err()).contains("poisoned"));
            }
        }
    }

    #[test]
    fn a_run_within_a_run_is_refused() {
        thread_local!(static TEAM: Team = Team::new(2).unwrap());
        let (caller, arrived) = (thread::current().id(), AtomicUsize::new(0));
        let panic = catch_unwind(|| {
            TEAM.with(|team| {
                team.run(|_| {
                    // Each thread makes one call: it does not leave before the other is there.
                    arrived.fetch_add(1, Ordering::SeqCst);
                    while arrived.load(Ordering::SeqCst) < 2 {
                        thread::yield_now();
                    }
                    if thread::current().id() == caller {
                        TEAM.with(|team| team.run(|_| ()));
                    }
                });
            });
        });
        assert!(message(&*panic.unwrap_err()).contains("within a run"));
    }

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(matches!(Team::new(0), Err(TeamError::Threads(0))));
        assert!(matches!(Team::new(1_000_000), Err(TeamError::Threads(1_000_000))));
    }

    #[test]
    fn a_worker_that_does_not_come_is_not_waited_for() {
        let team = Team::new(2).unwrap();
        let done = AtomicUsize::new(0);
        thread::sleep(Duration::from_millis(20));
        // Hide from the caller that the worker is parked, so that it sleeps through.
        let parked = &team.shared.worker_waits[0].0.parked;
        assert!(parked.swap(false, Ordering::SeqCst));
        team.run(|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        parked.store(true, Ordering::SeqCst);
        assert_eq!(done.into_inner(), 2);
    }

    #[test]
    fn a_team_that_ends_right_after_a_run_ends() {
        // A worker that is late for the run must not take the end for another run that it missed.
        let (sender, ended) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let start = Instant::now();
            // An emulated machine starts threads slowly.
            for round in (0..20_000).take_while(|_| start.elapsed() < Duration::from_secs(10)) {
                let team = Team::new(2 + round % 3).unwrap();
                team.run(|_| ());
            }
            sender.send(()).unwrap();
        });
        let waited = ended.recv_timeout(Duration::from_secs(120));
        assert!(waited.is_ok(), "a worker sleeps on, and the drop waits for it");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_idle_team_uses_no_cpu() {
        let time_of = |clock| {
            let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: fills the struct that it is given.
            assert_eq!(unsafe { libc::clock_gettime(clock, &raw mut time) }, 0);
            Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap())
        };
        let team = Team::new(2).unwrap();
        let (arrived, clock) = (AtomicUsize::new(0), Mutex::new(None));
        let caller = thread::current().id();
        team.run(|_| {
            // Nobody leaves before both are there.
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < 2 {
                thread::yield_now();
            }
            if thread::current().id() != caller {
                let mut id = 0;
                // SAFETY: fills the id that it is given.
                assert_eq!(unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut id) }, 0);
                *clock.lock().unwrap() = Some(id);
            }
        });
        let clock = clock.into_inner().unwrap().unwrap();
        let before = time_of(clock);
        thread::sleep(Duration::from_millis(200));
        assert!(time_of(clock) - before < Duration::from_millis(5));
    }

    proptest! {
        #[test]
        fn shares_cover_everything_once(items in 0usize..500, workers in 1usize..20) {
            let parts: Vec<_> = (0..workers).flat_map(|worker| share(items, workers, worker)).collect();
            prop_assert_eq!(parts, (0..items).collect::<Vec<_>>());
        }

        #[test]
        fn dealt_and_split_items_are_seen_once(items in 0usize..200, grain in 0usize..9, threads in 1usize..4) {
            let team = Team::new(threads).unwrap();
            let seen: Vec<_> = (0..items).map(|_| AtomicUsize::new(0)).collect();
            let count = |range: Range<usize>| for i in range { seen[i].fetch_add(1, Ordering::Relaxed); };
            team.deal(items, grain, count);
            team.split(items, count);
            let mut data = vec![0usize; items];
            team.chunks_mut(&mut data, 7, grain, |i, chunk| chunk.iter_mut().for_each(|v| *v += i + 1));
            prop_assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 2));
            prop_assert!(data.iter().enumerate().all(|(i, &v)| v == i / 7 + 1));
        }
    }
}
