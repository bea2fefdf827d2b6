"""Compresses random matrices with coremltools: what Tandem's palettizer and block quantizer are compared with.

    python compress_reference.py OUT
    python compress_reference.py --time ROWS COLUMNS    (prints seconds of the palettizer at 4, 6 and 8 bits, in one process)

Writes OUT/reference.safetensors: for each matrix NAME.weight (fp16) what coremltools makes of it, decompressed:
NAME.lut4, NAME.lut6, NAME.lut8 (k-means, groups of 16 rows), NAME.int4 (symmetric, blocks of 32).
Needs coremltools, scikit-learn, numpy and safetensors.
"""

import logging
import sys
import time
from pathlib import Path

logging.disable(logging.CRITICAL)
import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from safetensors.numpy import save_file

GROUP, BLOCK = 16, 32


def matrices():
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((64, 256)) * 0.02
    tailed = rng.standard_t(4, (64, 256)) * 0.02
    uneven = rng.standard_normal((64, 192)) * np.exp(rng.standard_normal((64, 1)))
    return {"normal": normal, "tailed": tailed, "uneven": uneven}


def model_of(weight):
    @mb.program(
        input_specs=[mb.TensorSpec(shape=(1, weight.shape[1]), dtype=ct.converters.mil.mil.types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x):
        return mb.linear(x=x, weight=weight, name="out")

    return ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
                      compute_precision=ct.precision.FLOAT16)  # fmt: skip


def decompressed(model, shape):
    for op in model._mil_program.functions["main"].operations:
        if op.op_type.startswith("constexpr_"):
            value = op.materialized_val_inference()
            if value.shape == shape:
                return value.astype(np.float16)
    raise SystemExit("coremltools left the matrix as it was")


def palettized(model, bits):
    config = cto.OpPalettizerConfig(
        mode="kmeans", nbits=bits, granularity="per_grouped_channel", group_size=GROUP, weight_threshold=0,
    )  # fmt: skip
    return cto.palettize_weights(model, cto.OptimizationConfig(global_config=config))


def time_palettizer(rows, columns):
    weight = (np.random.default_rng(0).standard_normal((rows, columns)) * 0.02).astype(np.float16)
    model = model_of(weight)
    for bits in (4, 6, 8):
        begun = time.perf_counter()
        palettized(model, bits)
        print(f"{rows} x {columns}, lut{bits}: {time.perf_counter() - begun:.2f} s", flush=True)


def main(out):
    tensors = {}
    for name, weight in matrices().items():
        weight = weight.astype(np.float16)
        tensors[f"{name}.weight"] = weight
        model = model_of(weight)
        for bits in (4, 6, 8):
            tensors[f"{name}.lut{bits}"] = decompressed(palettized(model, bits), weight.shape)
        config = cto.OpLinearQuantizerConfig(
            mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=BLOCK, weight_threshold=0
        )
        done = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))
        tensors[f"{name}.int4"] = decompressed(done, weight.shape)
    save_file(tensors, Path(out) / "reference.safetensors")


if __name__ == "__main__":
    if sys.argv[1] == "--time":
        time_palettizer(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main(sys.argv[1])
