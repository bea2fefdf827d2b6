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

Where rope depends on the length of the sequence (dynamic, longrope) the logits are those of one forward over exactly
that sequence, and there is no greedy.i: transformers changes the frequencies as the sequence grows.
"""

import json
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
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
    # Whether rope depends on the length of the sequence.
    by_length: bool = False
    # Norm weights scatter around this value: 1, or 0 where the architecture adds the 1 itself.
    norm_center: float = 1.0
    generation: dict = field(default_factory=dict)


# What most cases have in common.
SMALL = dict(
    vocab_size=192,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)

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
    Case(
        name="llama-linear",
        model_type="llama",
        dtype=torch.bfloat16,
        old_spelling=True,
        config=SMALL | dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    ),
    Case(
        name="llama-dynamic",
        model_type="llama",
        dtype=torch.bfloat16,
        by_length=True,
        config=SMALL
        | dict(
            max_position_embeddings=64,
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
        ),
    ),
    Case(
        name="llama-yarn",
        model_type="llama",
        dtype=torch.bfloat16,
        config=SMALL
        | dict(
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64
            )
        ),
    ),
    Case(
        name="mistral-window",
        model_type="mistral",
        dtype=torch.bfloat16,
        config=SMALL | dict(sliding_window=16, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    ),
    Case(
        name="qwen2-window",
        model_type="qwen2",
        dtype=torch.bfloat16,
        config=SMALL
        | dict(
            num_hidden_layers=3,
            use_sliding_window=True,
            sliding_window=24,
            max_window_layers=1,
            rope_parameters=dict(rope_type="default", rope_theta=1e6),
        ),
    ),
    Case(
        name="qwen2-yarn",
        model_type="qwen2",
        dtype=torch.bfloat16,
        old_spelling=True,
        config=SMALL
        | dict(
            max_position_embeddings=64,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=64
            ),
        ),
    ),
    Case(
        name="qwen3",
        model_type="qwen3",
        dtype=torch.bfloat16,
        config=SMALL
        | dict(head_dim=32, attention_bias=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    ),
    Case(
        name="gemma3",
        model_type="gemma3_text",
        dtype=torch.bfloat16,
        norm_center=0.0,
        config=SMALL
        | dict(
            hidden_size=96,
            intermediate_size=112,
            num_hidden_layers=3,
            num_key_value_heads=1,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=24,
            final_logit_softcapping=3.0,
            tie_word_embeddings=True,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
    ),
    Case(
        name="gemma3-vision",
        model_type="gemma3",
        dtype=torch.bfloat16,
        norm_center=0.0,
        old_spelling=True,
        config=dict(
            text_config=SMALL
            | dict(
                num_hidden_layers=6,
                intermediate_size=48,
                vocab_size=160,
                sliding_window=16,
                query_pre_attn_scalar=16,
                tie_word_embeddings=True,
                rope_parameters=dict(
                    full_attention=dict(rope_type="default", rope_theta=1e6),
                    sliding_attention=dict(rope_type="default", rope_theta=5000.0),
                ),
            ),
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=1,
                image_size=16,
                patch_size=8,
            ),
            mm_tokens_per_image=4,
            image_token_index=3,
            boi_token_index=1,
            eoi_token_index=2,
        ),
    ),
    Case(
        name="phi3-longrope",
        model_type="phi3",
        dtype=torch.bfloat16,
        by_length=True,
        old_spelling=True,
        config=SMALL
        | dict(
            num_key_value_heads=2,
            max_position_embeddings=512,
            original_max_position_embeddings=64,
            partial_rotary_factor=0.75,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                long_factor=[1.0, 1.5, 2.5, 4.0, 6.0, 7.5],
            ),
        ),
    ),
    Case(
        name="phi3-window",
        model_type="phi3",
        dtype=torch.bfloat16,
        config=SMALL
        | dict(
            num_key_value_heads=4,
            sliding_window=24,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        ),
    ),
    Case(
        name="smollm3",
        model_type="smollm3",
        dtype=torch.bfloat16,
        config=SMALL
        | dict(
            num_hidden_layers=4,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=5e6),
        ),
    ),
    Case(
        name="olmo2",
        model_type="olmo2",
        dtype=torch.bfloat16,
        config=SMALL | dict(rope_parameters=dict(rope_type="default", rope_theta=500000.0)),
    ),
    Case(
        name="granite",
        model_type="granite",
        dtype=torch.bfloat16,
        old_spelling=True,
        config=SMALL
        | dict(
            embedding_multiplier=12.0,
            attention_multiplier=0.125,
            residual_multiplier=0.22,
            logits_scaling=0.5,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
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
    config["torch_dtype"] = config.pop("dtype")
    text = config.get("text_config", config)
    rope = text.pop("rope_parameters")
    text.pop("dtype", None)
    if "full_attention" in rope:
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        text.pop("layer_types")
    text["rope_theta"] = rope.pop("rope_theta")
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        # Written both inside and outside by transformers 5.
        if key in text:
            rope.pop(key, None)
    text["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    if rope["rope_type"] == "longrope":
        rope["type"] = rope.pop("rope_type")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def sequences(name: str, vocab: int) -> list[np.ndarray]:
    draw = rng(f"{name}/ids")
    return [draw.integers(4, vocab, n).astype(np.int32) for n in SEQUENCES]


@torch.no_grad()
def golden(model: torch.nn.Module, ids: list[np.ndarray], greedy_too: bool = True) -> dict[str, np.ndarray]:
    out = {}
    for i, seq in enumerate(ids):
        row = torch.from_numpy(seq.astype(np.int64))[None]
        logits = model(row, use_cache=False).logits[0].float()
        last = len(seq) - 1
        positions = sorted({p for p in (POSITIONS if last >= POSITIONS[-1] else range(last)) if p < last} | {last})
        out[f"ids.{i}"] = seq
        out[f"positions.{i}"] = np.array(positions, dtype=np.int32)
        out[f"logits.{i}"] = logits[positions].numpy()
        if not greedy_too:
            continue
        greedy, next_logits = [], logits[-1]
        for _ in range(GREEDY):
            top = next_logits.topk(2)
            if top.values[0] - top.values[1] < MIN_GAP:
                break
            greedy.append(top.indices[0].item())
            row = torch.cat([row, top.indices[:1][None]], dim=1)
            next_logits = model(row, use_cache=False).logits[0, -1].float()
        assert len(greedy) >= 4, f"sequence {i}: near tie after {len(greedy)} tokens; choose another seed"
        out[f"greedy.{i}"] = np.array(greedy, dtype=np.int32)
    return out


def load(folder: Path) -> torch.nn.Module:
    disable_progress_bar()
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        # Gemma rounds this factor to the number format of the weights when it runs in that.
        if hasattr(module, "embed_scale"):
            module.embed_scale = module.embed_scale.to(config.dtype).float()
    return model.eval()


def make(case: Case, out: Path) -> None:
    folder = out / case.name
    config = AutoConfig.for_model(case.model_type, **case.config)
    config.dtype = case.dtype
    auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
    model = auto.from_config(config, dtype=case.dtype)
    fill(case, model)
    model.generation_config = GenerationConfig(**case.generation)
    model.save_pretrained(folder, max_shard_size=case.max_shard_size)
    if case.old_spelling:
        old_spelling(folder)
    ids = sequences(case.name, config.get_text_config().vocab_size)
    tensors = golden(load(folder), ids, greedy_too=not case.by_length)
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
