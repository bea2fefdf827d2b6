//! A sequence's keys and values: one pair of arrays a layer, `[1, kv heads, capacity, head_dim]`.
//!
//! MLX's attention wants keys in one piece, so a sequence has one buffer a layer. New tokens are written in place
//! (`slice_update` reuses a buffer that nothing else holds). The capacity is a multiple of [`CHUNK`] and at least doubles
//! when it grows, up to what the sequence was opened for, so that a token is copied twice at most on average. A fork shares
//! the buffers; whichever side writes next takes a copy of its own, once, of the tokens it has.

use crate::array::{Array, Dtype, Result};
use crate::load::bytes_of;

/// Tokens by which buffers grow.
pub(crate) const CHUNK: usize = 256;

/// Of a model.
pub(crate) struct KvShape {
    /// Key/value heads and values per head, by layer.
    pub layers: Vec<(usize, usize)>,
    pub float: Dtype,
}

pub(crate) struct Kv {
    /// Keys and values, by layer.
    pub layers: Vec<(Array, Array)>,
    pub capacity: usize,
}

impl KvShape {
    pub fn bytes_per_token(&self) -> u64 {
        self.layers.iter().map(|(heads, dim)| 2 * (heads * dim) as u64 * bytes_of(self.float)).sum()
    }

    pub fn bytes(&self, capacity: usize) -> u64 {
        self.bytes_per_token() * capacity as u64
    }

    /// Buffers of their own with the first `len` tokens of `from`, and room for `capacity`.
    pub fn with_room(&self, from: Option<&Kv>, len: usize, capacity: usize) -> Result<Kv> {
        let mut layers = Vec::with_capacity(self.layers.len());
        for (i, &(heads, dim)) in self.layers.iter().enumerate() {
            let of = |old: Option<&Array>| match old {
                Some(old) if len > 0 => {
                    let held = old.slice([0; 4], [1, heads, len, dim])?;
                    let room = Array::zeros([1, heads, capacity - len, dim], self.float)?;
                    Array::concatenate([&held, &room], 2)
                }
                _ => Array::zeros([1, heads, capacity, dim], self.float),
            };
            let old = from.map(|kv| &kv.layers[i]);
            layers.push((of(old.map(|(k, _)| k))?, of(old.map(|(_, v)| v))?));
        }
        Ok(Kv { layers, capacity })
    }
}

impl Kv {
    pub fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.layers.iter().flat_map(|(k, v)| [k, v])
    }
}

/// The capacity that `needed` tokens get, for a sequence that has `old` and may grow to `max_len`.
pub(crate) fn capacity_for(needed: usize, old: usize, max_len: usize) -> usize {
    needed.max((2 * old).min(max_len)).next_multiple_of(CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_double_up_to_the_length_and_are_whole_chunks() {
        assert_eq!(capacity_for(1, 0, 4096), 256);
        assert_eq!(capacity_for(257, 256, 4096), 512);
        assert_eq!(capacity_for(513, 512, 4096), 1024);
        assert_eq!(capacity_for(513, 512, 600), 768);
        assert_eq!(capacity_for(3000, 512, 4096), 3072);
    }
}
