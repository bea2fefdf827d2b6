"""Judges exports: runs the packages of a folder as their tandem.json says and compares with golden logits.

    python run_export.py EXPORT GOLDEN.safetensors [...pairs]

Each export is validated (validate_mlpackage.py), then run by mil_oracle.py: a prefill of the start of a golden sequence,
then decode steps, whose logits are compared with those that transformers computed. One line of JSON a pair.
Needs coremltools, numpy and safetensors.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent))
from mil_oracle import Program  # noqa: E402
from validate_mlpackage import validate  # noqa: E402

DECODE_STEPS = 8


class Session:
    """One sequence on an export: everything that tandem.json asks of a caller."""

    def __init__(self, folder, length):
        self.facts = facts = json.loads((folder / "tandem.json").read_text())
        self.programs = [Program(folder / package["file"]) for package in facts["packages"]]
        self.length = length
        self.restart()
        if facts["embedding"]:
            shape = (facts["embedding"]["rows"], facts["embedding"]["columns"])
            self.embedding = np.fromfile(folder / facts["embedding"]["file"], np.float16).reshape(shape)

    def restart(self):
        facts = self.facts
        # Which position each slot holds; -1 where it holds nothing of meaning.
        self.held = {cache["name"]: np.full(cache["slots"], -1) for cache in facts["caches"]}
        self.position = 0
        self.states = []
        for program in self.programs:
            states = program.states(facts["packages"][0]["functions"][0])
            if facts["kv"] == "io":
                for item in program.functions()["decode"].inputs:
                    if item.name in self.held:
                        shape = [d.constant.size for d in item.type.tensorType.dimensions]
                        states[item.name] = np.zeros(shape, np.float16)
            self.states.append(states)

    def rewind(self, position):
        """Forgets what comes after `position` tokens."""
        self.position = position
        for held in self.held.values():
            held[held >= position] = -1

    def turns(self, rope, positions):
        angles = next(a for a in rope["angles"] if self.length <= a["up_to"])
        a = np.outer(np.array(angles["inverse_frequencies"]), positions)
        cos = np.ones((rope["width"], len(positions)))
        sin = np.zeros((rope["width"], len(positions)))
        half = rope["rotary"] // 2
        cos[: rope["rotary"]] = np.concatenate([np.cos(a), np.cos(a)]) * angles["factor"]
        sin[: rope["rotary"]] = np.concatenate([-np.sin(a), np.sin(a)]) * angles["factor"]
        assert half == len(angles["inverse_frequencies"])
        return cos.astype(np.float16), sin.astype(np.float16)

    def call_flexible(self, ids):
        """One call of the GPU form; the logits of the last token."""
        facts = self.facts
        start, count = self.position, len(ids)
        positions = start + np.arange(count)
        inputs = {"ids": ids.astype(np.int32)[None]}
        for rope in facts["ropes"]:
            cos, sin = self.turns(rope, positions)
            inputs[rope["cos"]], inputs[rope["sin"]] = cos.T[None, None], sin.T[None, None]
        for cache in facts["caches"]:
            slots, p = np.arange(cache["slots"]), positions[:, None]
            seen = (slots <= p) & (slots > p - (cache["window"] or np.inf))
            inputs[cache["mask"]] = np.where(seen, 0, facts["mask_value"])[None, None].astype(np.float16)
            inputs[cache["slot"]] = np.array([start], np.int32)
            inputs[cache["slot"] + "_end"] = np.array([start + count], np.int32)
        outputs = self.programs[0].run(inputs, self.states[0], "main")
        self.position += count
        return np.concatenate([outputs[part["output"]].ravel() for part in facts["logits"]]).astype(np.float64)

    def call(self, function, ids):
        """`ids` are the meaningful tokens of a call at the current position."""
        facts = self.facts
        size = facts["prefill"] if function == "prefill" else 1
        start, count = self.position, len(ids)
        padded = np.concatenate([ids, np.zeros(size - count, ids.dtype)]).astype(np.int32)
        positions = start + np.arange(size)
        inputs = {}
        for rope in facts["ropes"]:
            cos, sin = self.turns(rope, positions)
            inputs[rope["cos"]], inputs[rope["sin"]] = cos[None, :, None, :], sin[None, :, None, :]
        for cache in facts["caches"]:
            window = cache["window"] or np.inf
            held = self.held[cache["name"]]
            p = positions[:, None]
            old = (held >= 0) & (held <= p) & (held > p - window)
            new = (positions <= p) & (positions > p - window)
            seen = np.concatenate([old, new], axis=1)
            inputs[cache["mask"]] = np.where(seen, 0, facts["mask_value"])[None, None].astype(np.float16)
            if cache["slot"]:
                slot = start % cache["slots"]
                inputs[cache["slot"]] = np.array([0, 0, slot, 0], np.int32)
                inputs[cache["slot"] + "_end"] = np.array([0, 0, slot + size, 0], np.int32)
        hidden = self.embedding[padded].T[None, :, None, :]
        outputs = {}
        for program, states in zip(self.programs, self.states):
            given = {**inputs, "hidden": hidden}
            if facts["kv"] == "io":
                given.update(states)
            names = {item.name for item in program.functions()[function].inputs}
            given = {name: value for name, value in given.items() if name in names}
            outputs = program.run(given, {} if facts["kv"] == "io" else states, function)
            for cache in facts["caches"]:
                if f"{cache['name']}_new" in outputs:
                    slots = (start + np.arange(count)) % cache["slots"]
                    states[cache["name"]][:, :, slots] = outputs[f"{cache['name']}_new"][:, :, :count]
            hidden = outputs.get("hidden_out", hidden)
        for cache in facts["caches"]:
            held = self.held[cache["name"]]
            written = count if facts["kv"] == "io" else size
            slots = (start + np.arange(written)) % cache["slots"]
            held[slots] = np.where(np.arange(written) < count, start + np.arange(written), -1)
        self.position += count
        if function == "decode":
            return np.concatenate([outputs[part["output"]].ravel() for part in facts["logits"]]).astype(np.float64)
        return None

    def prefill(self, ids):
        if self.facts["target"] == "gpu":
            # Two calls of different length.
            for some in np.split(ids, [len(ids) * 2 // 3]):
                if len(some):
                    self.call_flexible(some)
            return
        size = self.facts["prefill"]
        for at in range(0, len(ids), size):
            assert self.position % size == 0
            self.call("prefill", ids[at : at + size])

    def decode(self, token):
        if self.facts["target"] == "gpu":
            return self.call_flexible(np.array([token]))
        return self.call("decode", np.array([token]))


def cosine(a, b):
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def compare(folder, golden):
    """Cosines at each position that is both decoded and golden, and whether greedy tokens agree."""
    cosines, greedy = [], True
    for sequence in (0, 1):
        ids = golden[f"ids.{sequence}"]
        rows = dict(zip(golden[f"positions.{sequence}"].tolist(), golden[f"logits.{sequence}"]))
        session = Session(folder, len(ids))
        if session.facts["context"] < len(ids):
            continue
        # Everything decoded; a prefill that ends within a call; a prefill of all but the last token.
        starts = [0] if len(ids) <= DECODE_STEPS else [57, len(ids) - 1]
        for start in starts:
            session.restart()
            session.prefill(ids[:start])
            follow = golden.get(f"greedy.{sequence}", np.zeros(0, np.int32))
            tokens = np.concatenate([ids[start:], follow])[:DECODE_STEPS]
            for i, token in enumerate(tokens):
                if session.position >= session.facts["context"]:
                    break
                logits = session.decode(token)
                at = start + i
                if at in rows:
                    cosines.append(cosine(logits, rows[at].astype(np.float64)))
                if at + 1 >= len(ids) and at + 1 - len(ids) < len(follow):
                    greedy &= int(logits.argmax()) == int(follow[at + 1 - len(ids)])
    return {"cosine": min(cosines), "compared": len(cosines), "greedy": bool(greedy)}


def judge(folder, golden):
    folder = Path(folder)
    facts = json.loads((folder / "tandem.json").read_text())
    wrong = [f"{package['file']}: {e}" for package in facts["packages"] for e in validate(str(folder / package["file"]))]
    if wrong:
        return {"export": folder.name, "invalid": wrong}
    return {"export": folder.name, "invalid": [], **compare(folder, load_file(golden))}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    for export, golden in zip(arguments[::2], arguments[1::2]):
        print(json.dumps(judge(export, golden)), flush=True)
