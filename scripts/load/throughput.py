"""Tokens per second of 1 and of 8 clients, and beside another server on the same file:

    python scripts/load/throughput.py --model FILE.gguf [--peer PATH-TO-llama-server] [--rounds 5]

Every request has a prompt of its own of about 128 tokens and generates exactly 128 greedily, past any end. A round is
Tandem with one client, the peer with one, Tandem with all, the peer with all; the next goes the other way round. Both
servers run all the time, each in its turn, with the same threads and the same room for each client. Rates are all
generated tokens over the time from the first request to the last answer, prefill included.
"""

import asyncio
import contextlib
import statistics
import sys
import time
from pathlib import Path

from common import Server, arguments, report, session, spread, text, whole

parser = arguments(__doc__)
parser.add_argument("--peer", type=Path, help="llama.cpp's llama-server")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--clients", type=int, default=8, help="of the concurrent case (default: 8)")
parser.add_argument("--requests", type=int, default=2, help="of each client and round (default: 2)")
parser.add_argument("--tokens", type=int, default=128, help="to generate (default: 128)")
parser.add_argument("--words", type=int, default=100, help="of each prompt (default: 100, about 128 tokens)")
parser.add_argument("--peer-port", type=int, default=18412)
options = parser.parse_args()
if options.peer and not Path(options.model).is_file():
    sys.exit("--peer needs --model to be a GGUF file, so that both read the same")


async def measure(server, name, clients, round, requests, tokens):
    """Generated tokens per second."""

    async def work(http, number):
        total = 0
        for i in range(requests):
            prompt = text(options.words, f"{round} {clients} {number} {i}")
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            if name == "llama.cpp":
                body["cache_prompt"] = False
            usage = (await whole(http, f"{server.url}/v1/completions", body))["usage"]
            if usage["completion_tokens"] != tokens:
                sys.exit(f"{name} generated {usage['completion_tokens']} tokens, not {tokens}")
            total += usage["completion_tokens"]
        return total

    async with session() as http:
        begun = time.monotonic()
        totals = await asyncio.gather(*(work(http, number) for number in range(clients)))
        return sum(totals) / (time.monotonic() - begun)


async def main():
    context = 1024
    servers = {"tandem": Server.tandem(options, "--context", context)}
    if options.peer:
        # Its context is shared by all slots.
        peer = [options.peer, "-m", options.model, "-t", options.threads, "-tb", options.threads, "--port", options.peer_port]
        peer += ["-c", context * options.clients, "-np", options.clients, "--no-webui"]
        servers["llama.cpp"] = Server(peer, f"http://127.0.0.1:{options.peer_port}")
    cases = [(name, clients) for clients in (1, options.clients) for name in servers]
    rates = {case: [] for case in cases}
    with contextlib.ExitStack() as running:
        for server in servers.values():
            running.enter_context(server)
        for case in cases:
            await measure(servers[case[0]], *case, "warm-up", 1, 8)
        for round in range(options.rounds):
            for case in cases if round % 2 == 0 else reversed(cases):
                rate = await measure(servers[case[0]], *case, round, options.requests, options.tokens)
                rates[case].append(rate)

    def ratio(above, below):
        return [a / b for a, b in zip(rates[above], rates[below])]

    many = options.clients
    ratios = {f"{name}: {many} clients over 1": ratio((name, many), (name, 1)) for name in servers}
    for clients in (1, many) if options.peer else ():
        ratios[f"tandem over llama.cpp, {clients} clients"] = ratio(("tandem", clients), ("llama.cpp", clients))
    rows = [("what", "median (min to max)")]
    rows += [(f"{name}, {clients} clients", f"{spread(rates[name, clients])} tok/s") for name, clients in cases]
    rows += [(name, spread(values)) for name, values in ratios.items()]
    figures = {
        "tokens_per_second": {f"{name} x {clients}": values for (name, clients), values in rates.items()},
        "median_tokens_per_second": {f"{name} x {clients}": statistics.median(v) for (name, clients), v in rates.items()},
        "median_ratios": {name: statistics.median(values) for name, values in ratios.items()},
        "threads": options.threads, "rounds": options.rounds,
    }
    report(options, f"{options.tokens} tokens a request, {options.threads} threads, {options.rounds} rounds", rows, figures)


asyncio.run(main())
