"""Make random blocks of every quantized GGUF format, and what the `gguf` package decodes them to.

    python scripts/quant_blocks.py fixtures

Needs `gguf`, `numpy` and `safetensors`. Writes OUT/gguf/blocks.safetensors with, for each format,
    FORMAT.stored   u8 [ROWS, bytes]     rows of COLS values: every bit random, but f16 scales finite and of both signs
    FORMAT.values   f32 [ROWS, COLS]     the same, decoded by gguf.quants.dequantize
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from safetensors.numpy import save_file

ROWS, COLS = 3, 512

# Where the f16 scales of a block lie, in bytes.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def main() -> None:
    out = Path(sys.argv[1]) / "gguf" / "blocks.safetensors"
    tensors = {}
    for name, scales in SCALES.items():
        kind = GGMLQuantizationType[name]
        length, size = GGML_QUANT_SIZES[kind]
        draw = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
        blocks = draw.integers(0, 256, (ROWS, COLS // length, size), dtype=np.uint8)
        for at in scales:
            values = draw.standard_normal(blocks.shape[:2]).astype(np.float16)
            blocks[:, :, at : at + 2] = values[..., None].view(np.uint8)
        stored = blocks.reshape(ROWS, -1)
        values = quants.dequantize(stored, kind)
        assert values.shape == (ROWS, COLS) and np.isfinite(values).all()
        tensors |= {f"{name}.stored": stored, f"{name}.values": values.astype(np.float32)}
    save_file(tensors, out)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
