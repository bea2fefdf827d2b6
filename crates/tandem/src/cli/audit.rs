use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use tandem_coreml::audit::Chip;

#[derive(Debug, Args)]
pub struct AuditArgs {
    /// A Core ML package (.mlpackage) that holds an ML Program, whoever made it
    pub package: PathBuf,

    /// Chip whose Neural Engine it shall run on: m1, m2, m3, m4, m5, several with commas, or all
    #[arg(long, default_value = "all", value_name = "CHIP")]
    pub device: Devices,

    /// Largest share of operators, and of multiply-adds, that may be predicted off the engine
    #[arg(long, default_value = "15%", value_name = "PERCENT")]
    pub max_fallback: Percent,

    /// Do not let a package pass while an operator is uncertain or unknown
    #[arg(long)]
    pub strict: bool,

    /// On a Mac: do not ask Core ML where it would run each operator
    #[arg(long)]
    pub no_plan: bool,

    /// Print one JSON object with every operator; what is not known is null
    #[arg(long)]
    pub json: bool,
}

/// One or more chips.
#[derive(Debug, Clone, PartialEq)]
pub struct Devices(pub Vec<Chip>);

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self(Chip::ALL.to_vec()));
        }
        let mut chips = text.split(',').map(|name| name.trim().parse()).collect::<Result<Vec<Chip>, _>>()?;
        chips.sort();
        chips.dedup();
        Ok(Self(chips))
    }
}

/// A share, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Percent(pub f64);

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let hint = "hint: give 0% to 100%";
        let (number, sign) = match text.trim().strip_suffix('%') {
            Some(number) => (number.trim_end(), true),
            None => (text.trim(), false),
        };
        let percent: f64 = number.parse().map_err(|_| format!("{text} is not a percentage. {hint}"))?;
        if !sign && percent > 0.0 && percent < 1.0 {
            return Err(format!(
                "{text} may mean {percent} % or {} %. hint: write the percent sign",
                percent * 100.0
            ));
        }
        if !(0.0..=100.0).contains(&percent) {
            return Err(format!("{text} is out of range. {hint}"));
        }
        Ok(Self(percent / 100.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_percentages() {
        let share = |text: &str| text.parse::<Percent>().map(|percent| percent.0);
        assert_eq!(share("15%"), Ok(0.15));
        assert_eq!(share("15"), Ok(0.15));
        assert_eq!(share("0.5 %"), Ok(0.005));
        assert_eq!(share("0"), Ok(0.0));
        assert_eq!(share("100%"), Ok(1.0));
        for bad in ["", "%", "101%", "-1%", "nan", "inf%", "0.15", "15%%", "a"] {
            assert!(share(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn devices_are_chips_or_all() {
        let chips = |text: &str| text.parse::<Devices>().map(|devices| devices.0);
        assert_eq!(chips("all").unwrap().len(), 5);
        assert_eq!(chips("m4,M1,m4").unwrap(), [Chip::M1, Chip::M4]);
        for bad in ["", "m6", "m1,", "a17"] {
            assert!(chips(bad).is_err(), "{bad}");
        }
    }
}
