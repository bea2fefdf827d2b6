//! `choose.cu`: the largest logit of up to eight rows, chosen and told to the host in one launch.

use std::collections::BTreeMap;

use crate::array::{Array, Dtype, Launch, Module, Result, evaluate};
use crate::kernels::{LAUNCHES, ROWS, SLOTS, slots};

const SOURCE: &str = concat!(include_str!("device.cuh"), include_str!("choose.cu"));
// As in the source.
const THREADS: usize = 256;
/// Blocks of a row.
const BLOCKS: usize = 64;

/// What a kernel chose.
pub(crate) struct Chosen {
    /// `[rows]` of u32.
    pub ids: Array,
    /// For each row `[2]` of u32: the id, and the bits of its logit in f32.
    pub told: Vec<Array>,
}

/// The kernels, by the number of rows they are built for, and what the blocks of a launch share.
pub(crate) struct Choose {
    modules: BTreeMap<usize, Module>,
    /// By launch, several of which may run side by side: the largest yet, and how many blocks are done.
    shared: Vec<[Array; 2]>,
}

pub(crate) fn compile(slots: usize, architecture: &str, broken: bool) -> Result<Vec<u8>> {
    let mut defines = vec![format!("SLOTS={slots}")];
    if broken {
        defines.push("BROKEN=1".into());
    }
    Module::compile(SOURCE, architecture, &defines)
}

impl Choose {
    pub fn builds() -> [usize; 3] {
        SLOTS
    }

    pub fn new(modules: BTreeMap<usize, Module>) -> Result<Self> {
        let both = |_| Ok([Array::from_u32(&[0; 2 * ROWS])?, Array::from_u32(&[0; ROWS])?]);
        let shared = (0..LAUNCHES).map(both).collect::<Result<Vec<_>>>()?;
        evaluate(shared.iter().flatten())?;
        Ok(Self { modules, shared })
    }

    /// Once each has run.
    pub fn shorten(&mut self) {
        self.modules.values_mut().for_each(Module::shorten);
    }

    /// Of logits `[rows, vocab]` in bfloat16; `None` if no kernel is there for it.
    pub fn apply(&self, logits: &Array, rows: usize, vocab: usize) -> Result<Option<Chosen>> {
        if !vocab.is_multiple_of(8) || rows > ROWS * LAUNCHES {
            return Ok(None);
        }
        let (mut ids, mut told) = (Vec::new(), Vec::new());
        for ([best, counters], begin) in self.shared.iter().zip((0..rows).step_by(ROWS)) {
            let count = ROWS.min(rows - begin);
            let Some((slots, module)) =
                slots(count).and_then(|slots| Some((slots, self.modules.get(&slots)?)))
            else {
                return Ok(None);
            };
            let own = if count == rows {
                logits.clone()
            } else {
                logits.slice([begin, 0], [begin + count, vocab])?
            };
            let two = [2];
            let mut outputs: Vec<(Dtype, &[usize])> = vec![(Dtype::U32, &two); slots + 1];
            let all = [count];
            outputs[0].1 = &all;
            let mut out = module.launch(&Launch {
                inputs: &[&own, best, counters],
                outputs: &outputs,
                integers: &[vocab],
                floats: &[],
                grid: [BLOCKS.min(vocab.div_ceil(8 * THREADS)), count, 1],
                threads: THREADS,
                shared: 0,
            })?;
            told.extend(out.drain(1..=count));
            ids.extend(out.into_iter().next());
        }
        let ids = match ids.as_slice() {
            [one] => one.clone(),
            _ => Array::concatenate(&ids, 0)?,
        };
        Ok(Some(Chosen { ids, told }))
    }
}
