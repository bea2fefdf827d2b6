"""How long running streams stand still when a long prompt arrives:

    python scripts/load/gap.py [--repeats 20] [--prompt 2000] [--streams 4] [--context 1000]

A repetition starts the streams, lets them run for a while alone, and then sends the prompt. Reported are the median step
of the streams without it, the largest gap between two tokens of any stream from then until the prompt's first token, and
the 95th percentile of that over the repetitions.
"""

import asyncio
import statistics
import time

from common import Server, arguments, events, percentile, report, session, spread, text, whole

parser = arguments(__doc__)
parser.add_argument("--repeats", type=int, default=20)
parser.add_argument("--streams", type=int, default=4)
parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt that arrives")
parser.add_argument("--context", type=int, default=1000, help="tokens of each stream's own prompt")
parser.add_argument("--alone", type=int, default=60, help="tokens of each stream before it does")
options = parser.parse_args()


async def tokens(server, count, seed):
    """A prompt of exactly so many tokens."""
    async with session() as http:
        ids = (await whole(http, f"{server.url}/tokenize", {"content": text(count, seed)}))["tokens"]
    return ids[:count]


async def repetition(server, http, number):
    """Seconds between tokens before the prompt arrives, and the largest gap while it is read."""
    times = [[] for _ in range(options.streams)]
    enough, stop = asyncio.Event(), asyncio.Event()

    async def stream(i):
        own = await tokens(server, options.context, f"{number} {i}")
        body = {"prompt": own, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
        # A token's text may be held back, but not its log-probability.
        body["logprobs"] = 0
        async with http.post(f"{server.url}/v1/completions", json=body) as response:
            async for _ in events(response):
                times[i].append(time.monotonic())
                if all(len(of_stream) >= options.alone for of_stream in times):
                    enough.set()
                if stop.is_set():
                    response.close()
                    return

    running = [asyncio.create_task(stream(i)) for i in range(options.streams)]
    prompt = await tokens(server, options.prompt, f"long {number}")
    assert len(prompt) == options.prompt, "the text is too short"
    await asyncio.wait_for(enough.wait(), 120)
    arrived = time.monotonic()
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    usage = (await whole(http, f"{server.url}/v1/completions", body))["usage"]
    answered = time.monotonic()
    await asyncio.sleep(0.05)
    stop.set()
    await asyncio.gather(*running)
    assert usage["prompt_tokens_details"]["cached_tokens"] < 64, "the prompt was not new"
    # The streams' own prompts are read before.
    settled = max(of_stream[10] for of_stream in times)
    steps, largest = [], 0
    for of_stream in times:
        gaps = [(later, later - earlier) for earlier, later in zip(of_stream, of_stream[1:])]
        steps += [gap for at, gap in gaps if settled < at - gap and at <= arrived]
        largest = max([largest] + [gap for at, gap in gaps if arrived < at and at - gap < answered])
    return steps, largest, answered - arrived


async def main():
    with Server.tandem(options) as server:
        async with session() as http:
            await repetition(server, http, "warm-up")
            measured = [await repetition(server, http, i) for i in range(options.repeats)]
    step = statistics.median(gap for steps, _, _ in measured for gap in steps)
    largest = [gap for _, gap, _ in measured]
    p95 = percentile(largest, 0.95)
    rows = [
        ("figure", "value"),
        ("step of the streams alone, ms", f"{step * 1000:.3g}"),
        ("largest gap, ms", spread([gap * 1000 for gap in largest])),
        ("p95 of it, ms", f"{p95 * 1000:.3g}"),
        ("p95 over step", f"{p95 / step:.3g}"),
        ("time to read the prompt, s", spread([t for _, _, t in measured])),
    ]
    figures = {
        "median_step_s": step, "largest_gaps_s": largest, "p95_s": p95, "p95_over_step": p95 / step,
        "prompt_s": [t for _, _, t in measured], "threads": options.threads,
    }
    title = f"{options.prompt} tokens arrive while {options.streams} streams of {options.context} decode, {options.repeats} times"
    report(options, title, rows, figures)


asyncio.run(main())
