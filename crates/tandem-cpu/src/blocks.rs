//! Paged KV: blocks of [`KV_BLOCK`] tokens over all layers, counted by the sequences that hold them.
//!
//! A sequence is a list of block ids. A fork copies the list; the first write into a block that others hold too copies
//! that block. A block given back stays allocated for reuse.

use tandem_engine::EngineError;
use tandem_kernels::buffer::HugeBuffer;
use tandem_kernels::kv::{KV_BLOCK, KvLayout};

/// Index of a block in its pool.
pub(crate) type BlockId = u32;

pub(crate) struct Blocks {
    layers: Vec<KvLayout>,
    /// Where each layer's part of a block begins.
    offsets: Vec<usize>,
    block_bytes: usize,
    limit: usize,
    buffers: Vec<HugeBuffer>,
    holders: Vec<u32>,
    free: Vec<BlockId>,
}

impl Blocks {
    pub(crate) fn new(layers: Vec<KvLayout>, limit_bytes: u64) -> Self {
        let mut block_bytes = 0;
        let mut offsets = Vec::with_capacity(layers.len());
        for layer in &layers {
            offsets.push(block_bytes);
            block_bytes += layer.block_bytes();
        }
        let limit = usize::try_from(limit_bytes / block_bytes as u64).unwrap_or(usize::MAX);
        Self { layers, offsets, block_bytes, limit, buffers: vec![], holders: vec![], free: vec![] }
    }

    pub(crate) fn layers(&self) -> &[KvLayout] {
        &self.layers
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes as u64
    }

    pub(crate) fn limit_bytes(&self) -> u64 {
        self.limit as u64 * self.block_bytes()
    }

    /// `(held by one, held by several, held by none)`, in blocks.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        let count = |f: fn(u32) -> bool| self.holders.iter().filter(|h| f(**h)).count() as u64;
        (count(|h| h == 1), count(|h| h > 1), count(|h| h == 0))
    }

    pub(crate) fn is_shared(&self, block: BlockId) -> bool {
        self.holders[block as usize] > 1
    }

    /// Makes sure that `count` calls of [`Blocks::take`] will succeed.
    pub(crate) fn reserve(&mut self, count: usize) -> Result<(), EngineError> {
        let available = self.limit - (self.buffers.len() - self.free.len());
        let block_bytes = self.block_bytes;
        let out_of_memory = |available: usize| EngineError::OutOfMemory {
            what: "the KV cache".into(),
            needed: (count * block_bytes) as u64,
            available: available as u64 * block_bytes as u64,
            hint: "close a sequence, shorten the context or raise --memory-budget".into(),
        };
        if count > available {
            return Err(out_of_memory(available));
        }
        while self.free.len() < count {
            let buffer = HugeBuffer::zeroed(block_bytes).map_err(|_| out_of_memory(self.free.len()))?;
            self.free.push(self.buffers.len() as BlockId);
            self.buffers.push(buffer);
            self.holders.push(0);
        }
        Ok(())
    }

    /// A block held once, its contents unspecified. [`Blocks::reserve`] must have been called for it.
    pub(crate) fn take(&mut self) -> BlockId {
        let block = self.free.pop().expect("blocks are reserved before they are taken");
        self.holders[block as usize] = 1;
        block
    }

    pub(crate) fn hold(&mut self, block: BlockId) {
        self.holders[block as usize] += 1;
    }

    pub(crate) fn give_back(&mut self, block: BlockId) {
        self.holders[block as usize] -= 1;
        if self.holders[block as usize] == 0 {
            self.free.push(block);
        }
    }

    /// A block of the caller's own with the first `tokens` tokens of `shared`, which is given back.
    pub(crate) fn copy_on_write(&mut self, shared: BlockId, tokens: usize) -> BlockId {
        let own = self.take();
        if let Ok([from, to]) = self.buffers.get_disjoint_mut([shared as usize, own as usize]) {
            for (layer, offset) in self.layers.iter().zip(&self.offsets) {
                let part = *offset..offset + layer.block_bytes();
                layer.copy_prefix(&from[part.clone()], &mut to[part], tokens);
            }
        }
        self.give_back(shared);
        own
    }

    /// One layer's part of a block.
    pub(crate) fn part(&self, layer: usize, block: BlockId) -> &[u8] {
        &self.buffers[block as usize][self.offsets[layer]..][..self.layers[layer].block_bytes()]
    }

    /// The parts of several blocks, in ascending order and each once, for writing.
    pub(crate) fn parts_mut(
        &mut self,
        layer: usize,
        blocks: impl Iterator<Item = BlockId>,
    ) -> Vec<&mut [u8]> {
        let (offset, bytes) = (self.offsets[layer], self.layers[layer].block_bytes());
        let (mut rest, mut first) = (self.buffers.as_mut_slice(), 0);
        let mut parts = Vec::new();
        for block in blocks {
            let (upto, after) = rest.split_at_mut(block as usize + 1 - first);
            first = block as usize + 1;
            rest = after;
            parts.extend(upto.last_mut().map(|buffer| &mut buffer[offset..offset + bytes]));
        }
        parts
    }
}

/// Blocks that `tokens` tokens fill.
pub(crate) fn blocks_for(tokens: usize) -> usize {
    tokens.div_ceil(KV_BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kernels::kv::KvType;

    fn pool(limit_blocks: u64) -> Blocks {
        let layer = KvLayout { kv_heads: 1, head_dim: 8, dtype: KvType::F32 };
        let bytes = 2 * layer.block_bytes() as u64;
        Blocks::new(vec![layer, layer], limit_blocks * bytes)
    }

    #[test]
    fn the_limit_is_kept_and_blocks_come_back() {
        let mut blocks = pool(3);
        blocks.reserve(3).unwrap();
        let taken: Vec<_> = (0..3).map(|_| blocks.take()).collect();
        let error = blocks.reserve(1).unwrap_err();
        assert!(matches!(error, EngineError::OutOfMemory { available: 0, needed: 4096, .. }), "{error}");
        blocks.hold(taken[1]);
        blocks.give_back(taken[1]);
        assert!(blocks.reserve(1).is_err(), "still held once");
        taken.iter().for_each(|block| blocks.give_back(*block));
        assert_eq!(blocks.counts(), (0, 0, 3));
        blocks.reserve(3).unwrap();
    }

    #[test]
    fn copy_on_write_leaves_the_source_alone() {
        let mut blocks = pool(3);
        blocks.reserve(2).unwrap();
        let shared = blocks.take();
        blocks.hold(shared);
        blocks.parts_mut(1, [shared].into_iter())[0].fill(7);
        let own = blocks.copy_on_write(shared, 3);
        assert_ne!(own, shared);
        assert!(!blocks.is_shared(shared) && !blocks.is_shared(own));
        blocks.parts_mut(1, [own].into_iter())[0].fill(9);
        assert!(blocks.part(1, shared).iter().all(|b| *b == 7));
        assert!(blocks.part(0, own).iter().all(|b| *b == 0));
    }

    #[test]
    fn parts_of_several_blocks_are_those_asked_for() {
        let mut blocks = pool(5);
        blocks.reserve(5).unwrap();
        let taken: Vec<_> = (0..5).map(|_| blocks.take()).collect();
        assert_eq!(taken.len(), 5);
        for (i, part) in blocks.parts_mut(0, [0, 2, 4].into_iter()).into_iter().enumerate() {
            part.fill(i as u8 + 1);
        }
        let first: Vec<u8> = (0..5).map(|block| blocks.part(0, block)[0]).collect();
        assert_eq!(first, [1, 0, 2, 0, 3]);
    }
}
