#!/usr/bin/env python3
"""Seeds for the target `coreml`. usage: coreml_seeds.py OUT_FOLDER PACKAGE..."""
import struct, sys
from pathlib import Path

out = Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
for package in map(Path, sys.argv[2:]):
    data = package / "Data/com.apple.CoreML"
    program, weights = (data / "model.mlmodel").read_bytes(), data / "weights/weight.bin"
    weights = weights.read_bytes() if weights.exists() else b""
    (out / package.stem).write_bytes(struct.pack("<Q", len(program)) + program + weights)
