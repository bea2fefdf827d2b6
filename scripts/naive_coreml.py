#!/usr/bin/env python3
"""Makes fixtures/coreml/naive-{dynamic,static}.mlpackage with Apple's coremltools: a tiny random transformer converted
the way people do it first, with everything the Neural Engine does not like. usage: naive_coreml.py OUT_FOLDER

Both have fused attention, linear layers, rope tables gathered by position, key and value heads repeated, slices on the
last axis, an RMSNorm that squares in fp16, and an embedding looked up inside. naive-dynamic leaves the length open, has
a layer_norm over it, a mask of minus infinity cut to the length, and ends in an argmax. naive-static has three states of
a width that is no multiple of 32, written at a place that is an input, and int4 weights in blocks.
"""
import json, logging, shutil, sys
from pathlib import Path

logging.disable(logging.WARNING)
import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
from coremltools.converters.mil.mil import Builder as mb, get_new_symbol, types

VOCABULARY, WIDTH, HEADS, KV_HEADS, SIZE, HIDDEN, LAYERS, LONGEST = 128, 32, 4, 2, 8, 64, 2, 64
random = np.random.default_rng(6)


def weight(*shape):
    return (random.standard_normal(shape) * 0.1).astype(np.float32)


ANGLES = np.outer(np.arange(LONGEST), 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE))
ANGLES = np.concatenate([ANGLES, ANGLES], axis=1)
COSINES, SINES = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)
MASK = np.triu(np.full((LONGEST, LONGEST), -np.inf, np.float32), 1)[None, None]


def linear(x, outputs, inputs, name):
    return mb.linear(x=x, weight=mb.const(val=weight(outputs, inputs), name=name + "_weight"), name=name)


def rms_norm(x, name):
    square = mb.pow(x=x, y=2.0)
    mean = mb.reduce_mean(x=square, axes=[-1], keep_dims=True)
    return mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mb.add(x=mean, y=1e-5))), y=weight(WIDTH) + 1, name=name)


def heads_of(x, heads, length):
    shape = mb.concat(values=[1, length, heads, SIZE], axis=0) if length is not None else (1, 16, heads, SIZE)
    return mb.transpose(x=mb.reshape(x=x, shape=shape), perm=[0, 2, 1, 3])


def rotate(x, cosines, sines):
    half = SIZE // 2
    first = mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[0, 0, 0, half], end_mask=[True, True, True, False])
    second = mb.slice_by_index(x=x, begin=[0, 0, 0, half], end=[0, 0, 0, 0], end_mask=[True] * 4)
    turned = mb.concat(values=[mb.mul(x=second, y=-1.0), first], axis=-1)
    return mb.add(x=mb.mul(x=x, y=cosines), y=mb.mul(x=turned, y=sines))


def repeat(x, length):
    x = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, HEADS // KV_HEADS, 1, 1])
    shape = mb.concat(values=[1, HEADS, length, SIZE], axis=0) if length is not None else (1, HEADS, 16, SIZE)
    return mb.reshape(x=x, shape=shape)


def layer(x, i, norm, cosines, sines, mask, length, cached=lambda k: k):
    name = f"model_layers_{i}_"
    h = norm(x, name + "input_norm")
    q, k, v = (linear(h, n * SIZE, WIDTH, f"{name}self_attn_{p}_proj") for p, n in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)])
    q, k, v = heads_of(q, HEADS, length), heads_of(k, KV_HEADS, length), heads_of(v, KV_HEADS, length)
    q, k = rotate(q, cosines, sines), cached(rotate(k, cosines, sines))
    out = mb.scaled_dot_product_attention(query=q, key=repeat(k, length), value=repeat(v, length), attn_mask=mask)
    shape = mb.concat(values=[1, length, WIDTH], axis=0) if length is not None else (1, 16, WIDTH)
    out = mb.reshape(x=mb.transpose(x=out, perm=[0, 2, 1, 3]), shape=shape)
    x = mb.add(x=x, y=linear(out, WIDTH, WIDTH, name + "self_attn_o_proj"))
    h = rms_norm(x, name + "post_norm")
    gate = mb.silu(x=linear(h, HIDDEN, WIDTH, name + "mlp_gate_proj"))
    up = linear(h, HIDDEN, WIDTH, name + "mlp_up_proj")
    return mb.add(x=x, y=linear(mb.mul(x=gate, y=up), WIDTH, HIDDEN, name + "mlp_down_proj"))


def rope(positions):
    tables = (("rope_cos", COSINES), ("rope_sin", SINES))
    return [mb.expand_dims(x=mb.gather(x=mb.const(val=t, name=n), indices=positions, axis=0), axes=[1]) for n, t in tables]


def layer_norm(x, name):
    return mb.layer_norm(x=x, axes=[-1], gamma=weight(WIDTH) + 1, beta=weight(WIDTH), epsilon=1e-5, name=name)


def embed(ids):
    return mb.gather(x=mb.const(val=weight(VOCABULARY, WIDTH), name="embed_tokens_weight"), indices=ids, axis=0)


def dynamic():
    open_length = get_new_symbol()

    @mb.program(input_specs=[mb.TensorSpec((1, open_length), types.int32) for _ in range(2)], opset_version=ct.target.iOS18)
    def program(ids, positions):
        length = mb.gather(x=mb.shape(x=ids), indices=1, axis=0)
        end = mb.concat(values=[1, 1, length, length], axis=0)
        mask = mb.slice_by_index(x=mb.const(val=MASK, name="causal_mask"), begin=[0, 0, 0, 0], end=end)
        cosines, sines = rope(positions)
        x = embed(ids)
        for i in range(LAYERS):
            x = layer(x, i, layer_norm, cosines, sines, mask, length)
        logits = linear(x, VOCABULARY, WIDTH, "lm_head")
        return mb.reduce_argmax(x=logits, axis=-1, name="token")

    shape = (1, ct.RangeDim(1, LONGEST, default=16))
    inputs = [ct.TensorType(name=name, shape=shape, dtype=np.int32) for name in ("ids", "positions")]
    return ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, inputs=inputs)


def static():
    words = [mb.TensorSpec((1, 16), types.int32) for _ in range(2)]
    mask = mb.TensorSpec((1, 1, 16, 16), types.fp16)
    row = mb.TensorSpec((1,), types.int32)
    states = [mb.StateTensorSpec((1, KV_HEADS, 16, SIZE), dtype=types.fp16) for _ in range(3)]

    @mb.program(input_specs=[*words, mask, row, *states], opset_version=ct.target.iOS18)
    def program(ids, positions, mask, row, cache_0, cache_1, cache_2):
        mask = mb.cast(x=mask, dtype="fp32")
        cosines, sines = rope(positions)
        x = embed(ids)
        for i, cache in enumerate([cache_0, cache_1][:LAYERS]):
            begin = mb.concat(values=[[0], [0], row, [0]], axis=0)

            def cached(k):
                old = mb.read_state(input=cache)
                new = mb.slice_update(x=old, update=mb.cast(x=k, dtype="fp16"), begin=begin, end=[1, KV_HEADS, 16, SIZE])
                return mb.cast(x=mb.coreml_update_state(state=cache, value=new), dtype="fp32")

            x = layer(x, i, rms_norm, cosines, sines, mask, None, cached)
        unused = mb.cast(x=mb.read_state(input=cache_2), dtype="fp32")
        unused = mb.reduce_sum(x=unused, axes=[0, 1, 2, 3], keep_dims=False)
        return mb.add(x=linear(x, VOCABULARY, WIDTH, "lm_head"), y=unused, name="logits")

    model = ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18)
    config = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=16, weight_threshold=500
    )
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))


def save(model, path):
    """Without the date and with fixed identifiers, so that the same coremltools gives the same bytes."""
    shutil.rmtree(path, ignore_errors=True)
    model.save(str(path))
    file = path / "Data/com.apple.CoreML/model.mlmodel"
    spec = ct.proto.Model_pb2.Model.FromString(file.read_bytes())
    spec.description.metadata.userDefined.pop("com.github.apple.coremltools.conversion_date", None)
    file.write_bytes(spec.SerializeToString(deterministic=True))
    manifest = json.loads((path / "Manifest.json").read_text())
    items = sorted(manifest["itemInfoEntries"].items(), key=lambda item: item[1]["path"])
    named = {old: f"00000000-0000-4000-8000-{i:012}" for i, (old, _) in enumerate(items)}
    manifest["itemInfoEntries"] = {named[old]: item for old, item in items}
    manifest["rootModelIdentifier"] = named[manifest["rootModelIdentifier"]]
    (path / "Manifest.json").write_text(json.dumps(manifest, indent=4) + "\n")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    save(dynamic(), out / "naive-dynamic.mlpackage")
    save(static(), out / "naive-static.mlpackage")
