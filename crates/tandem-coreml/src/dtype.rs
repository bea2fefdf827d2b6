//! Element types, and their codes in the three places that have codes of their own: MIL, weight files, interfaces.

use crate::proto::mil::DataType;
use crate::proto::model::array_feature_type::ArrayDataType;

/// An element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum DType {
    Bool,
    String,
    F16,
    F32,
    F64,
    Bf16,
    F8E4M3,
    F8E5M2,
    I4,
    I8,
    I16,
    I32,
    I64,
    U1,
    U2,
    U3,
    U4,
    U6,
    U8,
    U16,
    U32,
    U64,
}

/// Type, name, bits of an element, code in MIL, code in a weight file.
const TABLE: [(DType, &str, usize, DataType, Option<u32>); 22] = [
    (DType::Bool, "bool", 8, DataType::Bool, None),
    (DType::String, "string", 0, DataType::String, None),
    (DType::F16, "fp16", 16, DataType::Float16, Some(1)),
    (DType::F32, "fp32", 32, DataType::Float32, Some(2)),
    (DType::F64, "fp64", 64, DataType::Float64, None),
    (DType::Bf16, "bf16", 16, DataType::Bfloat16, Some(5)),
    (DType::F8E4M3, "fp8e4m3fn", 8, DataType::Float8e4m3fn, Some(16)),
    (DType::F8E5M2, "fp8e5m2", 8, DataType::Float8e5m2, Some(17)),
    (DType::I4, "int4", 4, DataType::Int4, Some(8)),
    (DType::I8, "int8", 8, DataType::Int8, Some(4)),
    (DType::I16, "int16", 16, DataType::Int16, Some(6)),
    (DType::I32, "int32", 32, DataType::Int32, Some(14)),
    (DType::I64, "int64", 64, DataType::Int64, None),
    (DType::U1, "uint1", 1, DataType::Uint1, Some(9)),
    (DType::U2, "uint2", 2, DataType::Uint2, Some(10)),
    (DType::U3, "uint3", 3, DataType::Uint3, Some(12)),
    (DType::U4, "uint4", 4, DataType::Uint4, Some(11)),
    (DType::U6, "uint6", 6, DataType::Uint6, Some(13)),
    (DType::U8, "uint8", 8, DataType::Uint8, Some(3)),
    (DType::U16, "uint16", 16, DataType::Uint16, Some(7)),
    (DType::U32, "uint32", 32, DataType::Uint32, Some(15)),
    (DType::U64, "uint64", 64, DataType::Uint64, None),
];

impl DType {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (DType, &'static str, usize, DataType, Option<u32>) {
        &TABLE[self as usize]
    }

    /// The name coremltools uses (`fp16`, `uint4`, ...).
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Bits of one element; 0 for strings.
    pub fn bits(self) -> usize {
        self.row().2
    }

    /// Bytes of `count` elements, packed without gaps: elements smaller than a byte may straddle two. `None` if that
    /// overflows.
    pub fn bytes(self, count: usize) -> Option<usize> {
        Some(count.checked_mul(self.bits())?.div_ceil(8))
    }

    /// Its code in a weight file, where it has one.
    pub fn blob_code(self) -> Option<u32> {
        self.row().4
    }

    /// The type with that code in a weight file.
    pub fn from_blob_code(code: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.4 == Some(code)).map(|row| row.0)
    }

    pub(crate) fn mil(self) -> DataType {
        self.row().3
    }

    pub(crate) fn from_mil(code: i32) -> Option<Self> {
        TABLE.iter().find(|row| row.3 as i32 == code).map(|row| row.0)
    }

    /// Its code in an interface, where it may stand there.
    pub(crate) fn interface(self) -> Option<ArrayDataType> {
        match self {
            DType::F16 => Some(ArrayDataType::Float16),
            DType::F32 => Some(ArrayDataType::Float32),
            DType::F64 => Some(ArrayDataType::Double),
            DType::I32 => Some(ArrayDataType::Int32),
            DType::I8 => Some(ArrayDataType::Int8),
            _ => None,
        }
    }

    pub(crate) fn from_interface(code: i32) -> Option<Self> {
        DType::all().find(|dtype| dtype.interface().is_some_and(|interface| interface as i32 == code))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i);
            assert_eq!(DType::from_mil(row.3 as i32), Some(row.0));
        }
    }

    #[test]
    fn sub_byte_elements_are_packed_without_gaps() {
        assert_eq!(DType::U3.bytes(9), Some(4));
        assert_eq!(DType::I4.bytes(5), Some(3));
        assert_eq!(DType::U6.bytes(4), Some(3));
        assert_eq!(DType::F32.bytes(usize::MAX), None);
    }
}
