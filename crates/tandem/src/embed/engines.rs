//! The engines of this build. One that is added stands here once: its name, and how it is started.

use tandem_cpu::{CpuFactory, CpuOptions, LoadProgress};
use tandem_mlx::{MlxFactory, MlxOptions};
use tandem_model::Checkpoint;
use tandem_runtime::Coordinator;

use super::{Error, context};

/// Names of engines, in the order in which the coordinator is told of them. Which are [`built`] is another matter.
pub const ENGINES: [&str; 2] = ["cpu", "mlx"];

/// Those that this build has.
pub fn built() -> Vec<&'static str> {
    ENGINES.into_iter().filter(|name| *name != "mlx" || tandem_mlx::BUILT).collect()
}

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Only this engine; `None` starts each that can run the model: MLX's where it finds a GPU.
    pub engine: Option<String>,
    /// Tokens of prompt and answer together; 0 for all the model handles, `None` for 4096 or less.
    pub context: Option<usize>,
    /// Requests at once.
    pub requests: tandem_runtime::Options,
    /// The CPU engine's own; its context is the one above.
    pub cpu: CpuOptions,
    /// The MLX engine's own; its context is the one above.
    pub mlx: MlxOptions,
}

/// Starts the engines that can run `checkpoint`, or the one that the options name, as those of `model`. They load on
/// their own threads. `progress` gives for an engine's name what is told how far that has come.
///
/// # Errors
/// An unknown engine or one that this build or machine does not have, a context that is too long, no threads. What loading meets, [`Coordinator::ready`] tells.
pub fn start(
    coordinator: &mut Coordinator,
    model: &str,
    checkpoint: &Checkpoint,
    options: &Options,
    progress: &mut dyn FnMut(&str) -> LoadProgress,
) -> Result<(), Error> {
    let Options { engine, context: asked, requests, cpu, mlx } = options;
    if let Some(engine) = engine
        && !ENGINES.contains(&engine.as_str())
    {
        return Err(Error::NoEngine { engine: engine.clone() });
    }
    let context = context(*asked, checkpoint.decoder.max_context)?;
    let wanted = |name: &str| engine.as_deref().is_none_or(|engine| engine == name);
    if wanted("cpu") {
        let cpu = CpuOptions { context: Some(context), ..cpu.clone() };
        let (decoder, weights) = (checkpoint.decoder.clone(), checkpoint.weights.clone());
        let factory = CpuFactory::new(decoder, weights, cpu, progress("cpu"));
        coordinator.add(model, "cpu", Box::new(factory), requests)?;
    }
    let mlx_wanted = match engine {
        // Asked for by name, it must be there; then what MLX runs on is the machine's affair.
        Some(name) if name == "mlx" => tandem_mlx::device().map(|_| true)?,
        Some(_) => false,
        None => tandem_mlx::device().is_ok_and(|device| device.gpu),
    };
    if mlx_wanted {
        let mlx = MlxOptions { context: Some(context), ..mlx.clone() };
        let (decoder, weights) = (checkpoint.decoder.clone(), checkpoint.weights.clone());
        let factory = MlxFactory::new(decoder, weights, mlx, progress("mlx"));
        coordinator.add(model, "mlx", Box::new(factory), requests)?;
    }
    Ok(())
}
