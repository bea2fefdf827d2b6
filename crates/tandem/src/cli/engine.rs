use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

/// How to run a model, whatever it is used for.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Use only this engine [default: whichever serves the request best]
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(tandem::ENGINES))]
    pub engine: Option<String>,

    /// Threads to compute with [default: as many as the machine runs at once]
    #[arg(long, short = 't', value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,

    /// Tokens of prompt and answer together; 0 for all the model handles [default: 4096, or less if the model
    /// handles less]
    #[arg(long, short = 'c', value_name = "N", visible_alias = "ctx-size")]
    pub context: Option<usize>,

    #[command(flatten)]
    pub load: LoadArgs,
}

/// What numbers a model is held in, and how much memory it may take.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub struct LoadArgs {
    /// Quantize float weights while loading
    #[arg(long, value_enum, default_value_t = QuantArg::None)]
    pub quant: QuantArg,

    /// Keep activations and the KV cache in 32-bit floats: slower, nothing rounded on top of the weights
    #[arg(long)]
    pub exact: bool,

    /// Most memory for weights, KV cache and work together, such as 900MiB or 2GB [default: what is available]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub memory_budget: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum QuantArg {
    /// 4-bit blocks of 32
    Q4,
    /// 8-bit blocks of 32
    Q8,
    /// As they are stored
    None,
}

pub(super) fn threads(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|_| "not a number of threads".to_owned())?;
    let most = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    match count {
        0 => Err("there must be at least 1 thread".to_owned()),
        n if n > most => Err(format!("this machine runs at most {most} threads at once")),
        n => Ok(n),
    }
}

/// A size in bytes: `KiB`, `MiB`, `GiB` and single letters count in 1024, `kB`, `MB`, `GB` in 1000.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(format!("`{unit}` is not a unit; give a size such as 900MiB or 2GB")),
    };
    let number: f64 = number.parse().map_err(|_| "give a size such as 900MiB or 2GB".to_owned())?;
    let bytes = number * factor as f64;
    if bytes < 1.0 || bytes >= 2f64.powi(63) { Err("out of range".to_owned()) } else { Ok(bytes as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_both_kinds_of_units() {
        for (text, expected) in
            [("512", 512), ("1.5GiB", 3 << 29), ("2GB", 2_000_000_000), ("900 MiB", 900 << 20), ("1k", 1024)]
        {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for bad in ["", "0", "-1", "GiB", "1.2.3M", "5 parsecs", "1e99", "99999999999TB"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn threads_stay_within_the_machine() {
        assert!(threads("0").is_err());
        assert!(threads("-1").is_err());
        assert!(threads("100000").unwrap_err().contains("at most"));
        assert_eq!(threads("1"), Ok(1));
    }
}
