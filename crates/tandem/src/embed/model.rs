use std::path::Path;

use tandem_engine::SampleSpec;
use tandem_model::{Checkpoint, Detokenizer, Message, RenderOptions};
use tandem_runtime::{Coordinator, Request, RuntimeError, TextStream};

use super::engines::{self, Options};
use super::{Answer, Ask, Error, sampling};

/// What the coordinator calls the only model it has here.
const NAME: &str = "model";

/// A loaded model. Dropping it ends its engines and all answers under way.
#[derive(Debug)]
pub struct Model {
    checkpoint: Checkpoint,
    coordinator: Coordinator,
}

impl Model {
    /// Opens a Hugging Face folder or a `.gguf` file and waits until an engine has loaded it.
    ///
    /// # Errors
    /// Whatever is wrong with its files, not supported, or too large.
    pub fn load(path: impl AsRef<Path>, options: &Options) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(path.as_ref())?;
        let mut coordinator = Coordinator::default();
        engines::start(&mut coordinator, NAME, &checkpoint, options, &mut |_| Box::new(|_| ()))?;
        coordinator.ready(NAME, None)?;
        Ok(Self { checkpoint, coordinator })
    }

    /// Continues a conversation, through the model's chat template. Does not wait for the answer.
    ///
    /// # Errors
    /// [`Error::NoTemplate`], what the template refuses, or why no engine takes the request.
    pub fn chat(&self, messages: &[Message], ask: &Ask) -> Result<Answer, Error> {
        let Some(chat) = &self.checkpoint.chat else {
            return Err(Error::NoTemplate(self.checkpoint.source.display().to_string()));
        };
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let text = chat.render(messages, &options)?;
        self.generate(self.checkpoint.tokenizer.encode(&text, false)?, ask)
    }

    /// Continues a text. Does not wait for the answer.
    ///
    /// # Errors
    /// Why no engine takes the request.
    pub fn complete(&self, text: &str, ask: &Ask) -> Result<Answer, Error> {
        self.generate(self.checkpoint.tokenizer.encode(text, true)?, ask)
    }

    /// Continues these tokens. Does not wait for the answer.
    ///
    /// # Errors
    /// Why no engine takes the request.
    pub fn generate(&self, tokens: Vec<u32>, ask: &Ask) -> Result<Answer, Error> {
        let stop_tokens =
            if ask.ignore_eos { Vec::new() } else { self.checkpoint.generation.eos_token_ids.clone() };
        let request = Request {
            tokens,
            sample: ask.sample.clone().unwrap_or_else(|| self.sampling()),
            max_tokens: ask.max_tokens,
            stop_tokens,
            context: None,
            adapter: None,
            priority: ask.priority,
        };
        let routed = self.coordinator.generate(NAME, &[request], ask.engine.as_deref())?;
        let tokens = routed.streams.into_iter().next().ok_or(RuntimeError::ShutDown)?;
        let detokenizer = Detokenizer::new(&self.checkpoint.tokenizer, true);
        let stream = TextStream::new(tokens, detokenizer, ask.stop.iter().cloned())?;
        Ok(Answer::new(stream, routed.decision.route))
    }

    /// How tokens are chosen where an [`Ask`] does not say.
    pub fn sampling(&self) -> SampleSpec {
        sampling(&self.checkpoint.generation)
    }

    /// What was opened: config, tokenizer, chat template.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }
}
