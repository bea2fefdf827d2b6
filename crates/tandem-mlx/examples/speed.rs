//! Speed of the MLX engine on random weights, one measurement for each line of standard input.
//!
//!     speed CONFIG.json bf16|4bit BATCH PROMPT TOKENS
//!
//! First the logits of a short prompt are checked against the CPU engine in f32 on the same weights, where the model is
//! small enough for that. Then, for each line read, one JSON object: milliseconds to the first tokens of BATCH prompts of
//! PROMPT tokens, tokens a second of the TOKENS that follow, and how long the host was busy submitting a step. A step is
//! submitted before the last is collected. `scripts/mlx_speed.py` runs it beside mlx-lm.

#[cfg(not(tandem_mlx))]
fn main() {
    eprintln!("this build has no MLX engine");
    std::process::exit(1);
}

#[cfg(tandem_mlx)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    speed::run()
}

#[cfg(tandem_mlx)]
mod speed {
    use std::error::Error;
    use std::io::BufRead;
    use std::path::Path;
    use std::time::{Duration, Instant};

    use tandem_cpu::{CpuEngine, CpuOptions};
    use tandem_engine::conformance::{prompt, relative_error};
    use tandem_engine::{Engine, Input, Row, RowOut, SampleSpec, SeqId, Want, Which};
    use tandem_mlx::{MlxEngine, MlxOptions};
    use tandem_model::Checkpoint;
    use tandem_model::format::{Affine, Format, ScaleType};

    /// Largest relative error of the logits against f32; what bf16 loses over a model's layers is about 1e-2.
    const TOLERANCE: f32 = 5e-2;
    /// Bytes of weights up to which the CPU engine is asked.
    const CHECKED: u64 = 4 << 30;

    pub fn run() -> Result<(), Box<dyn Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [config, format, batch, length, tokens] = arguments.as_slice() else {
            return Err("usage: speed CONFIG.json bf16|4bit BATCH PROMPT TOKENS".into());
        };
        let (batch, length, tokens): (usize, usize, usize) =
            (batch.parse()?, length.parse()?, tokens.parse()?);
        let affine = Affine::new(4, 64, ScaleType::Bf16).map(Format::Affine);
        let format = match (format.as_str(), affine) {
            ("bf16", _) => Format::Bf16,
            ("4bit", Some(affine)) => affine,
            _ => return Err("the format is bf16 or 4bit".into()),
        };
        let model = Checkpoint::dummy(Path::new(config), 0, format)?;
        let options = MlxOptions {
            context: Some(length + tokens),
            max_step_tokens: (batch * length).max(64),
            ..MlxOptions::default()
        };
        let mut engine =
            MlxEngine::load(&model.decoder, model.weights.clone(), &options, &mut (Box::new(|_| ()) as _))?;
        eprintln!("{}, {} bytes of weights", engine.capabilities().device, engine.memory().weights);
        if model.weights.bytes() <= CHECKED {
            check(&model, &mut engine)?;
        }
        drop(model);
        for line in std::io::stdin().lock().lines() {
            line?;
            println!("{}", measure(&mut engine, batch, length, tokens)?);
        }
        Ok(())
    }

    fn logits(engine: &mut dyn Engine, ids: &[u32]) -> Result<Vec<f32>, Box<dyn Error>> {
        let seq = engine.open(ids.len(), None)?;
        let row = Row { seq, input: Input::Tokens(ids.to_vec()), want: Want::Logits(Which::All) };
        let ticket = engine.submit(&[row])?;
        let out = engine.collect(ticket)?.pop();
        engine.close(seq)?;
        match out {
            Some(RowOut::Logits(logits)) => Ok(logits.values),
            _ => Err("no logits".into()),
        }
    }

    fn check(model: &Checkpoint, engine: &mut MlxEngine) -> Result<(), Box<dyn Error>> {
        let ids = prompt(1, 16, model.decoder.vocab_size);
        let options = CpuOptions { context: Some(64), ..CpuOptions::default().exact() };
        let mut cpu =
            CpuEngine::load(&model.decoder, model.weights.clone(), &options, &mut (Box::new(|_| ()) as _))?;
        let error = relative_error(&logits(engine, &ids)?, &logits(&mut cpu, &ids)?);
        eprintln!("relative error of the logits against f32 on the CPU: {error:.2e}");
        if error <= TOLERANCE { Ok(()) } else { Err("the logits are wrong: nothing is timed".into()) }
    }

    fn measure(
        engine: &mut MlxEngine,
        batch: usize,
        length: usize,
        tokens: usize,
    ) -> Result<String, Box<dyn Error>> {
        let vocab = engine.capabilities().vocab_size;
        let seqs =
            (0..batch).map(|_| engine.open(length + tokens, None)).collect::<Result<Vec<SeqId>, _>>()?;
        let greedy = || Want::Sample(SampleSpec::greedy());
        let rows: Vec<Row> = seqs
            .iter()
            .zip(0..)
            .map(|(&seq, salt)| Row {
                seq,
                input: Input::Tokens(prompt(salt, length, vocab)),
                want: greedy(),
            })
            .collect();
        let begun = Instant::now();
        let ticket = engine.submit(&rows)?;
        engine.collect(ticket)?;
        let first = begun.elapsed();

        let rows: Vec<Row> =
            seqs.iter().map(|&seq| Row { seq, input: Input::PreviousSample, want: greedy() }).collect();
        let (begun, mut host) = (Instant::now(), Duration::ZERO);
        let mut before = None;
        for _ in 1..tokens {
            let submitting = Instant::now();
            let ticket = engine.submit(&rows)?;
            host += submitting.elapsed();
            if let Some(before) = before.replace(ticket) {
                engine.collect(before)?;
            }
        }
        if let Some(before) = before {
            engine.collect(before)?;
        }
        let decode = begun.elapsed();
        seqs.into_iter().try_for_each(|seq| engine.close(seq))?;
        let steps = (tokens - 1) as f64;
        Ok(format!(
            "{{\"ttft_ms\": {:.3}, \"tokens_per_second\": {:.2}, \"submit_ms\": {:.3}}}",
            first.as_secs_f64() * 1e3,
            steps * batch as f64 / decode.as_secs_f64(),
            host.as_secs_f64() * 1e3 / steps
        ))
    }
}
