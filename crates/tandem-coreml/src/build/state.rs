//! States: tensors that outlive a call.

use super::{Builder, Var};
use crate::mil::{Arg, Feature, FeatureKind, Flexibility, Named, Op, TensorType, Value, ValueType};

impl Builder {
    /// A state of the function, and its value at the start of the call.
    ///
    /// # Panics
    /// If its shape is not fixed.
    pub fn state(&mut self, name: &str, ty: TensorType) -> Var {
        let shape = ty.shape().expect("states have fixed shapes").iter().map(|&size| size as i64).collect();
        let kind = FeatureKind::Array { dtype: ty.dtype, shape, flexibility: Flexibility::Fixed };
        self.interface.states.push(Feature { name: name.into(), kind });
        self.inputs.push(Named { name: name.into(), ty: ValueType::State(ty.clone()) });
        self.names.insert(name.into(), 1);
        self.read_state(name, &format!("{name}_before"), ty)
    }

    /// What the state `name` of type `ty` holds here.
    pub fn read_state(&mut self, name: &str, label: &str, ty: TensorType) -> Var {
        let state = Var { name: name.into(), ty: ty.clone() };
        self.op("read_state", label, &[("input", &state)], ty)
    }

    /// Makes `value` what the state `name` holds from here on.
    pub fn write_state(&mut self, name: &str, value: &Var) {
        let label = self.unique(&format!("{name}_write"));
        let inputs = [("input", name), ("data", value.name.as_str())];
        self.ops.push(Op {
            kind: "write_state".into(),
            inputs: inputs.map(|(key, name)| (key.to_owned(), vec![Arg::Name(name.into())])).into(),
            attributes: [("name".to_owned(), Value::string(label))].into(),
            ..Op::default()
        });
    }
}
