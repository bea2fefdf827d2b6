use std::hash::{BuildHasher, RandomState};

use clap::Args;

/// How tokens are chosen. What is not given comes from the checkpoint's generation_config.json.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Randomness; 0 always takes the likeliest token [default: the checkpoint's, else 0.7]
    #[arg(long, value_name = "T", visible_alias = "temp")]
    pub temperature: Option<f32>,

    /// Keep the likeliest tokens up to this share of probability; 1 keeps all [default: the checkpoint's, else 0.95]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,

    /// Keep this many of the likeliest tokens; 0 keeps all [default: the checkpoint's, else 0]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,

    /// Drop tokens less likely than this share of the likeliest [default: the checkpoint's, else 0]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,

    /// Make tokens of the prompt and the answer less likely to come again; 1 is off [default: the checkpoint's, else 1]
    #[arg(long, value_name = "R", visible_alias = "repeat-penalty")]
    pub repetition_penalty: Option<f32>,

    /// Lower the logits of tokens the answer already has
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,

    /// Lower the logits of tokens the answer already has, times how often
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,

    /// Add V to a token's logit; may be repeated
    #[arg(long, value_name = "ID=V", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,

    /// The same seed gives the same answer; `random` takes another one each time
    #[arg(long, value_name = "N|random", default_value_t = tandem::SEED, value_parser = seed)]
    pub seed: u64,
}

fn seed(text: &str) -> Result<u64, String> {
    if text == "random" {
        // The standard library keys its hash maps from the system's entropy. Half of it is easier to type again.
        return Ok(RandomState::new().hash_one(()) >> 32);
    }
    text.parse().map_err(|_| format!("give a number from 0 to {}, or `random`", u64::MAX))
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let parsed =
        text.split_once('=').and_then(|(id, v)| Some((id.trim().parse().ok()?, v.trim().parse().ok()?)));
    parsed.ok_or_else(|| "give a token id and a number, such as 42=-1.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_number_or_random() {
        assert_eq!(seed("7"), Ok(7));
        assert_ne!(seed("random"), seed("random"));
        assert!(seed("-1").is_err());
    }

    #[test]
    fn a_bias_is_an_id_and_a_number() {
        assert_eq!(bias("42=-1.5"), Ok((42, -1.5)));
        assert_eq!(bias("42=-inf"), Ok((42, f32::NEG_INFINITY)));
        for bad in ["42", "x=1", "-1=1", "1=", "1=one"] {
            assert!(bias(bad).is_err(), "{bad}");
        }
    }
}
