//! A function as a graph: who makes a value, who reads it, of what type it is, and which constants an operator has.

use std::collections::{HashMap, HashSet};

use half::{bf16, f16};

use crate::dtype::DType;
use crate::mil::{Arg, Block, Data, Flexibility, Function, Named, Op, TensorType, Value, ValueType};
use crate::mil::{FeatureKind, Model};
use crate::package::Package;

/// A function, ready to be asked.
pub(super) struct Graph<'a> {
    pub function: &'a Function,
    /// All operators, those of nested blocks after the one that holds them.
    pub ops: Vec<Node<'a>>,
    /// States of the whole package, by name.
    pub states: Vec<(&'a str, &'a TensorType)>,
    types: HashMap<&'a str, &'a ValueType>,
    producers: HashMap<&'a str, usize>,
    consumers: HashMap<&'a str, Vec<usize>>,
    /// By operator: everything that comes of it says where state is written.
    places: Vec<bool>,
    package: Option<&'a Package>,
}

/// An operator and where it stands.
pub(super) struct Node<'a> {
    pub op: &'a Op,
    /// In the body of a loop or a branch: how often it runs is not known.
    pub nested: bool,
}

impl<'a> Graph<'a> {
    pub fn new(model: &'a Model, function: &'a Function, package: Option<&'a Package>) -> Self {
        let mut states: Vec<_> = model.functions.values().flat_map(Function::states).collect();
        states.sort_by_key(|(name, _)| *name);
        states.dedup_by_key(|(name, _)| *name);
        let mut graph = Self {
            function,
            ops: Vec::new(),
            states,
            types: HashMap::new(),
            producers: HashMap::new(),
            consumers: HashMap::new(),
            places: Vec::new(),
            package,
        };
        graph.declare(&function.inputs);
        graph.add(&function.block, false);
        graph.places = vec![false; graph.ops.len()];
        for index in (0..graph.ops.len()).rev() {
            graph.places[index] = graph.places_state(graph.site(index));
        }
        graph
    }

    /// Needs the answer for every operator after it.
    fn places_state(&self, site: Site<'_, 'a>) -> bool {
        let whole_numbers = site.output().is_some_and(|ty| ty.dtype == DType::I32);
        let own =
            |arg: &Arg| name_of(arg).is_some_and(|name| site.op.outputs.iter().any(|out| out.name == name));
        let places = |reader: Site<'_, 'a>| match reader.op.kind.as_str() {
            "slice_update" => !reader.data().any(|(_, arg)| own(arg)),
            _ => self.places[reader.index],
        };
        whole_numbers && site.readers().next().is_some() && site.readers().all(places)
    }

    fn declare(&mut self, named: &'a [Named]) {
        self.types.extend(named.iter().map(|named| (named.name.as_str(), &named.ty)));
    }

    fn add(&mut self, block: &'a Block, nested: bool) {
        self.declare(&block.inputs);
        for op in &block.ops {
            let index = self.ops.len();
            self.declare(&op.outputs);
            self.producers.extend(op.outputs.iter().map(|output| (output.name.as_str(), index)));
            for name in op.inputs.values().flatten().filter_map(name_of) {
                self.consumers.entry(name).or_default().push(index);
            }
            self.ops.push(Node { op, nested });
            for block in &op.blocks {
                self.add(block, true);
            }
        }
    }

    pub fn site(&self, index: usize) -> Site<'_, 'a> {
        Site { graph: self, index, op: self.ops[index].op }
    }

    /// The operators that are computed when the program runs: all but constants and what unpacks them.
    pub fn computed(&self) -> impl Iterator<Item = Site<'_, 'a>> {
        (0..self.ops.len()).map(|index| self.site(index)).filter(|site| !is_constant(&site.op.kind))
    }

    /// Whether a caller may choose among lengths within bounds, so that no shape is fixed before it calls.
    pub fn ranged(&self) -> bool {
        let features = self.function.interface.inputs.iter();
        features
            .map(|feature| &feature.kind)
            .any(|kind| matches!(kind, FeatureKind::Array { flexibility: Flexibility::Range(_), .. }))
    }

    /// Whether a caller may choose among listed shapes and nothing else is open.
    pub fn enumerated(&self) -> bool {
        let features = self.function.interface.inputs.iter();
        !self.ranged()
            && features.map(|feature| &feature.kind).any(|kind| {
                matches!(kind, FeatureKind::Array { flexibility: Flexibility::Enumerated(_), .. })
            })
    }

    pub fn produced(&self, name: &str) -> Option<Site<'_, 'a>> {
        self.producers.get(name).map(|index| self.site(*index))
    }

    /// A constant's value, wherever it stands: in place or in an operator `const`.
    pub fn constant(&self, arg: &'a Arg) -> Option<&'a Value> {
        match arg {
            Arg::Value(value) => Some(value),
            Arg::Name(name) => {
                let op = self.ops[*self.producers.get(name.as_str())?].op;
                (op.kind == "const").then(|| op.attributes.get("val"))?
            }
        }
    }

    /// Whether it is known before the program runs, also packed.
    pub fn is_constant(&self, arg: &Arg) -> bool {
        match arg {
            Arg::Value(_) => true,
            Arg::Name(name) => self.produced(name).is_some_and(|site| is_constant(&site.op.kind)),
        }
    }

    /// A value's numbers, where they can be had. Counts of weights are large: ask only for what a rule needs.
    pub fn numbers(&self, value: &'a Value) -> Option<Numbers<'a>> {
        match &value.data {
            Data::Floats(values) => Some(Numbers::F32(values)),
            Data::Bytes(_) | Data::Blob(_) => {
                let dtype = value.ty.tensor()?.dtype;
                let bytes = match (&value.data, self.package) {
                    (Data::Bytes(bytes), _) => bytes.as_slice(),
                    (_, Some(package)) => package.bytes(value).ok()??,
                    _ => return None,
                };
                Some(Numbers::Bytes(dtype, bytes))
            }
            _ => None,
        }
    }
}

/// The elements of a constant of floats.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    F32(&'a [f32]),
    Bytes(DType, &'a [u8]),
}

impl<'a> Numbers<'a> {
    /// As f32; nothing for other types than floats.
    pub fn floats(self) -> Box<dyn Iterator<Item = f32> + 'a> {
        fn of<const N: usize>(bytes: &[u8], read: fn([u8; N]) -> f32) -> impl Iterator<Item = f32> {
            bytes.as_chunks::<N>().0.iter().map(move |chunk| read(*chunk))
        }
        match self {
            Self::F32(values) => Box::new(values.iter().copied()),
            Self::Bytes(DType::F16, bytes) => Box::new(of(bytes, |b| f16::from_le_bytes(b).to_f32())),
            Self::Bytes(DType::Bf16, bytes) => Box::new(of(bytes, |b| bf16::from_le_bytes(b).to_f32())),
            Self::Bytes(DType::F32, bytes) => Box::new(of(bytes, f32::from_le_bytes)),
            Self::Bytes(..) => Box::new(std::iter::empty()),
        }
    }

    /// Whether one of them is minus infinity; compares bytes, as masks are large.
    pub fn has_negative_infinity(self) -> bool {
        fn holds<const N: usize>(bytes: &[u8], wanted: [u8; N]) -> bool {
            bytes.as_chunks::<N>().0.contains(&wanted)
        }
        match self {
            Self::F32(values) => values.contains(&f32::NEG_INFINITY),
            Self::Bytes(DType::F16, bytes) => holds(bytes, f16::NEG_INFINITY.to_le_bytes()),
            Self::Bytes(DType::Bf16, bytes) => holds(bytes, bf16::NEG_INFINITY.to_le_bytes()),
            Self::Bytes(DType::F32, bytes) => holds(bytes, f32::NEG_INFINITY.to_le_bytes()),
            Self::Bytes(..) => false,
        }
    }
}

/// An operator, with the graph around it.
#[derive(Clone, Copy)]
pub(super) struct Site<'g, 'a> {
    pub graph: &'g Graph<'a>,
    pub index: usize,
    pub op: &'a Op,
}

impl<'g, 'a> Site<'g, 'a> {
    pub fn is(self, kinds: &[&str]) -> bool {
        kinds.contains(&self.op.kind.as_str())
    }

    /// The first argument of a parameter.
    pub fn arg(self, key: &str) -> Option<&'a Arg> {
        self.op.inputs.get(key)?.first()
    }

    /// The type of an argument.
    pub fn ty_of(self, arg: &'a Arg) -> Option<&'a TensorType> {
        match arg {
            Arg::Value(value) => value.ty.tensor(),
            Arg::Name(name) => self.graph.types.get(name.as_str())?.tensor(),
        }
    }

    /// The type of a parameter's first argument.
    pub fn ty(self, key: &str) -> Option<&'a TensorType> {
        self.ty_of(self.arg(key)?)
    }

    /// The types of the results.
    pub fn outputs(self) -> impl Iterator<Item = &'a TensorType> {
        self.op.outputs.iter().filter_map(|output| output.ty.tensor())
    }

    /// The type of the first result.
    pub fn output(self) -> Option<&'a TensorType> {
        self.op.outputs.first()?.ty.tensor()
    }

    /// The arguments that are data (not positions, lengths or axes) and are computed when the program runs.
    pub fn data(self) -> impl Iterator<Item = (&'a str, &'a Arg)> {
        let args = self.op.inputs.iter().filter(|(key, _)| !NOT_DATA.contains(&key.as_str()));
        args.flat_map(|(key, args)| args.iter().map(move |arg| (key.as_str(), arg)))
            .filter(move |(_, arg)| !self.graph.is_constant(arg))
    }

    /// The types of the results and of the data, in that order.
    pub fn tensors(self) -> impl Iterator<Item = &'a TensorType> {
        self.outputs().chain(self.data().filter_map(move |(_, arg)| self.ty_of(arg)))
    }

    /// The operator that makes a parameter's first argument.
    pub fn made_by(self, key: &str) -> Option<Self> {
        self.graph.produced(name_of(self.arg(key)?)?)
    }

    /// The operators that make the data.
    pub fn makers(self) -> impl Iterator<Item = Self> {
        self.data().filter_map(move |(_, arg)| self.graph.produced(name_of(arg)?))
    }

    /// The operators that read the results.
    pub fn readers(self) -> impl Iterator<Item = Self> {
        let graph = self.graph;
        let names = self.op.outputs.iter().map(|output| output.name.as_str());
        names
            .flat_map(move |name| graph.consumers.get(name).into_iter().flatten())
            .map(move |index| graph.site(*index))
    }

    /// Whether everything that comes of it says where slice_update writes.
    pub fn places_state(self) -> bool {
        self.graph.places[self.index]
    }

    /// The operators that unpack its constants, and those that unpack what these read; each once.
    pub fn unpackers(self) -> Vec<Self> {
        let mut found: Vec<Self> = Vec::new();
        let mut seen = HashSet::new();
        let mut next = Some(self);
        let mut done = 0;
        while let Some(site) = next {
            for name in site.op.inputs.values().flatten().filter_map(name_of) {
                let Some(maker) = self.graph.produced(name) else { continue };
                if maker.op.kind.starts_with("constexpr_") && seen.insert(maker.index) {
                    found.push(maker);
                }
            }
            next = found.get(done).copied();
            done += 1;
        }
        found
    }

    /// The stored constants it is given, packed or not.
    pub fn stored(self) -> Vec<&'a Value> {
        let mut found = Vec::new();
        for site in std::iter::once(self).chain(self.unpackers()) {
            let args = site.op.inputs.values().flatten();
            found.extend(args.filter_map(|arg| self.graph.constant(arg)));
            // Older operator sets keep packed constants in the attributes.
            if site.index != self.index {
                found.extend(
                    site.op.attributes.iter().filter(|(key, _)| *key != "name").map(|(_, value)| value),
                );
            }
        }
        found
    }

    /// The value of a parameter that is a constant.
    pub fn constant(self, key: &str) -> Option<&'a Value> {
        self.graph.constant(self.arg(key)?)
    }

    /// The whole numbers of a constant parameter.
    pub fn ints(self, key: &str) -> Option<Vec<i64>> {
        let value = self.constant(key)?;
        match &value.data {
            Data::Ints(values) => Some(values.iter().map(|v| i64::from(*v)).collect()),
            Data::Longs(values) => Some(values.clone()),
            Data::Bytes(bytes) => match value.ty.tensor()?.dtype {
                DType::I8 => Some(bytes.iter().map(|b| i64::from(b.cast_signed())).collect()),
                DType::U8 => Some(bytes.iter().map(|b| i64::from(*b)).collect()),
                DType::I16 => Some(halves(bytes).map(|h| i64::from(i16::from_le_bytes(h))).collect()),
                DType::U16 => Some(halves(bytes).map(|h| i64::from(u16::from_le_bytes(h))).collect()),
                _ => None,
            },
            _ => None,
        }
    }

    /// A constant parameter that is true or false.
    pub fn flag(self, key: &str) -> Option<bool> {
        match self.constant(key)?.data {
            Data::Bools(ref values) => values.first().copied(),
            _ => None,
        }
    }

    /// A constant parameter that is a word.
    pub fn text(self, key: &str) -> Option<&'a str> {
        match &self.constant(key)?.data {
            Data::Strings(values) => values.first().map(String::as_str),
            _ => None,
        }
    }

    /// A constant parameter that is one float.
    pub fn float(self, key: &str) -> Option<f32> {
        self.graph.numbers(self.constant(key)?)?.floats().next()
    }
}

/// Parameters that say where, how long or along which axis: the engine never sees them as tensors.
const NOT_DATA: [&str; 16] = [
    "axes",
    "axis",
    "begin",
    "begin_mask",
    "end",
    "end_mask",
    "indices",
    "perm",
    "position",
    "reps",
    "shape",
    "size",
    "squeeze_mask",
    "stride",
    "strides",
    "dtype",
];

fn halves(bytes: &[u8]) -> impl Iterator<Item = [u8; 2]> {
    bytes.as_chunks::<2>().0.iter().copied()
}

/// Whether an operator only holds or unpacks a constant.
pub(super) fn is_constant(kind: &str) -> bool {
    kind == "const" || kind.starts_with("constexpr_")
}

pub(super) fn name_of(arg: &Arg) -> Option<&str> {
    match arg {
        Arg::Name(name) => Some(name),
        Arg::Value(_) => None,
    }
}
