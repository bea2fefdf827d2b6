"""Write the llama-gqa fixture as an MLX-quantized folder, with golden logits.

    python scripts/mlx_folder.py fixtures

Needs `mlx`, `mlx-cpu` (on Linux) and `mlx-lm` besides what golden.py needs. Writes OUT/mlx-llama-gqa/ as mlx_lm.convert
lays it out: affine, 4 bits in groups of 64, embedding included, scales and biases in bfloat16. Modules that differ are
there too: the head and the output projections have 8 bits in groups of 32; one key projection is not quantized, nor are
the down projections, whose 160 columns do not divide by 64.

golden.safetensors is as golden.py writes it: what transformers computes, in f32, from the weights that mx.dequantize
gives with scales and biases raised to f32.
"""

import json
import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import convert
from safetensors.numpy import save_file

from golden import golden, load, sequences


def predicate(path: str, module) -> bool | dict:
    if path == "model.layers.1.self_attn.k_proj":
        return False
    if path.endswith("o_proj") or path == "lm_head":
        return {"bits": 8, "group_size": 32, "mode": "affine"}
    return hasattr(module, "to_quantized")


def dequantized(folder: Path) -> dict[str, np.ndarray]:
    """Every parameter under transformers' name."""
    stored = mx.load(str(folder / "model.safetensors"))
    settings = json.loads((folder / "config.json").read_text())["quantization"]
    out = {}
    for name, value in stored.items():
        module, kind = name.rsplit(".", 1)
        if kind in ("scales", "biases"):
            continue
        if f"{module}.scales" in stored:
            own = settings.get(module, settings)
            scales, biases = (stored[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            value = mx.dequantize(value, scales, biases, group_size=own["group_size"], bits=own["bits"])
        out[name] = np.array(value.astype(mx.float32))
    return out


def main() -> None:
    fixtures = Path(sys.argv[1])
    source, folder = fixtures / "llama-gqa", fixtures / "mlx-llama-gqa"
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    convert(str(source), mlx_path=str(folder), quantize=True, q_bits=4, q_group_size=64, quant_predicate=predicate)
    for name in ("README.md", "model.safetensors.index.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).unlink(missing_ok=True)
    # The source's own, as mlx-lm would have copied them from a checkpoint of that age.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)

    model, weights = load(source), dequantized(folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(weights.pop(name)))
    assert not weights, weights.keys()
    save_file(golden(model, sequences(folder.name, model.config.vocab_size)), folder / "golden.safetensors")
    print(f"{folder.name}: {sum(f.stat().st_size for f in folder.iterdir()) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
