//! Attention as it is usually exported: masks, rope, shared heads, the fused operator.

use super::{ALL, APPLE_RULES, CATALOG, Check, Effect, LIMITS, Rule, SWEEP, Site, measured};
use crate::audit::Chip::{self, M1, M2, M3};
use crate::audit::graph::{Graph, Numbers};
use crate::mil::{FeatureKind, TensorType};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "fused-attention",
        kind: "fused attention",
        looks_at: "scaled_dot_product_attention",
        effect: Effect::Uncertain,
        chips: ALL,
        sources: &[APPLE_RULES, SWEEP],
        advice: "write it out, a product for each head or einsum bchq,bkhc->bkhq; Apple says that the engine has no \
                 fused attention, yet a program of that one operator compiled and was right on an M5 Pro",
        check: Check::Operator { ops: &["scaled_dot_product_attention"], when: super::always },
    },
    Rule {
        id: "mask-infinity",
        kind: "mask",
        looks_at: "constants of minus infinity in a mask",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "use a finite value such as -4e4: with minus infinity the softmax is wrong on the engine",
        check: Check::Operator { ops: MASKING, when: infinite_constant },
    },
    Rule {
        id: "mask-layout",
        kind: "mask",
        looks_at: "a mask input of (1, 1, query, key) in a function whose scores lie as (batch, key, heads, query)",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "pass the mask as (1, key, 1, query)",
        check: Check::Function(mask_layout),
    },
    Rule {
        id: "rope-gather",
        kind: "rope indexing",
        looks_at: "rows of a cosine or sine table picked by position inside the program",
        effect: Effect::Off,
        chips: ALL,
        sources: &[APPLE_RULES, SWEEP],
        advice: "pass the cosines and sines of the positions as inputs, (1, head size, 1, sequence)",
        check: Check::Operator {
            ops: GATHERS,
            when: |site, _| (role(site) == Role::Rope).then(|| table(site)),
        },
    },
    Rule {
        id: "embedding-gather",
        kind: "gather",
        looks_at: "rows of a constant matrix picked by token inside the program",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP],
        advice: "look the embeddings up outside and pass them as an input",
        check: Check::Operator {
            ops: GATHERS,
            when: |site, _| (role(site) == Role::Embedding).then(|| table(site)),
        },
    },
    Rule {
        id: "gather",
        kind: "gather",
        looks_at: "gather, gather_nd, gather_along_axis",
        effect: Effect::Off,
        chips: ALL,
        sources: &[SWEEP],
        advice: "slice at fixed offsets, or pick outside and pass the result as an input",
        check: Check::Operator {
            ops: GATHERS,
            when: |site, _| (role(site) == Role::Other).then(String::new),
        },
    },
    Rule {
        id: "gqa-repeat",
        kind: "GQA pattern",
        looks_at: "key or value heads repeated, then flattened",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[measured("ANEForge PR 57")],
        advice: "multiply each key and value head with its group of query heads instead of repeating it; the \
                 flattened axis grows with the context, and past 65536 nothing compiles",
        check: Check::Operator {
            ops: &["reshape"],
            when: |site, _| repeated(site, |longest| longest <= 65536),
        },
    },
    Rule {
        id: "gqa-repeat-length",
        kind: "GQA pattern",
        looks_at: "key or value heads repeated, then flattened to an axis over 65536",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured("ANEForge PR 57")],
        advice: "multiply each key and value head with its group of query heads instead of repeating it",
        check: Check::Operator {
            ops: &["reshape"],
            when: |site, _| repeated(site, |longest| longest > 65536),
        },
    },
    Rule {
        id: "slice-saturates",
        kind: "last-axis slice",
        looks_at: "slices that start past 0 on the last axis",
        effect: Effect::Uncertain,
        chips: &[M1, M2],
        sources: &[LIMITS],
        advice: "slice another axis (channels): there values beyond 4094 become infinite",
        check: Check::Operator { ops: SLICES, when: |site, _| starts_late(site) },
    },
    Rule {
        id: "concat-of-slices",
        kind: "last-axis slice",
        looks_at: "two or more slices that start past 0 on the last axis, put together again",
        effect: Effect::Fails,
        chips: &[M2],
        sources: &[CATALOG],
        advice: "slice and join along another axis: the result has wrong elements there",
        check: Check::Operator { ops: &["concat"], when: |site, _| joined_slices(site) },
    },
    Rule {
        id: "concat-of-slices-older",
        kind: "last-axis slice",
        looks_at: "two or more slices that start past 0 on the last axis, put together again",
        effect: Effect::Uncertain,
        chips: &[M1, M3],
        sources: &[CATALOG],
        advice: "slice and join along another axis: wrong elements were seen on M2, and the fault is said to be of all \
                 generations before M4",
        check: Check::Operator { ops: &["concat"], when: |site, _| joined_slices(site) },
    },
];

pub(super) const GATHERS: &[&str] = &["gather", "gather_nd", "gather_along_axis"];
const SLICES: &[&str] = &["slice_by_index", "slice_by_size"];
const MASKING: &[&str] = &[
    "add",
    "sub",
    "mul",
    "select",
    "cast",
    "maximum",
    "minimum",
    "fill",
    "concat",
    "slice_by_index",
    "slice_by_size",
    "gather",
    "gather_nd",
    "scaled_dot_product_attention",
    "expand_dims",
    "band_part",
    "reshape",
    "transpose",
    "tile",
    "softmax",
    "pad",
];

fn infinite_constant(site: Site<'_, '_>, _: Chip) -> Option<String> {
    for (key, args) in &site.op.inputs {
        for arg in args {
            let numbers = site.graph.constant(arg).and_then(|value| site.graph.numbers(value));
            if numbers.is_some_and(Numbers::has_negative_infinity) {
                return Some(format!("{key} holds minus infinity"));
            }
        }
    }
    None
}

fn mask_layout(graph: &Graph<'_>, _: Chip) -> Vec<String> {
    let engine_layout = |site: Site<'_, '_>| {
        site.is(&["einsum"])
            && site.text("equation").is_some_and(|text| text.replace(' ', "") == "bchq,bkhc->bkhq")
    };
    if !graph.computed().any(engine_layout) {
        return Vec::new();
    }
    let inputs = graph.function.interface.inputs.iter();
    inputs
        .filter_map(|feature| match &feature.kind {
            FeatureKind::Array { shape, .. } if feature.name.contains("mask") => match shape[..] {
                [1, 1, _, key] if key > 1 => Some(format!("{} is {shape:?}", feature.name)),
                _ => None,
            },
            _ => None,
        })
        .collect()
}

#[derive(PartialEq)]
enum Role {
    Rope,
    Embedding,
    Other,
}

/// A table whose first row is the cosine or sine of 0 everywhere is rope's; other constant matrices hold embeddings.
fn role(site: Site<'_, '_>) -> Role {
    let Some(arg) = site.arg("x").filter(|arg| site.graph.is_constant(arg)) else { return Role::Other };
    let Some(ty) = site.ty_of(arg) else { return Role::Other };
    let numbers = site.graph.constant(arg).and_then(|value| site.graph.numbers(value));
    let width = ty.dims.last().and_then(|dim| dim.fixed()).unwrap_or(0);
    let first_row_is = |wanted: f32| {
        numbers.is_some_and(|n| {
            let mut row = n.floats().take(width).peekable();
            row.peek().is_some() && row.all(|x| x == wanted)
        })
    };
    let bounded = || numbers.is_some_and(|n| n.floats().skip(width).all(|x| x.abs() <= 1.0));
    match ty.dims.len() {
        0 | 1 => Role::Other,
        _ if (first_row_is(1.0) || first_row_is(0.0)) && bounded() => Role::Rope,
        _ => Role::Embedding,
    }
}

fn table(site: Site<'_, '_>) -> String {
    site.ty("x").map_or_else(String::new, |ty| format!("table {ty}"))
}

/// A reshape of a tensor that was tiled, or joined from one tensor several times, and now has fewer dimensions.
fn repeated(site: Site<'_, '_>, wanted: fn(usize) -> bool) -> Option<String> {
    let maker = site.made_by("x")?;
    let twice = |site: Site<'_, '_>| {
        let values = site.op.inputs.get("values").map_or(&[][..], Vec::as_slice);
        values.len() > 1 && values.iter().all(|arg| *arg == values[0])
    };
    let flattened =
        site.output().zip(maker.output()).is_some_and(|(after, before)| after.dims.len() < before.dims.len());
    let repeats = maker.is(&["tile"]) || maker.is(&["concat", "stack"]) && twice(maker);
    let longest = |ty: &TensorType| ty.dims.iter().filter_map(|dim| dim.fixed()).max();
    let ty = site.output()?;
    (flattened && repeats && wanted(longest(ty)?)).then(|| ty.to_string())
}

fn starts_late(site: Site<'_, '_>) -> Option<String> {
    let last = site.ty("x")?.dims.len().checked_sub(1)?;
    let begin = *site.ints("begin")?.get(last)?;
    let masked = match site.constant("begin_mask").map(|value| &value.data) {
        Some(crate::mil::Data::Bools(mask)) => mask.get(last).copied().unwrap_or(false),
        _ => false,
    };
    (begin != 0 && !masked)
        .then(|| format!("starts at {begin} of {}", site.ty("x").map_or("?".into(), ToString::to_string)))
}

fn joined_slices(site: Site<'_, '_>) -> Option<String> {
    let late = site.makers().filter(|maker| maker.is(SLICES) && starts_late(*maker).is_some()).count();
    (late > 1).then(|| format!("{late} such slices"))
}
