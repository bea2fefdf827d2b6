//! What an audit says of small programs.

use std::collections::BTreeSet;

use super::cases::{Tiny, cases};
use super::{Audit, Chip, Effect, Options, Unit, Verdict, audit_model, catalog, rules};
use crate::dtype::DType::{F16, I32};

fn audit(tiny: Tiny) -> Audit {
    audit_model(&tiny.model(), &Options::default()).unwrap()
}

fn fired(audit: &Audit) -> BTreeSet<&'static str> {
    audit.rules.keys().copied().collect()
}

#[test]
fn every_rule_fires_where_it_should_and_nowhere_else() {
    let mut tried = BTreeSet::new();
    for (rule, bad, good) in cases() {
        assert!(fired(&audit(bad)).contains(rule), "{rule} does not fire");
        assert!(!fired(&audit(good)).contains(rule), "{rule} fires where it should not");
        tried.insert(rule);
    }
    let all: BTreeSet<&str> = rules().map(|rule| rule.id).collect();
    assert_eq!(tried, all, "a rule without a case, or a case without a rule");
    assert_eq!(rules().count(), all.len(), "two rules of one name");
}

#[test]
fn a_finding_names_only_chips_of_its_rule() {
    for (rule, bad, _) in cases() {
        let chips = super::rule(rule).unwrap().chips;
        for operator in audit(bad).functions[0].operators.iter() {
            for finding in operator.findings.iter().filter(|finding| finding.rule == rule) {
                assert!(finding.devices.iter().all(|chip| chips.contains(chip)), "{rule}");
            }
        }
    }
}

#[test]
fn every_rule_but_the_unknown_has_a_source_and_advice() {
    for rule in rules() {
        assert_eq!(rule.sources.is_empty(), rule.id == "operator-unknown", "{}", rule.id);
        assert!(
            !rule.advice.is_empty() && !rule.looks_at.is_empty() && !rule.chips.is_empty(),
            "{}",
            rule.id
        );
    }
}

/// What did not compile alone is never taken for granted, whatever else is said of it.
#[test]
fn no_operator_that_did_not_compile_is_predicted_on_the_engine() {
    for op in catalog::refused() {
        let shape = [1, 64, 1, 32];
        let tiny = Tiny::new().input("x", F16, &shape).op(op, &[("x", "x")], "y", F16, &shape);
        let audit = audit(tiny);
        let operator = &audit.functions[0].operators[0];
        assert!(operator.units.values().all(|unit| *unit != Unit::Ane), "{op}: {:?}", operator.units);
        assert_ne!(operator.rule, "operator-native", "{op}");
    }
}

#[test]
fn a_good_program_passes_on_every_chip() {
    let shape = [1, 64, 1, 32];
    let tiny = Tiny::new().input("x", F16, &shape).weight("w", &[64, 64, 1, 1]);
    let tiny = tiny.op("conv", &[("x", "x"), ("weight", "w")], "layers_3_q", F16, &shape);
    let tiny = tiny.op("sigmoid", &[("x", "layers_3_q")], "y", F16, &shape);
    let options = Options { max_fallback: 0.0, strict: true, ..Options::default() };
    let audit = audit_model(&tiny.model(), &options).unwrap();
    assert_eq!(audit.verdict, Verdict::Pass, "{:#?}", audit.functions[0].devices);
    let function = &audit.functions[0];
    assert_eq!(function.totals.operators, 2);
    assert_eq!(function.totals.weight_bytes, 64 * 64 * 2);
    assert_eq!(function.totals.multiply_adds, Some(64 * 64 * 32));
    let layers: Vec<_> = function.operators.iter().map(|op| op.layer.as_deref()).collect();
    assert_eq!(layers, [Some("layer 3"), Some("layer 3")], "a name that is silent follows what it reads");
    assert_eq!(function.operators[0].shares.multiply_adds, Some(1.0));
    assert_eq!(function.operators[0].rule, "operator-native");
}

#[test]
fn products_are_counted_and_open_lengths_are_not_zero() {
    let count = |tiny: Tiny| audit(tiny).functions[0].operators.last().unwrap().multiply_adds;
    let product = |length: i64| {
        Tiny::new().input("x", F16, &[1, 4, length, 16]).input("k", F16, &[1, 4, 16, 32]).op(
            "matmul",
            &[("x", "x"), ("y", "k")],
            "y",
            F16,
            &[1, 4, length, 32],
        )
    };
    assert_eq!(count(product(8)), Some(4 * 8 * 32 * 16));
    assert_eq!(count(product(-1)), None);
    let attention = Tiny::new()
        .input("q", F16, &[1, 4, 8, 16])
        .input("k", F16, &[1, 4, 32, 16])
        .input("v", F16, &[1, 4, 32, 24])
        .op(
            "scaled_dot_product_attention",
            &[("query", "q"), ("key", "k"), ("value", "v")],
            "y",
            F16,
            &[1, 4, 8, 24],
        );
    assert_eq!(count(attention), Some(4 * 8 * 32 * (16 + 24)));
    let audit = audit(product(-1));
    let function = &audit.functions[0];
    assert_eq!(function.totals.multiply_adds, None);
    assert_eq!(function.devices[0].off_engine.multiply_adds, None);
}

#[test]
fn lengths_that_overflow_are_unknown() {
    let huge = i64::MAX / 2;
    let tiny = Tiny::new().input("x", F16, &[1, huge, huge, huge]).op(
        "matmul",
        &[("x", "x"), ("y", "x")],
        "y",
        F16,
        &[1, huge, huge, huge],
    );
    assert_eq!(audit(tiny).functions[0].totals.multiply_adds, None);
}

#[test]
fn verdicts_follow_the_limit_and_strictness() {
    let shape = [1, 64, 1, 32];
    let tiny = || {
        let tiny = Tiny::new().input("x", F16, &shape).op("relu", &[("x", "x")], "a", F16, &shape);
        tiny.op("cumsum", &[("x", "a")], "b", F16, &shape).op("mystery", &[("x", "b")], "y", F16, &shape)
    };
    let verdict = |max_fallback, strict| {
        let options = Options { max_fallback, strict, devices: vec![Chip::M4] };
        audit_model(&tiny().model(), &options).unwrap().verdict
    };
    assert_eq!(verdict(0.15, false), Verdict::OverLimit);
    assert_eq!(verdict(0.34, false), Verdict::Pass);
    assert_eq!(verdict(0.34, true), Verdict::Uncertain);
    assert_eq!(verdict(0.15, true), Verdict::OverLimit);
    assert_eq!(
        [Verdict::Pass, Verdict::Uncertain, Verdict::OverLimit, Verdict::Failed].map(Verdict::exit_code),
        [0, 3, 2, 2]
    );
}

/// Whatever is allowed off the engine.
#[test]
fn nothing_on_the_engine_and_what_fails_there_never_pass() {
    let lenient = Options { max_fallback: 1.0, ..Options::default() };
    let ids = Tiny::new().input("x", I32, &[8]).op("add", &[("x", "x"), ("y", "x")], "y", I32, &[8]);
    let audit = audit_model(&ids.model(), &lenient).unwrap();
    assert_eq!(audit.verdict, Verdict::Failed);
    assert!(audit.functions[0].devices[0].reasons[0].contains("no operator"));
    for (rule, bad, _) in cases() {
        if super::rule(rule).unwrap().effect == Effect::Fails {
            assert_eq!(audit_model(&bad.model(), &lenient).unwrap().verdict, Verdict::Failed, "{rule}");
        }
    }
}

/// A value that depends on itself is nonsense, not an endless loop.
#[test]
fn damaged_graphs_end() {
    let shape = [1, 64, 1, 32];
    let tiny = Tiny::new()
        .op("constexpr_lut_to_dense", &[("indices", "w"), ("lut", "w")], "w", F16, &shape)
        .op("constexpr_blockwise_shift_scale", &[("data", "v"), ("scale", "w")], "v", F16, &shape)
        .op("mul", &[("x", "a"), ("y", "a")], "a", F16, &shape)
        .op("reduce_mean", &[("x", "a")], "m", F16, &shape)
        .op("reshape", &[("x", "r")], "r", F16, &shape)
        .op("conv", &[("x", "absent"), ("weight", "w"), ("bias", "v")], "y", F16, &shape);
    audit(tiny);
}
