//! The best path through a trellis (Viterbi 1967), closed to a circle, for one tile of weights.
//!
//! Costs are sums of `(target - integer)^2` in f32, added in the order of the path; equal costs go
//! to the lower state. Nothing depends on vector width, so every machine finds the same path.

use super::trellis::{STATE_BITS, STATES, TILE, Trellis};

/// Weights of a tile.
pub const WEIGHTS: usize = TILE * TILE;

/// An encoder with its tables and its memory.
pub struct Viterbi {
    trellis: Trellis,
    values: [Vec<f32>; 2], // [STATES] integers of each state
    costs: Vec<f32>,       // [STATES] of the best path to each state
    best: Vec<f32>,        // [STATES >> step] least cost of the states that continue alike
    from: Vec<u32>,        // the same: the high bits of the state with that cost
    trace: Vec<u8>,        // [steps, STATES >> step] `from` of each step
}

impl Viterbi {
    pub fn new(trellis: Trellis) -> Viterbi {
        let heads = STATES >> trellis.step;
        let value =
            |which: usize| (0..STATES as u32).map(|s| trellis.integers(s)[which] as f32).collect();
        Viterbi {
            trellis,
            values: [value(0), value(1)],
            costs: vec![0.0; STATES],
            best: vec![0.0; heads],
            from: vec![0; heads],
            trace: vec![0; WEIGHTS / trellis.weights * heads],
        }
    }

    /// The bits of each row of the tile whose integers come nearest to `targets` (row-major, in
    /// units of the integers).
    ///
    /// A circle closes only where the string's last bits are what its first states were told. They
    /// are found by a free path that starts half-way round, and kept in a second one.
    pub fn encode(&mut self, targets: &[f32; WEIGHTS]) -> [u64; TILE] {
        let steps = WEIGHTS / self.trellis.weights;
        let overlap = STATE_BITS - self.trellis.step;
        let mut turned = [0f32; WEIGHTS];
        let (first, second) = targets.split_at(WEIGHTS / 2);
        turned[..WEIGHTS / 2].copy_from_slice(second);
        turned[WEIGHTS / 2..].copy_from_slice(first);
        let free = self.path(&turned, None);
        // The state after the last weight of the true order.
        let head = free[steps / 2 - 1] & ((1 << overlap) - 1);
        let states = self.path(targets, Some(head));
        let per_row = steps / TILE;
        std::array::from_fn(|row| {
            let new = |s: &u32| (s & ((1 << self.trellis.step) - 1)) as u64;
            states[row * per_row..][..per_row]
                .iter()
                .fold(0, |bits, s| bits << self.trellis.step | new(s))
        })
    }

    /// The states of the best path; with `head`, of the best one whose first state begins with
    /// these bits and whose last state ends with them.
    fn path(&mut self, targets: &[f32; WEIGHTS], head: Option<u32>) -> Vec<u32> {
        let (step, per_state) = (self.trellis.step, self.trellis.weights);
        let heads = STATES >> step;
        self.best.fill(head.map_or(0.0, |_| f32::INFINITY));
        if let Some(head) = head {
            self.best[head as usize] = 0.0;
        }
        let steps = WEIGHTS / per_state;
        for t in 0..steps {
            if t > 0 {
                self.reduce();
                let trace = &mut self.trace[t * heads..][..heads];
                trace.iter_mut().zip(&self.from).for_each(|(t, f)| *t = *f as u8);
            }
            let targets = &targets[t * per_state..][..per_state];
            self.extend(targets);
        }
        let last = |s: &usize| head.is_none_or(|h| *s & (heads - 1) == h as usize);
        let end = (0..STATES).filter(last).fold(None, |best: Option<usize>, s| match best {
            Some(b) if self.costs[b] <= self.costs[s] => Some(b),
            _ => Some(s),
        });
        let mut states = vec![0; steps];
        let mut state = end.unwrap_or(0) as u32;
        for t in (0..steps).rev() {
            states[t] = state;
            let continued = state >> step;
            state = (self.trace[t * heads + continued as usize] as u32) << (STATE_BITS - step)
                | continued;
        }
        states
    }

    /// Cost of each state: of the best way to it, and of its own weights.
    fn extend(&mut self, targets: &[f32]) {
        let Viterbi { trellis, values, costs, best, .. } = self;
        match (trellis.step, targets) {
            (3, &[t]) => extend_one::<3>(costs, best, &values[0], t),
            (4, &[t]) => extend_one::<4>(costs, best, &values[0], t),
            (4, &[a, b]) => extend_two::<4>(costs, best, values, a, b),
            (5, &[a, b]) => extend_two::<5>(costs, best, values, a, b),
            _ => unreachable!("no code has this trellis"),
        }
    }

    /// Of the states that differ in their oldest bits only, the cheapest.
    fn reduce(&mut self) {
        let Viterbi { costs, best, from, .. } = self;
        reduce(costs, best, from);
    }
}

/// Defines a function whose body is compiled for each vector width.
macro_rules! vectorised {
    ($(fn $name:ident$(<const $c:ident: u32>)?($($arg:ident: $type:ty),*) $body:block)*) => {$(
        fn $name$(<const $c: u32>)?($($arg: $type),*) {
            #[inline(always)]
            fn body$(<const $c: u32>)?($($arg: $type),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn wide$(<const $c: u32>)?($($arg: $type),*) {
                    body$(::<$c>)?($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
                fn widest$(<const $c: u32>)?($($arg: $type),*) {
                    body$(::<$c>)?($($arg),*)
                }
                if is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl") {
                    // SAFETY: the machine has the instructions, as just asked.
                    return unsafe { widest$(::<$c>)?($($arg),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: as above.
                    return unsafe { wide$(::<$c>)?($($arg),*) };
                }
            }
            body$(::<$c>)?($($arg),*)
        }
    )*};
}

vectorised! {
    fn extend_one<const STEP: u32>(costs: &mut [f32], best: &[f32], values: &[f32], target: f32) {
        for ((costs, values), best) in costs.chunks_exact_mut(1 << STEP).zip(values.chunks_exact(1 << STEP)).zip(best) {
            for (cost, value) in costs.iter_mut().zip(values) {
                let e = target - value;
                *cost = best + e * e;
            }
        }
    }

    fn extend_two<const STEP: u32>(costs: &mut [f32], best: &[f32], values: &[Vec<f32>; 2], first: f32, second: f32) {
        let pairs = values[0].chunks_exact(1 << STEP).zip(values[1].chunks_exact(1 << STEP));
        for ((costs, (a, b)), best) in costs.chunks_exact_mut(1 << STEP).zip(pairs).zip(best) {
            for ((cost, a), b) in costs.iter_mut().zip(a).zip(b) {
                let (d, e) = (first - a, second - b);
                *cost = best + (d * d + e * e);
            }
        }
    }

    fn reduce(costs: &[f32], best: &mut [f32], from: &mut [u32]) {
        let mut parts = costs.chunks_exact(best.len()).enumerate();
        if let Some((_, part)) = parts.next() {
            best.copy_from_slice(part);
            from.fill(0);
        }
        for (high, part) in parts {
            for ((best, from), cost) in best.iter_mut().zip(from.iter_mut()).zip(part) {
                let less = *cost < *best;
                *best = if less { *cost } else { *best };
                *from = if less { high as u32 } else { *from };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Code;
    use super::super::encode::gain;
    use super::super::quantize::gaussian;
    use super::*;

    const ALL: [Code; 4] = [Code::T2, Code::T25, Code::T3, Code::T4];

    /// Integers of a tile whose rows have these bits.
    fn integers(trellis: Trellis, rows: &[u64; TILE]) -> Vec<i32> {
        (0..TILE).flat_map(|r| trellis.decode(rows[(r + TILE - 1) % TILE], rows[r])).collect()
    }

    fn tile(values: &[f32], scale: f32) -> [f32; WEIGHTS] {
        std::array::from_fn(|i| values[i] * scale)
    }

    /// Mean squared error on a unit Gaussian, each tile with its best scale behind a fixed one in
    /// front.
    fn distortion(trellis: Trellis, tiles: usize, gain: f32) -> f64 {
        let x = gaussian(tiles * WEIGHTS, 77);
        let mut viterbi = Viterbi::new(trellis);
        let (mut square, mut cross, mut coded) = (0f64, 0f64, 0f64);
        for values in x.chunks_exact(WEIGHTS) {
            let rows = viterbi.encode(&tile(values, trellis.deviation() / gain));
            for (v, q) in values.iter().zip(integers(trellis, &rows)) {
                square += (*v as f64).powi(2);
                cross += *v as f64 * q as f64;
                coded += (q as f64).powi(2);
            }
        }
        (square - cross * cross / coded) / square
    }

    /// The table of the design notes: .0758, .0406, .0190, .0050, and at most 3 % more.
    #[test]
    fn distortion_is_that_of_the_published_codes() {
        for (code, want) in ALL.into_iter().zip([0.0758, 0.0406, 0.0190, 0.0050]) {
            let got = distortion(Trellis::of(code).unwrap(), 150, gain(code));
            assert!(got < 1.03 * want && got > 0.85 * want, "{code:?}: {got:.5}, expected {want}");
        }
    }

    /// The path that the circle's first and last bits agree on is the only thing that is
    /// approximate.
    #[test]
    fn a_path_is_the_best_one_with_its_ends() {
        let trellis = Trellis::of(Code::T4).unwrap();
        let x = gaussian(WEIGHTS, 5);
        let targets = tile(&x, trellis.deviation());
        let mut viterbi = Viterbi::new(trellis);
        let states = viterbi.path(&targets, Some(17));
        let cost = |states: &[u32]| -> f64 {
            states
                .iter()
                .zip(&targets)
                .map(|(s, t)| (*t as f64 - trellis.integers(*s)[0] as f64).powi(2))
                .sum()
        };
        assert!(states[0] >> 4 == 17 && states[WEIGHTS - 1] & 255 == 17);
        assert!(states.windows(2).all(|w| w[1] >> 4 == w[0] & 255));
        // Every change of one symbol, which changes three states, costs more.
        for t in 0..WEIGHTS - 3 {
            for symbol in 0..16 {
                let mut other = states.clone();
                for (i, s) in other[t..t + 3].iter_mut().enumerate() {
                    *s = *s & !(15 << (4 * i)) | symbol << (4 * i);
                }
                assert!(cost(&other) >= cost(&states) - 1e-3, "{t} {symbol}");
            }
        }
    }

    #[test]
    fn a_tile_is_a_circle_of_the_states_chosen() {
        for code in ALL {
            let trellis = Trellis::of(code).unwrap();
            let x = gaussian(WEIGHTS, 9);
            let targets = tile(&x, trellis.deviation());
            let rows = Viterbi::new(trellis).encode(&targets);
            let error = |q: &[i32]| {
                q.iter().zip(&targets).map(|(q, t)| (t - *q as f32).powi(2)).sum::<f32>()
            };
            let coded = integers(trellis, &rows);
            let power: f32 = targets.iter().map(|t| t * t).sum();
            let most = [0.12, 0.07, 0.035, 0.012][ALL.iter().position(|c| *c == code).unwrap()];
            assert!(error(&coded) < most * power, "{code:?}: the circle does not close");
        }
    }

    /// Run by hand to find multipliers: `cargo test --release --lib search_for_multipliers --
    /// --ignored --nocapture`.
    #[test]
    #[ignore = "a search of some minutes, run by hand"]
    fn search_for_multipliers() {
        for code in ALL {
            let mut best: Vec<(f64, u32)> = Vec::new();
            let mut state = 0x1234_5678u32;
            for _ in 0..300 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let multiplier = state >> 8 | 1 | 1 << 23;
                let trellis = Trellis { multiplier, ..Trellis::of(code).unwrap() };
                best.push((distortion(trellis, 12, gain(code)), multiplier));
            }
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
            let again = |m: u32| {
                distortion(Trellis { multiplier: m, ..Trellis::of(code).unwrap() }, 150, gain(code))
            };
            let mut finals: Vec<_> = best[..12].iter().map(|(_, m)| (again(*m), *m)).collect();
            finals.sort_by(|a, b| a.0.total_cmp(&b.0));
            let trellis = Trellis::of(code).unwrap();
            let gains = [1.0, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14, 1.16]
                .map(|g| (g, distortion(trellis, 150, g)));
            println!("{code:?}: {:?}\n  by gain {gains:?}", &finals[..4]);
        }
    }
}
