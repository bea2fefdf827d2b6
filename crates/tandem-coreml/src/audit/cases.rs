//! For each rule a small program that triggers it and one that does not.

use std::collections::BTreeMap;

use half::f16;

use crate::dtype::DType::{self, Bool, F16, F32, I4, I8, I32, U4};
use crate::mil::{
    Arg, Block, Data, Dim, Feature, FeatureKind, Flexibility, Function, Interface, Model, Named, Op,
    TensorType, Value, ValueType,
};

/// A program of one function under construction.
#[derive(Clone)]
pub(super) struct Tiny {
    function: Function,
}

/// A type; a length of -1 is open.
fn ty(dtype: DType, shape: &[i64]) -> TensorType {
    let dim = |size: &i64| usize::try_from(*size).map_or(Dim::ANY, Dim::Fixed);
    TensorType { dtype, dims: shape.iter().map(dim).collect() }
}

fn named(name: &str, dtype: DType, shape: &[i64]) -> Named {
    Named { name: name.into(), ty: ValueType::Tensor(ty(dtype, shape)) }
}

fn feature(name: &str, dtype: DType, shape: &[i64]) -> Feature {
    let flexibility = if shape.contains(&-1) {
        let bounds = shape.iter().map(|size| if *size < 0 { (1, 512) } else { (*size as u64, *size) });
        Flexibility::Range(bounds.collect())
    } else {
        Flexibility::Fixed
    };
    let shape = shape.iter().map(|size| (*size).max(1)).collect();
    Feature { name: name.into(), kind: FeatureKind::Array { dtype, shape, flexibility } }
}

impl Tiny {
    pub fn new() -> Self {
        Self { function: Function { opset: "CoreML8".into(), ..Function::default() } }
    }

    pub fn input(mut self, name: &str, dtype: DType, shape: &[i64]) -> Self {
        self.function.inputs.push(named(name, dtype, shape));
        self.function.interface.inputs.push(feature(name, dtype, shape));
        self
    }

    pub fn state(mut self, name: &str, shape: &[i64]) -> Self {
        self.function.inputs.push(Named { name: name.into(), ty: ValueType::State(ty(F16, shape)) });
        self.function.interface.states.push(feature(name, F16, shape));
        self
    }

    /// Lets a caller pick the first input's shape from a list instead of within bounds.
    fn enumerated(mut self) -> Self {
        if let FeatureKind::Array { flexibility, .. } = &mut self.function.interface.inputs[0].kind {
            *flexibility = Flexibility::Enumerated(vec![vec![1, 32], vec![1, 64]]);
        }
        self
    }

    fn constant(self, name: &str, dtype: DType, shape: &[i64], data: Data) -> Self {
        let value = Value { ty: ValueType::Tensor(ty(dtype, shape)), data };
        let attributes = [("name".to_owned(), Value::string(name)), ("val".to_owned(), value)].into();
        self.push(Op {
            kind: "const".into(),
            outputs: vec![named(name, dtype, shape)],
            attributes,
            ..Op::default()
        })
    }

    fn ints(self, name: &str, values: &[i32]) -> Self {
        let shape = [values.len() as i64];
        self.constant(name, I32, &shape, Data::Ints(values.to_vec()))
    }

    fn halves(self, name: &str, shape: &[i64], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes = values.into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
        self.constant(name, F16, shape, Data::Bytes(bytes))
    }

    /// Weights whose values do not matter.
    pub fn weight(self, name: &str, shape: &[i64]) -> Self {
        let count = shape.iter().product::<i64>() as usize;
        self.halves(name, shape, std::iter::repeat_n(0.5, count.min(64)))
    }

    pub fn op(self, kind: &str, inputs: &[(&str, &str)], name: &str, dtype: DType, shape: &[i64]) -> Self {
        let mut args: BTreeMap<String, Vec<Arg>> = BTreeMap::new();
        for (key, value) in inputs {
            args.entry((*key).to_owned()).or_default().push(Arg::Name((*value).to_owned()));
        }
        self.push(Op {
            kind: kind.into(),
            inputs: args,
            outputs: vec![named(name, dtype, shape)],
            attributes: [("name".to_owned(), Value::string(name))].into(),
            blocks: Vec::new(),
        })
    }

    /// Gives the last operator a word as an argument.
    fn word(mut self, key: &str, text: &str) -> Self {
        let op = self.function.block.ops.last_mut().unwrap();
        op.inputs.insert(key.into(), vec![Arg::Value(Value::string(text))]);
        self
    }

    /// Moves the last operator into the body of a loop.
    fn looped(mut self) -> Self {
        let op = self.function.block.ops.pop().unwrap();
        let body = Block { ops: vec![op], ..Block::default() };
        self.push(Op { kind: "while_loop".into(), blocks: vec![body], ..Op::default() })
    }

    fn push(mut self, op: Op) -> Self {
        self.function.block.ops.push(op);
        self
    }

    pub fn model(mut self) -> Model {
        let last = self.function.block.ops.last().and_then(|op| op.outputs.first()).cloned();
        if let Some(Named { name, ty: ValueType::Tensor(ty) }) = last {
            let shape: Vec<i64> =
                ty.dims.iter().map(|dim| dim.fixed().map_or(1, |size| size as i64)).collect();
            let mut output = feature(&name, ty.dtype, &shape);
            if let FeatureKind::Array { flexibility, .. } = &mut output.kind {
                *flexibility = Flexibility::Fixed;
            }
            self.function.interface = Interface { outputs: vec![output], ..self.function.interface };
            self.function.block.outputs = vec![name];
        }
        Model {
            specification: 9,
            functions: [("main".to_owned(), self.function)].into(),
            default_function: "main".into(),
            ..Model::default()
        }
    }
}

/// An input `x` of fp16.
fn x(shape: &[i64]) -> Tiny {
    Tiny::new().input("x", F16, shape)
}

/// An operator on `x` that keeps its shape.
fn on_x(kind: &str, shape: &[i64]) -> Tiny {
    x(shape).op(kind, &[("x", "x")], "y", F16, shape)
}

/// `x` through a 1x1 convolution whose weights `unpack` makes from constants, under the name `w`.
fn convolved(unpack: impl FnOnce(Tiny) -> Tiny) -> Tiny {
    unpack(x(&[1, 64, 1, 32])).op("conv", &[("x", "x"), ("weight", "w")], "y", F16, &[1, 128, 1, 32])
}

fn blocks(dtype: DType, scales: &[i64]) -> Tiny {
    convolved(|tiny| {
        let bytes = vec![0; dtype.bytes(128 * 64).unwrap()];
        tiny.constant("q", dtype, &[128, 64, 1, 1], Data::Bytes(bytes)).weight("s", scales).op(
            "constexpr_blockwise_shift_scale",
            &[("data", "q"), ("scale", "s")],
            "w",
            F16,
            &[128, 64, 1, 1],
        )
    })
}

fn palette(lut: DType, shape: &[i64], result: &str) -> impl FnOnce(Tiny) -> Tiny {
    let (shape, result) = (shape.to_vec(), result.to_owned());
    move |tiny: Tiny| {
        let count: i64 = shape.iter().product();
        tiny.constant("i", U4, &[128, 64, 1, 1], Data::Bytes(vec![0; 4096]))
            .constant("lut", lut, &shape, Data::Bytes(vec![0; lut.bytes(count as usize).unwrap()]))
            .op("constexpr_lut_to_dense", &[("indices", "i"), ("lut", "lut")], &result, F16, &[128, 64, 1, 1])
    }
}

fn gather(tiny: Tiny, width: i64) -> Tiny {
    tiny.input("positions", I32, &[8]).ints("axis", &[0]).op(
        "gather",
        &[("x", "table"), ("indices", "positions"), ("axis", "axis")],
        "y",
        F16,
        &[8, width],
    )
}

fn rope(first: f32) -> Tiny {
    let row = |i: usize| if i == 0 { first } else { (i as f32).cos() };
    gather(
        Tiny::new().halves("table", &[16, 32], (0..16).flat_map(move |i| std::iter::repeat_n(row(i), 32))),
        32,
    )
}

fn embedding() -> Tiny {
    gather(Tiny::new().weight("table", &[128, 64]), 64)
}

/// Heads of `x` repeated and flattened to an axis of `length`.
fn repeat(flattened: &[i64]) -> Tiny {
    x(&[1, 2, 1, 32, 64])
        .ints("reps", &[1, 1, 2, 1, 1])
        .ints("shape", &[1])
        .op("tile", &[("x", "x"), ("reps", "reps")], "t", F16, &[1, 2, 2, 32, 64])
        .op("reshape", &[("x", "t"), ("shape", "shape")], "y", F16, flattened)
}

fn slice(tiny: Tiny, begin: i32, name: &str) -> Tiny {
    let [b, e] = ["begin", "end"].map(|what| format!("{name}_{what}"));
    tiny.ints(&b, &[0, 0, 0, begin]).ints(&e, &[1, 64, 1, begin + 8]).op(
        "slice_by_index",
        &[("x", "x"), ("begin", &b), ("end", &e)],
        name,
        F16,
        &[1, 64, 1, 8],
    )
}

fn joined(first: i32) -> Tiny {
    slice(slice(x(&[1, 64, 1, 32]), first, "a"), 16, "b").ints("axis", &[3]).op(
        "concat",
        &[("values", "a"), ("values", "b"), ("axis", "axis")],
        "y",
        F16,
        &[1, 64, 1, 16],
    )
}

fn masked(value: f32) -> Tiny {
    x(&[1, 1, 32, 32]).halves("m", &[1, 1, 1, 2], [0.0, value]).op(
        "add",
        &[("x", "x"), ("y", "m")],
        "y",
        F16,
        &[1, 1, 32, 32],
    )
}

fn scores(mask: &[i64]) -> Tiny {
    x(&[1, 64, 8, 32])
        .input("k", F16, &[1, 128, 8, 64])
        .input("mask", F16, mask)
        .op("einsum", &[("values", "x"), ("values", "k")], "y", F16, &[1, 128, 8, 32])
        .word("equation", "bchq,bkhc->bkhq")
}

fn pooled(window: i32, stride: i32) -> Tiny {
    x(&[1, 64, 64, 64]).ints("window", &[window, window]).ints("step", &[stride, stride]).op(
        "max_pool",
        &[("x", "x"), ("kernel_sizes", "window"), ("strides", "step")],
        "y",
        F16,
        &[1, 64, 32, 32],
    )
}

fn windowed(kernel: i64, dilation: i32) -> Tiny {
    x(&[1, 4, 64, 64]).weight("w", &[4, 4, kernel, kernel]).ints("d", &[dilation, dilation]).op(
        "conv",
        &[("x", "x"), ("weight", "w"), ("dilations", "d")],
        "y",
        F16,
        &[1, 4, 32, 32],
    )
}

fn head(channels: i64) -> Tiny {
    x(&[1, 64, 1, 32]).weight("w", &[channels, 64, 1, 1]).op(
        "conv",
        &[("x", "x"), ("weight", "w")],
        "y",
        F16,
        &[1, channels, 1, 32],
    )
}

fn linear(outputs: i64) -> Tiny {
    x(&[1, 32, 1024]).weight("w", &[outputs, 1024]).op(
        "linear",
        &[("x", "x"), ("weight", "w")],
        "y",
        F16,
        &[1, 32, outputs],
    )
}

fn states(count: usize, width: i64) -> Tiny {
    let tiny =
        (0..count).fold(x(&[1, 64, 1, 32]), |tiny, i| tiny.state(&format!("kv{i}"), &[1, 64, 1, width]));
    tiny.op("read_state", &[("input", "kv0")], "y", F16, &[1, 64, 1, width])
}

fn dynamic_blocks(length: i64) -> Tiny {
    let tiny = x(&[1, 64, 1, length]).state("kv", &[1, 64, 1, 32]);
    tiny.constant("q", I4, &[128, 64, 1, 1], Data::Bytes(vec![0; 4096]))
        .weight("s", &[128, 2, 1, 1])
        .op("constexpr_blockwise_shift_scale", &[("data", "q"), ("scale", "s")], "w", F16, &[128, 64, 1, 1])
        .op("conv", &[("x", "x"), ("weight", "w")], "y", F16, &[1, 128, 1, length])
}

fn squares(scaled: bool) -> Tiny {
    let shape = [1, 64, 1, 32];
    let tiny = x(&shape).op("reduce_max", &[("x", "x")], "largest", F16, &[1, 1, 1, 32]);
    let tiny = tiny.op("real_div", &[("x", "x"), ("y", "largest")], "small", F16, &shape);
    let of = if scaled { "small" } else { "x" };
    tiny.op("mul", &[("x", of), ("y", of)], "squares", F16, &shape).op(
        "reduce_mean",
        &[("x", "squares")],
        "y",
        F16,
        &[1, 1, 1, 32],
    )
}

fn tiled(factor: i32) -> Tiny {
    let shape = [1, 64, 1, 32 * i64::from(factor)];
    x(&[1, 64, 1, 32]).ints("reps", &[1, 1, 1, factor]).op(
        "tile",
        &[("x", "x"), ("reps", "reps")],
        "y",
        F16,
        &shape,
    )
}

fn quantized(constant: bool) -> Tiny {
    let input = if constant { "w" } else { "x" };
    x(&[1, 64, 1, 32]).weight("w", &[1, 64, 1, 32]).op(
        "quantize",
        &[("input", input)],
        "y",
        I8,
        &[1, 64, 1, 32],
    )
}

fn cast(to: DType) -> Tiny {
    x(&[1, 64, 1, 32]).op("cast", &[("x", "x")], "y", to, &[1, 64, 1, 32])
}

fn padded(mode: &str) -> Tiny {
    on_x("pad", &[1, 64, 1, 32]).word("mode", mode)
}

fn moving(computed: bool) -> Tiny {
    let begin = if computed { "at" } else { "zero" };
    x(&[1, 64, 1, 32]).input("at", I32, &[4]).ints("zero", &[0, 0, 0, 0]).op(
        "slice_by_index",
        &[("x", "x"), ("begin", begin)],
        "y",
        F16,
        &[1, 64, 1, 8],
    )
}

/// A sum of positions that an operator of this kind reads as its place.
fn placed(kind: &str) -> Tiny {
    x(&[1, 64, 1, 32]).input("at", I32, &[4]).op("add", &[("x", "at"), ("y", "at")], "begin", I32, &[4]).op(
        kind,
        &[("x", "x"), ("update", "x"), ("begin", "begin")],
        "y",
        F16,
        &[1, 64, 1, 32],
    )
}

fn good() -> Tiny {
    on_x("relu", &[1, 64, 1, 32])
}

/// Rule, a program that triggers it, and one that does not.
pub(super) fn cases() -> Vec<(&'static str, Tiny, Tiny)> {
    let shape = [1, 64, 1, 32];
    let of = |kind: &str| on_x(kind, &shape);
    vec![
        ("dtype", Tiny::new().input("x", F32, &shape).op("relu", &[("x", "x")], "y", F32, &shape), good()),
        ("state-place", placed("slice_update"), placed("add")),
        ("dtype-bool", x(&shape).op("equal", &[("x", "x"), ("y", "x")], "y", Bool, &shape), cast(Bool)),
        ("rank", on_x("relu", &[1, 1, 2, 2, 2, 32]), on_x("relu", &[1, 2, 2, 2, 32])),
        ("layer-norm-dynamic-length", on_x("layer_norm", &[1, -1, 64]), on_x("layer_norm", &[1, 32, 64])),
        ("dynamic-shape", on_x("relu", &[1, -1]), on_x("relu", &[1, -1]).enumerated()),
        ("last-axis-one", on_x("relu", &[1, 64, 1, 1]), good()),
        ("axis-length", on_x("relu", &[1, 1, 1, 65537]), on_x("relu", &[1, 65536, 1, 32])),
        ("vocabulary-axis", head(65537), head(65536)),
        ("transpose-length", on_x("transpose", &[1, 65537]), on_x("transpose", &[1, 16384])),
        ("convolution-kernel-m1", windowed(14, 1), windowed(13, 1)),
        ("convolution-kernel", windowed(16, 1), windowed(13, 1)),
        ("convolution-kernel-max", windowed(33, 1), windowed(32, 1)),
        ("fused-attention", of("scaled_dot_product_attention"), of("softmax")),
        ("mask-infinity", masked(f32::NEG_INFINITY), masked(-4e4)),
        ("mask-layout", scores(&[1, 1, 32, 128]), scores(&[1, 128, 1, 32])),
        ("rope-gather", rope(1.0), embedding()),
        ("embedding-gather", embedding(), rope(0.0)),
        ("gather", x(&[16, 32]).op("gather", &[("x", "x")], "y", F16, &[8, 32]), embedding()),
        ("gqa-repeat", repeat(&[1, 4, 32, 64]), repeat(&[1, 2, 2, 32, 64])),
        ("gqa-repeat-length", repeat(&[1, 2, 65600]), repeat(&[1, 4, 2048])),
        ("slice-saturates", slice(x(&shape), 16, "y"), slice(x(&shape), 0, "y")),
        ("concat-of-slices", joined(8), joined(0)),
        ("concat-of-slices-older", joined(8), joined(0)),
        ("weights-in-blocks", blocks(I4, &[128, 2, 1, 1]), blocks(I8, &[128, 1, 1, 1])),
        (
            "palette-with-scale",
            convolved(|tiny| {
                palette(F16, &[1, 1, 1, 1, 16, 1], "p")(tiny).weight("s", &[128, 1, 1, 1]).op(
                    "constexpr_blockwise_shift_scale",
                    &[("data", "p"), ("scale", "s")],
                    "w",
                    F16,
                    &[128, 64, 1, 1],
                )
            }),
            blocks(I8, &[128, 1, 1, 1]),
        ),
        (
            "palette-per-tensor",
            convolved(palette(F16, &[1, 1, 1, 1, 16, 1], "w")),
            convolved(palette(F16, &[8, 1, 1, 1, 16, 1], "w")),
        ),
        (
            "palette-of-int8",
            convolved(palette(I8, &[8, 1, 1, 1, 16, 1], "w")),
            convolved(palette(F16, &[8, 1, 1, 1, 16, 1], "w")),
        ),
        ("weights-unpacked", blocks(I8, &[128, 1, 1, 1]), convolved(palette(F16, &[8, 1, 1, 1, 16, 1], "w"))),
        ("linear", linear(1024), linear(1025)),
        ("linear-large", linear(1025), linear(1024)),
        ("working-set", linear(16385), linear(16384)),
        ("state-access", states(1, 32), good()),
        ("scatter", of("scatter_nd"), good()),
        ("control-flow", good().looped(), good()),
        ("recurrent", of("lstm"), good()),
        ("random", of("random_normal"), good()),
        ("logical", of("logical_and"), of("logical_not")),
        ("shape-of-data", of("non_zero"), of("reshape")),
        ("index-building", of("cumsum"), good()),
        ("range-m1", of("range_1d"), good()),
        ("argmax", of("reduce_argmax"), of("reduce_max")),
        ("arithmetic", of("tan"), of("tanh")),
        ("sine", of("sin"), of("atan")),
        ("sort", of("argsort"), of("topk")),
        ("top-k-m3", of("topk"), of("argsort")),
        ("top-k", of("topk"), of("argsort")),
        ("suppression", of("non_maximum_suppression"), good()),
        ("image", of("crop_resize"), of("crop")),
        ("cast-to-integer", cast(I32), cast(F32)),
        ("cast", cast(F32), good()),
        ("identity", of("identity"), good()),
        ("slice-at-runtime", moving(true), moving(false)),
        ("activation-quantized", quantized(false), quantized(true)),
        ("pad-reflect-m1", padded("reflect"), padded("constant")),
        ("tile-factor", tiled(5), tiled(4)),
        ("pool-window", pooled(32, 1), pooled(29, 1)),
        ("pool-window-old", pooled(14, 1), pooled(13, 2)),
        ("dilation", windowed(3, 2), windowed(3, 1)),
        ("norm-overflow", squares(false), squares(true)),
        ("silu", of("silu"), of("sigmoid")),
        ("gelu-m1", of("gelu"), of("silu")),
        ("operator-walled", of("acosh"), of("log")),
        ("operator-bridge", of("cross_product"), of("slice_by_index")),
        ("operator-unknown", of("mystery"), good()),
        ("operator-native", good(), of("mystery")),
        ("state-width", states(1, 33), states(1, 64)),
        ("state-count", states(3, 32), states(2, 32)),
        ("dynamic-state-blocks", dynamic_blocks(-1), dynamic_blocks(32)),
        ("input-padding", on_x("relu", &[1, 64, 1, 33]), good()),
        ("package-size", stored(1 << 20), stored(1 << 16)),
        ("program-bank", stored(9 << 20), stored(7 << 20)),
    ]
}

/// A convolution whose weights, of 1024 fp16 for each channel, lie in a weight file.
fn stored(channels: i64) -> Tiny {
    let blob = crate::mil::BlobRef { file: "@model_path/weights/weight.bin".into(), offset: 64 };
    x(&[1, 1024, 1, 32]).constant("w", F16, &[channels, 1024, 1, 1], Data::Blob(blob)).op(
        "conv",
        &[("x", "x"), ("weight", "w")],
        "y",
        F16,
        &[1, channels, 1, 32],
    )
}
