//! How a failure is told.

use std::process::ExitCode;

/// What happened and what to do, taken apart from a message that ends with a hint.
pub fn split(error: &anyhow::Error) -> (String, Option<String>) {
    let text = format!("{error:#}");
    match text.split_once("hint: ") {
        None => (text, None),
        Some((what, hint)) => {
            let parenthesis = what.ends_with('(');
            let what = what.trim_end_matches(|c: char| c == '(' || c == '.' || c.is_whitespace());
            let hint = if parenthesis { hint.strip_suffix(')').unwrap_or(hint) } else { hint };
            (what.to_owned(), Some(hint.to_owned()))
        }
    }
}

/// Prints the error and gives the exit code. A reader that went away is no failure.
pub fn failure(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::SUCCESS;
    }
    print(error);
    ExitCode::FAILURE
}

/// Prints the error and its hint.
pub fn print(error: &anyhow::Error) {
    let (what, hint) = split(error);
    eprintln!("error: {what}");
    if let Some(hint) = hint {
        eprintln!("hint: {hint}");
    }
}

/// Whether standard output's reader is gone (`tandem run ... | head -1`).
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_found_however_the_message_joins_it() {
        for text in ["it broke. hint: mend it", "it broke\nhint: mend it", "it broke (hint: mend it)"] {
            let split = split(&anyhow::anyhow!("{text}"));
            assert_eq!(split, ("it broke".to_owned(), Some("mend it".to_owned())), "{text}");
        }
        assert_eq!(split(&anyhow::anyhow!("it broke")), ("it broke".to_owned(), None));
        let outer = anyhow::anyhow!("inner. hint: mend it").context("outer");
        assert_eq!(split(&outer), ("outer: inner".to_owned(), Some("mend it".to_owned())));
    }
}
