//! Builds the functions of an ML Program: each operator is checked and its result's shape inferred when it is added, so
//! that a wrong graph fails here, by name, and not on a device.
//!
//! Every parameter of an operator is written out, also where the format knows a default: that is what Core ML's own
//! tools write.

mod elementwise;
mod layout;
mod product;
mod reduce;
mod state;

use std::collections::{BTreeMap, HashMap};

use half::f16;

use crate::dtype::DType;
use crate::error::CoremlError;
use crate::mil::{
    Arg, Block, Data, Dim, Feature, FeatureKind, Flexibility, Function, Interface, Named, Op, TensorType,
    Value, ValueType,
};
use crate::package::PackageWriter;

/// A value of the function under construction.
#[derive(Debug, Clone, PartialEq)]
pub struct Var {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: TensorType,
}

impl Var {
    /// The size of dimension `axis`.
    ///
    /// # Panics
    /// If there is no such dimension.
    pub fn dim(&self, axis: usize) -> Dim {
        self.ty.dims[axis]
    }
}

/// A weight that lies in the package's weight file.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// What an operator sees.
    pub shape: Vec<usize>,
    /// How it lies there.
    pub form: StoredForm,
}

/// How a weight lies in a weight file; offsets are those of records.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum StoredForm {
    /// As fp16.
    Dense { offset: u64 },
    /// Indices into tables of fp16 values; one table serves `shape[0] / tables` rows.
    Lut { indices: u64, index_type: DType, lut: u64, tables: usize },
    /// Integers times fp16 scales; one scale serves `block` values of a row.
    Blocks { data: u64, data_type: DType, scale: u64, block: usize },
}

/// A function under construction.
#[derive(Debug)]
pub struct Builder {
    opset: String,
    interface: Interface,
    inputs: Vec<Named>,
    ops: Vec<Op>,
    scope: String,
    /// How often a name was wanted.
    names: HashMap<String, usize>,
    constants: HashMap<String, Var>,
}

type Built = Result<Var, CoremlError>;

impl Builder {
    /// A function without anything, for the operator set `opset` (`CoreML8`).
    pub fn new(opset: &str) -> Self {
        Self {
            opset: opset.into(),
            interface: Interface::default(),
            inputs: vec![],
            ops: vec![],
            scope: String::new(),
            names: HashMap::new(),
            constants: HashMap::new(),
        }
    }

    /// What the names of the operators that follow begin with: the part of the network they belong to.
    pub fn scope(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// An input. Dimensions of unknown size have the bounds and the default that `flexible` gives for each.
    pub fn input(&mut self, name: &str, ty: TensorType, flexible: (usize, usize)) -> Var {
        let (default, most) = flexible;
        let shape = ty.dims.iter().map(|dim| dim.fixed().unwrap_or(default) as i64).collect();
        let range = |dim: &Dim| dim.fixed().map_or((1, most as i64), |size| (size as u64, size as i64));
        let flexibility = match ty.shape() {
            Some(_) => Flexibility::Fixed,
            None => Flexibility::Range(ty.dims.iter().map(range).collect()),
        };
        let kind = FeatureKind::Array { dtype: ty.dtype, shape, flexibility };
        self.interface.inputs.push(Feature { name: name.into(), kind });
        self.inputs.push(Named { name: name.into(), ty: ValueType::Tensor(ty.clone()) });
        self.names.insert(name.into(), 1);
        Var { name: name.into(), ty }
    }

    /// An input of a fixed shape.
    pub fn fixed_input(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Var {
        self.input(name, TensorType::fixed(dtype, shape), (0, 0))
    }

    /// Gives `var` to the caller as `name`.
    ///
    /// # Errors
    /// [`CoremlError::Operator`] if the name is taken.
    pub fn output(&mut self, name: &str, var: &Var) -> Result<(), CoremlError> {
        let producer =
            self.ops.iter_mut().rev().flat_map(|op| &mut op.outputs).find(|out| out.name == var.name);
        let Some(producer) = producer else {
            return Err(operator("output", name, format!("{} is no operator's result", var.name)));
        };
        if self.names.contains_key(name) {
            return Err(operator("output", name, "the name is taken".into()));
        }
        name.clone_into(&mut producer.name);
        for arg in self.ops.iter_mut().flat_map(|op| op.inputs.values_mut()).flatten() {
            if *arg == Arg::Name(var.name.clone()) {
                *arg = Arg::Name(name.into());
            }
        }
        self.names.insert(name.into(), 1);
        let shape = var.ty.shape().unwrap_or_default().iter().map(|&size| size as i64).collect();
        let kind = FeatureKind::Array { dtype: var.ty.dtype, shape, flexibility: Flexibility::Fixed };
        self.interface.outputs.push(Feature { name: name.into(), kind });
        Ok(())
    }

    /// The finished function.
    pub fn finish(self) -> Function {
        let outputs = self.interface.outputs.iter().map(|output| output.name.clone()).collect();
        // States follow the inputs.
        let (states, mut inputs): (Vec<_>, Vec<_>) =
            self.inputs.into_iter().partition(|input| matches!(input.ty, ValueType::State(_)));
        inputs.extend(states);
        Function {
            interface: self.interface,
            inputs,
            opset: self.opset,
            block: Block { inputs: vec![], outputs, ops: self.ops },
        }
    }

    /// A small constant; the same one is written once.
    fn constant(&mut self, ty: TensorType, data: Data) -> Var {
        let key = format!("{ty} {data:?}");
        if let Some(var) = self.constants.get(&key) {
            return var.clone();
        }
        let name = format!("const_{}", self.constants.len());
        let val = Value { ty: ValueType::Tensor(ty.clone()), data };
        let var = self.push_const(name, ty, val);
        self.constants.insert(key, var.clone());
        var
    }

    fn push_const(&mut self, name: String, ty: TensorType, val: Value) -> Var {
        self.ops.push(Op {
            kind: "const".into(),
            outputs: vec![Named { name: name.clone(), ty: ValueType::Tensor(ty.clone()) }],
            attributes: [("name".to_owned(), Value::string(name.clone())), ("val".to_owned(), val)].into(),
            ..Op::default()
        });
        Var { name, ty }
    }

    fn ints(&mut self, values: &[i32]) -> Var {
        self.constant(TensorType::fixed(DType::I32, &[values.len()]), Data::Ints(values.to_vec()))
    }

    fn int(&mut self, value: i32) -> Var {
        self.constant(TensorType::fixed(DType::I32, &[]), Data::Ints(vec![value]))
    }

    fn bools(&mut self, values: &[bool]) -> Var {
        self.constant(TensorType::fixed(DType::Bool, &[values.len()]), Data::Bools(values.to_vec()))
    }

    fn bool(&mut self, value: bool) -> Var {
        self.constant(TensorType::fixed(DType::Bool, &[]), Data::Bools(vec![value]))
    }

    fn text(&mut self, value: &str) -> Var {
        self.constant(TensorType::fixed(DType::String, &[]), Data::Strings(vec![value.into()]))
    }

    /// An fp16 scalar.
    pub fn half(&mut self, value: f32) -> Var {
        let bytes = f16::from_f32(value).to_le_bytes().to_vec();
        self.constant(TensorType::fixed(DType::F16, &[]), Data::Bytes(bytes))
    }

    /// A weight of the package's weight file, decompressed where it is compressed.
    pub fn weight(&mut self, label: &str, stored: &Stored) -> Var {
        let ty = TensorType::fixed(DType::F16, &stored.shape);
        let name = self.unique(label);
        let (kind, inputs) = match stored.form {
            StoredForm::Dense { offset } => {
                let val = blob(DType::F16, &stored.shape, offset);
                return self.push_const(name, ty, val);
            }
            StoredForm::Lut { indices, index_type, lut, tables } => {
                let mut lut_shape = vec![1; stored.shape.len() + 2];
                lut_shape[0] = tables;
                lut_shape[stored.shape.len()] = 1 << index_type.bits();
                let inputs = [
                    ("indices", blob(index_type, &stored.shape, indices)),
                    ("lut", blob(DType::F16, &lut_shape, lut)),
                ];
                ("constexpr_lut_to_dense", inputs)
            }
            StoredForm::Blocks { data, data_type, scale, block } => {
                let mut scale_shape = stored.shape.clone();
                scale_shape[1] /= block;
                let inputs = [
                    ("data", blob(data_type, &stored.shape, data)),
                    ("scale", blob(DType::F16, &scale_shape, scale)),
                ];
                ("constexpr_blockwise_shift_scale", inputs)
            }
        };
        let inputs = inputs.map(|(key, value)| (key.to_owned(), vec![Arg::Value(value)])).into();
        self.push_op(kind, name, inputs, ty)
    }

    /// Adds an operator with one result.
    fn op(&mut self, kind: &str, label: &str, args: &[(&str, &Var)], ty: TensorType) -> Var {
        let inputs = args.iter().map(|(key, var)| ((*key).to_owned(), vec![Arg::Name(var.name.clone())]));
        let inputs = inputs.collect();
        let name = self.unique(label);
        self.push_op(kind, name, inputs, ty)
    }

    fn push_op(
        &mut self,
        kind: &str,
        name: String,
        inputs: BTreeMap<String, Vec<Arg>>,
        ty: TensorType,
    ) -> Var {
        self.ops.push(Op {
            kind: kind.into(),
            inputs,
            outputs: vec![Named { name: name.clone(), ty: ValueType::Tensor(ty.clone()) }],
            attributes: [("name".to_owned(), Value::string(name.clone()))].into(),
            blocks: vec![],
        });
        Var { name, ty }
    }

    /// `SCOPE_LABEL`, numbered from its second use on.
    fn unique(&mut self, label: &str) -> String {
        let name = if self.scope.is_empty() { label.to_owned() } else { format!("{}_{label}", self.scope) };
        let uses = self.names.entry(name.clone()).or_insert(0);
        *uses += 1;
        if *uses == 1 { name } else { format!("{name}_{uses}") }
    }

    fn wrong(&self, kind: &str, label: &str, what: impl Into<String>) -> CoremlError {
        operator(kind, &format!("{}_{label}", self.scope), what.into())
    }
}

fn operator(op: &str, name: &str, what: String) -> CoremlError {
    CoremlError::Operator { op: op.into(), name: name.into(), what }
}

fn blob(dtype: DType, shape: &[usize], offset: u64) -> Value {
    Value {
        ty: ValueType::Tensor(TensorType::fixed(dtype, shape)),
        data: Data::Blob(PackageWriter::reference(offset)),
    }
}
