//! One-dimensional k-means: the table of `k` values that a group of weights is best replaced by.
//!
//! In one dimension a cluster is an interval of the sorted values, and with prefix sums of weights, values and squares
//! the cost of an interval takes constant time. Clusters are first the optimal ones whose borders lie on a grid (dynamic
//! programming, which is exact when there are no more distinct values than places in the grid), then Lloyd's iteration
//! moves the borders between all values. Equal input gives equal output.

use half::f16;

/// Places where the dynamic programme may put borders: at least so many, and so many a cluster.
const GRID: usize = 384;
const GRID_A_CLUSTER: usize = 4;
/// Lloyd's iteration ends when no border moves, and at the latest then.
const ROUNDS: usize = 60;

/// A group of weights in a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Palette {
    /// In ascending order, where fewer are needed padded with the last.
    pub table: Vec<f16>,
    /// One a value.
    pub indices: Vec<u8>,
}

/// The best table of `size` values for `values`, each counted once.
///
/// # Panics
/// If there are no values, or `size` is 0 or above 256.
pub fn palettize(values: &[f16], size: usize) -> Palette {
    assert!(!values.is_empty() && (1..=256).contains(&size), "{} values in {size}", values.len());
    // Ordered as the values are: negative ones count down.
    let key = |value: f16| {
        let bits = value.to_bits();
        usize::from(if bits >> 15 == 1 { !bits } else { bits | 0x8000 })
    };
    let mut counts = vec![0u32; 1 << 16];
    for &value in values {
        counts[key(value)] += 1;
    }
    let (mut points, mut keys) = (Vec::new(), Vec::new());
    for (at, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let bits = at as u16;
        let value = f16::from_bits(if bits >> 15 == 1 { bits & 0x7fff } else { !bits });
        points.push((f64::from(value), f64::from(count)));
        keys.push(at);
    }
    let mut table: Vec<f16> = kmeans(&points, size).into_iter().map(f16::from_f64).collect();
    table.dedup();
    let mut nearest = 0;
    for (at, (value, _)) in keys.into_iter().zip(points) {
        let distance = |index: usize| (f64::from(table[index]) - value).abs();
        while nearest + 1 < table.len() && distance(nearest + 1) < distance(nearest) {
            nearest += 1;
        }
        counts[at] = nearest as u32;
    }
    let indices = values.iter().map(|value| counts[key(*value)] as u8).collect();
    let last = table[table.len() - 1];
    table.resize(size, last);
    Palette { table, indices }
}

/// The means of at most `k` clusters of `points` (values in ascending order, with weights above 0), in ascending order.
///
/// # Panics
/// If there are no points or no clusters.
pub fn kmeans(points: &[(f64, f64)], k: usize) -> Vec<f64> {
    assert!(!points.is_empty() && k > 0);
    if points.len() <= k {
        return points.iter().map(|point| point.0).collect();
    }
    let sums = Sums::new(points);
    let borders = sums.programme(&grid(points, GRID.max(GRID_A_CLUSTER * k)), k);
    sums.lloyd(points, borders)
}

/// Borders (numbers of points before them, the first 0 and the last all) of `cells` cells, narrow where values are dense
/// and where they are far apart: the density of the best table for many values is the cube root of that of the values
/// (Panter and Dite, 1951).
fn grid(points: &[(f64, f64)], cells: usize) -> Vec<usize> {
    if points.len() <= cells {
        return (0..=points.len()).collect();
    }
    // The cube root of a density is flat: estimated over this many equal widths.
    const WIDTHS: usize = 256;
    let (first, last) = (points[0].0, points[points.len() - 1].0);
    let width = (last - first) / WIDTHS as f64;
    let at = |value: f64| (((value - first) / width) as usize).min(WIDTHS - 1);
    let mut mass = [0.0f64; WIDTHS];
    for (value, weight) in points {
        mass[at(*value)] += weight;
    }
    let mut before = [0.0; WIDTHS + 1];
    for (i, mass) in mass.iter().enumerate() {
        before[i + 1] = before[i] + mass.cbrt();
    }
    let place = |value: f64| {
        let i = at(value);
        before[i] + (before[i + 1] - before[i]) * ((value - first) / width - i as f64).clamp(0.0, 1.0)
    };
    let mut borders = vec![0];
    for cell in 1..cells {
        let target = before[WIDTHS] * cell as f64 / cells as f64;
        let border = points.partition_point(|(value, _)| place(*value) < target);
        // Cells are never empty.
        borders.push(border.clamp(borders[cell - 1] + 1, points.len() - (cells - cell)));
    }
    borders.push(points.len());
    borders
}

/// Sums over the points before each place.
struct Sums {
    weight: Vec<f64>,
    value: Vec<f64>,
    square: Vec<f64>,
}

impl Sums {
    fn new(points: &[(f64, f64)]) -> Self {
        let mut sums = Self { weight: vec![0.0], value: vec![0.0], square: vec![0.0] };
        let (mut weight, mut value, mut square) = (0.0, 0.0, 0.0);
        for (x, w) in points {
            weight += w;
            value += w * x;
            square += w * x * x;
            sums.weight.push(weight);
            sums.value.push(value);
            sums.square.push(square);
        }
        sums
    }

    fn mean(&self, from: usize, to: usize) -> f64 {
        (self.value[to] - self.value[from]) / (self.weight[to] - self.weight[from])
    }

    /// Weighted squared distance of points `from..to` from their mean.
    fn cost(&self, from: usize, to: usize) -> f64 {
        let value = self.value[to] - self.value[from];
        let weight = self.weight[to] - self.weight[from];
        self.square[to] - self.square[from] - value * value / weight
    }

    /// The `k + 1` of `grid`'s borders that cost least. The best last border moves up with the place, so that each row
    /// of the programme is solved by halving (Wu, 1991).
    fn programme(&self, grid: &[usize], k: usize) -> Vec<usize> {
        let cells = grid.len() - 1;
        let k = k.min(cells);
        // Least cost of the points before a place in the clusters so far, and for each cluster where it begins.
        let mut least: Vec<f64> =
            (0..=cells).map(|j| if j == 0 { 0.0 } else { self.cost(0, grid[j]) }).collect();
        let mut begins = vec![vec![0usize; cells + 1]];
        for cluster in 1..k {
            let mut next = vec![f64::INFINITY; cells + 1];
            let mut begin = vec![0; cells + 1];
            // Each cluster to come needs a cell.
            let mut open = vec![(cluster + 1, cells - (k - 1 - cluster), cluster, cells - 1)];
            while let Some((low, high, first, last)) = open.pop() {
                if low > high {
                    continue;
                }
                let middle = low + (high - low) / 2;
                let mut best = first;
                for i in first..=last.min(middle - 1) {
                    let cost = least[i] + self.cost(grid[i], grid[middle]);
                    if cost < next[middle] {
                        (next[middle], best) = (cost, i);
                    }
                }
                begin[middle] = best;
                open.push((low, middle - 1, first, best));
                open.push((middle + 1, high, best, last));
            }
            least = next;
            begins.push(begin);
        }
        let mut borders = vec![cells; k + 1];
        for cluster in (0..k).rev() {
            borders[cluster] = begins[cluster][borders[cluster + 1]];
        }
        borders.into_iter().map(|at| grid[at]).collect()
    }

    /// Moves borders half way between the means they part until none moves; the means.
    fn lloyd(&self, points: &[(f64, f64)], mut borders: Vec<usize>) -> Vec<f64> {
        let means = |borders: &[usize]| -> Vec<f64> {
            borders
                .windows(2)
                .filter(|pair| pair[0] < pair[1])
                .map(|pair| self.mean(pair[0], pair[1]))
                .collect()
        };
        let mut centers = means(&borders);
        for _ in 0..ROUNDS {
            let between = centers.windows(2).map(|pair| {
                let middle = (pair[0] + pair[1]) / 2.0;
                points.partition_point(|point| point.0 <= middle)
            });
            let moved: Vec<usize> = std::iter::once(0).chain(between).chain([points.len()]).collect();
            if moved == borders {
                break;
            }
            borders = moved;
            centers = means(&borders);
        }
        centers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(points: &[(f64, f64)], centers: &[f64]) -> f64 {
        let nearest = |x: f64| centers.iter().map(|c| (c - x).powi(2)).fold(f64::INFINITY, f64::min);
        points.iter().map(|(x, w)| w * nearest(*x)).sum()
    }

    /// The least cost over every way to cut the points into `k` intervals.
    fn brute_force(points: &[(f64, f64)], k: usize) -> f64 {
        if k == 1 {
            return Sums::new(points).cost(0, points.len());
        }
        (k - 1..points.len())
            .map(|cut| {
                brute_force(&points[..cut], k - 1) + Sums::new(&points[cut..]).cost(0, points.len() - cut)
            })
            .fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn few_points_are_clustered_at_the_least_cost(
            steps in prop::collection::vec((0.01f64..3.0, 0.1f64..5.0), 1..13),
            k in 1usize..5,
        ) {
            let mut at = -5.0;
            let points: Vec<(f64, f64)> = steps.iter().map(|(step, weight)| { at += step; (at, *weight) }).collect();
            let centers = kmeans(&points, k);
            prop_assert!(centers.len() <= k);
            let least = if points.len() <= k { 0.0 } else { brute_force(&points, k) };
            prop_assert!(cost(&points, &centers) <= least + 1e-9, "{} for {least}", cost(&points, &centers));
        }

        #[test]
        fn every_value_gets_the_nearest_entry(
            values in prop::collection::vec(-2f32..2.0, 1..600),
            bits in 1u32..9,
        ) {
            let values: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
            let Palette { table, indices } = palettize(&values, 1 << bits);
            prop_assert_eq!(table.len(), 1 << bits);
            for (value, index) in values.iter().zip(&indices) {
                let distance = |entry: &f16| (f64::from(*entry) - f64::from(*value)).abs();
                let best = table.iter().map(distance).fold(f64::INFINITY, f64::min);
                prop_assert_eq!(distance(&table[usize::from(*index)]), best);
            }
        }
    }

    #[test]
    fn values_that_fit_into_the_table_are_kept() {
        let values: Vec<f16> = [-0.0, 0.0, 1.5, -2.0, 65504.0, 6e-8].map(f16::from_f32).to_vec();
        let Palette { table, indices } = palettize(&values, 8);
        for (value, index) in values.iter().zip(indices) {
            assert_eq!(table[usize::from(index)], *value);
        }
    }

    #[test]
    fn a_large_table_costs_little_more_than_the_least() {
        // 256 entries for a normal distribution cost about (sqrt(3) pi / 2) / 256² of the variance (Panter and Dite).
        let values: Vec<f16> = (0..40_000)
            .map(|i| {
                f16::from_f32((0..12).map(|j| ((i * 12 + j) as f32 * 12.9898).sin().fract()).sum::<f32>())
            })
            .collect();
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        let variance =
            values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / values.len() as f64;
        let Palette { table, indices } = palettize(&values, 256);
        let error = values
            .iter()
            .zip(&indices)
            .map(|(v, i)| (f64::from(*v) - f64::from(table[usize::from(*i)])).powi(2));
        let error = error.sum::<f64>() / values.len() as f64;
        assert!(error < 1.1 * 2.721 / 65536.0 * variance, "{error} of {variance}");
    }
}
