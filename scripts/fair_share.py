"""What a busy machine leaves of Tandem's speed, against its fair share of the machine.

    python scripts/fair_share.py TANDEM MODEL [THREADS [BUSY [ROUNDS]]]

TANDEM is the program, MODEL what `tandem bench` takes. In each of ROUNDS (5) rounds, `tandem bench` runs with THREADS (2)
threads alone, and then beside BUSY (2) processes that count as fast as they can. A fair share is what the scheduler gives
to THREADS of all the threads that want to run, as a part of what THREADS alone would get. Prints for each test the median
speeds and which part of its fair share Tandem kept: 1.0 is all of it. Start it on an otherwise quiet machine.
"""

import json
import os
import statistics
import subprocess
import sys

TANDEM, MODEL = sys.argv[1:3]
THREADS, BUSY, ROUNDS = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in [(3, 2), (4, 2), (5, 5)])


def speeds() -> dict[str, float]:
    flags = ["-t", str(THREADS), "-p", "512", "-n", "128", "-d", "0", "-r", "1", "-o", "json"]
    done = subprocess.run([TANDEM, "bench", MODEL, *flags], check=True, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    return {row["test"]: statistics.median(row["samples"]) for row in rows if row["unit"] == "tok/s"}


def beside_busy() -> dict[str, float]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        return speeds()
    finally:
        for other in others:
            other.kill()
            other.wait()


cores = len(os.sched_getaffinity(0))
alone = min(THREADS, cores)
fair = min(THREADS, cores * THREADS / (THREADS + BUSY)) / alone
rounds = [(speeds(), beside_busy()) for _ in range(ROUNDS)]
print(f"{THREADS} threads on {cores} cores beside {BUSY} busy processes: a fair share is {fair:.2f}")
for test in rounds[0][0]:
    quiet, busy = ([figures[i][test] for figures in rounds] for i in (0, 1))
    kept = statistics.median(b / q / fair for q, b in zip(quiet, busy))
    print(f"{test:12} {statistics.median(quiet):8.1f} tok/s alone, {statistics.median(busy):8.1f} busy: {kept:.2f} of its share")
