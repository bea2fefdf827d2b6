"""Time to first token along a conversation of turns of equal size:

    python scripts/load/turns.py [--turns 10] [--repeats 9]

Every turn sends the whole history, as clients do; what the server keeps of it decides how long the first token takes.
Reported are the medians of each turn, and the median over conversations of the last turn's over the second's.
"""

import asyncio
import statistics

from common import Server, arguments, events, report, session, spread, text

parser = arguments(__doc__)
parser.add_argument("--turns", type=int, default=10)
parser.add_argument("--repeats", type=int, default=9)
parser.add_argument("--words", type=int, default=60, help="of each question (default: 60)")
parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: 64)")
options = parser.parse_args()


async def conversation(server, http, number):
    """For each turn: seconds to the first token, tokens of the prompt, and how many of them were cached."""
    messages, turns = [], []
    for turn in range(options.turns):
        messages.append({"role": "user", "content": text(options.words, f"{number} {turn}")})
        body = {
            "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": options.tokens, "temperature": 0, "ignore_eos": True,
        }
        said, timing, usage = "", None, None
        async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
            async for event in events(response):
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    said += choice["delta"].get("content") or ""
                    timing = choice.get("tandem", {}).get("timing") or timing
        messages.append({"role": "assistant", "content": said})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append((timing["ttft"], usage["prompt_tokens"], cached))
    return turns


async def main():
    with Server.tandem(options) as server:
        async with session() as http:
            await conversation(server, http, "warm-up")
            all_turns = [await conversation(server, http, i) for i in range(options.repeats)]
    ratios = [turns[-1][0] / turns[1][0] for turns in all_turns]
    rows = [("turn", "ttft, ms", "prompt tokens", "cached")]
    for i, of_turn in enumerate(zip(*all_turns)):
        ttft, prompt, cached = zip(*of_turn)
        rows.append((i + 1, spread([t * 1000 for t in ttft]), int(statistics.median(prompt)), int(statistics.median(cached))))
    rows.append((f"{options.turns} over 2", spread(ratios), "", ""))
    figures = {
        "median_ttft_s": [statistics.median(t[0] for t in of_turn) for of_turn in zip(*all_turns)],
        "median_ratio_last_over_second": statistics.median(ratios), "ratios": ratios, "threads": options.threads,
    }
    report(options, f"{options.turns} turns of {options.words} words, {options.repeats} conversations", rows, figures)


asyncio.run(main())
