"""Check the GGUF fixtures against llama.cpp, and store its greedy tokens for SmolLM2.

    python scripts/llama_cpp_reference.py fixtures [NAME=SMOLLM2.gguf ...]

Needs `llama-cpp-python`, `numpy` and `safetensors`. Keys and values are kept in f32 and flash attention is off, so
that what is left to differ is arithmetic: with a file of f32 weights the logits agree to rounding; with a quantized
one llama.cpp also rounds each activation to 8 bits, which is how it multiplies.

Prints the differences of OUT/gguf/*.gguf from their golden logits. For each NAME=FILE (say f32=... and q4_1=...),
writes the greedy ids of the prompts of OUT/smollm2/greedy.json to OUT/smollm2/greedy_llama_cpp.json, under NAME.
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from safetensors.numpy import load_file

GGML_F32 = 0


def open_model(path: Path) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=512, type_k=GGML_F32, type_v=GGML_F32, flash_attn=False, logits_all=True, verbose=False
    )


def logits(llama: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    llama.reset()
    llama.eval(ids)
    return llama.scores[: len(ids)].copy()


def check_fixtures(fixtures: Path) -> None:
    golden = load_file(fixtures / "gguf" / "golden.safetensors")
    for path in sorted((fixtures / "gguf").glob("*.gguf")):
        llama, kind = open_model(path), path.stem.rsplit("-", 1)[1]
        off = [
            np.abs(logits(llama, golden[f"ids.{i}"].tolist())[golden[f"positions.{i}"]] - golden[f"{kind}.logits.{i}"]).max()
            for i in range(2)
        ]
        print(f"{path.name}: llama.cpp is off by at most {max(off):.5f}")


def greedy(llama: llama_cpp.Llama, ids: list[int], steps: int) -> list[int]:
    llama.reset()
    out, row = [], ids
    while len(out) < steps and llama.token_eos() not in out:
        llama.eval(row)
        row = [int(llama.scores[llama.n_tokens - 1].argmax())]
        out += row
    return out


def main() -> None:
    fixtures, files = Path(sys.argv[1]), sys.argv[2:]
    check_fixtures(fixtures)
    records = json.loads((fixtures / "smollm2" / "greedy.json").read_text(encoding="utf-8"))
    result = {}
    for name, path in (f.split("=", 1) for f in files):
        llama = open_model(Path(path))
        result[name] = {}
        for r in records:
            out = result[name][r["name"]] = greedy(llama, r["ids"], 32)
            same = next((i for i, (a, b) in enumerate(zip(out, r["greedy"])) if a != b), None)
            note = "equal" if same is None else f"differs at {same}, where the top two are {r['top2'][same]}"
            print(f"{name} {r['name']}: {note}", flush=True)
    if result:
        text = json.dumps(result, indent=1)
        (fixtures / "smollm2" / "greedy_llama_cpp.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
