//! Calls out of a text that arrives in pieces.

use super::written::read;
use super::{CallFormat, ToolCall};

/// Longest name and id before the arguments of a call, in bytes.
const MAX_HEADER: usize = 256;

/// What may stand in JSON outside of strings: anything else ends the hope for a call at once, not at the text's end.
const OUTSIDE_STRINGS: &[u8] = b"{}[]:,+-.0123456789eEtrufalsn \t\r\n";

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallPiece {
    /// Text that is no call.
    Text(String),
    /// A whole call.
    Call(ToolCall),
}

/// Takes the calls out of a text.
///
/// The result does not depend on how the text was cut. Text comes out as soon as it can no longer begin a call, a call as
/// soon as it is whole. Space around calls is dropped. What begins like a call and is none comes out as it was written,
/// and [`CallParser::failed`] says so. Every byte is looked at a bounded number of times.
#[derive(Debug)]
pub struct CallParser {
    format: CallFormat,
    /// Names of the request's tools: what an unmarked call must name.
    tools: Vec<String>,
    /// What has come and is not decided.
    pending: String,
    /// White space that comes out only if text follows it.
    space: String,
    state: State,
    calls: usize,
    failed: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Nothing but white space so far, in a format that needs no mark.
    Start,
    Text,
    /// `pending` begins with calls.
    Calls(Calls),
}

/// How far the calls at the beginning of `pending` are read.
#[derive(Debug, Clone, Copy)]
struct Calls {
    /// The next byte to read.
    at: usize,
    /// A value was complete; it is no longer in `pending`.
    any: bool,
    marked: bool,
    expect: Expect,
}

#[derive(Debug, Clone, Copy)]
enum Expect {
    /// A value or the end.
    Value,
    /// More of a name that began at `from`, up to its arguments.
    Name { from: usize },
    /// More of a JSON value that began at `from`.
    Json { name: Option<usize>, from: usize, depth: usize, string: bool, escaped: bool },
}

impl CallParser {
    /// For a new text. `tools` are the names of the request's tools.
    pub fn new(format: CallFormat, tools: impl IntoIterator<Item = String>) -> Self {
        Self {
            format,
            tools: tools.into_iter().collect(),
            pending: String::new(),
            space: String::new(),
            state: if format.bare { State::Start } else { State::Text },
            calls: 0,
            failed: false,
        }
    }

    /// Takes the next piece and gives what is decided with it.
    pub fn push(&mut self, piece: &str) -> Vec<CallPiece> {
        self.pending.push_str(piece);
        self.run(false)
    }

    /// The text has ended: gives what is left of it.
    pub fn finish(&mut self) -> Vec<CallPiece> {
        let mut out = self.run(true);
        let space = std::mem::take(&mut self.space);
        if self.calls == 0 && !space.is_empty() {
            out.push(CallPiece::Text(space));
        }
        out
    }

    /// Whether something began like a call and was none.
    pub fn failed(&self) -> bool {
        self.failed
    }

    fn run(&mut self, end: bool) -> Vec<CallPiece> {
        let mut out = Vec::new();
        loop {
            let more = match self.state {
                State::Start => self.start(end),
                State::Text => self.text(end, &mut out),
                State::Calls(calls) => self.calls(calls, end, &mut out),
            };
            if !more {
                return out;
            }
        }
    }

    fn start(&mut self, end: bool) -> bool {
        let at = self.pending.len() - self.pending.trim_start().len();
        if at == self.pending.len() && !end {
            return false;
        }
        self.state = if self.pending[at..].starts_with('{') {
            State::Calls(Calls { at, any: false, marked: false, expect: Expect::Value })
        } else {
            State::Text
        };
        true
    }

    fn text(&mut self, end: bool, out: &mut Vec<CallPiece>) -> bool {
        let opens = self.format.opens;
        let found = opens.iter().filter_map(|open| Some((self.pending.find(open)?, *open))).min();
        let Some((at, open)) = found else {
            let held = |open: &&str| (1..open.len()).rev().find(|&n| self.pending.ends_with(&open[..n]));
            let held = if end { 0 } else { opens.iter().filter_map(held).max().unwrap_or(0) };
            self.show(self.pending.len() - held, out);
            return false;
        };
        self.show(at, out);
        let at = open.trim_end_matches('[').len();
        self.state = State::Calls(Calls { at, any: false, marked: true, expect: Expect::Value });
        true
    }

    fn calls(&mut self, mut calls: Calls, end: bool, out: &mut Vec<CallPiece>) -> bool {
        while let Some(&byte) = self.pending.as_bytes().get(calls.at) {
            match &mut calls.expect {
                Expect::Value => {
                    let rest = &self.pending[calls.at..];
                    if let Some(close) = self.format.close.filter(|_| calls.marked)
                        && (rest.starts_with(close) || close.starts_with(rest))
                    {
                        if rest.len() < close.len() {
                            break;
                        }
                        calls.at += close.len();
                        return self.leave(&calls, out);
                    }
                    let separates = calls.any && self.format.many && matches!(byte, b';' | b',');
                    if separates || byte.is_ascii_whitespace() {
                        calls.at += 1;
                    } else if calls.any && !self.format.many {
                        return self.leave(&calls, out);
                    } else if matches!(byte, b'{' | b'[') {
                        let (name, from, depth) = (None, calls.at, 0);
                        calls.expect = Expect::Json { name, from, depth, string: false, escaped: false };
                    } else if self.format.inner.is_empty() || !is_name(byte) {
                        return self.leave(&calls, out);
                    } else {
                        calls.expect = Expect::Name { from: calls.at };
                    }
                }
                Expect::Name { from } => {
                    let name = *from;
                    if byte == b'{' {
                        let (name, from, depth) = (Some(name), calls.at, 0);
                        calls.expect = Expect::Json { name, from, depth, string: false, escaped: false };
                    } else if calls.at - name < MAX_HEADER && (is_name(byte) || b"[]".contains(&byte)) {
                        calls.at += 1;
                    } else {
                        return self.leave(&calls, out);
                    }
                }
                Expect::Json { name, from, depth, string, escaped } => {
                    if *string {
                        (*escaped, *string) = (byte == b'\\' && !*escaped, byte != b'"' || *escaped);
                    } else if !OUTSIDE_STRINGS.contains(&byte) && byte != b'"' {
                        return self.leave(&calls, out);
                    } else {
                        match byte {
                            b'"' => *string = true,
                            b'{' | b'[' => *depth += 1,
                            b'}' | b']' => *depth -= 1,
                            _ => {}
                        }
                    }
                    calls.at += 1;
                    if *depth > 0 {
                        continue;
                    }
                    let json = &self.pending[*from..calls.at];
                    let read = match *name {
                        None => read(json),
                        Some(name) => named(&self.pending[name..*from], json),
                    };
                    let known = |call: &ToolCall| calls.marked || self.tools.contains(&call.name);
                    let Some(read) = read.filter(|read| read.iter().all(known)) else {
                        return self.leave(&calls, out);
                    };
                    self.calls += read.len();
                    out.extend(read.into_iter().map(CallPiece::Call));
                    self.pending.drain(..calls.at);
                    self.space.clear();
                    calls = Calls { at: 0, any: true, expect: Expect::Value, ..calls };
                }
            }
        }
        self.state = State::Calls(calls);
        end && self.end(&calls, out)
    }

    /// The calls are over, or were none, before the next byte.
    fn leave(&mut self, calls: &Calls, out: &mut Vec<CallPiece>) -> bool {
        if calls.any && matches!(calls.expect, Expect::Value) {
            let after: String = self.pending.drain(..calls.at).collect();
            // What separates calls from the text behind them, if it is nothing else.
            self.space = if after.trim().is_empty() { after } else { String::new() };
        } else {
            self.failed |= calls.marked || self.pending[..calls.at].contains("\"name\"");
            self.show(calls.at, out);
        }
        self.state = State::Text;
        true
    }

    /// The text has ended within calls.
    fn end(&mut self, calls: &Calls, out: &mut Vec<CallPiece>) -> bool {
        if calls.any && matches!(calls.expect, Expect::Value) {
            self.pending.clear();
            self.state = State::Text;
            return false;
        }
        let all = Calls { at: self.pending.len(), ..*calls };
        self.leave(&all, out)
    }

    /// Gives the first `len` pending bytes as text, but keeps the white space at their end.
    fn show(&mut self, len: usize, out: &mut Vec<CallPiece>) {
        let text: String = self.pending.drain(..len).collect();
        let shown = text.trim_end().len();
        if shown > 0 {
            let mut whole = std::mem::take(&mut self.space);
            whole.push_str(&text[..shown]);
            out.push(CallPiece::Text(whole));
        }
        self.space.push_str(&text[shown..]);
    }
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)
}

/// Mistral's newer form: `name[ARGS]{..}` or `name[CALL_ID]id[ARGS]{..}`.
fn named(header: &str, json: &str) -> Option<Vec<ToolCall>> {
    let header = header.strip_suffix("[ARGS]").unwrap_or(header);
    let (name, id) = match header.split_once("[CALL_ID]") {
        Some((name, id)) => (name, Some(id)),
        None => (header, None),
    };
    let plain = |text: &str| !text.is_empty() && text.bytes().all(is_name);
    if !plain(name) || !id.is_none_or(plain) {
        return None;
    }
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(json).ok()?;
    Some(vec![ToolCall { id: id.map(str::to_owned), name: name.to_owned(), arguments: json.to_owned() }])
}
