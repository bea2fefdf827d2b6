"""Make SmolLM2 as an MLX-quantized folder, and the greedy tokens that mlx-lm gives with it.

    python scripts/smollm2_mlx.py convert HF_FOLDER OUT
    python scripts/smollm2_mlx.py greedy OUT fixtures

Needs `mlx`, `mlx-cpu` (on Linux) and `mlx-lm`. HF_FOLDER is what smollm2_folder.py writes; OUT is its affine 4-bit form in
groups of 64, embedding included, 84 MB and never committed. The folder is f32, so are scales and biases, and mlx-lm
computes in f32 with a KV cache in f32. mlx-lm 0.32 does not read transformers 5's `rope_parameters` for this
architecture, and would fall back to a base of 10000 without a word: config.json is written in the spelling it knows.

Writes fixtures/smollm2/greedy_mlx.json: for each prompt of greedy.json, up to 32 greedy ids, ending with the end token
where it comes sooner, and the gap between the two highest log-probabilities at each step, so that a near tie shows. MLX's
CPU backend manages a few tokens a second: expect minutes.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm import convert, load
from mlx_lm.generate import generate_step

STEPS = 32


def greedy(model, ids: list[int], end: int) -> tuple[list[int], list[float]]:
    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(ids), model, max_tokens=STEPS):
        second, first = mx.sort(logprobs)[-2:].tolist()
        tokens.append(token)
        gaps.append(round(first - second, 4))
        if token == end:
            break
    return tokens, gaps


def make(source: Path, folder: Path) -> None:
    convert(str(source), mlx_path=str(folder), quantize=True, q_bits=4, q_group_size=64)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config, indent=4, sort_keys=True) + "\n")


def main() -> None:
    command, first, second = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if command == "convert":
        make(first, second)
        return
    model, tokenizer = load(str(first))
    folder = second / "smollm2"
    records = []
    for prompt in json.loads((folder / "greedy.json").read_text(encoding="utf-8")):
        tokens, gaps = greedy(model, prompt["ids"], tokenizer.eos_token_id)
        text = tokenizer.decode(tokens)
        print(f"{prompt['name']}: least gap {min(gaps)}: {text!r}", flush=True)
        records.append({"name": prompt["name"], "greedy": tokens, "gaps": gaps, "text": text})
    out = folder / "greedy_mlx.json"
    out.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
