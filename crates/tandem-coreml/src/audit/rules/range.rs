//! Precision: what fp16 and the engine's tables do to numbers.

use super::{ALL, CATALOG, Check, Effect, Rule, SWEEP, Site, apple, measured};
use crate::audit::Chip::{self, M1};
use crate::dtype::DType;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "norm-overflow",
        kind: "norm range",
        looks_at: "means and sums of fp16 squares that were not scaled down before",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[
            measured("ANEMLL (layer_norm over [x, -x])"),
            apple("coremltools, RMSNorm of the torch frontend (scales by the largest)"),
        ],
        advice: "divide by the largest absolute value first, or take layer_norm of x joined with -x: a square above \
                 65504 is infinite in fp16",
        check: Check::Operator { ops: SUMS, when: unscaled_squares },
    },
    Rule {
        id: "silu",
        kind: "activation",
        looks_at: "silu",
        effect: Effect::Cost,
        chips: ALL,
        sources: &[apple("apple/coreai-models, common_issues.md"), SWEEP],
        advice: "x * sigmoid(x) is safe everywhere; the single operator compiled on an M5 Pro, but Core AI wraps it in \
                 fp32 casts",
        check: Check::Operator { ops: &["silu"], when: super::always },
    },
    Rule {
        id: "gelu-m1",
        kind: "activation",
        looks_at: "gelu",
        effect: Effect::Cost,
        chips: &[M1],
        sources: &[CATALOG],
        advice: "expect about 8 % relative error from its table, or write it with tanh or sigmoid",
        check: Check::Operator { ops: &["gelu"], when: super::always },
    },
];

const SUMS: &[&str] = &["reduce_mean", "reduce_sum", "reduce_sum_square", "reduce_l2_norm"];

fn unscaled_squares(site: Site<'_, '_>, _: Chip) -> Option<String> {
    let ty = site.ty("x").filter(|ty| ty.dtype == DType::F16)?;
    let squared = if site.is(&["reduce_sum_square", "reduce_l2_norm"]) { site } else { square(site)? };
    let scaled = squared.made_by("x").is_some_and(|maker| {
        maker.is(&["real_div", "mul"]) && ["x", "y"].iter().any(|key| is_largest(maker, key, 4))
    });
    (!scaled).then(|| ty.to_string())
}

fn square<'g, 'a>(site: Site<'g, 'a>) -> Option<Site<'g, 'a>> {
    let maker = site.made_by("x")?;
    let itself = maker.is(&["mul"]) && maker.arg("x") == maker.arg("y");
    let power = maker.is(&["pow"]) && maker.float("y") == Some(2.0);
    (itself || power || maker.is(&["square"])).then_some(maker)
}

/// Whether an argument comes from a maximum, through at most `steps` operators.
fn is_largest(site: Site<'_, '_>, key: &str, steps: usize) -> bool {
    let Some(maker) = site.made_by(key) else { return false };
    maker.is(&["reduce_max"]) || steps > 0 && ["x", "y"].iter().any(|key| is_largest(maker, key, steps - 1))
}
