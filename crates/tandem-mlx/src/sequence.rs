//! What the engine knows of a sequence, and tokens that the host may not have seen yet.

use std::cell::OnceCell;
use std::rc::Rc;

use crate::array::{Array, Dtype, Result};
use crate::kernels::Kernels;
use crate::kernels::choose::Chosen;
use crate::kv::Kv;
use crate::turns::Turns;

pub(crate) struct Sequence {
    pub max_len: usize,
    pub tokens: Vec<Token>,
    /// `None` as long as nothing was fed.
    pub kv: Option<Rc<Kv>>,
    pub turns: Rc<Turns>,
    /// What its last row sampled.
    pub sampled: Option<Token>,
    /// A step that failed on the device took its keys and values with it.
    pub lost: bool,
}

/// A token of a history.
#[derive(Clone)]
pub(crate) enum Token {
    Known(u32),
    /// The one at this place of a step's choices.
    Chosen(Rc<Choices>, usize),
}

/// The largest logits of a step's lines, chosen on the device.
pub(crate) struct Choices {
    /// Ids, `[lines]` of u32.
    pub ids: Array,
    /// What the host reads.
    told: Told,
    pub lines: usize,
    seen: OnceCell<(Vec<u32>, Vec<f32>)>,
}

enum Told {
    /// The logits, `[lines]` of f32; the ids are above.
    Logits(Array),
    /// By line `[2]` of u32: the id and the bits of its logit.
    Lines(Vec<Array>),
}

impl Choices {
    /// Of logits `[lines, vocab]`.
    pub fn of(logits: &Array, lines: usize, vocab: usize, kernels: &Kernels) -> Result<Self> {
        let (ids, told) = match kernels.choose(logits, lines, vocab)? {
            Some(Chosen { ids, told }) => (ids, Told::Lines(told)),
            None => (logits.argmax()?, Told::Logits(logits.maximum()?.as_type(Dtype::F32)?)),
        };
        Ok(Self { ids, told, lines, seen: OnceCell::new() })
    }

    /// What must be computed.
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        let told = match &self.told {
            Told::Logits(logits) => std::slice::from_ref(logits),
            Told::Lines(lines) => lines,
        };
        told.iter().chain([&self.ids])
    }

    fn read(&self) -> Result<(Vec<u32>, Vec<f32>)> {
        match &self.told {
            Told::Logits(logits) => Ok((self.ids.read_u32(self.lines)?, logits.read_f32(self.lines)?)),
            Told::Lines(lines) => {
                let mut seen = (Vec::new(), Vec::new());
                for line in lines {
                    let both = line.read_u32(2)?;
                    seen.0.push(both[0]);
                    seen.1.push(f32::from_bits(both[1]));
                }
                Ok(seen)
            }
        }
    }

    /// The id and the logit of a line. Waits for the device the first time.
    pub fn line(&self, line: usize) -> Result<(u32, f32)> {
        if self.seen.get().is_none() {
            // Cannot be set: this is the only place that does it.
            let _ = self.seen.set(self.read()?);
        }
        let (ids, logits) = self.seen.get().map_or((&[][..], &[][..]), |(i, l)| (i.as_slice(), l.as_slice()));
        Ok((ids.get(line).copied().unwrap_or(0), logits.get(line).copied().unwrap_or(f32::NAN)))
    }
}

impl Token {
    /// Waits for the device if need be.
    pub fn id(&self) -> Result<u32> {
        match self {
            Token::Known(id) => Ok(*id),
            Token::Chosen(choices, line) => Ok(choices.line(*line)?.0),
        }
    }
}

/// The ids of a history.
pub(crate) fn known(tokens: &[Token]) -> Result<Vec<u32>> {
    tokens.iter().map(Token::id).collect()
}

/// The ids of several rows' tokens, one after the other, without waiting for those the host has not seen.
pub(crate) fn ids(rows: &[Vec<Token>]) -> Result<Array> {
    if let Some(choices) = all_of_a_step(rows) {
        return Ok(choices.ids.clone());
    }
    let mut pieces = Vec::new();
    let mut run = Vec::new();
    for token in rows.iter().flatten() {
        match token {
            Token::Known(id) => run.push(*id),
            Token::Chosen(choices, line) => {
                if !run.is_empty() {
                    pieces.push(Array::from_u32(&std::mem::take(&mut run))?);
                }
                pieces.push(choices.ids.slice([*line], [line + 1])?);
            }
        }
    }
    if !run.is_empty() {
        pieces.push(Array::from_u32(&run)?);
    }
    match pieces.as_slice() {
        [one] => Ok(one.clone()),
        _ => Array::concatenate(&pieces, 0),
    }
}

/// The choices of one step, if the rows are exactly these in their order: a batch that goes on as it was.
fn all_of_a_step(rows: &[Vec<Token>]) -> Option<&Rc<Choices>> {
    let [Token::Chosen(first, 0)] = rows.first()?.as_slice() else { return None };
    let same = |(row, at): (&Vec<Token>, usize)| matches!(row.as_slice(), [Token::Chosen(choices, line)] if *line == at && Rc::ptr_eq(choices, first));
    (rows.len() == first.lines && rows.iter().zip(0..).all(same)).then_some(first)
}
