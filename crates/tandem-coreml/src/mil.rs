//! An ML Program in memory: what the reader gives and the writer takes.
//!
//! It follows the format closely (functions of one block each, operators with named arguments), but speaks of types and
//! shapes instead of messages. Large constants stay in the weight file: a [`Value`] then names a record of it.

mod wire;

use std::collections::BTreeMap;

use crate::dtype::DType;

/// A model of kind ML Program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Model {
    /// Version of the format: 9 is iOS 18 and macOS 15, 10 is iOS 26 and macOS 26.
    pub specification: i32,
    /// By name; a model with one function calls it `main`.
    pub functions: BTreeMap<String, Function>,
    /// Which function a caller gets who names none.
    pub default_function: String,
    /// What people wrote about it.
    pub metadata: Metadata,
}

/// What people wrote about a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Metadata {
    pub description: String,
    pub version: String,
    pub author: String,
    pub license: String,
    /// Keys and values of the author's own.
    pub user_defined: BTreeMap<String, String>,
}

/// One entry point.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Function {
    /// What a caller sees.
    pub interface: Interface,
    /// Arguments of the program itself: inputs, then states.
    pub inputs: Vec<Named>,
    /// Operator set (`CoreML8`), which is also the key of the block.
    pub opset: String,
    /// What is computed.
    pub block: Block,
}

impl Function {
    /// The states among [`Function::inputs`].
    pub fn states(&self) -> impl Iterator<Item = (&str, &TensorType)> {
        self.inputs.iter().filter_map(|input| match &input.ty {
            ValueType::State(tensor) => Some((input.name.as_str(), tensor)),
            _ => None,
        })
    }
}

/// What a caller of a function sees.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Interface {
    pub inputs: Vec<Feature>,
    pub outputs: Vec<Feature>,
    pub states: Vec<Feature>,
}

/// An input, output or state as a caller sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feature {
    /// Its name, the same as in the program.
    pub name: String,
    /// What it is.
    pub kind: FeatureKind,
}

/// What a feature is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FeatureKind {
    /// A tensor (or a state of that type).
    Array {
        /// Element type.
        dtype: DType,
        /// Default shape; empty for an output whose shape is left open.
        shape: Vec<i64>,
        /// Which other shapes are allowed.
        flexibility: Flexibility,
    },
    /// An image, a dictionary or another kind that Tandem does not write, by name.
    Other(&'static str),
}

/// Which shapes a feature may have beside its default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flexibility {
    /// No other.
    Fixed,
    /// Any within these bounds, a pair for each dimension; an upper bound below 0 is none.
    Range(Vec<(u64, i64)>),
    /// One of these.
    Enumerated(Vec<Vec<i64>>),
}

/// Operators in order of execution.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Block {
    /// Arguments of a nested block.
    pub inputs: Vec<Named>,
    /// Names of the values it gives.
    pub outputs: Vec<String>,
    /// What it runs.
    pub ops: Vec<Op>,
}

impl Block {
    /// All operators, those of nested blocks after the operator that holds them.
    pub fn walk(&self) -> Box<dyn Iterator<Item = &Op> + '_> {
        Box::new(
            self.ops.iter().flat_map(|op| std::iter::once(op).chain(op.blocks.iter().flat_map(Block::walk))),
        )
    }
}

/// One operator.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Op {
    /// Kind (`conv`, `const`, `read_state`, ...).
    pub kind: String,
    /// Arguments by parameter; a variadic parameter has several.
    pub inputs: BTreeMap<String, Vec<Arg>>,
    /// Results; `write_state` has none.
    pub outputs: Vec<Named>,
    /// `name` always, `val` of a `const`.
    pub attributes: BTreeMap<String, Value>,
    /// Bodies of `cond` and `while_loop`.
    pub blocks: Vec<Block>,
}

impl Op {
    /// The name in its attributes, else that of its first result, else nothing.
    pub fn name(&self) -> &str {
        match self.attributes.get("name").map(|value| &value.data) {
            Some(Data::Strings(names)) if names.len() == 1 => &names[0],
            _ => self.outputs.first().map_or("", |output| output.name.as_str()),
        }
    }

    /// The values that stand in this operator itself, with the parameter or attribute they stand in.
    pub fn values(&self) -> impl Iterator<Item = (&str, &Value)> {
        let inputs =
            self.inputs.iter().flat_map(|(key, args)| args.iter().map(move |arg| (key.as_str(), arg)));
        let inline = inputs.filter_map(|(key, arg)| match arg {
            Arg::Value(value) => Some((key, value)),
            Arg::Name(_) => None,
        });
        self.attributes.iter().map(|(key, value)| (key.as_str(), value)).chain(inline)
    }
}

/// An argument.
#[derive(Debug, Clone, PartialEq)]
pub enum Arg {
    /// Another operator's result, or an input.
    Name(String),
    /// Given in place.
    Value(Value),
}

/// A name with a type.
#[derive(Debug, Clone, PartialEq)]
pub struct Named {
    /// Unique in its function.
    pub name: String,
    /// Its type.
    pub ty: ValueType,
}

/// A type.
#[derive(Debug, Clone, PartialEq)]
pub enum ValueType {
    /// Of a tensor, or of a scalar (no dimensions).
    Tensor(TensorType),
    /// Of a state that holds a tensor.
    State(TensorType),
    /// A list, tuple or dictionary.
    Other(Box<crate::proto::mil::ValueType>),
}

impl ValueType {
    /// The tensor's type; a state's is that of what it holds.
    pub fn tensor(&self) -> Option<&TensorType> {
        match self {
            ValueType::Tensor(tensor) | ValueType::State(tensor) => Some(tensor),
            ValueType::Other(_) => None,
        }
    }
}

/// Element type and shape.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Slowest dimension first; none for a scalar.
    pub dims: Vec<Dim>,
}

/// One dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Of this size.
    Fixed(usize),
    /// Known only when the program runs; `variadic` stands for any number of dimensions.
    Unknown {
        /// As in the format.
        variadic: bool,
    },
}

impl Dim {
    /// One dimension of unknown size.
    pub const ANY: Self = Self::Unknown { variadic: false };

    /// The size, where it is known.
    pub fn fixed(self) -> Option<usize> {
        match self {
            Dim::Fixed(size) => Some(size),
            Dim::Unknown { .. } => None,
        }
    }
}

impl TensorType {
    /// Of a fixed shape.
    pub fn fixed(dtype: DType, shape: &[usize]) -> Self {
        Self { dtype, dims: shape.iter().copied().map(Dim::Fixed).collect() }
    }

    /// The shape, where every dimension is known.
    pub fn shape(&self) -> Option<Vec<usize>> {
        self.dims.iter().map(|dim| dim.fixed()).collect()
    }

    /// Elements, where every dimension is known and the product does not overflow.
    pub fn elements(&self) -> Option<usize> {
        self.dims.iter().try_fold(1usize, |product, dim| product.checked_mul(dim.fixed()?))
    }
}

/// Writes `fp16[1, 64, 1, ?]`.
impl std::fmt::Display for TensorType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dims: Vec<String> =
            self.dims.iter().map(|dim| dim.fixed().map_or("?".to_owned(), |size| size.to_string())).collect();
        write!(f, "{}[{}]", self.dtype.name(), dims.join(", "))
    }
}

/// A constant.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Its type.
    pub ty: ValueType,
    /// Its elements, row by row, or where they lie.
    pub data: Data,
}

/// The elements of a constant.
#[derive(Debug, Clone, PartialEq)]
pub enum Data {
    /// Of `bool`.
    Bools(Vec<bool>),
    /// Of `int32`, `int16` and `uint16`.
    Ints(Vec<i32>),
    /// Of `int64` and `uint64`.
    Longs(Vec<i64>),
    /// Of `fp32`.
    Floats(Vec<f32>),
    /// Of `fp64`.
    Doubles(Vec<f64>),
    /// Of `string`.
    Strings(Vec<String>),
    /// Of every other type: little endian, packed.
    Bytes(Vec<u8>),
    /// In a weight file.
    Blob(BlobRef),
    /// A list, tuple or dictionary, or nothing at all.
    Other(Option<Box<crate::proto::mil::value::ImmediateValue>>),
}

/// A record of a weight file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlobRef {
    /// As the program spells it (`@model_path/weights/weight.bin`).
    pub file: String,
    /// Of the record's header.
    pub offset: u64,
}

impl Value {
    /// A scalar or vector given in place.
    pub fn immediate(dtype: DType, shape: &[usize], data: Data) -> Self {
        Self { ty: ValueType::Tensor(TensorType::fixed(dtype, shape)), data }
    }

    /// A string.
    pub fn string(text: impl Into<String>) -> Self {
        Self::immediate(DType::String, &[], Data::Strings(vec![text.into()]))
    }
}
