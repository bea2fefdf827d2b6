//! How each quantized format looks once it is packed.
//!
//! Many stored formats become few packed ones. A panel of a quantized format is a sequence of *units*: the columns that
//! share the scales at the unit's head (32; a group of MLX's; 256 of ggml's super-blocks). A unit is a head and its
//! *blocks* of 32 columns, and a block may have small scales of its own before its values:
//!
//! ```text
//! unit:   scales [PANEL]   minima [PANEL]?   block   block ...
//! block:  small scales [2][PANEL] u8?   values
//! ```
//!
//! Every value is `scale * (q + shift) + minimum`, where scale and minimum come from the head alone, or (nested) from the
//! head times the block's small integers, which is exact in f32. A format of five or six bits takes a whole byte a
//! value: `Q5_0` is packed as if it were `Q8_0`.

use tandem_model::format::{BLOCK, Format};

use super::PANEL;

/// The properties of a packed format.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    /// Bits of a packed value: 4, unsigned, or 8, signed.
    pub bits: usize,
    /// How scales and minima are stored.
    pub scales: Scales,
    /// Whether there are minima.
    pub affine: bool,
    /// Whether the first and the last 16 columns of a block have scales of their own.
    pub split: bool,
    /// Added to the packed integer.
    pub shift: i32,
}

/// How scales and minima are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// At the head of the unit, as f32.
    F32,
    /// At the head, as f16.
    F16,
    /// At the head, as bfloat16.
    Bf16,
    /// f16 at the head (the minimum's with its sign turned), times integers of 8 bits at each block: of scale and
    /// minimum, unsigned, or of the two scales of a split block, signed.
    Nested,
}

impl Shape {
    pub fn of(format: Format) -> Shape {
        with_kind!(format, K => K::SHAPE)
    }

    /// Bytes of a scale at the head of a unit.
    pub const fn scale_bytes(self) -> usize {
        match self.scales {
            Scales::F32 => 4,
            Scales::F16 | Scales::Bf16 | Scales::Nested => 2,
        }
    }

    /// Bytes of the head of a unit.
    pub const fn head(self) -> usize {
        PANEL * self.scale_bytes() * (1 + self.affine as usize)
    }

    /// Bytes of the small scales of a block.
    pub const fn block_head(self) -> usize {
        match self.scales {
            Scales::Nested => 2 * PANEL,
            _ => 0,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        self.block_head() + PANEL * BLOCK * self.bits / 8
    }
}

/// A packed format as a type, so that kernels are compiled for each.
pub(super) trait Kind {
    const SHAPE: Shape;
}

const PLAIN: Shape = Shape { bits: 8, scales: Scales::F16, affine: false, split: false, shift: 0 };
const NIBBLES: Shape = Shape { bits: 4, affine: true, ..PLAIN };

macro_rules! kinds {
    ($($name:ident: $shape:expr;)*) => {
        $(pub(super) struct $name;
        impl Kind for $name {
            const SHAPE: Shape = $shape;
        })*
    };
}

kinds! {
    Q4_0: Shape { bits: 4, shift: -8, ..PLAIN };
    Q4_1: NIBBLES;
    Q5_1: Shape { affine: true, ..PLAIN };
    Q8_0: PLAIN;
    Q4K: Shape { scales: Scales::Nested, ..NIBBLES };
    Q5K: Shape { scales: Scales::Nested, affine: true, ..PLAIN };
    Q6K: Shape { scales: Scales::Nested, split: true, ..PLAIN };
    Affine4Bf16: Shape { scales: Scales::Bf16, ..NIBBLES };
    Affine4F32: Shape { scales: Scales::F32, ..NIBBLES };
    Affine8F16: Shape { affine: true, shift: 128, ..PLAIN };
    Affine8Bf16: Shape { scales: Scales::Bf16, ..Affine8F16::SHAPE };
    Affine8F32: Shape { scales: Scales::F32, ..Affine8F16::SHAPE };
}

/// `$body` with `$kind` standing for the packed form of a quantized format.
macro_rules! with_kind {
    ($format:expr, $kind:ident => $body:expr) => {{
        use tandem_model::format::{Format as F, ScaleType as S};
        use $crate::matrix::kind;
        macro_rules! with {
            ($name:ident) => {{
                type $kind = kind::$name;
                #[allow(unused_imports, reason = "some bodies name no item of the trait")]
                use kind::Kind as _;
                $body
            }};
        }
        match $format {
            F::Q4_0 => with!(Q4_0),
            F::Q4_1 => with!(Q4_1),
            F::Q5_1 => with!(Q5_1),
            F::Q4K => with!(Q4K),
            F::Q5K => with!(Q5K),
            F::Q6K => with!(Q6K),
            F::Affine(affine) => match (affine.bits(), affine.scales()) {
                (4, S::F16) => with!(Q4_1),
                (4, S::Bf16) => with!(Affine4Bf16),
                (4, S::F32) => with!(Affine4F32),
                (_, S::F16) => with!(Affine8F16),
                (_, S::Bf16) => with!(Affine8Bf16),
                (_, S::F32) => with!(Affine8F32),
            },
            F::Q5_0 | F::Q8_0 | F::F32 | F::F16 | F::Bf16 => with!(Q8_0),
        }
    }};
}
pub(super) use with_kind;
