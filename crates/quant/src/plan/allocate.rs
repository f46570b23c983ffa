//! Choice of a format for each tensor so that all fit a given size: a multiple-choice knapsack.
//!
//! The cost of a tensor is its sensitivity times its share of the weights times the distortion of
//! its format. The KL divergence of a model grows linearly with the relative squared error of each
//! layer (HIGGS, arXiv 2411.17525). The slope depends on the model.

use gemma_base::tensor::Format;
use gemma_model::models::Role;

/// States of the knapsack. Sizes are rounded up to a multiple of the distributable bytes divided by
/// this.
const STATES: u64 = 1 << 17;

/// A tensor with its possible formats.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Cost per unit of distortion.
    pub weight: f64,
    /// Possible formats, at least one.
    pub options: Vec<Rate>,
}

/// Size and distortion of a tensor in one format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    pub format: Format,
    pub bytes: u64,
    /// Relative squared error, see [`Format::distortion`].
    pub distortion: f64,
}

/// Returns one format for each tensor, so that the sum of weight times distortion is least and the
/// bytes are at most `budget`. Returns `None` if even the smallest formats do not fit.
///
/// The result is exact if the distributable bytes, divided by the greatest common divisor of all
/// sizes, are at most [`STATES`]. Otherwise sizes are rounded up, and the remaining bytes are spent
/// on the best single upgrades. The budget is never exceeded.
pub fn allocate(tensors: &[Candidate], budget: u64) -> Option<Vec<Format>> {
    let least = |c: &Candidate| c.options.iter().map(|o| o.bytes).min();
    let floors: Vec<u64> = tensors.iter().map(least).collect::<Option<_>>()?;
    let slack = budget.checked_sub(floors.iter().sum())?;
    let most: u64 = tensors
        .iter()
        .zip(&floors)
        .map(|(t, f)| t.options.iter().map(|o| o.bytes - f).max().unwrap_or(0))
        .sum();
    let slack = slack.min(most);
    let divisor = tensors
        .iter()
        .zip(&floors)
        .flat_map(|(t, f)| t.options.iter().map(move |o| o.bytes - f))
        .fold(0, gcd)
        .max(1);
    let unit = divisor * (slack / divisor).div_ceil(STATES).max(1);
    let mut chosen = knapsack(tensors, &floors, unit, (slack / unit) as usize);
    if unit > divisor {
        upgrade(tensors, &mut chosen, budget);
    }
    Some(tensors.iter().zip(chosen).map(|(t, c)| t.options[c].format).collect())
}

/// Solves the knapsack by dynamic programming over tensors and over units that exceed the smallest
/// formats.
fn knapsack(tensors: &[Candidate], floors: &[u64], unit: u64, states: usize) -> Vec<usize> {
    let width = states + 1;
    let mut best = vec![0f64; width];
    let mut next = vec![0f64; width];
    let mut picks = vec![0u8; width * tensors.len()]; // [tensors, width]
    for ((tensor, floor), picks) in tensors.iter().zip(floors).zip(picks.chunks_exact_mut(width)) {
        next.fill(f64::INFINITY);
        for (index, option) in tensor.options.iter().enumerate() {
            let (spent, cost) =
                ((option.bytes - floor).div_ceil(unit) as usize, tensor.weight * option.distortion);
            for at in spent..width {
                let sum = best[at - spent] + cost;
                if sum < next[at] {
                    next[at] = sum;
                    picks[at] = index as u8;
                }
            }
        }
        std::mem::swap(&mut best, &mut next);
    }
    let mut at = states;
    let mut chosen = vec![0; tensors.len()];
    for (i, tensor) in tensors.iter().enumerate().rev() {
        chosen[i] = picks[i * width + at] as usize;
        at -= (tensor.options[chosen[i]].bytes - floors[i]).div_ceil(unit) as usize;
    }
    chosen
}

/// Spends the bytes that are left because of rounding. Repeats the best single upgrade that fits
/// until there is none.
fn upgrade(tensors: &[Candidate], chosen: &mut [usize], budget: u64) {
    loop {
        let spent: u64 = tensors.iter().zip(chosen.iter()).map(|(t, c)| t.options[*c].bytes).sum();
        let mut best = (0.0, 0, 0);
        for (i, tensor) in tensors.iter().enumerate() {
            let now = tensor.options[chosen[i]];
            for (index, option) in tensor.options.iter().enumerate() {
                let gain = tensor.weight * (now.distortion - option.distortion);
                if spent - now.bytes + option.bytes <= budget && gain > best.0 {
                    best = (gain, i, index);
                }
            }
        }
        if best.0 <= 0.0 {
            return;
        }
        chosen[best.1] = best.2;
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the assumed sensitivity of a tensor relative to the average, without data.
///
/// v, o and down have a direct effect on the residual stream. q and k only change attention scores,
/// after a norm. The first layer and the last four count more, because few other layers average
/// their errors.
pub fn prior(role: Role, layer: usize, n_layers: usize) -> f64 {
    let by_role = match role {
        Role::V => 2.0,
        Role::O | Role::Down | Role::ExpertDown => 1.4,
        Role::Up => 1.0,
        Role::Gate => 0.8,
        Role::Q | Role::K => 0.7,
        _ => 1.0,
    };
    let by_layer = match role.is_layer() && (layer == 0 || layer + 4 >= n_layers) {
        true => 1.5,
        false => 1.0,
    };
    by_role * by_layer
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(tensors: &[Candidate], formats: &[Format]) -> (f64, u64) {
        tensors.iter().zip(formats).fold((0.0, 0), |(cost, bytes), (t, f)| {
            let option = t.options.iter().find(|o| o.format == *f).unwrap();
            (cost + t.weight * option.distortion, bytes + option.bytes)
        })
    }

    /// Returns the least cost of all combinations.
    fn brute(tensors: &[Candidate], budget: u64) -> Option<f64> {
        let Some((first, rest)) = tensors.split_first() else { return Some(0.0) };
        let cost = |o: &Rate| {
            Some(first.weight * o.distortion + brute(rest, budget.checked_sub(o.bytes)?)?)
        };
        first.options.iter().filter_map(cost).min_by(f64::total_cmp)
    }

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        let formats = ["f32", "bf16", "i8-row", "i4-row"].map(|f| f.parse::<Format>().unwrap());
        let option = (1u64..400, 0.0..1.0f64);
        let options = proptest::collection::vec(option, 1..=4);
        let candidate = (0.1..3.0f64, options).prop_map(move |(weight, list)| Candidate {
            weight,
            options: list
                .iter()
                .zip(formats)
                .map(|(o, format)| Rate { format, bytes: o.0, distortion: o.1 })
                .collect(),
        });
        proptest::collection::vec(candidate, 1..=5)
    }

    proptest! {
        #[test]
        fn no_way_is_better(
            tensors in candidates(),
            budget in 0u64..1500,
            scale in prop_oneof![Just(1u64), Just(1_000_003)],
        ) {
            let mut tensors = tensors;
            tensors.iter_mut().flat_map(|t| &mut t.options).for_each(|o| o.bytes *= scale);
            let budget = budget * scale + scale / 2;
            let found = allocate(&tensors, budget).map(|formats| cost(&tensors, &formats));
            match (found, brute(&tensors, budget)) {
                (Some((cost, bytes)), Some(least)) => {
                    prop_assert!(bytes <= budget);
                    prop_assert!((cost - least).abs() < 1e-9, "{cost} {least}");
                }
                (None, None) => {}
                (found, brute) => prop_assert!(false, "{found:?} {brute:?}"),
            }
        }
    }

    /// Sizes without a common divisor are rounded up. The result fits and is close to the optimum.
    #[test]
    fn rounded_sizes_never_exceed_the_budget() {
        let formats = ["i4-row", "i8-row", "bf16"].map(|f| f.parse::<Format>().unwrap());
        let tensor = |i: u64| Candidate {
            weight: 1.0 + (i * 7 % 13) as f64,
            options: formats
                .iter()
                .zip([1u64, 2, 4])
                .map(|(f, n)| Rate {
                    format: *f,
                    bytes: n * (1_000_000 + 7919 * i) + i,
                    distortion: 0.25f64.powi(n as i32),
                })
                .collect(),
        };
        let tensors: Vec<_> = (0..40).map(tensor).collect();
        let least: u64 = tensors.iter().map(|t| t.options[0].bytes).sum();
        assert_eq!(allocate(&tensors, least - 1), None);
        let mut last = f64::INFINITY;
        for percent in [100, 105, 130, 180, 250, 400, 900] {
            let budget = least * percent / 100;
            let (cost, bytes) = cost(&tensors, &allocate(&tensors, budget).unwrap());
            assert!(
                bytes <= budget && cost <= last,
                "{percent}: {bytes} of {budget}, {cost} after {last}"
            );
            if percent > 100 && percent < 400 {
                assert!(bytes > budget - 1_500_000, "{percent}: {bytes} of {budget}");
            }
            last = cost;
        }
    }

    #[test]
    fn sensitive_tensors_come_first() {
        assert!(prior(Role::V, 20, 62) > prior(Role::Down, 20, 62));
        assert!(
            prior(Role::Down, 20, 62) > prior(Role::Up, 20, 62)
                && prior(Role::Up, 20, 62) > prior(Role::Gate, 20, 62)
        );
        for (layer, promoted) in [(0, true), (1, false), (57, false), (58, true), (61, true)] {
            assert_eq!(prior(Role::Up, layer, 62) > 1.0, promoted, "{layer}");
        }
    }
}
