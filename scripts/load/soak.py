"""Many clients for a long time against a server that this starts itself:

    python scripts/load/soak.py [--seconds 600] [--clients 64] [--memory-budget 600MiB]

Each client talks for some turns over one of a few shared beginnings, reads to the end, or goes away: after some events
(it cancels) or at once (it cuts the connection). It fails unless
  - every error is a refusal by admission (429, 413),
  - no stream is silent for 30 s,
  - memory is flat after warm-up: in the second half it grows by less than 3 % (fitted), and its peak is less than 5 %
    above that of the first quarter after the warm-up,
  - at the end nothing runs or waits, and the KV in use is what the prefix cache holds (its tokens are counted, its
    blocks are not: a tenth and 16 MiB more are let pass).
A run under two minutes says nothing of memory, and does not judge it.
"""

import asyncio
import collections
import random
import statistics
import sys
import time

import aiohttp
from common import Refused, Server, arguments, events, percentile, report, session, text

parser = arguments(__doc__)
parser.add_argument("--seconds", type=float, default=600)
parser.add_argument("--clients", type=int, default=64)
parser.add_argument("--silence", type=float, default=30, help="seconds without an event that are too many")
parser.add_argument("--memory-budget", default="600MiB", help="of the server; small, so that prefixes are evicted and requests wait")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

BLOCKS, SLACK = 1.1, 16 << 20
# Under this, warm-up is not over.
LEAST_SECONDS = 120
SYSTEMS = [text(120, f"system {i}") for i in range(4)]


class Tally:
    def __init__(self):
        self.ends, self.faults, self.ttft, self.tokens = collections.Counter(), [], [], 0

    def fault(self, what):
        self.ends["failed"] += 1
        self.faults.append(what)


async def converse(server, client, dice, tally, until):
    """One conversation; no new turn begins after `until`."""
    messages = [{"role": "system", "content": dice.choice(SYSTEMS)}]
    for _ in range(dice.randint(1, 5)):
        if time.monotonic() > until:
            return
        messages.append({"role": "user", "content": text(dice.choice([5, 30, 150]), dice.random())})
        body = {"messages": messages, "stream": True, "max_tokens": dice.choice([8, 32, 96]), "temperature": 0.8}
        body["seed"] = dice.randrange(2**31)
        goes = dice.choice(["stays"] * 6 + ["cancels", "cuts"])
        after, said, begun, first = dice.randint(0, 20), "", time.monotonic(), True
        try:
            async with client.post(f"{server.url}/v1/chat/completions", json=body) as response:
                if goes == "cuts" and after < 5:
                    # In the middle of prefill, perhaps.
                    response.close()
                    tally.ends["cut"] += 1
                    return
                count = 0
                async for event in events(response, options.silence):
                    if first:
                        tally.ttft.append(time.monotonic() - begun)
                        first = False
                    said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                    count += 1
                    tally.tokens += 1
                    if goes != "stays" and count > after:
                        response.close()
                        tally.ends["cut" if goes == "cuts" else "cancelled"] += 1
                        return
            tally.ends["completed"] += 1
        except Refused as refusal:
            if refusal.status not in (429, 413):
                tally.fault(str(refusal))
            else:
                tally.ends["refused"] += 1
                await asyncio.sleep(dice.uniform(0.2, 1))
            return
        except TimeoutError:
            tally.fault(f"a stream was silent for {options.silence} s")
            return
        except (aiohttp.ClientError, RuntimeError) as error:
            tally.fault(f"{type(error).__name__}: {error}")
            return
        messages.append({"role": "assistant", "content": said})


async def abandon(server, dice, tally):
    """Opens a connection, sends half or all of a request, and is gone."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text(50, dice.random()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    sent = head % len(body) + body
    writer.write(sent[: dice.choice([20, len(sent) // 2, len(sent)])])
    await writer.drain()
    await asyncio.sleep(dice.uniform(0, 0.2))
    writer.transport.abort()
    tally.ends["abandoned"] += 1


async def client(server, number, tally, until):
    dice = random.Random(f"{options.seed} {number}")
    async with session() as http:
        while time.monotonic() < until:
            if dice.random() < 0.05:
                await abandon(server, dice, tally)
            else:
                await converse(server, http, dice, tally, until)


async def watch(server, samples, until):
    begun = time.monotonic()
    while time.monotonic() < until:
        samples.append((time.monotonic() - begun, await asyncio.to_thread(server.rss)))
        await asyncio.sleep(max(0.25, options.seconds / 400))


def memory(samples):
    """The faults of a memory curve: it must be flat once a fifth of the time is over."""
    late = [(t, m) for t, m in samples if t > options.seconds / 5]
    quarter, half = late[: max(2, len(late) // 4)], late[len(late) // 2 :]
    if options.seconds < LEAST_SECONDS:
        return {"peak_mib": max(m for _, m in samples), "memory_judged": False}, []
    slope = statistics.linear_regression([t for t, _ in half], [m for _, m in half]).slope
    growth = slope * (half[-1][0] - half[0][0]) / half[0][1]
    rise = max(m for _, m in half) / max(m for _, m in quarter) - 1
    faults = [f"memory grows by {growth:.1%} in the second half"] if growth > 0.03 else []
    faults += [f"memory peaks {rise:.1%} above the first quarter's"] if rise > 0.05 else []
    return {"growth_second_half": growth, "rise_over_first_quarter": rise, "peak_mib": max(m for _, m in samples)}, faults


async def settle(server):
    """Waits for what was abandoned to be noticed; what the engine holds then."""
    for _ in range(150):
        engine = await asyncio.to_thread(server.engine)
        if engine["running"] == engine["waiting"] == 0:
            break
        await asyncio.sleep(0.2)
    return engine


async def main():
    with Server.tandem(options, "--memory-budget", options.memory_budget) as server:
        tally, samples, until = Tally(), [], time.monotonic() + options.seconds
        await asyncio.gather(watch(server, samples, until), *(client(server, i, tally, until) for i in range(options.clients)))
        engine = await settle(server)
        figures, faults = memory(samples)
        if engine["running"] or engine["waiting"]:
            faults.append(f"{engine['running']} run and {engine['waiting']} wait at the end")
        if engine["restarts"]:
            faults.append(f"the engine was rebuilt {engine['restarts']} times")
        held = engine["kv_used_bytes"]
        accounted = engine["prefix_tokens"] * engine["kv_bytes_per_token"]
        if held > BLOCKS * accounted + SLACK:
            faults.append(f"{held} bytes of KV are in use, and the prefix cache accounts for {accounted}")
    faults = tally.faults + faults
    figures |= dict(tally.ends) | {
        "seconds": options.seconds, "clients": options.clients, "events_per_second": tally.tokens / options.seconds,
        "first_event_median_s": statistics.median(tally.ttft), "first_event_p99_s": percentile(tally.ttft, 0.99),
        "kv_at_end_bytes": held, "kv_of_prefixes_bytes": accounted, "faults": faults,
    }
    rows = [("figure", "value")] + [(k, f"{v:.4g}" if isinstance(v, float) else v) for k, v in figures.items() if k != "faults"]
    report(options, f"{options.clients} clients for {options.seconds:.0f} s", rows, figures)
    for fault, count in collections.Counter(faults).most_common(20):
        print(f"FAULT: {fault} ({count} times)", file=sys.stderr)
    sys.exit(bool(faults))


asyncio.run(main())
