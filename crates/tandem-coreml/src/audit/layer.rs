//! Which layer of a network an operator belongs to, by names and, where a name is silent, by what it reads.

use super::graph::{Graph, Site, name_of};

/// Words before a number that say that it counts layers.
const COUNTED: [&str; 5] = ["layers", "layer", "blocks", "block", "h"];

/// For each operator of the graph the layer it belongs to: `layer 3`, `embedding`, `head`, or nothing.
pub(super) fn layers(graph: &Graph<'_>) -> Vec<Option<String>> {
    let mut found: Vec<Option<String>> = Vec::with_capacity(graph.ops.len());
    for index in 0..graph.ops.len() {
        let site = graph.site(index);
        let own = own_name(site).or_else(|| last_read(site, &found));
        found.push(own);
    }
    found
}

/// What the operator's own names and those of its weights say.
fn own_name(site: Site<'_, '_>) -> Option<String> {
    let weights = site.op.inputs.values().flatten().filter(|arg| site.graph.is_constant(arg));
    let names = std::iter::once(site.op.name())
        .chain(site.op.outputs.iter().map(|output| output.name.as_str()))
        .chain(weights.filter_map(name_of));
    let names: Vec<&str> = names.collect();
    names.iter().find_map(|name| numbered(name)).or_else(|| names.iter().find_map(|name| ends(name)))
}

/// That of the last value it reads which has one: in a residual sum, the layer's and not the stream's.
fn last_read(site: Site<'_, '_>, found: &[Option<String>]) -> Option<String> {
    let makers = site.makers().map(|maker| maker.index).filter(|index| *index < site.index);
    makers.filter(|index| found[*index].is_some()).max().and_then(|index| found[index].clone())
}

fn numbered(name: &str) -> Option<String> {
    let mut words =
        name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).peekable();
    while let Some(word) = words.next() {
        let split = word.find(|c: char| c.is_ascii_digit()).unwrap_or(word.len());
        let (stem, digits) = word.split_at(split);
        let digits = if digits.is_empty() { words.peek().copied().unwrap_or_default() } else { digits };
        if COUNTED.contains(&stem) && !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) {
            return digits.parse::<u32>().ok().map(|number| format!("layer {number}"));
        }
    }
    None
}

fn ends(name: &str) -> Option<String> {
    let has = |part: &str| name.contains(part);
    if has("lm_head") || has("logits") {
        Some("head".into())
    } else if has("embed") || has("wte") {
        Some("embedding".into())
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_the_layer() {
        for (name, layer) in [
            ("model_layers_3_self_attn_q_proj_weight_to_fp16", Some("layer 3")),
            ("model.layers.12.mlp", Some("layer 12")),
            ("layer0/q", Some("layer 0")),
            ("transformer.h.7.attn", Some("layer 7")),
            ("op_40_cast_fp16", None),
            ("layer_norm_5", None),
            ("layers", None),
            ("layers_99999999999999999999", None),
        ] {
            assert_eq!(numbered(name).as_deref(), layer, "{name}");
        }
        assert_eq!(ends("lm_head_weight").as_deref(), Some("head"));
        assert_eq!(ends("embed_tokens").as_deref(), Some("embedding"));
        assert_eq!(ends("x"), None);
    }
}
