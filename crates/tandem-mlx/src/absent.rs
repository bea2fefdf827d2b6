//! What stands in where the engine was not built: the same names, and a clear word.

use std::sync::Arc;

use tandem_engine::{Engine, EngineError, EngineFactory};
use tandem_model::{Decoder, Weights};

use crate::{LoadProgress, MlxDevice, MlxOptions};

fn absent() -> EngineError {
    let hint = if cfg!(target_os = "macos") {
        "python3 -m pip install mlx, then build Tandem again"
    } else {
        "python3 -m pip install mlx mlx-cpu (or, for an NVIDIA GPU, mlx mlx-cuda-13), then build Tandem with --features mlx"
    };
    EngineError::Unsupported {
        engine: "mlx".into(),
        feature: "this build: it was made without MLX".into(),
        hint: hint.into(),
    }
}

/// What MLX says of the device it computes on.
///
/// # Errors
/// [`EngineError::Unsupported`]: this build has no MLX.
pub fn device() -> Result<MlxDevice, EngineError> {
    Err(absent())
}

/// Builds nothing: this build has no MLX.
pub struct MlxFactory;

impl MlxFactory {
    /// A factory that will refuse.
    pub fn new(
        _decoder: Decoder,
        _weights: Arc<Weights>,
        _options: MlxOptions,
        _progress: LoadProgress,
    ) -> Self {
        Self
    }
}

impl EngineFactory for MlxFactory {
    fn build(&mut self) -> Result<Box<dyn Engine>, EngineError> {
        Err(absent())
    }
}
