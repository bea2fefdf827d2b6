//! Speed of the MLX engine on random weights, one measurement for each line of standard input.
//!
//!     speed CONFIG.json bf16|4bit BATCH PROMPT TOKENS [own|mlx|broken]
//!
//! First the logits of short prompts and of decoding behind them are checked against f32 on the same weights: the CPU engine's
//! where the model is small enough for that, else MLX's. Then, for each line read, one JSON object: milliseconds to the first
//! tokens of BATCH prompts of PROMPT tokens, tokens a second of the TOKENS that follow, and how long the host was busy
//! submitting a step. A step is submitted before the last is collected. `mlx` leaves Tandem's kernels out, `broken` builds them
//! wrong. `scripts/mlx_speed.py` runs this beside mlx-lm.

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
    use tandem_engine::{Engine, EngineError, Input, Row, RowOut, SampleSpec, SeqId, Want, Which};
    use tandem_mlx::{KernelChoice, MlxEngine, MlxOptions};
    use tandem_model::Checkpoint;
    use tandem_model::format::{Affine, Format, ScaleType};

    /// Largest relative error of the logits against f32; what bf16 loses over a model's layers is about 1e-2.
    const TOLERANCE: f32 = 5e-2;
    /// Bytes of weights up to which the CPU engine is asked.
    const CHECKED: u64 = 4 << 30;
    /// Tokens of a checked prompt that are fed one by one.
    const DECODED: usize = 4;

    pub fn run() -> Result<(), Box<dyn Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [config, format, batch, length, tokens, kernels @ ..] = arguments.as_slice() else {
            return Err("usage: speed CONFIG.json bf16|4bit BATCH PROMPT TOKENS [own|mlx|broken]".into());
        };
        let (batch, length, tokens): (usize, usize, usize) =
            (batch.parse()?, length.parse()?, tokens.parse()?);
        let affine = Affine::new(4, 64, ScaleType::Bf16).map(Format::Affine);
        let format = match (format.as_str(), affine) {
            ("bf16", _) => Format::Bf16,
            ("4bit", Some(affine)) => affine,
            _ => return Err("the format is bf16 or 4bit".into()),
        };
        let kernels = match kernels.first().map(String::as_str) {
            None | Some("own") => KernelChoice::Measured,
            Some("mlx") => KernelChoice::Off,
            Some("broken") => KernelChoice::Broken,
            Some(other) => return Err(format!("kernels are own, mlx or broken, not {other}").into()),
        };
        let begun = Instant::now();
        let model = Checkpoint::dummy(Path::new(config), 0, format)?;
        let made = begun.elapsed();
        let options = MlxOptions {
            context: Some((length + tokens).max(64)),
            max_step_tokens: (batch * length).max(64),
            kernels,
            ..MlxOptions::default()
        };
        let mut engine = load(&model, &options)?;
        let loaded = begun.elapsed() - made;
        eprintln!("{}, {} bytes of weights", engine.capabilities().device, engine.memory().weights);
        check(&model, &mut engine, batch)?;
        eprintln!(
            "weights made in {:.1} s, loaded in {:.1} s, checked in {:.1} s",
            made.as_secs_f64(),
            loaded.as_secs_f64(),
            (begun.elapsed() - made - loaded).as_secs_f64()
        );
        drop(model);
        for line in std::io::stdin().lock().lines() {
            line?;
            println!("{}", measure(&mut engine, batch, length, tokens)?);
        }
        Ok(())
    }

    fn load(model: &Checkpoint, options: &MlxOptions) -> Result<MlxEngine, EngineError> {
        MlxEngine::load(&model.decoder, model.weights.clone(), options, &mut (Box::new(|_| ()) as _))
    }

    /// Logits of every token of each prompt, the last ones decoded together.
    fn logits(engine: &mut dyn Engine, prompts: &[Vec<u32>]) -> Result<Vec<f32>, Box<dyn Error>> {
        let mut seqs = Vec::new();
        let mut all = Vec::new();
        let mut step = |engine: &mut dyn Engine, rows: &[Row]| -> Result<(), Box<dyn Error>> {
            let ticket = engine.submit(rows)?;
            for out in engine.collect(ticket)? {
                let RowOut::Logits(logits) = out else { return Err("no logits".into()) };
                all.extend(logits.values);
            }
            Ok(())
        };
        for prompt in prompts {
            let seq = engine.open(prompt.len(), None)?;
            seqs.push(seq);
            let input = Input::Tokens(prompt[..prompt.len() - DECODED].to_vec());
            step(engine, &[Row { seq, input, want: Want::Logits(Which::All) }])?;
        }
        for at in (1..=DECODED).rev() {
            let row = |(seq, prompt): (&SeqId, &Vec<u32>)| Row {
                seq: *seq,
                input: Input::Tokens(vec![prompt[prompt.len() - at]]),
                want: Want::Logits(Which::Last),
            };
            let rows: Vec<Row> = seqs.iter().zip(prompts).map(row).collect();
            step(engine, &rows)?;
        }
        seqs.into_iter().try_for_each(|seq| engine.close(seq))?;
        Ok(all)
    }

    fn check(model: &Checkpoint, engine: &mut MlxEngine, batch: usize) -> Result<(), Box<dyn Error>> {
        let vocab = model.decoder.vocab_size;
        let prompts: Vec<Vec<u32>> =
            (0..batch).map(|row| prompt(row as u32 + 1, 12 + 3 * row, vocab)).collect();
        let got = logits(engine, &prompts)?;
        let (reference, whose) = if model.weights.bytes() <= CHECKED {
            let options = CpuOptions { context: Some(64), ..CpuOptions::default().exact() };
            let mut cpu = CpuEngine::load(
                &model.decoder,
                model.weights.clone(),
                &options,
                &mut (Box::new(|_| ()) as _),
            )?;
            (logits(&mut cpu, &prompts)?, "the CPU engine's")
        } else {
            let options = MlxOptions { context: Some(64), exact: true, ..MlxOptions::default() };
            (logits(&mut load(model, &options)?, &prompts)?, "MLX's")
        };
        let error = relative_error(&got, &reference);
        eprintln!("relative error of the logits against {whose} in f32: {error:.2e}");
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
