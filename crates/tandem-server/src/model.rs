//! The text side of a model that is being served.

use tandem_engine::SampleSpec;
use tandem_model::{CallFormat, ChatTemplate, Checkpoint, Message, RenderOptions, Tokenizer};
use tandem_runtime::Request;

use crate::ApiError;
use crate::calls::{self, Calls};
use crate::request::{Ask, Prompt, Tools};

/// What a model's requests are made of. Its engines stand under the same name in the coordinator.
#[derive(Debug, Clone)]
pub struct Model {
    pub(crate) id: String,
    pub(crate) aliases: Vec<String>,
    pub(crate) tokenizer: Tokenizer,
    chat: Option<ChatTemplate>,
    stop_tokens: Vec<u32>,
    defaults: SampleSpec,
    vocab_size: usize,
}

impl Model {
    /// `id` is the name that requests use, beside `aliases`; `defaults` is how tokens are chosen where a request does
    /// not say.
    pub fn new(id: &str, aliases: Vec<String>, checkpoint: &Checkpoint, defaults: SampleSpec) -> Self {
        Self {
            id: id.to_owned(),
            aliases,
            tokenizer: checkpoint.tokenizer.clone(),
            chat: checkpoint.chat.clone(),
            stop_tokens: checkpoint.generation.eos_token_ids.clone(),
            defaults,
            vocab_size: checkpoint.decoder.vocab_size,
        }
    }

    /// Whether a request that says `name` means this model.
    pub(crate) fn is_called(&self, name: &str) -> bool {
        self.id == name || self.aliases.iter().any(|alias| alias == name)
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
            calls::hand_on(&mut messages, source, tools, &mut options);
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

    /// One request for each choice: all those of the first prompt, then of the next.
    pub(crate) fn requests(&self, prompts: &[Vec<u32>], ask: &Ask) -> Result<Vec<Request>, ApiError> {
        let mut requests = Vec::with_capacity(prompts.len() * ask.n);
        for tokens in prompts {
            for index in 0..ask.n {
                let sample = ask.sample(&self.defaults, index);
                sample.validate(self.vocab_size)?;
                requests.push(Request {
                    tokens: tokens.clone(),
                    sample,
                    max_tokens: ask.max_tokens,
                    stop_tokens: if ask.ignore_eos { Vec::new() } else { self.stop_tokens.clone() },
                    context: None,
                    adapter: None,
                    priority: ask.tier.unwrap_or_default().priority(),
                });
            }
        }
        Ok(requests)
    }
}
