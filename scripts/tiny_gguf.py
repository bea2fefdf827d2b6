"""Write the llama-gqa fixture as GGUF files, with golden logits for each.

    python scripts/tiny_gguf.py fixtures

Needs `gguf` besides what golden.py needs; run golden.py and tiny_tokenizer.py first. Writes
OUT/gguf/llama-gqa-{f16,q8_0,q4_0,q4_1,q5_0,q5_1}.gguf as llama.cpp's converter lays a Llama checkpoint out: matrices in the
file's type, norms in f32, the rows of q and k permuted from the half-split rope order to the interleaved one.

OUT/gguf/golden.safetensors holds ids.i and positions.i as in golden.py, and TYPE.logits.i and TYPE.greedy.i: what
transformers computes, in f32, from the file's own dequantized weights.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, TokenType, quants
from safetensors.numpy import load_file, save_file

from golden import golden, load

TYPES = {
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": (GGMLQuantizationType.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": (GGMLQuantizationType.Q5_1, LlamaFileType.MOSTLY_Q5_1),
}

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` to `blk.0.ffn_up.weight`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def to_interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Reorders each head's rows from [first halves, second halves] to pairs."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def to_half_split(w: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_interleaved`."""
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def rope_heads(name: str, config) -> int | None:
    """How many rope heads the rows of this tensor form; None where rope does not touch it."""
    if ".q_proj." in name:
        return config.num_attention_heads
    if ".k_proj." in name:
        return config.num_key_value_heads
    return None


def add_metadata(writer: GGUFWriter, config, folder: Path, file_type: LlamaFileType) -> None:
    writer.add_name("Tandem tiny llama")
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {t["id"] for t in tokenizer["added_tokens"]}
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda entry: entry[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([TokenType.CONTROL if i in special else TokenType.NORMAL for _, i in vocab])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(config.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"])


def write(path: Path, model: torch.nn.Module, folder: Path, kind: str) -> None:
    qtype, file_type = TYPES[kind]
    writer = GGUFWriter(path, "llama")
    add_metadata(writer, model.config, folder, file_type)
    for name, p in model.named_parameters():
        w = p.detach().numpy()
        if heads := rope_heads(name, model.config):
            w = to_interleaved(w, heads)
        t = qtype if w.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), quants.quantize(np.ascontiguousarray(w), t), raw_dtype=t)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_into(path: Path, model: torch.nn.Module) -> None:
    """Replaces the model's weights by the file's dequantized ones."""
    tensors = {t.name: quants.dequantize(t.data, t.tensor_type) for t in GGUFReader(path).tensors}
    with torch.no_grad():
        for name, p in model.named_parameters():
            w = tensors.pop(gguf_name(name))
            if heads := rope_heads(name, model.config):
                w = to_half_split(w, heads)
            p.copy_(torch.from_numpy(np.array(w, dtype=np.float32)))
    assert not tensors, tensors.keys()


def main() -> None:
    fixtures = Path(sys.argv[1])
    folder, out = fixtures / "llama-gqa", fixtures / "gguf"
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    source = load_file(folder / "golden.safetensors")
    ids = [source["ids.0"], source["ids.1"]]
    tensors = {}
    for kind in TYPES:
        path = out / f"llama-gqa-{kind}.gguf"
        model = load(folder)
        write(path, model, folder, kind)
        read_into(path, model)
        for name, value in golden(model, ids).items():
            shared = name.startswith(("ids", "positions"))
            tensors[name if shared else f"{kind}.{name}"] = value
        off = np.abs(tensors[f"{kind}.logits.1"] - source["logits.1"]).max()
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, logits off by at most {off:.4f} from the checkpoint's")
    save_file(tensors, out / "golden.safetensors")


if __name__ == "__main__":
    main()
