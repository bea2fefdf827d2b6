"""Runs the functions of an ML Program on any system, operator by operator, with coremltools as the oracle.

Nothing of Tandem is used: the package is found by Apple's libmodelpackage, protobuf and weights are read by
coremltools, and each operator is computed by coremltools' own value inference. Operators for which it has none
(convolution, pooling, reductions, SiLU) are computed here in NumPy, in f32. Each result is rounded to the type that the
program declares, as a device in that precision would.

    program = Program("x.mlpackage")
    outputs = program.run({"x": array}, states, function="decode")    # states is a dict and is updated

Needs coremltools and numpy.
"""

import logging
import os

logging.disable(logging.CRITICAL)
import numpy as np
from coremltools import proto
from coremltools.converters.mil._deployment_compatibility import AvailableTarget
from coremltools.converters.mil.frontend.milproto import load as milproto
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Placeholder, TupleInputType, types
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from coremltools.libmodelpackage import ModelPackage


def f32(value):
    return np.asarray(value, np.float32)


def ints(value, default):
    return [int(v) for v in np.atleast_1d(default if value is None else value)]


def windows(x, kernel, args, fill):
    """Views of `x` [n, c, spatial...] under a sliding window: [n, c, out..., kernel...]."""
    rank = len(kernel)
    strides = ints(args.get("strides"), [1] * rank)
    dilations = ints(args.get("dilations"), [1] * rank)
    kind = str(args.get("pad_type", "valid"))
    if kind == "custom":
        flat = ints(args.get("pad"), [0] * 2 * rank)
        pad = list(zip(flat[::2], flat[1::2]))
    elif kind == "valid":
        pad = [(0, 0)] * rank
    elif kind in ("same", "same_lower"):
        pad = []
        for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations):
            total = max((-(-size // s) - 1) * s + (k - 1) * d + 1 - size, 0)
            less, more = total // 2, total - total // 2
            pad.append((less, more) if kind == "same" else (more, less))
    else:
        raise NotImplementedError(f"pad_type {kind}")
    x = np.pad(x, [(0, 0), (0, 0), *pad], constant_values=fill)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    view = np.lib.stride_tricks.sliding_window_view(x, spans, axis=tuple(range(2, 2 + rank)))
    steps = tuple(slice(None, None, s) for s in strides)
    taps = tuple(slice(None, None, d) for d in dilations)
    return view[(slice(None), slice(None), *steps, *taps)]


def conv(args):
    x, weight = f32(args["x"]), f32(args["weight"])
    groups = int(args.get("groups", 1))
    rank = weight.ndim - 2
    view = windows(x, weight.shape[2:], args, 0.0)
    outs, n, out_spatial = weight.shape[0], x.shape[0], view.shape[2 : 2 + rank]
    parts = []
    for group in range(groups):
        channels = slice(group * weight.shape[1], (group + 1) * weight.shape[1])
        rows = slice(group * outs // groups, (group + 1) * outs // groups)
        # [n, out..., channels, kernel...] as a matrix
        part = np.moveaxis(view[:, channels], 1, 1 + rank).reshape(n * int(np.prod(out_spatial)), -1)
        part = part @ weight[rows].reshape(outs // groups, -1).T
        parts.append(np.moveaxis(part.reshape(n, *out_spatial, outs // groups), -1, 1))
    out = np.concatenate(parts, axis=1)
    if args.get("bias") is not None:
        out = out + f32(args["bias"]).reshape(1, -1, *[1] * rank)
    return out


def pool(reduce, fill):
    def run(args):
        if args.get("ceil_mode") is not None and bool(args["ceil_mode"]):
            raise NotImplementedError("ceil_mode")
        x = f32(args["x"])
        kernel = ints(args["kernel_sizes"], [])
        strides = args.get("strides") if args.get("strides") is not None else [1] * len(kernel)
        kept = {"strides": strides, "pad_type": args.get("pad_type", "valid"), "pad": args.get("pad")}
        axes = tuple(range(-len(kernel), 0))
        view = windows(x, kernel, kept, fill)
        if reduce is np.mean and bool(args.get("exclude_padding_from_average", False)):
            count = windows(np.ones_like(x), kernel, kept, 0.0).sum(axis=axes)
            return view.sum(axis=axes) / count
        return reduce(view, axis=axes)

    return run


def reduction(reduce):
    def run(args):
        axes = args.get("axes")
        axes = None if axes is None else tuple(ints(axes, []))
        return reduce(f32(args["x"]), axis=axes, keepdims=bool(args.get("keep_dims", False)))

    return run


def silu(args):
    x = f32(args["x"])
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-x))


def slice_update(args):
    x = np.array(args["x"])
    rank = x.ndim
    masks = {k: ints(args.get(k), [0] * rank) for k in ("begin_mask", "end_mask", "squeeze_mask")}
    if any(masks["squeeze_mask"]):
        raise NotImplementedError("squeeze_mask")
    index = []
    for axis, (begin, end, step) in enumerate(
        zip(ints(args["begin"], []), ints(args["end"], []), ints(args.get("stride"), [1] * rank))
    ):
        begin = None if masks["begin_mask"][axis] else begin
        end = None if masks["end_mask"][axis] else end
        index.append(slice(begin, end, step))
    assert x[tuple(index)].shape == np.shape(args["update"]), "slice_update: the update has another shape"
    x[tuple(index)] = args["update"]
    return x


def attention(args):
    query, key, value = f32(args["query"]), f32(args["key"]), f32(args["value"])
    scores = query @ np.swapaxes(key, -1, -2) / np.sqrt(query.shape[-1])
    mask = args.get("attn_mask")
    if mask is not None:
        mask = np.asarray(mask)
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + f32(mask)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True) @ value


IN_NUMPY = {
    "conv": conv,
    "max_pool": pool(np.max, -np.inf),
    "avg_pool": pool(np.mean, 0.0),
    "silu": silu,
    "reduce_mean": reduction(np.mean),
    "reduce_sum": reduction(np.sum),
    "reduce_max": reduction(np.max),
    "reduce_min": reduction(np.min),
    "slice_update": slice_update,
    "scaled_dot_product_attention": attention,
    "matmul": lambda a: np.matmul(
        np.swapaxes(f32(a["x"]), -1, -2) if bool(a.get("transpose_x", False)) else f32(a["x"]),
        np.swapaxes(f32(a["y"]), -1, -2) if bool(a.get("transpose_y", False)) else f32(a["y"]),
    ),
    "linear": lambda a: f32(a["x"]) @ f32(a["weight"]).T + f32(0 if a.get("bias") is None else a["bias"]),
}


class Program:
    def __init__(self, package):
        root = ModelPackage(str(package)).getRootModel().path()
        self.spec = proto.Model_pb2.Model()
        with open(root, "rb") as file:
            self.spec.ParseFromString(file.read())
        self.context = milproto.TranscriptionContext(os.path.join(os.path.dirname(root), "weights"))
        self.target = AvailableTarget(self.spec.specificationVersion)
        # Values of constants by function: they do not change between calls.
        self.constants = {}

    def functions(self):
        return self.spec.mlProgram.functions

    def states(self, function):
        """Zeros for every state of a function."""
        out = {}
        for item in self.functions()[function].inputs:
            if item.type.WhichOneof("type") == "stateType":
                tensor = item.type.stateType.wrappedType.tensorType
                shape = [d.constant.size for d in tensor.dimensions]
                out[item.name] = np.zeros(shape, types.nptype_from_builtin(milproto.proto_to_types(item.type.stateType.wrappedType).get_primitive()))
        return out

    def run(self, inputs, states, function, trace=None):
        program = self.functions()[function]
        block = program.block_specializations[program.opset]
        constants = self.constants.setdefault(function, {})
        env = dict(inputs)
        declared = {item.name for item in program.inputs}
        assert declared == set(inputs) | (declared & set(states)), f"{declared} declared, {set(inputs)} given"
        env.update(constants)
        fold = not constants
        with Function({"unused": Placeholder((1,), dtype=types.fp32)}, opset_version=self.target):
            for op in block.operations:
                if op.outputs and op.outputs[0].name in constants:
                    continue
                values = self.compute(op, env, states)
                for output, value in zip(op.outputs, values):
                    kind = milproto.proto_to_types(output.type)
                    dtype = types.nptype_from_builtin(kind.get_primitive() if types.is_tensor(kind) else kind)
                    with np.errstate(over="ignore"):
                        env[output.name] = value if isinstance(value, str) else np.asarray(value).astype(dtype)
                    if fold and (op.type == "const" or op.type.startswith("constexpr_")):
                        constants[output.name] = env[output.name]
                    if trace is not None and op.type != "const":
                        trace[output.name] = env[output.name]
        return {name: env[name] for name in block.outputs}

    def compute(self, op, env, states):
        def get(argument):
            if argument.WhichOneof("binding") == "name":
                return env[argument.name]
            return milproto._load_value(self.context, argument.value)

        if op.type == "const":
            return [milproto._load_value(self.context, op.attributes["val"])]
        if op.type == "read_state":
            return [states[op.inputs["input"].arguments[0].name].copy()]
        if op.type == "write_state":
            states[op.inputs["input"].arguments[0].name] = np.asarray(get(op.inputs["data"].arguments[0]))
            return []
        spec = SSAOpRegistry._get_core_op_cls(op.type).input_spec.input_types
        args = {}
        for key, argument in op.inputs.items():
            values = [get(item) for item in argument.arguments]
            single = len(values) == 1 and not isinstance(spec[key], TupleInputType)
            args[key] = values[0] if single else values
        if op.type in IN_NUMPY:
            return [IN_NUMPY[op.type](args)]
        if not op.type.startswith("constexpr_"):
            args = {k: [mb.const(val=x) for x in v] if isinstance(v, list) else mb.const(val=v) for k, v in args.items()}
        results = getattr(mb, op.type)(**args)
        results = results if isinstance(results, (tuple, list)) else [results]
        values = []
        for result in results:
            value = result.val
            if value is None and hasattr(result.op, "materialized_val_inference"):
                value = result.op.materialized_val_inference()
            if value is None:
                raise NotImplementedError(f"coremltools computes no {op.type}")
            values.append(value)
        return values
