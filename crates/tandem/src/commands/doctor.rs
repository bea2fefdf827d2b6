//! `tandem doctor`: what this machine offers and what Tandem makes of it. What is not known says so.

use std::io::Write;
use std::process::ExitCode;

use serde::Serialize;
use tandem_kernels::path::{Amx, Path, VARIABLE, amx};
use tandem_mlx::MlxDevice;
use tandem_store::Store;

use crate::cli::DoctorArgs;
use crate::host;
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
    mlx: Mlx,
    store: Option<String>,
    models: Option<usize>,
}

/// What MLX computes on here, or why it does not.
#[derive(Serialize)]
struct Mlx {
    version: Option<String>,
    gpu: Option<bool>,
    device: Option<String>,
    memory_bytes: Option<u64>,
    memory_usable_bytes: Option<u64>,
    /// Whether Tandem has kernels for this device, which a model gets if they are found right and faster when it loads.
    own_kernels: Option<bool>,
    missing: Option<String>,
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
            cpu: host::cpu_name(),
            threads: std::thread::available_parallelism().ok().map(usize::from),
            cpu_features: host::cpu_features(),
            kernels: Kernels::new(),
            memory_bytes: host::total_memory(),
            memory_available_bytes: tandem_cpu::available_memory(),
            huge_pages: host::huge_pages(),
            engines: tandem::engines::built(),
            mlx: Mlx::new(),
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
            ("mlx", self.mlx.line()),
            ("store", format!("{} ({models} models)", or_unknown(self.store.clone()))),
        ]
    }
}

impl Mlx {
    fn new() -> Self {
        match tandem_mlx::device() {
            Ok(MlxDevice { version, gpu, name, memory, usable, architecture: _, own_kernels }) => Self {
                version: Some(version),
                gpu: Some(gpu),
                device: name,
                memory_bytes: memory,
                memory_usable_bytes: usable,
                own_kernels: Some(own_kernels),
                missing: None,
            },
            Err(error) => Self {
                version: None,
                gpu: None,
                device: None,
                memory_bytes: None,
                memory_usable_bytes: None,
                own_kernels: None,
                missing: Some(error.to_string()),
            },
        }
    }

    fn line(&self) -> String {
        if let Some(missing) = &self.missing {
            return missing.clone();
        }
        let or_unknown = |value: Option<String>| value.unwrap_or_else(|| "unknown".to_owned());
        let kind = if self.gpu == Some(true) { "GPU" } else { "CPU, for tests only" };
        let kernels =
            if self.own_kernels == Some(true) { "MLX's or Tandem's, tried at load" } else { "MLX's" };
        format!(
            "{} on {} ({kind}), memory {}, {} usable, kernels {kernels}",
            or_unknown(self.version.clone()),
            or_unknown(self.device.clone()),
            or_unknown(self.memory_bytes.map(size)),
            or_unknown(self.memory_usable_bytes.map(size))
        )
    }
}

impl Kernels {
    fn new() -> Self {
        let supported: Vec<_> = Path::supported().into_iter().map(Path::name).collect();
        let (live, why) = match (Path::detect(), std::env::var_os(VARIABLE)) {
            (Ok(path), Some(_)) => (Some(path.name()), format!("{VARIABLE} says so")),
            (Ok(path), None) => {
                let refused = if amx() == Amx::Refused { "; the system refuses the CPU's amx" } else { "" };
                (Some(path.name()), format!("the best this CPU runs of {}{refused}", supported.join(", ")))
            }
            (Err(error), _) => (None, error.to_string()),
        };
        Self { live, supported, why }
    }
}
