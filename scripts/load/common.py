"""What the load tests share: servers that they start themselves, clients, statistics, tables."""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
WORDS = (ROOT / "fixtures" / "text" / "persuasion.txt").read_text().split()
# Loopback only, whatever proxies the environment names.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "*"
# Servers are stopped also when this is told to end.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tandem", default=ROOT / "target/release/tandem", type=Path, help="the program to test")
    parser.add_argument("--model", default="smollm2", help="what `tandem serve` takes (default: smollm2)")
    parser.add_argument("--threads", default=os.cpu_count(), type=int, help="threads to compute with (default: all)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, beside the table on standard error")
    return parser


def text(words, seed):
    """So many words, drawn from a novel; another seed, another text."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Server:
    """A server process. Whoever starts it stops it: use it as a context."""

    def __init__(self, command, url=None, ready="/health"):
        self.command, self.url, self.ready = [str(part) for part in command], url, ready

    @classmethod
    def tandem(cls, options, *flags):
        flags = ["--port", 0, "--threads", options.threads, *flags]
        return cls([options.tandem, "serve", options.model, *flags])

    def __enter__(self):
        piped = subprocess.PIPE if self.url is None else subprocess.DEVNULL
        errors = None if self.url is None else subprocess.DEVNULL
        self.process = subprocess.Popen(self.command, stdout=piped, stderr=errors, text=True)
        if self.url is None:
            for line in self.process.stdout:
                if line.startswith("listening on "):
                    self.url = line.removeprefix("listening on ").strip()
                    break
            else:
                sys.exit(f"{' '.join(self.command)} ended with {self.process.wait()}")
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                self.get(self.ready)
                return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                sys.exit(f"{' '.join(self.command)} is not ready: it ended with {self.process.poll()}")
            time.sleep(0.1)

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def engine(self):
        """The only engine of a tandem server, as /health shows it."""
        return json.loads(self.get("/health"))["models"][0]["engines"][0]

    def rss(self):
        """Resident memory in MiB."""
        return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(self.process.pid)])) / 1024


def session():
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20
    )


class Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status, text):
        super().__init__(f"status {status}: {text[:300]}")
        self.status = status


async def events(response, patience=60):
    """The JSON of each event of a stream; a silence longer than `patience` seconds is a TimeoutError."""
    if response.status != 200:
        raise Refused(response.status, await response.text())
    done = False
    while line := await asyncio.wait_for(response.content.readline(), patience):
        if line == b"data: [DONE]\n":
            done = True
        elif line.startswith(b"data: "):
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event
    if not done:
        raise RuntimeError("the stream broke off")


async def whole(client, url, body):
    async with client.post(url, json=body) as response:
        if response.status != 200:
            raise Refused(response.status, await response.text())
        return await response.json()


def spread(values):
    """Median, least and greatest, for a table."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def percentile(values, share):
    """The smallest value that `share` of the values do not exceed."""
    values = sorted(values)
    return values[min(len(values) - 1, -int(-share * len(values) // 1) - 1)]


def report(options, title, rows, figures):
    """One table; with --json, the figures instead, and the table on standard error."""
    out = sys.stderr if options.json else sys.stdout
    print(f"\n{title}", file=out)
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    for i, row in enumerate(rows):
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip(), file=out)
        if i == 0:
            print("  ".join("-" * width for width in widths), file=out)
    if options.json:
        print(json.dumps(figures, indent=1))
