//! `tandem doctor`: what this machine offers and what Tandem makes of it. What is not known says so.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use tandem_kernels::path::{Path, VARIABLE};
use tandem_store::Store;

use crate::cli::DoctorArgs;
use crate::measure::size;

#[derive(Serialize)]
struct Report {
    version: &'static str,
    /// A build without optimization says nothing about speed.
    optimized: bool,
    platform: String,
    cpu: Option<String>,
    threads: Option<usize>,
    cpu_features: Vec<&'static str>,
    kernels: Kernels,
    memory_bytes: Option<u64>,
    memory_available_bytes: Option<u64>,
    /// Whether large buffers may lie in huge pages, in the system's word.
    huge_pages: Option<String>,
    engines: Vec<&'static str>,
    store: Option<String>,
    models: Option<usize>,
}

/// Which kernels compute here, and why.
#[derive(Serialize)]
struct Kernels {
    live: Option<&'static str>,
    supported: Vec<&'static str>,
    why: String,
}

pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let report = Report::new();
    let mut out = std::io::stdout();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        for (name, value) in report.lines() {
            writeln!(out, "{name:13} {value}")?;
        }
    }
    Ok(if report.kernels.live.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Report {
    fn new() -> Self {
        let store = Store::open(None).ok();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            optimized: !cfg!(debug_assertions),
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: cpu_name(),
            threads: std::thread::available_parallelism().ok().map(usize::from),
            cpu_features: cpu_features(),
            kernels: Kernels::new(),
            memory_bytes: total_memory(),
            memory_available_bytes: tandem_cpu::available_memory(),
            huge_pages: huge_pages(),
            engines: vec!["cpu"],
            store: store.as_ref().map(|s| s.root().display().to_string()),
            models: store.as_ref().map(|s| s.list().len()),
        }
    }

    fn lines(&self) -> Vec<(&'static str, String)> {
        let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
        let build = if self.optimized { "" } else { " (not optimized)" };
        let kernels = format!("{} ({})", self.kernels.live.unwrap_or("none"), self.kernels.why);
        let features =
            if self.cpu_features.is_empty() { "unknown".to_owned() } else { self.cpu_features.join(" ") };
        let memory = [(self.memory_bytes, ""), (self.memory_available_bytes, " available")];
        let memory = memory.map(|(bytes, what)| or_unknown(bytes.map(size)) + what).join(", ");
        let models = or_unknown(self.models.map(|n| n.to_string()));
        vec![
            ("version", format!("{}{build}", self.version)),
            ("platform", self.platform.clone()),
            ("cpu", or_unknown(self.cpu.clone())),
            ("threads", or_unknown(self.threads.map(|n| n.to_string()))),
            ("cpu features", features),
            ("kernels", kernels),
            ("memory", memory),
            ("huge pages", or_unknown(self.huge_pages.clone())),
            ("engines", self.engines.join(" ")),
            ("store", format!("{} ({models} models)", or_unknown(self.store.clone()))),
        ]
    }
}

impl Kernels {
    fn new() -> Self {
        let supported: Vec<_> = Path::supported().into_iter().map(Path::name).collect();
        let (live, why) = match (Path::detect(), std::env::var_os(VARIABLE)) {
            (Ok(path), Some(_)) => (Some(path.name()), format!("{VARIABLE} says so")),
            (Ok(path), None) => {
                (Some(path.name()), format!("the best this CPU runs of {}", supported.join(", ")))
            }
            (Err(error), _) => (None, error.to_string()),
        };
        Self { live, supported, why }
    }
}

/// Those that a kernel could use.
fn cpu_features() -> Vec<&'static str> {
    #[allow(unused_mut)]
    let mut features = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! look {
            ($($name:tt)*) => { $(if is_x86_feature_detected!($name) { features.push($name) })* };
        }
        look!("sse4.2" "avx" "avx2" "fma" "f16c" "avxvnni" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16");
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
fn cpu_name() -> Option<String> {
    field("/proc/cpuinfo", "model name")
}

#[cfg(not(target_os = "macos"))]
fn total_memory() -> Option<u64> {
    field("/proc/meminfo", "MemTotal")?.strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(target_os = "macos")]
fn cpu_name() -> Option<String> {
    sysctl("machdep.cpu.brand_string")
}

#[cfg(target_os = "macos")]
fn total_memory() -> Option<u64> {
    sysctl("hw.memsize")?.parse().ok()
}

#[cfg(target_os = "macos")]
fn sysctl(name: &str) -> Option<String> {
    let output = std::process::Command::new("/usr/sbin/sysctl").args(["-n", name]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// The choice in brackets of `always [madvise] never`.
fn huge_pages() -> Option<String> {
    let text = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}
