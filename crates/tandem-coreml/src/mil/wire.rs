//! Between the program in memory and the messages of the format.

use std::collections::BTreeMap;

use super::{
    Arg, BlobRef, Block, Data, Dim, Feature, FeatureKind, Flexibility, Function, Interface, Metadata, Model,
    Named, Op, TensorType, Value, ValueType,
};
use crate::dtype::DType;
use crate::proto::mil::{self, argument, dimension, tensor_value, value, value_type};
use crate::proto::model::{self, array_feature_type, feature_type};

/// What is wrong with a message, in words.
type Wrong = String;

impl Model {
    /// From the messages of a model whose kind is known to be ML Program.
    pub(crate) fn from_proto(proto: model::Model) -> Result<Self, Wrong> {
        let program = proto.ml_program.ok_or("it holds no program")?;
        let description = proto.description.unwrap_or_default();
        let mut interfaces = BTreeMap::new();
        let mut default_function = description.default_function_name;
        if description.functions.is_empty() {
            if default_function.is_empty() {
                default_function = "main".into();
            }
            let interface =
                Interface::from_proto(&description.input, &description.output, &description.state)?;
            interfaces.insert(default_function.clone(), interface);
        }
        for function in description.functions {
            let interface = Interface::from_proto(&function.input, &function.output, &function.state)?;
            interfaces.insert(function.name, interface);
        }
        let mut functions = BTreeMap::new();
        for (name, function) in program.functions {
            let interface = interfaces
                .remove(&name)
                .ok_or_else(|| format!("no interface is described for function {name}"))?;
            let function = Function::from_proto(function, interface)
                .map_err(|what| format!("function {name}: {what}"))?;
            functions.insert(name, function);
        }
        if let Some(name) = interfaces.keys().next() {
            return Err(format!(
                "an interface is described for function {name}, which is not in the program"
            ));
        }
        let metadata = description.metadata.unwrap_or_default();
        Ok(Self {
            specification: proto.specification_version,
            functions,
            default_function,
            metadata: Metadata {
                description: metadata.short_description,
                version: metadata.version_string,
                author: metadata.author,
                license: metadata.license,
                user_defined: metadata.user_defined,
            },
        })
    }

    /// To messages. A single function called `main` is described at the top, as Core ML's own tools do.
    pub(crate) fn to_proto(&self) -> model::Model {
        let single = self.functions.len() == 1 && self.functions.contains_key("main");
        let Metadata { description, version, author, license, user_defined } = &self.metadata;
        let mut described = model::ModelDescription {
            metadata: Some(model::Metadata {
                short_description: description.clone(),
                version_string: version.clone(),
                author: author.clone(),
                license: license.clone(),
                user_defined: user_defined.clone(),
            }),
            ..Default::default()
        };
        for (name, function) in &self.functions {
            let [input, output, state] = function.interface.to_proto();
            if single {
                (described.input, described.output, described.state) = (input, output, state);
            } else {
                described.functions.push(model::FunctionDescription {
                    name: name.clone(),
                    input,
                    output,
                    state,
                });
            }
        }
        if !single {
            described.default_function_name.clone_from(&self.default_function);
        }
        model::Model {
            specification_version: self.specification,
            description: Some(described),
            is_updatable: false,
            ml_program: Some(mil::Program {
                version: 1,
                functions: self.functions.iter().map(|(name, f)| (name.clone(), f.to_proto())).collect(),
                ..Default::default()
            }),
        }
    }
}

impl Interface {
    fn from_proto(
        inputs: &[model::FeatureDescription],
        outputs: &[model::FeatureDescription],
        states: &[model::FeatureDescription],
    ) -> Result<Self, Wrong> {
        let all = |features: &[model::FeatureDescription]| {
            features.iter().map(Feature::from_proto).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self { inputs: all(inputs)?, outputs: all(outputs)?, states: all(states)? })
    }

    fn to_proto(&self) -> [Vec<model::FeatureDescription>; 3] {
        let all = |features: &[Feature], state| features.iter().map(|f| f.to_proto(state)).collect();
        [all(&self.inputs, false), all(&self.outputs, false), all(&self.states, true)]
    }
}

impl Feature {
    fn from_proto(proto: &model::FeatureDescription) -> Result<Self, Wrong> {
        use feature_type::Type;
        let kind = match proto.r#type.as_ref().and_then(|ty| ty.r#type.as_ref()) {
            Some(Type::MultiArrayType(array)) => FeatureKind::from_proto(array),
            Some(Type::StateType(state)) => match &state.array_type {
                Some(array) => FeatureKind::from_proto(array),
                None => Err("a state without a type".into()),
            },
            Some(Type::Int64Type(_)) => Ok(FeatureKind::Other("integer")),
            Some(Type::DoubleType(_)) => Ok(FeatureKind::Other("double")),
            Some(Type::StringType(_)) => Ok(FeatureKind::Other("string")),
            Some(Type::ImageType(_)) => Ok(FeatureKind::Other("image")),
            Some(Type::DictionaryType(_)) => Ok(FeatureKind::Other("dictionary")),
            Some(Type::SequenceType(_)) => Ok(FeatureKind::Other("sequence")),
            None => Err("no type".into()),
        };
        Ok(Self {
            name: proto.name.clone(),
            kind: kind.map_err(|what| format!("feature {}: {what}", proto.name))?,
        })
    }

    fn to_proto(&self, state: bool) -> model::FeatureDescription {
        use feature_type::Type;
        let ty = match (self.kind.to_proto(), state) {
            (Some(array), true) => Some(Type::StateType(model::StateFeatureType { array_type: Some(array) })),
            (Some(array), false) => Some(Type::MultiArrayType(array)),
            (None, _) => None,
        };
        model::FeatureDescription {
            name: self.name.clone(),
            short_description: String::new(),
            r#type: Some(model::FeatureType { r#type: ty, is_optional: false }),
        }
    }
}

impl FeatureKind {
    fn from_proto(array: &model::ArrayFeatureType) -> Result<Self, Wrong> {
        use array_feature_type::ShapeFlexibility;
        let dtype = DType::from_interface(array.data_type)
            .ok_or_else(|| format!("element type {} is not known", array.data_type))?;
        let flexibility = match &array.shape_flexibility {
            None => Flexibility::Fixed,
            Some(ShapeFlexibility::ShapeRange(range)) => {
                Flexibility::Range(range.size_ranges.iter().map(|r| (r.lower_bound, r.upper_bound)).collect())
            }
            Some(ShapeFlexibility::EnumeratedShapes(shapes)) => {
                Flexibility::Enumerated(shapes.shapes.iter().map(|s| s.shape.clone()).collect())
            }
        };
        Ok(FeatureKind::Array { dtype, shape: array.shape.clone(), flexibility })
    }

    fn to_proto(&self) -> Option<model::ArrayFeatureType> {
        use array_feature_type::{EnumeratedShapes, Shape, ShapeFlexibility, ShapeRange, SizeRange};
        let FeatureKind::Array { dtype, shape, flexibility } = self else { return None };
        let shape_flexibility = match flexibility {
            Flexibility::Fixed => None,
            Flexibility::Range(ranges) => Some(ShapeFlexibility::ShapeRange(ShapeRange {
                size_ranges: ranges
                    .iter()
                    .map(|&(lower_bound, upper_bound)| SizeRange { lower_bound, upper_bound })
                    .collect(),
            })),
            Flexibility::Enumerated(shapes) => Some(ShapeFlexibility::EnumeratedShapes(EnumeratedShapes {
                shapes: shapes.iter().map(|shape| Shape { shape: shape.clone() }).collect(),
            })),
        };
        Some(model::ArrayFeatureType {
            shape: shape.clone(),
            data_type: dtype.interface()? as i32,
            shape_flexibility,
        })
    }
}

impl Function {
    fn from_proto(mut proto: mil::Function, interface: Interface) -> Result<Self, Wrong> {
        let block = proto
            .block_specializations
            .remove(&proto.opset)
            .ok_or_else(|| format!("no block for its operator set {:?}", proto.opset))?;
        Ok(Self {
            interface,
            inputs: proto.inputs.into_iter().map(Named::from_proto).collect::<Result<_, _>>()?,
            block: Block::from_proto(block)?,
            opset: proto.opset,
        })
    }

    fn to_proto(&self) -> mil::Function {
        mil::Function {
            inputs: self.inputs.iter().map(Named::to_proto).collect(),
            opset: self.opset.clone(),
            block_specializations: [(self.opset.clone(), self.block.to_proto())].into(),
            attributes: BTreeMap::new(),
        }
    }
}

impl Block {
    fn from_proto(proto: mil::Block) -> Result<Self, Wrong> {
        Ok(Self {
            inputs: proto.inputs.into_iter().map(Named::from_proto).collect::<Result<_, _>>()?,
            outputs: proto.outputs,
            ops: proto.operations.into_iter().map(Op::from_proto).collect::<Result<_, _>>()?,
        })
    }

    fn to_proto(&self) -> mil::Block {
        mil::Block {
            inputs: self.inputs.iter().map(Named::to_proto).collect(),
            outputs: self.outputs.clone(),
            operations: self.ops.iter().map(Op::to_proto).collect(),
            attributes: BTreeMap::new(),
        }
    }
}

impl Op {
    fn from_proto(proto: mil::Operation) -> Result<Self, Wrong> {
        let name = proto.outputs.first().map(|output| output.name.clone()).unwrap_or_default();
        let kind = proto.r#type.clone();
        let read = |proto: mil::Operation| -> Result<Self, Wrong> {
            let mut inputs = BTreeMap::new();
            for (key, argument) in proto.inputs {
                let args = argument.arguments.into_iter().map(Arg::from_proto);
                inputs.insert(key, args.collect::<Result<_, _>>()?);
            }
            let mut attributes = BTreeMap::new();
            for (key, value) in proto.attributes {
                attributes.insert(key, Value::from_proto(value)?);
            }
            Ok(Self {
                kind: proto.r#type,
                inputs,
                outputs: proto.outputs.into_iter().map(Named::from_proto).collect::<Result<_, _>>()?,
                attributes,
                blocks: proto.blocks.into_iter().map(Block::from_proto).collect::<Result<_, _>>()?,
            })
        };
        read(proto).map_err(|what| format!("operator {kind} {name}: {what}"))
    }

    fn to_proto(&self) -> mil::Operation {
        let argument =
            |args: &Vec<Arg>| mil::Argument { arguments: args.iter().map(Arg::to_proto).collect() };
        mil::Operation {
            r#type: self.kind.clone(),
            inputs: self.inputs.iter().map(|(key, args)| (key.clone(), argument(args))).collect(),
            outputs: self.outputs.iter().map(Named::to_proto).collect(),
            blocks: self.blocks.iter().map(Block::to_proto).collect(),
            attributes: self.attributes.iter().map(|(key, value)| (key.clone(), value.to_proto())).collect(),
        }
    }
}

impl Arg {
    fn from_proto(proto: argument::Binding) -> Result<Self, Wrong> {
        match proto.binding {
            Some(argument::binding::Binding::Name(name)) => Ok(Arg::Name(name)),
            Some(argument::binding::Binding::Value(value)) => Ok(Arg::Value(Value::from_proto(value)?)),
            None => Err("an argument that is neither a name nor a value".into()),
        }
    }

    fn to_proto(&self) -> argument::Binding {
        argument::Binding {
            binding: Some(match self {
                Arg::Name(name) => argument::binding::Binding::Name(name.clone()),
                Arg::Value(value) => argument::binding::Binding::Value(value.to_proto()),
            }),
        }
    }
}

impl Named {
    fn from_proto(proto: mil::NamedValueType) -> Result<Self, Wrong> {
        let ty = proto.r#type.ok_or_else(|| format!("{} has no type", proto.name))?;
        Ok(Self {
            ty: ValueType::from_proto(ty).map_err(|what| format!("{}: {what}", proto.name))?,
            name: proto.name,
        })
    }

    fn to_proto(&self) -> mil::NamedValueType {
        mil::NamedValueType { name: self.name.clone(), r#type: Some(self.ty.to_proto()) }
    }
}

impl ValueType {
    fn from_proto(proto: mil::ValueType) -> Result<Self, Wrong> {
        match proto.r#type {
            Some(value_type::Type::TensorType(tensor)) => {
                Ok(ValueType::Tensor(TensorType::from_proto(&tensor)?))
            }
            Some(value_type::Type::StateType(state)) => match state.wrapped_type.and_then(|ty| ty.r#type) {
                Some(value_type::Type::TensorType(tensor)) => {
                    Ok(ValueType::State(TensorType::from_proto(&tensor)?))
                }
                _ => Err("a state that holds no tensor".into()),
            },
            Some(_) => Ok(ValueType::Other(Box::new(proto))),
            None => Err("an empty type".into()),
        }
    }

    fn to_proto(&self) -> mil::ValueType {
        let tensor = |tensor: &TensorType| mil::ValueType {
            r#type: Some(value_type::Type::TensorType(tensor.to_proto())),
        };
        match self {
            ValueType::Tensor(ty) => tensor(ty),
            ValueType::State(ty) => mil::ValueType {
                r#type: Some(value_type::Type::StateType(Box::new(mil::StateType {
                    wrapped_type: Some(Box::new(tensor(ty))),
                }))),
            },
            ValueType::Other(proto) => (**proto).clone(),
        }
    }
}

impl TensorType {
    fn from_proto(proto: &mil::TensorType) -> Result<Self, Wrong> {
        let dtype = DType::from_mil(proto.data_type)
            .ok_or_else(|| format!("element type {} is not known", proto.data_type))?;
        let dims = proto.dimensions.iter().map(|dim| match &dim.dimension {
            Some(dimension::Dimension::Constant(constant)) => usize::try_from(constant.size)
                .map(Dim::Fixed)
                .map_err(|_| format!("a dimension of {}", constant.size)),
            Some(dimension::Dimension::Unknown(unknown)) => Ok(Dim::Unknown { variadic: unknown.variadic }),
            None => Err("an empty dimension".to_owned()),
        });
        Ok(Self { dtype, dims: dims.collect::<Result<_, _>>()? })
    }

    fn to_proto(&self) -> mil::TensorType {
        let dimension = |dim: &Dim| match *dim {
            Dim::Fixed(size) => {
                dimension::Dimension::Constant(dimension::ConstantDimension { size: size as u64 })
            }
            Dim::Unknown { variadic } => {
                dimension::Dimension::Unknown(dimension::UnknownDimension { variadic })
            }
        };
        let variadic = self.dims.contains(&Dim::Unknown { variadic: true });
        mil::TensorType {
            data_type: self.dtype.mil() as i32,
            rank: if variadic { -1 } else { self.dims.len() as i64 },
            dimensions: self.dims.iter().map(|d| mil::Dimension { dimension: Some(dimension(d)) }).collect(),
            attributes: BTreeMap::new(),
        }
    }
}

impl Value {
    fn from_proto(proto: mil::Value) -> Result<Self, Wrong> {
        let ty = ValueType::from_proto(proto.r#type.ok_or("a value without a type")?)?;
        let data = match proto.value {
            Some(value::Value::BlobFileValue(blob)) => {
                Data::Blob(BlobRef { file: blob.file_name, offset: blob.offset })
            }
            Some(value::Value::ImmediateValue(immediate)) => match immediate.value {
                Some(value::immediate_value::Value::Tensor(mil::TensorValue { value: Some(tensor) })) => {
                    match tensor {
                        tensor_value::Value::Floats(it) => Data::Floats(it.values),
                        tensor_value::Value::Ints(it) => Data::Ints(it.values),
                        tensor_value::Value::Bools(it) => Data::Bools(it.values),
                        tensor_value::Value::Strings(it) => Data::Strings(it.values),
                        tensor_value::Value::LongInts(it) => Data::Longs(it.values),
                        tensor_value::Value::Doubles(it) => Data::Doubles(it.values),
                        tensor_value::Value::Bytes(it) => Data::Bytes(it.values),
                    }
                }
                _ => Data::Other(Some(Box::new(immediate))),
            },
            None => Data::Other(None),
        };
        Ok(Self { ty, data })
    }

    fn to_proto(&self) -> mil::Value {
        use tensor_value::Value as Tensor;
        let tensor = match &self.data {
            Data::Floats(values) => Tensor::Floats(tensor_value::RepeatedFloats { values: values.clone() }),
            Data::Ints(values) => Tensor::Ints(tensor_value::RepeatedInts { values: values.clone() }),
            Data::Bools(values) => Tensor::Bools(tensor_value::RepeatedBools { values: values.clone() }),
            Data::Strings(values) => {
                Tensor::Strings(tensor_value::RepeatedStrings { values: values.clone() })
            }
            Data::Longs(values) => {
                Tensor::LongInts(tensor_value::RepeatedLongInts { values: values.clone() })
            }
            Data::Doubles(values) => {
                Tensor::Doubles(tensor_value::RepeatedDoubles { values: values.clone() })
            }
            Data::Bytes(values) => Tensor::Bytes(tensor_value::RepeatedBytes { values: values.clone() }),
            Data::Blob(BlobRef { file, offset }) => {
                let blob = value::BlobFileValue { file_name: file.clone(), offset: *offset };
                return self.wrap(Some(value::Value::BlobFileValue(blob)));
            }
            Data::Other(immediate) => {
                return self.wrap(immediate.as_deref().cloned().map(value::Value::ImmediateValue));
            }
        };
        self.wrap(Some(value::Value::ImmediateValue(value::ImmediateValue {
            value: Some(value::immediate_value::Value::Tensor(mil::TensorValue { value: Some(tensor) })),
        })))
    }

    fn wrap(&self, value: Option<value::Value>) -> mil::Value {
        mil::Value { doc_string: String::new(), r#type: Some(self.ty.to_proto()), value }
    }
}
