"""Speed of Tandem's MLX engine beside mlx-lm's on the same MLX, on random weights of a shape.

    python scripts/mlx_speed.py SPEED CONFIG.json bf16|4bit BATCH PROMPT TOKENS [ROUNDS]
    python scripts/mlx_speed.py peer CONFIG.json bf16|4bit BATCH PROMPT TOKENS

SPEED is the program of crates/tandem-mlx/examples/speed.rs. Both processes load once; then each round measures both, one
right after the other, in the opposite order from round to round. Two rounds warm up. Printed is one line of JSON with the
medians of each and of the rounds' ratios. `peer` is the other process: mlx-lm's Llama with random weights, greedy, a step
built while the last is computed. Needs `mlx` and `mlx-lm`.
"""

import json
import statistics
import subprocess
import sys
import time


def peer(config: str, kind: str, batch: int, length: int, tokens: int) -> None:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import llama
    from mlx_lm.models.cache import make_prompt_cache

    with open(config) as file:
        model = llama.Model(llama.ModelArgs.from_dict(json.load(file)))
    model.set_dtype(mx.bfloat16)
    if kind == "4bit":
        nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    prompts = mx.random.randint(0, model.args.vocab_size, (batch, length))
    mx.eval(prompts)
    for _ in sys.stdin:
        cache = make_prompt_cache(model)

        def step(ids):
            return mx.argmax(model(ids, cache=cache)[:, -1], axis=-1)

        begun = time.perf_counter()
        # As mlx-lm's generate does it: all but the last token fill the cache, the last gives logits.
        if length > 1:
            model(prompts[:, :-1], cache=cache)
            mx.eval([c.state for c in cache])
        token = step(prompts[:, -1:])
        mx.eval(token)
        first = time.perf_counter() - begun
        begun = time.perf_counter()
        token = step(token[:, None])
        mx.async_eval(token)
        for _ in range(tokens - 2):
            following = step(token[:, None])
            mx.async_eval(following)
            token.tolist()
            token = following
        token.tolist()
        decode = time.perf_counter() - begun
        print(json.dumps({"ttft_ms": first * 1e3, "tokens_per_second": (tokens - 1) * batch / decode}), flush=True)


def main() -> None:
    program, *shape = sys.argv[1:]
    if program == "peer":
        config, kind, *numbers = shape
        peer(config, kind, *map(int, numbers))
        return
    rounds = int(shape[5]) if len(shape) > 5 else 3
    commands = {"tandem": [program, *shape[:5]], "mlx-lm": [sys.executable, __file__, "peer", *shape[:5]]}
    children = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    figures = {name: [] for name in children}
    for round in range(rounds + 2):
        for name in list(children)[:: -1 if round % 2 else 1]:
            children[name].stdin.write("go\n")
            children[name].stdin.flush()
            line = children[name].stdout.readline()
            if not line:
                sys.exit(f"{name} ended without a figure")
            if round >= 2:
                figures[name].append(json.loads(line))
    for child in children.values():
        child.stdin.close()
        child.wait()
    median = lambda of, key: round_to(statistics.median(figure[key] for figure in of))
    report = {"shape": shape[:5], "rounds": rounds}
    for name, of in figures.items():
        report[name] = {key: median(of, key) for key in of[0]}
    for key in ["ttft_ms", "tokens_per_second"]:
        pairs = zip(figures["tandem"], figures["mlx-lm"])
        report[f"{key} ratio"] = round_to(statistics.median(ours[key] / theirs[key] for ours, theirs in pairs))
    print(json.dumps(report), flush=True)


def round_to(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
