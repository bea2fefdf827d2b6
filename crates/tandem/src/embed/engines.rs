//! The engines of this build. One that is added stands here once: its name, and how it is started.

use tandem_cpu::{CpuFactory, CpuOptions, LoadProgress};
use tandem_model::Checkpoint;
use tandem_runtime::Coordinator;

use super::{Error, context};

/// Their names, in the order in which the coordinator is told of them.
pub const ENGINES: [&str; 1] = ["cpu"];

/// How a model is loaded.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Only this engine; `None` starts each that can run the model.
    pub engine: Option<String>,
    /// Tokens of prompt and answer together; 0 for all the model handles, `None` for 4096 or less.
    pub context: Option<usize>,
    /// Requests at once.
    pub requests: tandem_runtime::Options,
    /// The CPU engine's own; its context is the one above.
    pub cpu: CpuOptions,
}

/// Starts the engines that can run `checkpoint`, or the one that the options name, as those of `model`. They load on
/// their own threads. `progress` gives for an engine's name what is told how far that has come.
///
/// # Errors
/// An unknown engine, a context that is too long, no threads. What loading meets, [`Coordinator::ready`] tells.
pub fn start(
    coordinator: &mut Coordinator,
    model: &str,
    checkpoint: &Checkpoint,
    options: &Options,
    progress: &mut dyn FnMut(&str) -> LoadProgress,
) -> Result<(), Error> {
    let Options { engine, context: asked, requests, cpu } = options;
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
    Ok(())
}
