//! `tandem run`.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use tandem_model::{Checkpoint, Message};
use tandem_runtime::Reason;

use crate::cli::RunArgs;
use crate::commands::chat;
use crate::interrupt;
use crate::output::Output;
use crate::prompt::{self, Prompt};
use crate::report;
use crate::session::Session;

pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let mut output = Output::new(args.output.json);
    let done = answer_or_chat(args, &mut output);
    if let Err(error) = &done
        && !report::is_broken_pipe(error)
    {
        let (what, hint) = report::split(error);
        output.error(&what, hint.as_deref())?;
    }
    done
}

fn answer_or_chat(args: &RunArgs, output: &mut Output) -> anyhow::Result<ExitCode> {
    let prompt = Prompt::read(args)?;
    if matches!(prompt, Prompt::Chat) && args.output.json {
        bail!("--json needs a prompt. hint: give it as an argument, with -f FILE or on standard input");
    }
    interrupt::install()?;
    let path = crate::model::resolve(args.model.as_ref(), &args.dummy)?;

    let begun = Instant::now();
    let checkpoint = crate::model::open(path.as_ref(), &args.dummy)?;
    let handles = checkpoint.decoder.max_context;
    let context = tandem::context(args.engine.context, handles)?;
    tell_what_differs(args, &checkpoint)?;

    let tokens = match prompt {
        Prompt::Chat => return chat::run(args, Session::start(args, checkpoint, context, begun)?),
        Prompt::Tokens(count) => prompt::filler(count, checkpoint.decoder.vocab_size),
        Prompt::Text(text) => {
            let system = args.prompt.system.as_deref().map(|text| Message::new("system", text));
            let messages: Vec<Message> = system.into_iter().chain([Message::new("user", text)]).collect();
            prompt::encode(&checkpoint, &messages, args.prompt.raw)?
        }
    };
    // Said before the weights are loaded, which may take a while.
    prompt::check_fits(tokens.len(), args.answer.max_tokens.map(usize::from), context, handles)?;
    let mut session = Session::start(args, checkpoint, context, begun)?;
    let (_, done) = session.answer(tokens, output)?;
    let interrupted = done.reason == Reason::Interrupted;
    Ok(if interrupted { ExitCode::from(interrupt::EXIT_CODE) } else { ExitCode::SUCCESS })
}

/// Says where this model is not treated as its user may expect.
fn tell_what_differs(args: &RunArgs, checkpoint: &Checkpoint) -> anyhow::Result<()> {
    if checkpoint.chat.is_none() && args.prompt.system.is_some() {
        bail!(
            "this model has no chat template, so --system has no place. hint: put its text into the prompt"
        );
    }
    if checkpoint.chat.is_none() && !args.prompt.raw && args.dummy.weights.is_none() {
        eprintln!("note: this model has no chat template; it completes the prompt as it is");
    }
    crate::model::tell_not_honoured(checkpoint);
    Ok(())
}
