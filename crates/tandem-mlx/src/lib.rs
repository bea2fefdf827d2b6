//! The MLX engine: Apple's GPU, NVIDIA's through MLX's CUDA backend, and the CPU for tests.
//!
//! A bridge of some fifty functions (`ffi`, `bridge.h`) carries what is needed of MLX's C++ API; `array` makes values of
//! it. Loading turns the stored weights into arrays (`load`) and a [`Decoder`](tandem_model::Decoder) into what a forward
//! pass walks (`lower`); a step becomes one lazy graph (`forward`) over the sequences' caches (`kv`) and one evaluation, which a device of its own computes while the host goes on; on NVIDIA `kernels` of our own stand in for the operations that
//! bound decoding, where they are found right and faster; `engine` keeps the contract's promises around that.
//!
//! MLX is there if the feature `mlx` is on, or on macOS if it was found. Else the same names say that it is not.

mod options;

#[cfg(tandem_mlx)]
mod array;
#[cfg(tandem_mlx)]
mod device;
#[cfg(tandem_mlx)]
mod engine;
#[cfg(tandem_mlx)]
mod ffi;
#[cfg(tandem_mlx)]
mod forward;
#[cfg(tandem_mlx)]
mod kernels;
#[cfg(tandem_mlx)]
mod kv;
#[cfg(tandem_mlx)]
mod load;
#[cfg(tandem_mlx)]
mod lower;
#[cfg(tandem_mlx)]
mod sequence;
#[cfg(tandem_mlx)]
mod snapshot;
#[cfg(tandem_mlx)]
mod turns;

#[cfg(not(tandem_mlx))]
mod absent;

#[cfg(not(tandem_mlx))]
pub use absent::{MlxFactory, device};
#[cfg(tandem_mlx)]
pub use device::device;
#[cfg(tandem_mlx)]
pub use engine::{MlxEngine, MlxFactory};
pub use options::{KernelChoice, LoadProgress, MlxOptions, Quant};

/// Whether this build has the engine.
pub const BUILT: bool = cfg!(tandem_mlx);

/// What MLX computes on. `None` is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlxDevice {
    /// Of MLX.
    pub version: String,
    /// Whether it is a GPU.
    pub gpu: bool,
    /// What the device calls itself.
    pub name: Option<String>,
    /// Of the device, in its maker's word.
    pub architecture: Option<String>,
    /// Bytes the device has.
    pub memory: Option<u64>,
    /// Bytes that can be taken of them.
    pub usable: Option<u64>,
    /// Whether there are kernels of ours for it, which a model gets if they are found right and faster when it loads.
    pub own_kernels: bool,
}
