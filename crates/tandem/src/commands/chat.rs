//! The interactive chat of `tandem run`.

use std::process::ExitCode;

use anyhow::Context;
use rustyline::config::{Behavior, Config};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use tandem_model::Message;
use tandem_store::Store;

use crate::cli::RunArgs;
use crate::output::Output;
use crate::session::Session;
use crate::{prompt, report};

const HELP: &str = "\
/help          show this
/reset         forget the conversation
/system TEXT   say who the model is and how it answers; without TEXT, say nothing of the kind
/exit          leave (also Ctrl-D)
Ctrl-C stops an answer. Pasted text may have several lines.";

/// A line that the user entered.
#[derive(Debug, PartialEq)]
enum Entered<'a> {
    Nothing,
    Help,
    Reset,
    System(&'a str),
    Exit,
    Unknown(&'a str),
    Text(&'a str),
}

impl<'a> Entered<'a> {
    fn read(line: &'a str) -> Self {
        let trimmed = line.trim();
        let (word, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
        match word {
            "" => Self::Nothing,
            "/help" | "/?" => Self::Help,
            "/reset" | "/clear" => Self::Reset,
            "/system" => Self::System(rest.trim()),
            "/exit" | "/quit" | "/bye" => Self::Exit,
            // A path is no command.
            _ if word.starts_with('/') && !word[1..].contains('/') => Self::Unknown(word),
            _ => Self::Text(line),
        }
    }
}

/// Chats until the user leaves.
pub fn run(args: &RunArgs, session: Session) -> anyhow::Result<ExitCode> {
    // The prompt goes to the terminal even if standard output does not.
    let config = Config::builder().behavior(Behavior::PreferTerm).auto_add_history(true).build();
    let mut editor =
        rustyline::Editor::<(), DefaultHistory>::with_config(config).context("cannot read the terminal")?;
    // Without a folder for it, or at the first start, there is no history.
    let history = Store::open(None).ok().map(|store| store.root().join("history"));
    if let Some(path) = &history {
        let _ = editor.load_history(path);
    }
    eprintln!("/help shows the commands, Ctrl-D leaves");
    let mut chat =
        Chat { session, raw: args.prompt.raw, system: args.prompt.system.clone(), messages: Vec::new() };
    let left = chat.run(&mut editor);
    if let Some(path) = &history {
        let kept = std::fs::create_dir_all(path.parent().unwrap_or(path)).is_ok()
            && editor.save_history(path).is_ok();
        if !kept {
            eprintln!("note: the history could not be written to {}", path.display());
        }
    }
    left.map(|()| ExitCode::SUCCESS)
}

struct Chat {
    session: Session,
    raw: bool,
    system: Option<String>,
    /// Without the system message.
    messages: Vec<Message>,
}

impl Chat {
    fn run(&mut self, editor: &mut rustyline::Editor<(), DefaultHistory>) -> anyhow::Result<()> {
        loop {
            let line = match editor.readline(">>> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => {
                    eprintln!("Ctrl-D or /exit leaves");
                    continue;
                }
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error).context("cannot read the terminal"),
            };
            match Entered::read(&line) {
                Entered::Nothing => {}
                Entered::Help => eprintln!("{HELP}"),
                Entered::Reset => self.messages.clear(),
                Entered::System(_) if self.raw || self.session.checkpoint.chat.is_none() => {
                    eprintln!("error: without a chat template a system message has no place");
                }
                Entered::System(text) => self.system = (!text.is_empty()).then(|| text.to_owned()),
                Entered::Exit => return Ok(()),
                Entered::Unknown(word) => {
                    eprintln!("error: there is no {word}\nhint: /help shows what there is");
                }
                Entered::Text(text) => self.turn(text)?,
            }
        }
    }

    /// One turn. What goes wrong with it is told, and the chat goes on as if it had not been made; only a broken
    /// standard output ends the chat.
    fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(Message::new("user", text));
        let mut output = Output::new(false);
        match self.answer(&mut output) {
            Ok(answer) => self.messages.push(Message::new("assistant", answer)),
            Err(error) if error.downcast_ref::<std::io::Error>().is_some() => return Err(error),
            Err(error) => {
                self.messages.pop();
                output.error("", None)?;
                report::print(&error);
            }
        }
        Ok(())
    }

    fn answer(&mut self, output: &mut Output) -> anyhow::Result<String> {
        let system = self.system.iter().map(|text| Message::new("system", text.as_str()));
        let messages: Vec<Message> = system.chain(self.messages.iter().cloned()).collect();
        let tokens = prompt::encode(&self.session.checkpoint, &messages, self.raw)?;
        self.session.check_fits(tokens.len()).context("the conversation is too long (/reset begins anew)")?;
        Ok(self.session.answer(tokens, output)?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_told_from_text() {
        for (line, expected) in [
            ("", Entered::Nothing),
            ("  ", Entered::Nothing),
            ("/help", Entered::Help),
            (" /reset ", Entered::Reset),
            ("/system Be brief. ", Entered::System("Be brief.")),
            ("/system", Entered::System("")),
            ("/exit", Entered::Exit),
            ("/rest", Entered::Unknown("/rest")),
            ("/etc/passwd, what is it?", Entered::Text("/etc/passwd, what is it?")),
            ("what is /etc?", Entered::Text("what is /etc?")),
            (" a\nb", Entered::Text(" a\nb")),
        ] {
            assert_eq!(Entered::read(line), expected, "{line}");
        }
    }
}
