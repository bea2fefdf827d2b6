"""Make the Gemma 3 270M references: greedy tokens, the likelihood of a text past the window, and logits.

    python scripts/gemma3_reference.py LLAMA_TOKENIZE gemma3-270m.gguf fixtures

Needs `torch`, `transformers`, `gguf` and `safetensors`; LLAMA_TOKENIZE is llama.cpp's `llama-tokenize`. The network is
transformers' on the file's dequantized weights, in f32, on the CPU. Writes
  fixtures/gemma3-270m/greedy.json         for each prompt: text, ids, 32 greedy ids, and at each step the two highest
                                           [id, logit], so that a near tie shows
  fixtures/gemma3-270m/nll.json            ids of fixtures/text/persuasion.txt, longer than the window of 512, and the
                                           mean negative log-likelihood in nats of all and of those past the window
  fixtures/gemma3-270m/logits.safetensors  positions, columns (some ids of the vocabulary) and the logits there
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, quants
from safetensors.numpy import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

STEPS = 32

PROMPTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea,",
    "code": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    if n < 2:\n        return n\n",
    "german": "Die Hauptstadt von Deutschland ist",
    "numbers": "1, 2, 4, 8, 16, 32,",
    "planets": "The planets of the solar system are Mercury, Venus,",
}

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{LAYER[part]}.weight"
    return {"model.embed_tokens": "token_embd.weight", "model.norm": "output_norm.weight"}[stem]


def load(path: Path) -> Gemma3ForCausalLM:
    reader = GGUFReader(path)
    get = lambda key: reader.fields[f"gemma3.{key}"].contents()  # noqa: E731
    tensors = {t.name: t for t in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        head_dim=get("attention.key_length"),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        sliding_window=get("attention.sliding_window"),
        query_pre_attn_scalar=get("attention.key_length"),
        attn_implementation="eager",
    )
    with torch.device("meta"):
        network = Gemma3ForCausalLM(config)
    network.to_empty(device="cpu")
    state = {}
    for name in [name for name, _ in network.named_parameters() if name != "lm_head.weight"]:
        tensor = tensors.pop(gguf_name(name))
        weight = torch.from_numpy(np.array(quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        # The file holds 1 + w.
        state[name] = weight - 1 if "norm" in name else weight
    assert not tensors, tensors.keys()
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    network.model.rotary_emb = type(network.model.rotary_emb)(config)
    network.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return network.eval()


def encode(tool: str, model: Path, text: str) -> list[int]:
    command = [tool, "-m", model, "--ids", "--log-disable", "--stdin"]
    out = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    return json.loads(out.stdout.strip().splitlines()[-1])


@torch.no_grad()
def greedy(network, ids: list[int]) -> tuple[list[int], list[list]]:
    out, top2, row, cache = [], [], torch.tensor([ids]), None
    while len(out) < STEPS and network.config.eos_token_id not in out:
        result = network(row, cache=cache, use_cache=True, logits_to_keep=1)
        cache, top = result.cache, result.logits[0, -1].topk(2)
        top2.append([[i, round(v, 4)] for v, i in zip(top.values.tolist(), top.indices.tolist())])
        out.append(top.indices[0].item())
        row = top.indices[:1][None]
    return out, top2


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    tool, model, fixtures = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    folder = fixtures / "gemma3-270m"
    torch.set_num_threads(1)
    network = load(model)
    text = (fixtures / "text" / "persuasion.txt").read_text(encoding="utf-8")
    # The long one goes on past the window.
    prompts = PROMPTS | {"long": text[:3000].rsplit(" ", 1)[0]}
    records = []
    for name, prompt in prompts.items():
        ids = encode(tool, model, prompt)
        out, top2 = greedy(network, ids)
        gap = min(a[1] - b[1] for a, b in top2)
        print(f"{name}: {len(ids)} + {len(out)} tokens, least gap {gap:.3f}", flush=True)
        records.append(dict(name=name, prompt=prompt, ids=ids, greedy=out, top2=top2))
    write(folder / "greedy.json", records)

    ids = encode(tool, model, text)
    window = network.config.sliding_window
    with torch.no_grad():
        logits = network(torch.tensor([ids]), use_cache=False).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").double()
    write(
        folder / "nll.json",
        dict(ids=ids, mean_nll=each.mean().item(), mean_nll_past_window=each[window:].mean().item()),
    )
    draw = np.random.Generator(np.random.PCG64(0))
    columns = np.sort(draw.choice(logits.shape[1], 1000, replace=False)).astype(np.int32)
    positions = np.array([0, 1, 100, window - 1, window, window + 1, 700, len(ids) - 1], dtype=np.int32)
    kept = logits[positions][:, columns].numpy()
    save_file(dict(positions=positions, columns=columns, logits=kept), folder / "logits.safetensors")
    print(f"{len(ids)} tokens, mean NLL {each.mean():.5f}, past the window {each[window:].mean():.5f}")


if __name__ == "__main__":
    main()
