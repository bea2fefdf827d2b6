//! Figures about a run. One that was not measured is unknown, never 0.

use std::time::Duration;

use tandem_runtime::Done;

/// Most bytes this process has held in memory; `None` where the system does not say.
pub fn peak_memory() -> Option<u64> {
    peak()
}

/// Most bytes that another process, which still runs, has held in memory.
pub fn peak_memory_of(process: u32) -> Option<u64> {
    if cfg!(target_os = "linux") { peak_in(&format!("/proc/{process}/status")) } else { None }
}

fn peak_in(status: &str) -> Option<u64> {
    let status = std::fs::read_to_string(status).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// `getrusage` would not do here: its maximum survives `exec`, so a large parent shows through.
#[cfg(target_os = "linux")]
fn peak() -> Option<u64> {
    peak_in("/proc/self/status")
}

#[cfg(all(unix, not(target_os = "linux")))]
fn peak() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: getrusage fills the structure it is given, which lives until after the call.
    let filled = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } == 0;
    // SAFETY: zeroed above, and every bit pattern of this plain structure of integers is valid.
    let max = unsafe { usage.assume_init() }.ru_maxrss;
    let unit = if cfg!(target_vendor = "apple") { 1 } else { 1024 };
    filled.then(|| u64::try_from(max).ok()?.checked_mul(unit)).flatten()
}

#[cfg(not(unix))]
fn peak() -> Option<u64> {
    None
}

/// The lines of `--stats`. `load` is given for the first answer after loading.
pub fn lines(load: Option<Duration>, seed: u64, done: &Done) -> Vec<String> {
    let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
    let rate = |rate: Option<f64>| or_unknown(rate.map(|r| format!("{r:.1}")));
    let (usage, timing) = (&done.usage, &done.timing);
    let computed = usage.prompt - usage.cached;
    let mut lines = vec![format!("seed {seed}")];
    lines.extend(load.map(|load| format!("load {:.2} s", load.as_secs_f64())));
    lines.push(format!(
        "prefill {computed} tokens ({} cached) {} tok/s",
        usage.cached,
        rate(timing.prefill_rate(usage))
    ));
    lines.push(format!("ttft {}", or_unknown(timing.ttft.map(|s| format!("{s:.2} s")))));
    lines.push(format!("decode {} tokens {} tok/s", usage.generated, rate(timing.decode_rate(usage))));
    lines.push(format!("peak memory {}", or_unknown(peak_memory().map(|b| format!("{} MiB", b >> 20)))));
    lines
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.0} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use tandem_runtime::{Reason, Route, Timing, Usage};

    use super::*;

    fn done(usage: Usage, timing: Timing) -> Done {
        let route = Route { engine: "cpu".to_owned(), reason: String::new() };
        Done { reason: Reason::Length, usage, timing, route }
    }

    #[test]
    fn lines_are_as_documented() {
        let usage = Usage { prompt: 606, cached: 100, generated: 128 };
        let timing = Timing { queue: Some(0.03), prefill: Some(0.8), ttft: Some(0.83), decode: Some(1.0) };
        let lines = lines(Some(Duration::from_millis(210)), 7, &done(usage, timing));
        let expected = [
            "seed 7",
            "load 0.21 s",
            "prefill 506 tokens (100 cached) 632.5 tok/s",
            "ttft 0.83 s",
            "decode 128 tokens 127.0 tok/s",
        ];
        assert_eq!(lines[..5], expected);
        assert!(lines[5].starts_with("peak memory "), "{}", lines[5]);
    }

    #[test]
    fn what_was_not_measured_is_unknown() {
        let lines = lines(None, 7, &done(Usage { prompt: 5, ..Usage::default() }, Timing::default()));
        let expected =
            ["prefill 5 tokens (0 cached) unknown tok/s", "ttft unknown", "decode 0 tokens unknown tok/s"];
        assert_eq!(lines[1..4], expected);
    }

    #[test]
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    fn peak_memory_sees_an_allocation() {
        let before = peak_memory().unwrap();
        let block = vec![1u8; 64 << 20];
        assert!(peak_memory().unwrap() >= before.max(block.len() as u64));
    }
}
