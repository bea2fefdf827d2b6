//! Element types, ranks and lengths.

use super::{ALL, APPLE_RULES, CATALOG, Check, Effect, LIMITS, Rule, Site, apple, measured};
use crate::audit::Chip::{self, M1, M2, M3, M4, M5};
use crate::dtype::DType;
use crate::mil::{Dim, TensorType};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "dtype",
        kind: "dtype",
        looks_at: "element types of what an operator reads and gives, other than casts",
        effect: Effect::Off,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "keep every tensor in fp16, int8 or int16; a float literal in Python becomes an fp32 constant",
        check: Check::Operator { ops: &[], when: foreign_dtype },
    },
    Rule {
        id: "state-place",
        kind: "state",
        looks_at: "arithmetic of int32 values that only say where slice_update writes",
        effect: Effect::Uncertain,
        chips: &[M4],
        sources: &[
            APPLE_RULES,
            measured("CoreML-LLM MLSTATE_PATTERN (an int32 position works on A19 and M4)"),
        ],
        advice: "give slice_update its begin and end whole, as inputs: only on A19 and M4 were packages seen to work that \
                 compute them, and Apple names no int32 among the engine's types",
        check: Check::Operator { ops: &[], when: place_of_state },
    },
    Rule {
        id: "dtype-bool",
        kind: "dtype",
        looks_at: "operators that give truth values",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[APPLE_RULES, CATALOG],
        advice: "pass the mask as an fp16 input instead of comparing inside; Apple names no bool among the engine's \
                 types, while single comparisons were seen to compile",
        check: Check::Operator { ops: &[], when: truth_values },
    },
    Rule {
        id: "rank",
        kind: "rank",
        looks_at: "tensors of more than five dimensions",
        effect: Effect::Off,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "merge dimensions before the operator; (batch, channels, 1, sequence) is what the engine likes",
        check: Check::Operator { ops: &[], when: high_rank },
    },
    Rule {
        id: "layer-norm-dynamic-length",
        kind: "layer norm with dynamic length",
        looks_at: "layer_norm over a tensor with an open length",
        effect: Effect::Off,
        chips: ALL,
        sources: &[APPLE_RULES, apple("coremltools guide, flexible inputs and faqs")],
        advice: "fix the length: one function for each chunk size, or enumerated shapes",
        check: Check::Operator { ops: &["layer_norm"], when: open_length },
    },
    Rule {
        id: "dynamic-shape",
        kind: "dynamic shape",
        looks_at: "tensors with a length that is known only when the program runs",
        effect: Effect::Off,
        chips: ALL,
        sources: &[
            APPLE_RULES,
            apple("coremltools guide, flexible inputs and faqs"),
            measured("CoreML-LLM, REJECTED_APPROACHES"),
        ],
        advice: "export fixed shapes (a function for prefill, one for decode) or enumerated shapes; \
                 reshapeFrequency=Infrequent may help from iOS 17.4 on, and was seen to fail as well",
        check: Check::Operator { ops: &[], when: dynamic },
    },
    Rule {
        id: "last-axis-one",
        kind: "last-axis padding",
        looks_at: "results whose last axis has length 1",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "put a long axis last: each row is padded to 64 bytes, 32 times the memory in fp16",
        check: Check::Operator { ops: &[], when: last_axis_of_one },
    },
    Rule {
        id: "axis-length",
        kind: "axis length",
        looks_at: "axes over 16384 (M1 to M3) or 65536 (M4, M5); a channel axis may have 65536 on all",
        effect: Effect::Off,
        chips: ALL,
        sources: &[LIMITS],
        advice: "split the axis; a vocabulary wants a head of several convolutions",
        check: Check::Operator { ops: &[], when: long_axis },
    },
    Rule {
        id: "vocabulary-axis",
        kind: "axis length",
        looks_at: "convolutions with more than 65536 output channels",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[
            LIMITS,
            measured("ANEMLL, heads split 8 and 16 ways"),
            measured("CoreML-LLM, one head ran best on A19"),
        ],
        advice: "split the head into convolutions of at most 65536 (M1 to M3 of 16384) channels, or profile it whole",
        check: Check::Operator { ops: &["conv"], when: many_channels },
    },
    Rule {
        id: "transpose-length",
        kind: "axis length",
        looks_at: "transposes of axes over 16384 (M1 to M3) or 65536 (M4, M5)",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[LIMITS, CATALOG],
        advice: "avoid transposing long axes: one source allows 8388607, another no more than other operators have",
        check: Check::Operator { ops: &["transpose"], when: long_transpose },
    },
    Rule {
        id: "convolution-kernel-m1",
        kind: "convolution window",
        looks_at: "fp16 convolutions with kernels longer than 13 along an axis",
        effect: Effect::Off,
        chips: &[M1],
        sources: &[LIMITS, CATALOG],
        advice: "compose the kernel of smaller ones",
        check: Check::Operator { ops: &["conv"], when: |site, _| wide_kernel(site, 13, usize::MAX) },
    },
    Rule {
        id: "convolution-kernel",
        kind: "convolution window",
        looks_at: "convolutions with kernels longer than 13 (M2, M3) or of 16 to 32 (M4, M5) along an axis",
        effect: Effect::Uncertain,
        chips: &[M2, M3, M4, M5],
        sources: &[LIMITS, CATALOG],
        advice: "compose the kernel of smaller ones, or profile: sources differ on the limit",
        check: Check::Operator {
            ops: &["conv"],
            when: |site, chip| {
                if chip < M4 { wide_kernel(site, 13, usize::MAX) } else { wide_kernel(site, 15, 32) }
            },
        },
    },
    Rule {
        id: "convolution-kernel-max",
        kind: "convolution window",
        looks_at: "convolutions with kernels longer than 32 along an axis",
        effect: Effect::Off,
        chips: &[M4, M5],
        sources: &[CATALOG],
        advice: "compose the kernel of smaller ones",
        check: Check::Operator { ops: &["conv"], when: |site, _| wide_kernel(site, 32, usize::MAX) },
    },
];

/// Types of the engine, and those that only index, hold words or are told apart elsewhere.
fn foreign_dtype(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    let good = [DType::F16, DType::I8, DType::I16, DType::Bool, DType::String];
    // Another rule's, where it looks at that chip.
    if site.op.kind == "cast" || (chip == M4 && site.places_state()) {
        return None;
    }
    site.tensors().find(|ty| !good.contains(&ty.dtype)).map(ToString::to_string)
}

fn place_of_state(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let found = site.op.kind != "cast" && site.places_state();
    found.then(|| site.output().map_or_else(String::new, ToString::to_string))
}

fn truth_values(site: Site<'_, '_>, _: Chip) -> Option<String> {
    if site.op.kind == "cast" {
        return None;
    }
    site.outputs().find(|ty| ty.dtype == DType::Bool).map(ToString::to_string)
}

fn high_rank(site: Site<'_, '_>, _: Chip) -> Option<String> {
    site.tensors().find(|ty| ty.dims.len() > 5).map(ToString::to_string)
}

fn is_open(ty: &TensorType) -> bool {
    ty.dims.iter().any(|dim| matches!(dim, Dim::Unknown { .. }))
}

/// Lengths that a caller picks from a list are fixed for the engine, which then has a program for each.
fn open_length(site: Site<'_, '_>, _: Chip) -> Option<String> {
    if site.graph.enumerated() {
        return None;
    }
    site.tensors().find(|ty| is_open(ty)).map(ToString::to_string)
}

fn dynamic(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    if site.op.kind == "layer_norm" { None } else { open_length(site, chip) }
}

fn last_axis_of_one(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let found = site.outputs().find(|ty| ty.dims.len() > 1 && ty.dims.last() == Some(&Dim::Fixed(1)));
    found.map(ToString::to_string)
}

/// The longest axis that operators may have.
fn longest(chip: Chip) -> usize {
    if chip < M4 { 16384 } else { 65536 }
}

const LONGEST_CHANNELS: usize = 65536;

fn long_axis(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    if site.op.kind == "transpose" {
        return None;
    }
    let too_long = |ty: &&TensorType| {
        ty.dims.iter().enumerate().any(|(axis, dim)| {
            let channels = axis == 1 && ty.dims.len() >= 4;
            let limit = if channels { LONGEST_CHANNELS } else { longest(chip) };
            let heads = channels && site.op.kind == "conv";
            !heads && dim.fixed().is_some_and(|size| size > limit)
        })
    };
    site.tensors().find(too_long).map(ToString::to_string)
}

fn many_channels(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let ty = site.output()?;
    (ty.dims.len() >= 4 && ty.dims[1].fixed()? > LONGEST_CHANNELS).then(|| ty.to_string())
}

fn long_transpose(site: Site<'_, '_>, chip: Chip) -> Option<String> {
    let ty = site.output()?;
    ty.dims.iter().any(|dim| dim.fixed().is_some_and(|size| size > longest(chip))).then(|| ty.to_string())
}

/// Kernels with an axis longer than `above` and none longer than `most`.
fn wide_kernel(site: Site<'_, '_>, above: usize, most: usize) -> Option<String> {
    let weight = site.ty("weight")?;
    let widest = weight.dims.get(2..)?.iter().filter_map(|dim| dim.fixed()).max()?;
    (widest > above && widest <= most).then(|| weight.to_string())
}
