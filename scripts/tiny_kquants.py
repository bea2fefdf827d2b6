"""Write a tiny Llama as GGUF files in K-quant mixtures, with golden logits for each.

    python scripts/tiny_kquants.py fixtures LLAMA_QUANTIZE

Needs what tiny_gguf.py needs, and the program llama-quantize of llama.cpp: the `gguf` package decodes K-quants but
does not make them. The network is as small as their super-blocks of 256 allow: one layer, 256 wide, tied head. Writes
    OUT/gguf/llama-256-{q4_k_m,q5_k_m}.gguf    Q4_K or Q5_K with Q6_K for the embedding and what else the mixture says
    OUT/gguf/golden_k.safetensors              as golden.safetensors there
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from golden import Case, fill, golden, sequences
from tiny_gguf import read_into, write

MIXTURES = ["q4_k_m", "q5_k_m"]

CASE = Case(
    name="llama-256",
    model_type="llama",
    dtype=torch.float32,
    config=dict(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    ),
)


def main() -> None:
    fixtures, quantize = Path(sys.argv[1]), sys.argv[2]
    out = fixtures / "gguf"
    torch.set_num_threads(1)
    config = AutoConfig.for_model(CASE.model_type, **CASE.config)
    model = AutoModelForCausalLM.from_config(config, dtype=CASE.dtype, attn_implementation="eager").eval()
    fill(CASE, model)
    ids = sequences(CASE.name, config.vocab_size)
    tensors = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "f16.gguf"
        write(source, model, fixtures / "llama-gqa", "f16")
        for mixture in MIXTURES:
            path = out / f"{CASE.name}-{mixture}.gguf"
            subprocess.run([quantize, source, path, mixture.upper(), "1"], check=True, capture_output=True)
            read_into(path, model)
            for name, value in golden(model, ids).items():
                shared = name.startswith(("ids", "positions"))
                tensors[name if shared else f"{mixture}.{name}"] = value
            kinds = Counter(t.tensor_type.name for t in GGUFReader(path).tensors)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB, {dict(kinds)}")
    save_file(tensors, out / "golden_k.safetensors")


if __name__ == "__main__":
    main()
