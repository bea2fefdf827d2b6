//! A model that is being served.

use tandem_engine::{Capabilities, EngineError, SampleSpec};
use tandem_model::{CallFormat, ChatTemplate, Checkpoint, Message, RenderOptions, Tokenizer};
use tandem_runtime::{ActorHandle, Request, Route, RuntimeError};

use crate::ApiError;
use crate::calls::{self, Calls};
use crate::request::{Ask, Prompt, Tools};

/// A model, its text side and the actor that runs it.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) id: String,
    pub(crate) tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    stop_tokens: Vec<u32>,
    defaults: SampleSpec,
    pub(crate) handle: ActorHandle,
    pub(crate) capabilities: Capabilities,
}

impl Model {
    /// Waits until the engine behind `handle` is ready. `id` is the name that requests use, `defaults` how tokens are
    /// chosen where a request does not say.
    ///
    /// # Errors
    /// Why the engine could not be built.
    pub fn new(
        id: impl Into<String>,
        checkpoint: &Checkpoint,
        defaults: SampleSpec,
        handle: ActorHandle,
    ) -> Result<Self, RuntimeError> {
        Ok(Self {
            id: id.into(),
            tokenizer: checkpoint.tokenizer.clone(),
            chat: checkpoint.chat.clone(),
            stop_tokens: checkpoint.generation.eos_token_ids.clone(),
            defaults,
            capabilities: handle.ready()?,
            handle,
        })
    }

    /// Who will answer.
    pub(crate) fn route(&self) -> Route {
        Route { engine: self.capabilities.engine.clone(), reason: "the only engine".to_owned() }
    }

    /// The tokens of a conversation that the model is to continue.
    pub(crate) fn render(
        &self,
        mut messages: Vec<Message>,
        tools: Option<&Tools>,
    ) -> Result<Vec<u32>, ApiError> {
        let Some(chat) = &self.chat else {
            let message = format!("{} has no chat template. hint: use /v1/completions", self.id);
            return Err(ApiError::field("messages", message));
        };
        let source = chat.source(tools.is_some())?;
        calls::place(&mut messages, source, self.call_format(tools.is_some()))?;
        let mut options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        if let Some(tools) = tools {
            if !source.contains("tools") || self.call_format(true).is_none() {
                let message = format!(
                    "`tools`: the chat template of {} shows no way to call tools that Tandem knows. hint: leave them out, \
                     or describe them in a message",
                    self.id
                );
                let error = ApiError::field("tools", message);
                return Err(ApiError { code: Some("unsupported_parameter"), ..error });
            }
            options.tools = Some(tools.tools.clone());
            // Granite 3.3 has a name of its own for them.
            options.extra.insert("available_tools".to_owned(), tools.tools.clone().into());
        }
        Ok(self.tokenizer.encode(&chat.render(&messages, &options)?, false)?)
    }

    /// What reads the calls in an answer; `None` if it may hold none.
    pub(crate) fn calls(&self, ask: &Ask) -> Option<Calls> {
        let tools = ask.tools.as_ref()?;
        Some(Calls::new(self.call_format(true)?, tools))
    }

    /// How this model writes calls, by its template for requests with or without tools.
    fn call_format(&self, tools: bool) -> Option<CallFormat> {
        let source = self.chat.as_ref()?.source(tools).ok()?;
        CallFormat::find(source, |token| self.tokenizer.id_of(token).is_some())
    }

    /// The tokens of a text to continue.
    pub(crate) fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>, ApiError> {
        match prompt {
            Prompt::Tokens(ids) => Ok(ids.clone()),
            Prompt::Text(text) => Ok(self.tokenizer.encode(text, true)?),
        }
    }

    /// One request for each choice: all those of the first prompt, then of the next. Checks what can be checked before
    /// anything is queued.
    pub(crate) fn requests(&self, prompts: &[Vec<u32>], ask: &Ask) -> Result<Vec<Request>, ApiError> {
        let limit = self.capabilities.context;
        let mut requests = Vec::with_capacity(prompts.len() * ask.n);
        for tokens in prompts {
            let needed = tokens.len().saturating_add(ask.max_tokens.unwrap_or(1));
            if needed > limit {
                let error = ApiError::from(EngineError::ContextOverflow { needed, limit });
                let what = match ask.max_tokens {
                    Some(most) => format!("{} of prompt and {most} to generate", tokens.len()),
                    None => format!("{} of prompt", tokens.len()),
                };
                return Err(ApiError { message: format!("{what}: {}", error.message), ..error });
            }
            for index in 0..ask.n {
                let sample = ask.sample(&self.defaults, index);
                sample.validate(self.capabilities.vocab_size)?;
                requests.push(Request {
                    tokens: tokens.clone(),
                    sample,
                    max_tokens: ask.max_tokens,
                    stop_tokens: if ask.ignore_eos { Vec::new() } else { self.stop_tokens.clone() },
                    context: None,
                });
            }
        }
        Ok(requests)
    }
}
