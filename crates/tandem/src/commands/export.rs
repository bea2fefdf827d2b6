//! `tandem export`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;
use tandem_coreml::export::manifest::{ActivationFacts, DeviceFacts, Manifest};
use tandem_coreml::export::{ExportOptions, KvForm, Opset, Quant, Sample, Source, Target, export};
use tandem_coreml::trace;

use crate::cli::{ExportArgs, ExportQuant, KvArg, OpsetArg, TargetArg};
use crate::measure::size;
use crate::progress;

/// Tokens of context where the user does not say.
const DEFAULT_CONTEXT: usize = 2048;

/// What a caller of a package needs of a folder beside its weights.
const COMPANIONS: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

pub fn run(args: &ExportArgs) -> anyhow::Result<ExitCode> {
    if args.batch != 1 {
        bail!("a batch of {} cannot be exported yet. hint: leave --batch out", args.batch);
    }
    let (model, out) = model_and_out(args)?;
    let path = crate::model::resolve(model, &args.dummy)?;
    let checkpoint = crate::model::open(path.as_ref(), &args.dummy)?;
    let options = options(args, checkpoint.decoder.max_context);
    let companions: Vec<PathBuf> = match &path {
        Some(folder) if folder.is_dir() => {
            COMPANIONS.iter().map(|name| folder.join(name)).filter(|file| file.is_file()).collect()
        }
        _ => vec![],
    };
    let companions: Vec<&Path> = companions.iter().map(PathBuf::as_path).collect();
    let mut progress = progress::load("exporting");
    let tokens = checkpoint.tokenizer.encode(trace::SAMPLE, true)?;
    let sample = match args {
        ExportArgs { no_trace: true, .. } => Sample::Without("--no-trace was given"),
        _ if path.is_none() => Sample::Without("the weights are random (--dummy-weights)"),
        _ => Sample::Tokens(&tokens),
    };
    let source = Source {
        decoder: &checkpoint.decoder,
        weights: &checkpoint.weights,
        sample,
        companions: &companions,
    };
    let manifest = export(source, out, &options, &mut |done, total| {
        progress(done as f32 / total.max(1) as f32);
    })?;
    progress(1.0);
    if path.is_some_and(|path| path.is_file()) {
        eprintln!("note: the tokenizer stays in the .gguf file; keep it beside the packages");
    }
    std::io::stdout().write_all(summary(&manifest, out).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// With random weights there is no MODEL, and the first argument is OUT.
fn model_and_out(args: &ExportArgs) -> anyhow::Result<(Option<&String>, &Path)> {
    match (&args.model, &args.out, &args.dummy.weights) {
        (Some(out), None, Some(_)) => Ok((None, Path::new(out))),
        (Some(model), Some(out), None) => Ok((Some(model), out)),
        _ => bail!("--dummy-weights is in place of MODEL. hint: give OUT alone"),
    }
}

fn options(args: &ExportArgs, handles: usize) -> ExportOptions {
    ExportOptions {
        target: match args.target {
            TargetArg::Ane => Target::Ane,
            TargetArg::Gpu => Target::Gpu,
        },
        context: args.context.unwrap_or(DEFAULT_CONTEXT.min(handles)),
        prefill: args.prefill,
        quant: match args.quant {
            ExportQuant::None => Quant::None,
            ExportQuant::Lut4 => Quant::Lut(4),
            ExportQuant::Lut6 => Quant::Lut(6),
            ExportQuant::Lut8 => Quant::Lut(8),
            ExportQuant::Int4 => Quant::Int(4),
            ExportQuant::Int8 => Quant::Int(8),
        },
        group: args.group,
        chunks: args.chunks.0,
        kv: match args.kv {
            KvArg::State => KvForm::State,
            KvArg::Io => KvForm::Io,
        },
        head_parts: args.head_split.0,
        opset: match args.opset {
            OpsetArg::Ios18 => Opset::Ios18,
            OpsetArg::Ios26 => Opset::Ios26,
        },
    }
}

fn summary(manifest: &Manifest, out: &Path) -> String {
    let mut text = String::new();
    for package in &manifest.packages {
        let file = out.join(&package.file);
        let last = package.first_layer + package.layers - 1;
        text += &format!(
            "{}  layers {} to {last}, weights {}\n",
            file.display(),
            package.first_layer,
            size(package.weight_bytes)
        );
    }
    text += &match &manifest.activations {
        ActivationFacts::Traced(range) => format!(
            "activations: up to {} in the residual stream on {} tokens of text; kept at {} of that\n",
            range.residual(),
            range.tokens,
            manifest.residual_factor
        ),
        ActivationFacts::NotTraced(reason) => {
            format!(
                "activations: not known, {reason}; residual stream kept at {}\n",
                manifest.residual_factor
            )
        }
    };
    if manifest.target == "ane" {
        let worst = |of: fn(&DeviceFacts) -> u64| manifest.audit.devices.iter().map(of).max().unwrap_or(0);
        text += &format!(
            "audit: {} (at worst {} operators off the engine, {} uncertain, {} unknown; predicted by rules)\n",
            manifest.audit.verdict,
            worst(|device| device.gpu_cpu),
            worst(|device| device.uncertain),
            worst(|device| device.unknown)
        );
    }
    text
}
