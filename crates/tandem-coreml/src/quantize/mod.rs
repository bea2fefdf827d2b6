//! Weights in fewer bits: tables by k-means, and blocks with scales.

pub mod blocks;
pub mod palette;
