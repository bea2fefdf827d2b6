//! How to run a model with MLX.

/// Told the share of loading that is done, from 0 to 1.
pub type LoadProgress = Box<dyn FnMut(f32) + Send>;

/// What float weights are quantized to at load, in MLX's affine groups of 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quant {
    /// 4 bits; the head at 8.
    Q4,
    /// 8 bits.
    Q8,
}

/// Whether kernels of our own stand in for MLX's on NVIDIA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KernelChoice {
    /// Those that are found right and faster when the model is loaded.
    #[default]
    Measured,
    /// MLX's alone.
    Off,
    /// Kernels that compute wrongly, to see that the check refuses them.
    Broken,
}

/// How to run a model with MLX.
#[derive(Debug, Clone)]
pub struct MlxOptions {
    /// Longest sequence in tokens; `None` for what the checkpoint says.
    pub context: Option<usize>,
    /// Compute and cache in f32, whatever the weights are stored in.
    pub exact: bool,
    /// Quantize float weights at load.
    pub quant: Option<Quant>,
    /// Most bytes for weights, KV and working memory together; `None` for what the device says it has.
    pub memory_budget: Option<u64>,
    /// Most tokens in a step.
    pub max_step_tokens: usize,
    /// Most sequences in a step.
    pub max_batch: usize,
    /// Kernels of our own on NVIDIA.
    pub kernels: KernelChoice,
}

impl Default for MlxOptions {
    fn default() -> Self {
        Self {
            context: None,
            exact: false,
            quant: None,
            memory_budget: None,
            max_step_tokens: 1024,
            max_batch: 64,
            kernels: KernelChoice::default(),
        }
    }
}
