//! Operators that the engine has not, or that sources disagree about.

use super::{ALL, CATALOG, Check, Effect, Rule, SWEEP, Site, always, guess, measured};
use crate::audit::Chip::{self, M1, M2, M3, M4, M5};
use crate::dtype::DType;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "state-access",
        kind: "state",
        looks_at: "read_state, write_state and slice_update",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[
            SWEEP,
            measured("CoreML-LLM MLSTATE_PATTERN and ANEMLL (they run on A19 and M4)"),
            measured("CoreML-LLM HANDOFF (rejected)"),
        ],
        advice: "profile on the device; where state leaves the engine, pass the cache in and the new rows out instead",
        check: Check::Operator { ops: &["read_state", "write_state", "slice_update"], when: always },
    },
    Rule {
        id: "scatter",
        kind: "scatter",
        looks_at: "scatter, scatter_along_axis, scatter_nd",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "write rows with a mask (old * (1 - mask) + new * mask), or give them out and write them outside",
        check: Check::Operator { ops: &["scatter", "scatter_along_axis", "scatter_nd"], when: always },
    },
    Rule {
        id: "control-flow",
        kind: "control flow",
        looks_at: "loops, branches and lists",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "unroll the loop, or drive it from outside",
        check: Check::Operator {
            ops: &[
                "while_loop",
                "cond",
                "make_list",
                "list_gather",
                "list_length",
                "list_read",
                "list_scatter",
                "list_write",
            ],
            when: always,
        },
    },
    Rule {
        id: "recurrent",
        kind: "recurrent",
        looks_at: "lstm, gru, rnn",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG, guess("hollance/neural-engine, unsupported layers (2020)")],
        advice: "unroll it to products and activations",
        check: Check::Operator { ops: &["lstm", "gru", "rnn"], when: always },
    },
    Rule {
        id: "random",
        kind: "random numbers",
        looks_at: "random_*",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "draw outside and pass the numbers as an input",
        check: Check::Operator {
            ops: &["random_bernoulli", "random_categorical", "random_normal", "random_uniform"],
            when: always,
        },
    },
    Rule {
        id: "logical",
        kind: "logic",
        looks_at: "logical_and, logical_or, logical_xor",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "use minimum, maximum and differences of numbers, or pass the mask as an input",
        check: Check::Operator { ops: &["logical_and", "logical_or", "logical_xor"], when: always },
    },
    Rule {
        id: "shape-of-data",
        kind: "dynamic shape",
        looks_at: "operators that ask for a length, or whose result's length depends on the data",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "fix all lengths when exporting, so that they become constants",
        check: Check::Operator { ops: &["shape", "non_zero", "reshape_like"], when: always },
    },
    Rule {
        id: "index-building",
        kind: "index arithmetic",
        looks_at: "one_hot, cumsum, band_part, reverse_sequence, sliding_windows",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "compute it outside and pass it as an input, or make it a constant",
        check: Check::Operator {
            ops: &["one_hot", "cumsum", "band_part", "reverse_sequence", "sliding_windows"],
            when: always,
        },
    },
    Rule {
        id: "range-m1",
        kind: "index arithmetic",
        looks_at: "range_1d",
        effect: Effect::Off,
        chips: &[M1],
        sources: &[CATALOG],
        advice: "make it a constant",
        check: Check::Operator { ops: &["range_1d"], when: always },
    },
    Rule {
        id: "argmax",
        kind: "reduction",
        looks_at: "reduce_argmax, reduce_argmin, reduce_prod",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP],
        advice: "give the logits out and pick outside",
        check: Check::Operator { ops: &["reduce_argmax", "reduce_argmin", "reduce_prod"], when: always },
    },
    Rule {
        id: "arithmetic",
        kind: "arithmetic",
        looks_at: "mod, tan, asin, acos, atanh, sinh, cosh",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "compute it outside, or compose it of operators the engine has",
        check: Check::Operator {
            ops: &["mod", "tan", "asin", "acos", "atanh", "sinh", "cosh"],
            when: always,
        },
    },
    Rule {
        id: "sine",
        kind: "arithmetic",
        looks_at: "sin, cos",
        effect: Effect::Off,
        chips: &[M1, M2],
        sources: &[CATALOG],
        advice: "pass the sines and cosines as inputs",
        check: Check::Operator { ops: &["sin", "cos"], when: always },
    },
    Rule {
        id: "sort",
        kind: "sorting",
        looks_at: "argsort",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP],
        advice: "give the scores out and sort outside",
        check: Check::Operator { ops: &["argsort"], when: always },
    },
    Rule {
        id: "top-k-m3",
        kind: "sorting",
        looks_at: "topk",
        effect: Effect::Off,
        chips: &[M3],
        sources: &[measured("rf-detr PR 1495 (MLComputePlan, M3 Pro, macOS 27)")],
        advice: "give the scores out and pick outside",
        check: Check::Operator { ops: &["topk"], when: always },
    },
    Rule {
        id: "top-k",
        kind: "sorting",
        looks_at: "topk",
        effect: Effect::Uncertain,
        chips: &[M2, M4, M5],
        sources: &[SWEEP, CATALOG, measured("rf-detr PR 1495 (MLComputePlan, M3 Pro, macOS 27)")],
        advice: "give the scores out and pick outside: it compiles alone, but Core ML put it on the CPU of an M3",
        check: Check::Operator { ops: &["topk"], when: always },
    },
    Rule {
        id: "suppression",
        kind: "sorting",
        looks_at: "non_maximum_suppression",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "suppress outside: sources differ on whether the engine has it",
        check: Check::Operator { ops: &["non_maximum_suppression"], when: always },
    },
    Rule {
        id: "image",
        kind: "image",
        looks_at: "crop_resize, classify, conv_quantized",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP],
        advice: "do it before or after the model",
        check: Check::Operator { ops: &["crop_resize", "classify", "conv_quantized"], when: always },
    },
    Rule {
        id: "cast-to-integer",
        kind: "cast",
        looks_at: "casts to int32",
        effect: Effect::Off,
        chips: &[M1],
        sources: &[CATALOG],
        advice: "keep it a float, or cast outside",
        check: Check::Operator { ops: &["cast"], when: |site, _| cast(site, true) },
    },
    Rule {
        id: "cast",
        kind: "cast",
        looks_at: "casts",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "declare inputs and outputs fp16, so that no cast is left; alone a cast does not compile, inside a \
                 program it may be free",
        check: Check::Operator {
            ops: &["cast"],
            when: |site, chip| {
                if chip == M1 && cast(site, true).is_some() { None } else { cast(site, false) }
            },
        },
    },
    Rule {
        id: "identity",
        kind: "identity",
        looks_at: "identity",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[SWEEP, CATALOG],
        advice: "leave it out: alone it does not compile, though it should cost nothing",
        check: Check::Operator { ops: &["identity"], when: always },
    },
    Rule {
        id: "slice-at-runtime",
        kind: "index arithmetic",
        looks_at: "slice_by_index, slice_by_size at a place that is computed",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[CATALOG],
        advice: "slice at constant places (those are folded), or pass the part you want as an input",
        check: Check::Operator { ops: &["slice_by_index", "slice_by_size"], when: moving_slice },
    },
    Rule {
        id: "activation-quantized",
        kind: "activation",
        looks_at: "quantize and dequantize of what is computed",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[
            measured("CoreML-LLM (iPhone chunks do not compile)"),
            super::apple("coremltools guide, quantization (int8 is fast on A17 Pro and M4)"),
        ],
        advice: "quantize weights only, or profile",
        check: Check::Operator {
            ops: &["quantize", "dequantize"],
            when: |site, _| site.data().next().map(|_| String::new()),
        },
    },
    Rule {
        id: "pad-reflect-m1",
        kind: "padding",
        looks_at: "pad that reflects",
        effect: Effect::Uncertain,
        chips: &[M1],
        sources: &[CATALOG],
        advice: "pad with a constant",
        check: Check::Operator {
            ops: &["pad"],
            when: |site, _| site.text("mode").filter(|mode| *mode == "reflect").map(str::to_owned),
        },
    },
    Rule {
        id: "tile-factor",
        kind: "tile",
        looks_at: "tile by other factors than 1, 2, 3, 4 and 8",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[CATALOG],
        advice: "tile in steps of 2, 3, 4 or 8, or let the next operator broadcast",
        check: Check::Operator { ops: &["tile"], when: odd_tile },
    },
    Rule {
        id: "pool-window",
        kind: "convolution window",
        looks_at: "pools with windows wider than 29 (M1) or 31",
        effect: Effect::Off,
        chips: ALL,
        sources: &[CATALOG],
        advice: "pool in steps",
        check: Check::Operator {
            ops: POOLS,
            when: |site, chip| pool(site, if chip == M1 { 29 } else { 31 }, i64::MAX, i64::MAX),
        },
    },
    Rule {
        id: "pool-window-old",
        kind: "convolution window",
        looks_at: "pools with windows over 13 or strides over 2",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[guess("hollance/neural-engine, unsupported layers (2020)")],
        advice: "pool in steps; the source is old",
        check: Check::Operator {
            ops: POOLS,
            when: |site, chip| pool(site, 13, if chip == M1 { 29 } else { 31 }, 2),
        },
    },
    Rule {
        id: "dilation",
        kind: "convolution window",
        looks_at: "convolutions with gaps in the kernel",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[guess("hollance/neural-engine, unsupported layers (2020)")],
        advice: "use a kernel with zeros in its gaps, or profile; the source is old",
        check: Check::Operator {
            ops: &["conv", "conv_transpose"],
            when: |site, _| {
                site.ints("dilations").filter(|d| d.iter().any(|d| *d > 1)).map(|d| format!("{d:?}"))
            },
        },
    },
];

const POOLS: &[&str] = &["avg_pool", "max_pool", "l2_pool"];

fn cast(site: Site<'_, '_>, to_integer: bool) -> Option<String> {
    let to = site.output()?;
    (!to_integer || to.dtype == DType::I32).then(|| format!("to {}", to.dtype.name()))
}

fn moving_slice(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let mut places = ["begin", "end", "size"].into_iter().filter_map(|key| Some((key, site.arg(key)?)));
    let (key, _) = places.find(|(_, arg)| !site.graph.is_constant(arg))?;
    Some(format!("{key} is computed"))
}

fn odd_tile(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let reps = site.ints("reps")?;
    reps.iter().any(|factor| ![1, 2, 3, 4, 8].contains(factor)).then(|| format!("by {reps:?}"))
}

/// Windows wider than `above` and not wider than `most`, or (of such windows as are not wider) strides over `stride`.
fn pool(site: Site<'_, '_>, above: i64, most: i64, stride: i64) -> Option<String> {
    let window = site.ints("kernel_sizes")?;
    let widest = *window.iter().max()?;
    let strides = site.ints("strides").unwrap_or_default();
    let found = widest > above || strides.iter().any(|step| *step > stride);
    (found && widest <= most).then(|| format!("window {window:?}, strides {strides:?}"))
}
