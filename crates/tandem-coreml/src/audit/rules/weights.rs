//! How weights are stored and how large they are.

use super::{ALL, APPLE_RULES, CATALOG, Check, Effect, Rule, Site, guess, measured};
use crate::audit::Chip::{M1, M2};
use crate::audit::cost::stored_bytes;
use crate::dtype::DType;
use crate::mil::TensorType;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "weights-in-blocks",
        kind: "integer blocks",
        looks_at: "int4 or int8 weights with a scale for each block of a row",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured("coreai-models issues 279, 55 and 205"), CATALOG],
        advice: "palettize instead (lut4, lut6, lut8): with blocks the engine was seen to give wrong results without a \
                 word, to crash the compiler, or to leave everything to the GPU",
        check: Check::Operator { ops: &[], when: |site, _| packed(site, in_blocks) },
    },
    Rule {
        id: "palette-with-scale",
        kind: "palette",
        looks_at: "palettized weights with a scale for each channel",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured("coremltools PR 2688 (macOS 26)")],
        advice: "palettize without per-channel scales; use grouped channels for precision",
        check: Check::Operator { ops: &[], when: |site, _| packed(site, scaled_palette) },
    },
    Rule {
        id: "palette-per-tensor",
        kind: "palette",
        looks_at: "weights with one palette of 16 entries for the whole tensor, from CoreML8 on",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[measured("coremltools PR 2688 (macOS 26)")],
        advice: "use a palette for each group of channels: some single palettes were seen to fail an assertion at load",
        check: Check::Operator { ops: &[], when: |site, _| packed(site, single_palette) },
    },
    Rule {
        id: "palette-of-int8",
        kind: "palette",
        looks_at: "palettes whose entries are int8",
        effect: Effect::Off,
        chips: ALL,
        sources: &[measured("CoreML-LLM (92.9 to 86.7 % on the engine)")],
        advice: "keep fp16 entries: what unpacks int8 entries leaves the engine",
        check: Check::Operator { ops: &[], when: |site, _| packed(site, integer_palette) },
    },
    Rule {
        id: "weights-unpacked",
        kind: "weight format",
        looks_at: "int8, affine or sparse weights",
        effect: Effect::Cost,
        chips: &[M1, M2],
        sources: &[CATALOG],
        advice: "palettize instead: these are unpacked to fp16 there, so they save disk but no memory traffic",
        check: Check::Operator { ops: &[], when: |site, _| packed(site, unpacked_at_load) },
    },
    Rule {
        id: "linear",
        kind: "linear",
        looks_at: "linear, and matmul with constant weights, of at most 2 MB",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[APPLE_RULES, CATALOG],
        advice: "write it as a 1x1 convolution on (batch, channels, 1, sequence)",
        check: Check::Operator {
            ops: PRODUCTS,
            when: |site, _| product_of_weights(site, |bytes| bytes <= FOLDED),
        },
    },
    Rule {
        id: "linear-large",
        kind: "linear",
        looks_at: "linear, and matmul with constant weights, of more than 2 MB",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[APPLE_RULES, CATALOG],
        advice: "write it as a 1x1 convolution on (batch, channels, 1, sequence): only up to 2 MB does it become one by \
                 itself",
        check: Check::Operator {
            ops: PRODUCTS,
            when: |site, _| product_of_weights(site, |bytes| bytes > FOLDED),
        },
    },
    Rule {
        id: "working-set",
        kind: "weight working set",
        looks_at: "operators with more than 32 MB of stored weights",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[guess("rule of thumb: about 32 MB of memory on the engine")],
        advice: "split the operator or use smaller weights: what does not stay on the engine is fetched at each run",
        check: Check::Operator { ops: &[], when: |site, _| large(site) },
    },
];

const PRODUCTS: &[&str] = &["linear", "matmul"];
/// In fp16, as the engine holds it.
const FOLDED: u64 = 2 << 20;
const WORKING_SET: u64 = 32 << 20;

/// What `says` of an operator that unpacks its constants.
fn packed(site: Site<'_, '_>, says: fn(Site<'_, '_>) -> Option<String>) -> Option<String> {
    site.unpackers().into_iter().find_map(says)
}

/// A grid of scales that is finer than one for each channel.
fn in_blocks(unpacker: Site<'_, '_>) -> Option<String> {
    if !unpacker.is(&["constexpr_blockwise_shift_scale", "constexpr_sparse_blockwise_shift_scale"]) {
        return None;
    }
    let (scale, whole) = (unpacker.ty("scale")?, unpacker.output()?);
    let sizes = scale.dims.iter().zip(&whole.dims).map(|(scale, dim)| Some((scale.fixed()?, dim.fixed()?)));
    let sizes: Vec<(usize, usize)> = sizes.collect::<Option<_>>()?;
    let blocked = sizes.iter().any(|(scales, size)| *scales > 1 && scales < size);
    let grid = sizes.iter().filter(|(scales, _)| *scales > 1).count() > 1;
    let ty = data_type(unpacker);
    (blocked || grid).then(|| format!("{ty} with scales {scale}"))
}

fn data_type(unpacker: Site<'_, '_>) -> String {
    let ty = unpacker.ty("data").or_else(|| unpacker.ty("nonzero_data"));
    ty.map_or_else(|| "weights".into(), ToString::to_string)
}

fn is_palette(site: Site<'_, '_>) -> bool {
    site.op.kind == "constexpr_lut_to_dense"
}

fn scaled_palette(unpacker: Site<'_, '_>) -> Option<String> {
    let scaled = unpacker.is(&["constexpr_blockwise_shift_scale"]);
    (scaled && unpacker.made_by("data").is_some_and(is_palette))
        .then(|| unpacker.ty("scale").map_or_else(String::new, |scale| format!("scales {scale}")))
}

/// The palettes of the newer form, whose shape is `[groups along each axis..., entries, vector]`.
fn palettes<'a>(unpacker: Site<'_, 'a>) -> Option<&'a TensorType> {
    if is_palette(unpacker) { unpacker.ty("lut") } else { None }
}

fn single_palette(unpacker: Site<'_, '_>) -> Option<String> {
    let shape = palettes(unpacker)?.shape()?;
    let (groups, entries) = shape.split_at_checked(shape.len().checked_sub(2)?)?;
    (entries[0] == 16 && groups.iter().all(|n| *n == 1)).then(|| format!("palette of {shape:?}"))
}

fn integer_palette(unpacker: Site<'_, '_>) -> Option<String> {
    let lut = palettes(unpacker)?;
    let quantized = unpacker.made_by("lut").is_some_and(|maker| maker.op.kind.starts_with("constexpr_"));
    (quantized || [DType::I8, DType::U8].contains(&lut.dtype)).then(|| format!("palette {lut}"))
}

fn unpacked_at_load(unpacker: Site<'_, '_>) -> Option<String> {
    let known = unpacker.is(&[
        "constexpr_affine_dequantize",
        "constexpr_blockwise_shift_scale",
        "constexpr_sparse_to_dense",
        "constexpr_lut_to_sparse",
        "constexpr_sparse_blockwise_shift_scale",
    ]);
    known.then(|| unpacker.op.kind.clone())
}

fn product_of_weights(site: Site<'_, '_>, wanted: fn(u64) -> bool) -> Option<String> {
    let mut weights = ["weight", "y", "x"].into_iter().filter_map(|key| site.arg(key));
    let weight = weights.find(|arg| site.graph.is_constant(arg))?;
    let ty = site.ty_of(weight)?;
    let bytes = u64::try_from(DType::F16.bytes(ty.elements()?)?).ok()?;
    wanted(bytes).then(|| format!("weights {ty}"))
}

fn large(site: Site<'_, '_>) -> Option<String> {
    let bytes = site.stored().into_iter().fold(0u64, |sum, value| sum.saturating_add(stored_bytes(value)));
    (bytes > WORKING_SET).then(|| format!("{} MiB of weights", bytes >> 20))
}
