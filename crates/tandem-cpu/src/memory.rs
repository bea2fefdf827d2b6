//! How much memory there is to take.

/// Bytes that can be allocated now without swapping, as the system estimates it; `None` where it does not say.
///
/// On Linux the smaller of `MemAvailable` and what the control group (version 2) leaves.
pub fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = available.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024;
    let group = |file: &str| {
        let text = std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let left = group("memory.max").zip(group("memory.current")).map(|(max, now)| max.saturating_sub(now));
    Some(left.map_or(available, |left| left.min(available)))
}
