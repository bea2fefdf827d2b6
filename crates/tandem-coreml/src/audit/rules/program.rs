//! What holds for a function or a package as a whole.

use std::collections::BTreeSet;

use super::{ALL, APPLE_RULES, Check, Effect, Rule, apple, measured};
use crate::audit::Chip;
use crate::audit::cost::stored_bytes;
use crate::audit::graph::Graph;
use crate::mil::{BlobRef, Data, Feature, FeatureKind};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "state-width",
        kind: "state",
        looks_at: "states whose last dimension is no multiple of 32",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured("coremltools issue 2631")],
        advice: "pad the state's last dimension to a multiple of 32: otherwise it fails on the engine while CPU and GPU run",
        check: Check::Function(state_width),
    },
    Rule {
        id: "state-count",
        kind: "state",
        looks_at: "three or more states in a package",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured(
            "CoreML-LLM MLSTATE_PATTERN (error 11 at run time, and wrong output on the CPU)",
        )],
        advice: "keep all layers in one state, or in two (full attention and windows)",
        check: Check::Function(state_count),
    },
    Rule {
        id: "dynamic-state-blocks",
        kind: "dynamic shape",
        looks_at: "open lengths, states and integer blocks together",
        effect: Effect::Off,
        chips: ALL,
        sources: &[measured("coremltools issue 2600")],
        advice: "fix the lengths, or palettize: a model with all three runs on the CPU alone",
        check: Check::Function(dynamic_state_blocks),
    },
    Rule {
        id: "input-padding",
        kind: "last-axis padding",
        looks_at: "inputs and outputs whose last axis is no multiple of 64 bytes",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[APPLE_RULES],
        advice: "make the last axis a multiple of 32 elements of fp16",
        check: Check::Function(input_padding),
    },
    Rule {
        id: "package-size",
        kind: "size",
        looks_at: "weights of more than 1 GB in a function",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[
            apple("coremltools guide, mlmodel-utilities (iPhone)"),
            measured("coremltools issue 2758 (a large fp16 program that does not compile kills the process)"),
        ],
        advice: "split the model into chunks",
        check: Check::Function(|graph, _| size(graph, 1_000_000_000, 15 << 30)),
    },
    Rule {
        id: "program-bank",
        kind: "size",
        looks_at: "weights of more than 15 GiB in a function",
        effect: Effect::Fails,
        chips: ALL,
        sources: &[measured("omlx issue 2781 (load fails with 0x20004; two of 7.9 GB load)")],
        advice: "split the model into chunks",
        check: Check::Function(|graph, _| size(graph, 15 << 30, u64::MAX)),
    },
];

fn state_width(graph: &Graph<'_>, _: Chip) -> Vec<String> {
    let odd = |size: usize| !size.is_multiple_of(32);
    let states = graph.function.states();
    let states = states.filter(|(_, ty)| ty.dims.last().and_then(|dim| dim.fixed()).is_some_and(odd));
    states.map(|(name, ty)| format!("{name} is {ty}")).collect()
}

fn state_count(graph: &Graph<'_>, _: Chip) -> Vec<String> {
    if graph.states.len() < 3 || graph.function.states().next().is_none() {
        return Vec::new();
    }
    let names: Vec<&str> = graph.states.iter().take(4).map(|(name, _)| *name).collect();
    let more = if graph.states.len() > names.len() { ", ..." } else { "" };
    vec![format!("{} states: {}{more}", graph.states.len(), names.join(", "))]
}

fn dynamic_state_blocks(graph: &Graph<'_>, chip: Chip) -> Vec<String> {
    let rule = super::rule("weights-in-blocks");
    let blocks =
        || rule.is_some_and(|rule| graph.computed().any(|site| rule.check.operator(site, chip).is_some()));
    let all = graph.ranged() && graph.function.states().next().is_some() && blocks();
    if all { vec!["open lengths, states and integer blocks".into()] } else { Vec::new() }
}

fn input_padding(graph: &Graph<'_>, _: Chip) -> Vec<String> {
    let interface = &graph.function.interface;
    interface.inputs.iter().chain(&interface.outputs).filter_map(padded).collect()
}

/// An array of more than one dimension: a list of numbers is no tensor of the engine.
fn padded(feature: &Feature) -> Option<String> {
    let FeatureKind::Array { dtype, shape, .. } = &feature.kind else { return None };
    let bytes = dtype.bytes(usize::try_from(*shape.last()?).ok()?)?;
    let float = dtype.name().starts_with("fp");
    (float && shape.len() > 1 && !bytes.is_multiple_of(64))
        .then(|| format!("{} is {} {shape:?}", feature.name, dtype.name()))
}

/// Weights of the function, each record once, if they take more than `above` and at most `most` bytes.
fn size(graph: &Graph<'_>, above: u64, most: u64) -> Vec<String> {
    let mut seen: BTreeSet<&BlobRef> = BTreeSet::new();
    let values = graph.ops.iter().flat_map(|node| node.op.values());
    let bytes = values.fold(0u64, |sum, (_, value)| match &value.data {
        Data::Blob(blob) if seen.insert(blob) => sum.saturating_add(stored_bytes(value)),
        _ => sum,
    });
    if bytes > above && bytes <= most { vec![format!("{:.1} GB", bytes as f64 / 1e9)] } else { Vec::new() }
}
