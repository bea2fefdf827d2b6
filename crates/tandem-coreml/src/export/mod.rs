//! From a checkpoint to Core ML packages.
//!
//! [`export`] makes a folder: one package for each chunk of layers, the embedding where it stays outside the graph, the
//! tokenizer's files and `tandem.json`, which says how they belong together. The folder is whole or not there.

mod ane;
mod gpu;
pub mod manifest;
mod norm;
mod options;
mod plan;
mod store;
mod turn;

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;

use tandem_model::Weights;
use tandem_model::decoder::{Decoder, WeightUse};

pub use options::{ExportOptions, KvForm, Opset, Quant, Target};

use crate::audit;
use crate::error::CoremlError;
use crate::mil::{Metadata, Model};
use crate::package::{Package, PackageWriter, Staging};
use crate::trace;
use ane::Role;
use manifest::{
    ActivationFacts, AuditFacts, CacheFacts, Embedding, LogitsPart, Manifest, ModelFacts, PackageFacts,
    RopeFacts,
};
use plan::{Cache, Plan};
use store::Store;

/// What masks hold for rows that are not seen: finite in fp16, and `exp` of it is 0.
const MASK_VALUE: f32 = -4e4;
const EMBEDDING: &str = "embedding.bin";
const MANIFEST: &str = "tandem.json";

/// Told how far an export is: values stored, and all there are.
pub type Progress<'a> = dyn FnMut(u64, u64) + 'a;

/// What is exported.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// What the network is.
    pub decoder: &'a Decoder,
    /// Its tensors.
    pub weights: &'a Weights,
    /// What the range of its activations is traced on.
    pub sample: Sample<'a>,
    /// Files to put beside the packages (the tokenizer's).
    pub companions: &'a [&'a Path],
}

/// What the range of a model's activations is traced on.
#[derive(Debug, Clone, Copy)]
pub enum Sample<'a> {
    /// [`trace::SAMPLE`] in tokens of the model.
    Tokens(&'a [u32]),
    /// Nothing, for this reason; what families need is then a guess.
    Without(&'a str),
}

/// Exports a network into the new folder `out`.
///
/// # Errors
/// [`CoremlError::Refused`] for what does not go together or cannot be exported yet, by name; [`CoremlError::Io`].
/// Nothing is left behind then.
pub fn export(
    source: Source<'_>,
    out: &Path,
    options: &ExportOptions,
    progress: &mut Progress<'_>,
) -> Result<Manifest, CoremlError> {
    let Source { decoder, weights, sample, companions } = source;
    let mut plan = Plan::new(decoder, options)?;
    let staging = Staging::create(out)?;
    let values = |uses: &[WeightUse<'_>]| -> u64 {
        uses.iter().map(|WeightUse { shape, .. }| shape.iter().product::<usize>() as u64).sum()
    };
    let uses = decoder.weight_uses();
    // Tracing reads all but the embedding, which comes first, and the head, which comes last.
    let traced = match sample {
        Sample::Tokens(_) => values(&uses[1..uses.len() - 1]),
        Sample::Without(_) => 0,
    };
    let total = values(&uses) + traced;
    let mut done = 0;
    let mut advance = |values: usize| {
        done += values as u64;
        progress(done.min(total), total);
    };
    let activations = match sample {
        Sample::Tokens(tokens) => {
            let range = trace::trace(decoder, weights, tokens, &mut advance)?;
            plan.fit(&range)?;
            ActivationFacts::traced(&range)
        }
        Sample::Without(reason) => ActivationFacts::NotTraced(reason.to_owned()),
    };
    let embedding = match options.target {
        Target::Ane => Some(write_embedding(&plan, weights, staging.path(), &mut advance)?),
        Target::Gpu => None,
    };
    let mut packages = Vec::new();
    for chunk in 0..plan.chunks.len() {
        packages.push(write_package(&plan, chunk, weights, staging.path(), &mut advance)?);
    }
    let mut tokenizer = Vec::new();
    for file in companions {
        let name = file.file_name().unwrap_or_default();
        fs::copy(file, staging.path().join(name)).map_err(CoremlError::writing(&out.join(name)))?;
        tokenizer.push(name.to_string_lossy().into_owned());
    }
    let audit = audited(&packages, staging.path())?;
    let manifest = facts(&plan, weights, Made { packages, embedding, tokenizer, activations, audit });
    let json = serde_json::to_string_pretty(&manifest).expect("strings and numbers") + "\n";
    staging.write(MANIFEST, json.as_bytes())?;
    staging.commit(out)?;
    Ok(manifest)
}

/// What the operator audit says of what was written.
fn audited(packages: &[PackageFacts], folder: &Path) -> Result<AuditFacts, CoremlError> {
    let options = audit::Options::default();
    let audit = |facts: &PackageFacts| audit::audit(&Package::open(&folder.join(&facts.file))?, &options);
    let audits: Vec<_> = packages.iter().map(audit).collect::<Result<_, _>>()?;
    Ok(AuditFacts::new(&audits, &options))
}

fn write_package(
    plan: &Plan<'_>,
    chunk: usize,
    weights: &Weights,
    folder: &Path,
    advance: &mut store::Advance<'_>,
) -> Result<PackageFacts, CoremlError> {
    let count = plan.chunks.len();
    let file = if count == 1 {
        "model.mlpackage".to_owned()
    } else {
        format!("model-{}-of-{count}.mlpackage", chunk + 1)
    };
    let mut writer = PackageWriter::create(&folder.join(&file))?;
    let mut store = Store::new(weights, plan.options, &mut writer.weights, advance);
    let functions = match plan.options.target {
        Target::Ane => {
            let mut function = |role| ane::function(plan, chunk, role, &mut store);
            vec![("decode", function(Role::Decode)?), ("prefill", function(Role::Prefill)?)]
        }
        Target::Gpu => vec![("main", gpu::function(plan, &mut store)?)],
    };
    let model = Model {
        specification: plan.options.opset.specification(),
        default_function: functions[0].0.into(),
        functions: functions.into_iter().map(|(name, function)| (name.to_owned(), function)).collect(),
        metadata: metadata(plan),
    };
    let weight_bytes = writer.weights.bytes();
    writer.finish(&model)?;
    Ok(PackageFacts {
        file,
        first_layer: plan.chunks[chunk].start,
        layers: plan.chunks[chunk].len(),
        functions: model.functions.into_keys().collect(),
        weight_bytes,
    })
}

fn metadata(plan: &Plan<'_>) -> Metadata {
    let said = [
        ("tandem.exporter", exporter()),
        ("tandem.architecture", plan.decoder.architecture.clone()),
        ("tandem.target", plan.options.target.name().to_owned()),
        ("tandem.quantization", plan.options.quant.name()),
    ];
    Metadata {
        user_defined: said.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
        ..Metadata::default()
    }
}

fn exporter() -> String {
    concat!("tandem ", env!("CARGO_PKG_VERSION")).to_owned()
}

/// Rows of fp16, one after the other.
fn write_embedding(
    plan: &Plan<'_>,
    weights: &Weights,
    folder: &Path,
    advance: &mut store::Advance<'_>,
) -> Result<Embedding, CoremlError> {
    const ROWS_AT_ONCE: usize = 1024;
    let path = folder.join(EMBEDDING);
    let weight = &plan.decoder.embedding;
    let table = weights.matrix(weight)?;
    let factor = plan.decoder.embedding_scale * plan.residual;
    let mut file = BufWriter::new(fs::File::create(&path).map_err(CoremlError::writing(&path))?);
    for first in (0..table.rows).step_by(ROWS_AT_ONCE) {
        let rows = first..table.rows.min(first + ROWS_AT_ONCE);
        let halves = store::scaled_halves(weight, &table, rows, factor)?;
        file.write_all(&store::bytes(&halves)).map_err(CoremlError::writing(&path))?;
        advance(halves.len());
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(CoremlError::writing(&path))?;
    weights.release(weight);
    Ok(Embedding { file: EMBEDDING.into(), rows: table.rows, columns: table.cols })
}

/// What an export consists of, and what was learned on the way.
struct Made {
    packages: Vec<PackageFacts>,
    embedding: Option<Embedding>,
    tokenizer: Vec<String>,
    activations: ActivationFacts,
    audit: AuditFacts,
}

fn facts(plan: &Plan<'_>, weights: &Weights, made: Made) -> Manifest {
    let Made { packages, embedding, tokenizer, activations, audit } = made;
    let ExportOptions { target, context, prefill, quant, group, chunks: _, kv, head_parts: _, opset } =
        plan.options;
    let decoder = plan.decoder;
    let caches =
        [Cache::Full, Cache::Ring].into_iter().filter(|cache| plan.layers.iter().any(|l| l.cache == *cache));
    let cache = |cache: Cache| CacheFacts {
        name: cache.name().into(),
        mask: cache.mask().into(),
        slot: (*kv == KvForm::State).then(|| cache.slot().into()),
        slots: plan.slots(cache),
        window: plan.ring.filter(|_| cache == Cache::Ring).map(|ring| ring.window),
    };
    let rope = |(index, rope)| RopeFacts::new(index, rope, plan.heads.head_dim, *context);
    let part = |(i, rows): (usize, &std::ops::Range<usize>)| LogitsPart {
        output: format!("logits_{i}"),
        first: rows.start,
        count: rows.len(),
    };
    Manifest {
        format: manifest::FORMAT,
        exporter: exporter(),
        model: ModelFacts {
            architecture: decoder.architecture.clone(),
            hash: weights.hash().to_owned(),
            vocab_size: decoder.vocab_size,
            hidden_size: decoder.hidden_size,
            layers: decoder.layers.len(),
        },
        target: target.name().into(),
        quantization: quant.name(),
        group: matches!(quant, Quant::Lut(_)).then_some(*group),
        opset: opset.name().into(),
        kv: if *kv == KvForm::State { "state" } else { "io" }.into(),
        context: *context,
        prefill: (*target == Target::Ane).then_some(*prefill),
        batch: 1,
        packages,
        embedding,
        caches: caches.map(cache).collect(),
        mask_value: MASK_VALUE,
        ropes: plan.ropes.iter().enumerate().map(rope).collect(),
        logits: plan.head_parts.iter().enumerate().map(part).collect(),
        residual_factor: plan.residual,
        activations,
        tokenizer,
        audit,
    }
}
