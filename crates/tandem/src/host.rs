//! What is known of this machine. `None` is unknown.

/// Those of the CPU's features that a kernel could use.
pub fn cpu_features() -> Vec<&'static str> {
    #[allow(unused_mut)]
    let mut features = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! look {
            ($($name:tt)*) => { $(if is_x86_feature_detected!($name) { features.push($name) })* };
        }
        look!("sse4.2" "avx" "avx2" "fma" "f16c" "avxvnni" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16");
        if tandem_kernels::path::amx() != tandem_kernels::path::Amx::Absent {
            features.push("amx-int8");
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! look {
            ($($name:tt)*) => { $(if std::arch::is_aarch64_feature_detected!($name) { features.push($name) })* };
        }
        look!("neon" "fp16" "dotprod" "i8mm" "bf16" "sve" "sve2");
    }
    features
}

/// The value of a `name: value` or `name : value` line of one of Linux's own files.
#[cfg(not(target_os = "macos"))]
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.find_map(|(key, value)| (key.trim() == name).then(|| value.trim().to_owned()))
}

#[cfg(not(target_os = "macos"))]
/// What the CPU calls itself.
pub fn cpu_name() -> Option<String> {
    field("/proc/cpuinfo", "model name")
}

#[cfg(not(target_os = "macos"))]
/// Bytes of memory.
pub fn total_memory() -> Option<u64> {
    field("/proc/meminfo", "MemTotal")?.strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(target_os = "macos")]
pub fn cpu_name() -> Option<String> {
    sysctl("machdep.cpu.brand_string")
}

#[cfg(target_os = "macos")]
pub fn total_memory() -> Option<u64> {
    sysctl("hw.memsize")?.parse().ok()
}

#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<String> {
    let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The choice in brackets of `always [madvise] never`: whether large buffers may lie in huge pages.
pub fn huge_pages() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// How many threads wanted to run, on average over the last minute.
pub fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}
