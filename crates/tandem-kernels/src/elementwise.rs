//! Operations on one element at a time.

use crate::lanes::Lanes;
use crate::lanes::with_lanes;
use crate::team::Team;

/// Elements that a thread takes at a time: fewer are not worth waking it.
const PIECE: usize = 8192;

/// `x += scale * y`
///
/// # Panics
/// If the lengths differ.
pub fn add_scaled(team: &Team, x: &mut [f32], y: &[f32], scale: f32) {
    assert!(x.len() == y.len(), "{} floats and {} to add", x.len(), y.len());
    with_lanes!(team.path(), lanes => team.chunks_mut(x, PIECE, 1, |i, x| {
        lanes.vectorize(
            #[inline(always)]
            || {
                for (x, y) in x.iter_mut().zip(&y[i * PIECE..]) {
                    *x += scale * y;
                }
            },
        );
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums() {
        for length in [0, 1, 9, PIECE, 3 * PIECE + 5] {
            let y: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let mut x = vec![0.5; length];
            add_scaled(&Team::new(2).unwrap(), &mut x, &y, 0.25);
            assert!(x.iter().zip(&y).all(|(x, y)| *x == 0.5 + 0.25 * y));
        }
    }

    #[test]
    #[should_panic(expected = "3 floats and 2 to add")]
    fn lengths_must_agree() {
        add_scaled(&Team::new(1).unwrap(), &mut [0.0; 3], &[0.0; 2], 1.0);
    }
}
