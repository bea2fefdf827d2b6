"""Make tiny checkpoints and their golden logits with transformers.

    python scripts/golden.py fixtures [NAME...]

Needs `torch`, `transformers` (5.x) and `safetensors`. For each row of CASES this writes OUT/NAME/ as
`save_pretrained` lays it out, with golden.safetensors beside it. A new architecture is one more row.

The weights are drawn so that every part matters: matrices keep the size of what passes through them, norm weights
scatter around their neutral value, biases are large enough to see. They are stored in the row's dtype; the
logits come from those *stored* weights, loaded from the folder, raised to f32, on the CPU with eager attention.

golden.safetensors holds, for sequence i of SEQUENCES:
    ids.i        i32 [n]            input ids
    positions.i  i32 [p]            the positions whose logits are kept
    logits.i     f32 [p, vocab]     logits at those positions
    greedy.i     i32 [<= GREEDY]    greedy continuation of the whole sequence; ends before the first near tie
"""

import json
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

POSITIONS = [0, 1, 31, 32, 63, 64, 99]
SEQUENCES = [7, 113]
GREEDY = 16
# Greedy tokens are a fair test only where rounding cannot change the winner: the top two logits are this far apart.
MIN_GAP = 1e-2


@dataclass
class Case:
    """One tiny checkpoint: `config` are the keys of its config.json that differ from the architecture's defaults."""

    name: str
    model_type: str
    dtype: torch.dtype
    config: dict
    max_shard_size: str = "5GB"
    # transformers before 5 wrote rope_theta, rope_scaling and torch_dtype where 5 writes rope_parameters and dtype.
    old_spelling: bool = False
    # Norm weights scatter around this value: 1, or 0 where the architecture adds the 1 itself.
    norm_center: float = 1.0
    generation: dict = field(default_factory=dict)


CASES = [
    Case(
        name="llama-gqa",
        model_type="llama",
        dtype=torch.bfloat16,
        old_spelling=True,
        config=dict(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=50000.0),
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        ),
        generation=dict(bos_token_id=1, eos_token_id=2, pad_token_id=2),
    ),
    Case(
        name="llama-tied-bias",
        model_type="llama",
        dtype=torch.float32,
        config=dict(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=256,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=500000.0),
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=[2, 3],
        ),
        generation=dict(bos_token_id=1, eos_token_id=[2, 3], do_sample=True, temperature=0.6, top_p=0.9),
    ),
    Case(
        name="llama3-rope",
        model_type="llama",
        dtype=torch.float16,
        max_shard_size="200KB",
        config=dict(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
            rms_norm_eps=1e-5,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        ),
        generation=dict(bos_token_id=1, eos_token_id=2),
    ),
]


def rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))


def fill(case: Case, model: torch.nn.Module) -> None:
    """Draws every parameter, each from a stream named after it, and rounds it to the stored dtype."""
    tied = model.config.get_text_config().tie_word_embeddings
    with torch.no_grad():
        for name, p in model.named_parameters():
            draw = rng(f"{case.name}/{name}").standard_normal(tuple(p.shape), dtype=np.float32)
            if "norm" in name:
                value = case.norm_center + 0.2 * draw
            elif p.ndim == 1:
                value = 0.1 * draw
            elif "embed" in name:
                value = draw * (p.shape[-1] ** -0.5 if tied else 1.0)
            else:
                value = draw * p.shape[-1] ** -0.5
            p.copy_(torch.from_numpy(value))


def old_spelling(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope.pop("rope_type") != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def sequences(name: str, vocab: int) -> list[np.ndarray]:
    draw = rng(f"{name}/ids")
    return [draw.integers(4, vocab, n).astype(np.int32) for n in SEQUENCES]


@torch.no_grad()
def golden(model: torch.nn.Module, ids: list[np.ndarray]) -> dict[str, np.ndarray]:
    out = {}
    for i, seq in enumerate(ids):
        row = torch.from_numpy(seq.astype(np.int64))[None]
        logits = model(row, use_cache=False).logits[0].float()
        last = len(seq) - 1
        positions = sorted({p for p in (POSITIONS if last >= POSITIONS[-1] else range(last)) if p < last} | {last})
        greedy, next_logits = [], logits[-1]
        for _ in range(GREEDY):
            top = next_logits.topk(2)
            if top.values[0] - top.values[1] < MIN_GAP:
                break
            greedy.append(top.indices[0].item())
            row = torch.cat([row, top.indices[:1][None]], dim=1)
            next_logits = model(row, use_cache=False).logits[0, -1].float()
        assert len(greedy) >= 4, f"sequence {i}: near tie after {len(greedy)} tokens; choose another seed"
        out[f"ids.{i}"] = seq
        out[f"positions.{i}"] = np.array(positions, dtype=np.int32)
        out[f"logits.{i}"] = logits[positions].numpy()
        out[f"greedy.{i}"] = np.array(greedy, dtype=np.int32)
    return out


def load(folder: Path) -> torch.nn.Module:
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def make(case: Case, out: Path) -> None:
    folder = out / case.name
    config = AutoConfig.for_model(case.model_type, **case.config)
    config.dtype = case.dtype
    model = AutoModelForCausalLM.from_config(config, dtype=case.dtype)
    fill(case, model)
    model.generation_config = GenerationConfig(**case.generation)
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    if case.old_spelling:
        old_spelling(folder)
    tensors = golden(load(folder), sequences(case.name, config.get_text_config().vocab_size))
    save_file(tensors, folder / "golden.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{case.name}: logits std {tensors['logits.1'].std():.2f}, {size / 1000:.0f} kB")


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    for case in CASES:
        if not names or case.name in names:
            make(case, out)


if __name__ == "__main__":
    main()
