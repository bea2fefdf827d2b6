use tandem_engine::SampleSpec;
use tandem_model::GenerationConfig;

/// The seed where nobody names one.
pub const SEED: u64 = 1234;

/// How to choose tokens where nobody says: what the checkpoint says, else temperature 0.7 and `top_p` 0.95, and [`SEED`].
///
/// A checkpoint that says anything is taken at its word: what it leaves out is off, as its authors measured it.
pub fn sampling(checkpoint: &GenerationConfig) -> SampleSpec {
    let GenerationConfig { do_sample, temperature, top_p, top_k, min_p, repetition_penalty, .. } = checkpoint;
    let silent =
        do_sample.is_none() && temperature.is_none() && top_p.is_none() && top_k.is_none() && min_p.is_none();
    let (default_temperature, default_top_p) = match (silent, do_sample) {
        (true, _) => (0.7, 0.95),
        (false, Some(false)) => (0.0, 1.0),
        (false, _) => (temperature.unwrap_or(1.0), 1.0),
    };
    SampleSpec {
        temperature: default_temperature,
        top_p: top_p.unwrap_or(default_top_p),
        top_k: top_k.unwrap_or(0),
        min_p: min_p.unwrap_or(0.0),
        repetition_penalty: repetition_penalty.unwrap_or(1.0),
        seed: SEED,
        ..SampleSpec::greedy()
    }
}
