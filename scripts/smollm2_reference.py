"""Make the SmolLM2 references: greedy tokens and the likelihood of a text.

    python scripts/smollm2_reference.py SmolLM2-135M-Instruct.Q4_1.gguf fixtures

Needs what smollm2_folder.py needs. The network is transformers' on the file's dequantized weights, in f32, on the
CPU. Writes
  fixtures/smollm2/greedy.json   for each prompt: text, ids, up to 32 greedy ids (ending with the end token where it
                                 comes sooner), and at each step the two highest [id, logit], so that a near tie shows
  fixtures/smollm2/nll.json      the mean negative log-likelihood, in nats, of fixtures/text/persuasion.txt
"""

import json
import math
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from transformers.utils.chat_template_utils import render_jinja_template

from smollm2_folder import field, model, tokenizer

STEPS = 32

CHATS = {
    "question": [{"role": "user", "content": "What is the capital of France?"}],
    "turns": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Name a planet with rings."},
        {"role": "assistant", "content": "Saturn has the most visible rings."},
        {"role": "user", "content": "And what are they made of?"},
    ],
}

PLAIN = {
    "code": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    if n < 2:\n        return n\n",
    "list": "Ingredients for pancakes:\n\n- flour\n- milk\n-",
    "french": "La Révolution française commence en",
    "numbers": "1, 2, 4, 8, 16, 32,",
    "story": "Once upon a time, in a small village by the sea,",
    "json": '{"name": "Ada Lovelace", "born": 1815, "field": "',
    "unicode": "日本語: こんにちは 👋\nEnglish:",
}


def prompts(reader: GGUFReader, text: str) -> dict[str, str]:
    template = field(reader, "tokenizer.chat_template")
    rendered, _ = render_jinja_template([*CHATS.values()], chat_template=template, add_generation_prompt=True)
    # The long one crosses the tiles and blocks in which keys and values are kept.
    return dict(zip(CHATS, rendered)) | PLAIN | {"long": text[:1500]}


@torch.no_grad()
def greedy(network, ids: list[int]) -> tuple[list[int], list[list]]:
    out, top2 = [], []
    row, cache = torch.tensor([ids]), None
    while len(out) < STEPS and network.config.eos_token_id not in out:
        result = network(row, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        top = result.logits[0, -1].topk(2)
        top2.append([[i, round(v, 4)] for v, i in zip(top.values.tolist(), top.indices.tolist())])
        out.append(top.indices[0].item())
        row = top.indices[:1][None]
    return out, top2


@torch.no_grad()
def nll(network, ids: list[int]) -> float:
    row = torch.tensor(ids)
    logits = network(row[None], use_cache=False).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, row[1:]).item()


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    gguf, fixtures = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(gguf)
    encode, network = tokenizer(reader), model(gguf)
    text = (fixtures / "text" / "persuasion.txt").read_text(encoding="utf-8")

    records = []
    for name, prompt in prompts(reader, text).items():
        ids = encode.encode(prompt).ids
        out, top2 = greedy(network, ids)
        gap = min(a[1] - b[1] for a, b in top2)
        print(f"{name}: {len(ids)} + {len(out)} tokens, least gap {gap:.3f}: {encode.decode(out)!r}", flush=True)
        records.append({
            "name": name,
            "prompt": prompt,
            "ids": ids,
            "greedy": out,
            "text": encode.decode(out, skip_special_tokens=False),
            "top2": top2,
        })
    write(fixtures / "smollm2" / "greedy.json", records)

    ids = encode.encode(text).ids
    mean = nll(network, ids)
    print(f"persuasion.txt: {len(ids)} tokens, mean NLL {mean:.5f}, perplexity {math.exp(mean):.3f}")
    write(fixtures / "smollm2" / "nll.json", {
        "text": "persuasion.txt",
        "tokens": len(ids),
        "scored": len(ids) - 1,
        "mean_nll": round(mean, 6),
        "perplexity": round(math.exp(mean), 4),
        "first_ids": ids[:16],
    })


if __name__ == "__main__":
    main()
