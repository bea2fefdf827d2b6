//! Where a prompt comes from, and how it becomes tokens.

use std::io::{IsTerminal, Read};

use anyhow::{Context, bail};
use tandem_model::{Checkpoint, Message, RenderOptions};

use crate::cli::RunArgs;

/// What the user wants answered.
#[derive(Debug)]
pub enum Prompt {
    /// This text.
    Text(String),
    /// This many tokens, whatever they are.
    Tokens(usize),
    /// Whatever they type.
    Chat,
}

impl Prompt {
    /// From the argument, a file or standard input.
    pub fn read(args: &RunArgs) -> anyhow::Result<Self> {
        if let Some(count) = args.dummy_prompt {
            return Ok(Self::Tokens(count.get()));
        }
        let argument = match (&args.dummy.weights, &args.model, &args.prompt.text) {
            // There is no MODEL, so the first word is the prompt.
            (Some(_), text, None) => text,
            (Some(_), _, Some(_)) => bail!("--dummy-weights stands in place of MODEL. hint: leave MODEL out"),
            (None, _, text) => text,
        };
        if argument.is_some() && args.prompt.file.is_some() {
            bail!("there are two prompts, an argument and a file. hint: leave one out");
        }
        let text = match (argument.as_deref(), &args.prompt.file) {
            (Some("-"), _) => read_stdin()?,
            (Some(text), _) => text.to_owned(),
            (None, Some(path)) if path.as_os_str() == "-" => read_stdin()?,
            (None, Some(path)) => {
                let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
                decode(bytes, &path.display().to_string())?
            }
            (None, None) if std::io::stdin().is_terminal() => return Ok(Self::Chat),
            (None, None) => read_stdin()?,
        };
        if text.trim().is_empty() {
            bail!(
                "the prompt is empty. hint: give it as an argument, with -f FILE or on standard input; run in a \
                 terminal without one to chat"
            );
        }
        Ok(Self::Text(text))
    }
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().read_to_end(&mut bytes).context("cannot read standard input")?;
    decode(bytes, "standard input")
}

/// Text without the line break that editors and `echo` end with.
fn decode(bytes: Vec<u8>, name: &str) -> anyhow::Result<String> {
    let Ok(mut text) = String::from_utf8(bytes) else {
        bail!("{name} is not UTF-8 text. hint: convert it first, for example with iconv");
    };
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// The tokens of a conversation that the model is to continue, through its chat template.
///
/// A model without one completes the last message as it is.
pub fn encode(checkpoint: &Checkpoint, messages: &[Message], raw: bool) -> anyhow::Result<Vec<u32>> {
    let tokenizer = &checkpoint.tokenizer;
    match &checkpoint.chat {
        Some(chat) if !raw => {
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            Ok(tokenizer.encode(&chat.render(messages, &options)?, false)?)
        }
        _ => {
            let text = messages.last().and_then(|m| m.content.as_ref()?.as_str()).unwrap_or_default();
            Ok(tokenizer.encode(text, true)?)
        }
    }
}

/// Tokens that look like nothing in particular.
pub fn filler(count: usize, vocab_size: usize) -> Vec<u32> {
    // A linear congruential generator (Knuth's MMIX).
    let next =
        |n: &u64| Some(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    let numbers = std::iter::successors(Some(1u64), next);
    numbers.take(count).map(|n| ((n >> 33) % vocab_size as u64) as u32).collect()
}

/// Whether the prompt and what is to be generated fit. `handles` is the most tokens the model could be given.
pub fn check_fits(
    prompt: usize,
    max_tokens: Option<usize>,
    context: usize,
    handles: usize,
) -> anyhow::Result<()> {
    let needed = prompt.saturating_add(max_tokens.unwrap_or(1));
    if needed <= context {
        return Ok(());
    }
    let what = match max_tokens {
        Some(n) if prompt < context => format!("the prompt's {prompt} tokens and the {n} to generate"),
        _ => format!("the prompt's {prompt} tokens"),
    };
    let hint = if needed <= handles {
        format!("give --context {needed} or more; this model handles {handles}")
    } else {
        "shorten the prompt or ask for fewer tokens; this model handles no more".to_owned()
    };
    bail!("{what} do not fit the context of {context}. hint: {hint}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_last_line_break_is_left_out() {
        for (text, expected) in [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a"), ("\n", "")] {
            assert_eq!(decode(text.as_bytes().to_vec(), "x").unwrap(), expected);
        }
        assert!(decode(vec![0xff], "x.txt").unwrap_err().to_string().contains("x.txt is not UTF-8"));
    }

    #[test]
    fn overflow_names_both_numbers_and_the_way_out() {
        check_fits(4095, None, 4096, 8192).unwrap();
        check_fits(4000, Some(96), 4096, 8192).unwrap();
        let text = |p, n, c, h| check_fits(p, n, c, h).unwrap_err().to_string();
        assert_eq!(
            text(5000, None, 4096, 8192),
            "the prompt's 5000 tokens do not fit the context of 4096. hint: give --context 5001 or more; this model \
             handles 8192"
        );
        assert!(text(4000, Some(100), 4096, 8192).contains("4000 tokens and the 100 to generate do not fit"));
        assert!(text(9000, None, 8192, 8192).contains("handles no more"));
    }

    #[test]
    fn filler_tokens_are_in_the_vocabulary_and_differ() {
        let tokens = filler(100, 50);
        assert!(tokens.len() == 100 && tokens.iter().all(|t| *t < 50));
        assert!(tokens.iter().any(|t| *t != tokens[0]));
    }
}
