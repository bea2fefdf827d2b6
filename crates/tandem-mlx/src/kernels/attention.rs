//! `attention.cu`: rope, the writing of keys and values, and attention, for new tokens of up to eight sequences.

use std::collections::BTreeMap;

use crate::array::{Array, Dtype, Launch, Module, Result, evaluate};
use crate::kernels::{LAUNCHES, ROWS, SLOTS, slots};
use crate::kv::Kv;
use crate::turns::Turn;

const SOURCE: &str = concat!(include_str!("device.cuh"), include_str!("attention.cu"));
// As in the source.
const WARPS: usize = 8;
const TIMES: usize = 2;
const MOST_SPLITS: usize = 32;
/// How many blocks are wanted, two on each of some 132 multiprocessors.
const BLOCKS: usize = 264;
/// Attention's shape in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heads {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

/// A new token of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct NewToken<'a> {
    pub kv: &'a Kv,
    /// The first key it sees.
    pub first: usize,
    pub position: usize,
}

/// Attention of new tokens, one of each sequence.
pub(crate) struct Decode<'a> {
    /// Queries, keys and values `[rows, (heads + 2 * kv_heads) * dim]`.
    pub qkv: &'a Array,
    pub heads: Heads,
    pub scale: f32,
    pub turn: &'a Turn,
    pub layer: usize,
    pub rows: &'a [NewToken<'a>],
}

/// What a kernel is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Build {
    slots: usize,
    dim: usize,
    /// Query heads of a block.
    heads: usize,
}

impl Build {
    /// For so many sequences; `None` if the source does not do it.
    fn of(Heads { heads, kv_heads, dim }: Heads, rows: usize) -> Option<Self> {
        let group = heads / kv_heads;
        let fits = [64, 128, 256].contains(&dim) && heads.is_multiple_of(kv_heads);
        let slots = slots(rows)?;
        let heads = (1..=4).rev().find(|heads| group.is_multiple_of(*heads))?;
        fits.then_some(Self { slots, dim, heads })
    }

    /// All that a layer may need.
    pub fn all(heads: Heads) -> Vec<Self> {
        SLOTS.iter().filter_map(|slots| Self::of(heads, *slots)).collect()
    }

    pub fn compile(self, architecture: &str, broken: bool) -> Result<Vec<u8>> {
        let Self { slots, dim, heads } = self;
        let mut defines = vec![format!("SLOTS={slots}"), format!("DIM={dim}"), format!("HEADS={heads}")];
        if broken {
            defines.push("BROKEN=1".into());
        }
        Module::compile(SOURCE, architecture, &defines)
    }

    /// Keys that a block takes at a time.
    fn page(self) -> usize {
        WARPS * TIMES * 32 / (self.dim / 8)
    }
}

/// The kernels that were built, and the counters by which the blocks of a launch know their last.
pub(crate) struct Attention {
    modules: BTreeMap<Build, Module>,
    /// For each launch of a step that may run beside another.
    counters: Vec<Array>,
}

impl Attention {
    /// For shapes with at most `heads` query heads.
    pub fn new(modules: BTreeMap<Build, Module>, heads: usize) -> Result<Self> {
        let counters = (0..LAUNCHES).map(|_| Array::from_u32(&vec![0; ROWS * heads]));
        let counters = counters.collect::<Result<Vec<Array>>>()?;
        evaluate(&counters)?;
        Ok(Self { modules, counters })
    }

    /// Once each has run.
    pub fn shorten(&mut self) {
        self.modules.values_mut().for_each(Module::shorten);
    }

    /// `[rows, heads * dim]`; the new keys and values are in the sequences' buffers once that is computed. `None` if no
    /// kernel is there for it.
    pub fn apply(&self, decode: &Decode<'_>) -> Result<Option<Array>> {
        if decode.turn.factor.is_some() || decode.rows.len() > ROWS * LAUNCHES {
            return Ok(None);
        }
        let mut outputs = Vec::new();
        for (at, rows) in decode.rows.chunks(ROWS).enumerate() {
            let Some(out) = self.launch(decode, at, rows)? else { return Ok(None) };
            outputs.push(out);
        }
        let out = match outputs.as_slice() {
            [one] => one.clone(),
            _ => Array::concatenate(&outputs, 0)?,
        };
        Ok(Some(out))
    }

    fn launch(&self, decode: &Decode<'_>, at: usize, rows: &[NewToken<'_>]) -> Result<Option<Array>> {
        let Heads { heads, kv_heads, dim } = decode.heads;
        let Some((build, module)) =
            Build::of(decode.heads, rows.len()).and_then(|build| Some((build, self.modules.get(&build)?)))
        else {
            return Ok(None);
        };
        let qkv = if decode.rows.len() == rows.len() {
            decode.qkv.clone()
        } else {
            decode.qkv.slice([at * ROWS, 0], [at * ROWS + rows.len(), (heads + 2 * kv_heads) * dim])?
        };
        let mut inputs = vec![&qkv, &decode.turn.wavelengths, &self.counters[at]];
        let mut integers = Vec::new();
        // Slots without a sequence name the first once more; no block comes to them.
        for NewToken { kv, first, position } in
            rows.iter().chain(std::iter::repeat(&rows[0])).take(build.slots)
        {
            let (k, v) = &kv.layers[decode.layer];
            inputs.extend([k, v]);
            integers.extend([*first, *position, kv.capacity]);
        }
        integers.extend([heads, kv_heads, decode.turn.dims]);
        let groups = heads / build.heads;
        let longest = rows.iter().map(|row| row.position + 1 - row.first).max().unwrap_or(1);
        let splits =
            longest.div_ceil(build.page()).min(BLOCKS.div_ceil(groups * rows.len())).min(MOST_SPLITS);
        let out = module.launch(&Launch {
            inputs: &inputs,
            outputs: &[
                (Dtype::Bf16, &[rows.len(), heads * dim]),
                (Dtype::F32, &[rows.len() * heads * splits, dim + 2]),
            ],
            integers: &integers,
            floats: &[decode.scale],
            grid: [splits, groups, rows.len()],
            threads: WARPS * 32,
            shared: 0,
        })?;
        Ok(out.into_iter().next())
    }
}
