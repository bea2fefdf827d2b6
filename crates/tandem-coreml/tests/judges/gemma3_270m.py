"""Judges an export of Gemma 3 270M on real text, which needs more than the range of fp16 in its residual stream.

    tandem export gemma3-270m OUT --context 1024 --prefill 64
    python gemma3_270m.py OUT FIXTURES/gemma3-270m

Runs the first tokens one by one and a prefill up to each position whose logits transformers computed (the last ones past
the window of 512), and prints the cosine and the largest magnitude that any operator gave. Exit status 1 below 0.999 or
where a value is not finite. Needs coremltools, numpy and safetensors; takes minutes.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent))
from mil_oracle import Program  # noqa: E402
from run_export import Session, cosine  # noqa: E402

LEAST = 0.999


class Watched(dict):
    """A trace that keeps only the largest magnitude."""

    largest = 0.0
    where = None

    def __setitem__(self, name, value):
        if isinstance(value, np.ndarray) and value.dtype == np.float16 and "mask" not in name and "scores" not in name:
            most = float(np.abs(value.astype(np.float32)).max(initial=0.0))
            if not most <= self.largest:
                self.largest, self.where = most, name


def main(export, fixture):
    golden = load_file(fixture / "logits.safetensors")
    ids = np.array(json.loads((fixture / "nll.json").read_text())["ids"])
    rows = dict(zip(golden["positions"].tolist(), golden["logits"]))
    watched = Watched()
    run = Program.run
    Program.run = lambda self, inputs, states, function: run(self, inputs, states, function, watched)
    session = Session(export, len(ids))
    good = True

    def judge(token):
        nonlocal good
        at = session.position
        logits = session.decode(token)
        if at in rows:
            value = cosine(logits[golden["columns"]], rows[at].astype(np.float64))
            print(f"position {at}: cosine {value:.6f}", flush=True)
            good &= value >= LEAST

    for token in ids[:2]:
        judge(token)
    size = session.facts["prefill"]
    for at in sorted(rows)[2:]:
        # A prefill starts at a multiple of its size, so what does not fill one is fed again.
        session.rewind(session.position - session.position % size)
        session.prefill(ids[session.position : at])
        judge(ids[at])
    print(f"largest magnitude {watched.largest} at {watched.where}")
    return good and np.isfinite(watched.largest)


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]), Path(sys.argv[2])) else 1)
