//! Finds the best circular path through a trellis for tiles of weights (Viterbi 1967).
//!
//! Costs are 16-bit integers, so that every machine finds the same path regardless of the order of
//! additions. A state's cost is twice the squared distance of its integers from their targets,
//! which are rounded to quarters. It is at most [`DEAREST`]. Every head can be reached from the
//! cheapest path in three states, so costs relative to the cheapest one fit 16 bits. On equal costs
//! the lower state wins.
//!
//! The search stores only the least cost of each head, not the state that reached it. Recomputing
//! that state along one path takes less time than storing it for all heads.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::trellis::{OFFSET, STATE_BITS, STATES, TILE, Trellis};

/// Weights of a tile.
pub const WEIGHTS: usize = TILE * TILE;

/// States of a tile.
pub const STEPS: usize = WEIGHTS / 2;
/// States that are processed at once. At least this many states differ only in their oldest bits.
const LANES: usize = 32;
/// Tiles that are worked on at once: they share what is read from the tables.
pub const TOGETHER: usize = 4;
/// States on either side of the circle's seam that determine the state at the seam.
const SEAM: usize = 40;
/// Largest target in quarters. The integers range from -30 to 30.
const LARGEST: f32 = 127.0;
/// Largest cost of a state: its integers are at most 61.75 from their targets.
const DEAREST: u16 = 15_300;
/// Cost of heads that cannot be reached yet: above the cost of three states. Adding one more state
/// still fits 16 bits.
const UNREACHED: u16 = 50_000;
const _: () = assert!(3 * DEAREST < UNREACHED && UNREACHED <= u16::MAX - DEAREST);

/// States of [`LANES`] heads with the same oldest bits. [`head_of_lane`] maps lanes to heads.
#[derive(Clone)]
#[repr(align(64))]
struct StateBlock {
    /// The two integers of each state plus [`OFFSET`].
    pairs: [[u8; 2]; LANES],
    /// Twice the sum of the squares of `pairs`.
    squares: [u16; LANES],
}

/// Returns the head of a lane.
///
/// Lanes alternate between the two halves of a block, because the halves may follow different
/// heads: the two 16-bit costs are then repeated as one 32-bit value.
const fn head_of_lane(lane: usize) -> usize {
    lane % 2 * (LANES / 2) + lane / 2
}

/// A state's two targets, in the form that cost computations use.
#[derive(Clone, Copy)]
struct Target {
    quarters: [i8; 2],
    /// Offset that makes the least possible cost 0: a cost is `base + squares - quarters * pairs`.
    base: u16,
}

/// Converts a target in units of the integers to quarters.
pub fn quarters(target: f32) -> i8 {
    (target * 4.0).round().clamp(-LARGEST, LARGEST) as i8
}

impl Target {
    /// Creates a target; `targets` are in units of the integers.
    fn new(targets: &[f32; 2]) -> Target {
        let quarters = targets.map(quarters);
        let base = |t: i8| (t as i32 * t as i32 + 7) / 8 + OFFSET * t as i32;
        Target { quarters, base: quarters.map(base).iter().sum::<i32>() as u16 }
    }

    /// Returns the cost of two integers, without the base.
    #[inline(always)]
    fn cost([x, y]: [i32; 2], quarters: [i8; 2]) -> i32 {
        let (p, q) = (x + OFFSET, y + OFFSET);
        2 * (x * x + y * y) - p * quarters[0] as i32 - q * quarters[1] as i32
    }
}

/// Buffers of one tile's search.
struct Search {
    /// Costs before the two halves of a block, including the base of the next state.
    front: Vec<[u16; 2]>,
    costs: Vec<u16>, // [STEPS + 1, heads]: least cost before a state
}

/// One tile's part of a step of the search.
struct SearchStep<'a> {
    quarters: [i8; 2],
    front: &'a [[u16; 2]],
    next: &'a mut [[u16; LANES]],
}

/// An encoder with its tables and buffers.
pub struct Viterbi {
    trellis: Trellis,
    // [heads / LANES, 2^step]: blocks that differ in the oldest bits are adjacent
    blocks: Vec<StateBlock>,
    searches: [Search; TOGETHER],
}

impl Viterbi {
    pub fn trellis(&self) -> Trellis {
        self.trellis
    }

    pub fn new(trellis: Trellis) -> Viterbi {
        let (heads, highs) = (STATES >> trellis.step, 1 << trellis.step);
        let block = |head: usize, high: usize| {
            let integers: [_; LANES] = std::array::from_fn(|i| {
                trellis.integers((high * heads + head + head_of_lane(i)) as u32)
            });
            StateBlock {
                pairs: integers.map(|pair| pair.map(|x| (x + OFFSET) as u8)),
                squares: integers.map(|[x, y]| 2 * (x * x + y * y) as u16),
            }
        };
        let blocks = (0..heads)
            .step_by(LANES)
            .flat_map(|head| (0..highs).map(move |high| (head, high)))
            .map(|(head, high)| block(head, high))
            .collect();
        let search = |_| Search {
            front: vec![[0; 2]; STATES >> trellis.step.max(5)],
            costs: vec![0; (STEPS + 1) * heads],
        };
        Viterbi { trellis, blocks, searches: [(); TOGETHER].map(search) }
    }

    /// Finds the bits of each row of the tiles with integers nearest to `targets` (row-major, in
    /// units of the integers).
    pub fn encode(&mut self, targets: &[[f32; WEIGHTS]], rows: &mut [[u64; TILE]]) {
        let (targets, single_targets) = targets.as_chunks::<TOGETHER>();
        let (rows, single_rows) = rows.as_chunks_mut::<TOGETHER>();
        for (targets, rows) in targets.iter().zip(rows) {
            self.encode_together(targets, rows);
        }
        for (target, row) in single_targets.iter().zip(single_rows) {
            self.encode_together(std::array::from_ref(target), std::array::from_mut(row));
        }
    }

    /// Encodes N tiles.
    ///
    /// A circular path must end with the bits that its first states began with. An unconstrained
    /// path over the seam determines these bits, and a second path round the circle is constrained
    /// to them.
    fn encode_together<const N: usize>(
        &mut self,
        targets: &[[f32; WEIGHTS]; N],
        rows: &mut [[u64; TILE]; N],
    ) {
        let targets: [[Target; STEPS]; N] = std::array::from_fn(|n| {
            let (pairs, _) = targets[n].as_chunks::<2>();
            std::array::from_fn(|i| Target::new(&pairs[i]))
        });
        let seams: [[Target; 2 * SEAM]; N] =
            targets.map(|t| std::array::from_fn(|i| t[(STEPS - SEAM + i) % STEPS]));
        let mut states = [[0; STEPS]; N];
        self.path(std::array::from_fn(|n| &seams[n][..]), None, &mut states);
        // Head after the last weight.
        let heads = states.map(|s| s[SEAM - 1] & ((STATES >> self.trellis.step) as u32 - 1));
        self.path(std::array::from_fn(|n| &targets[n][..]), Some(heads), &mut states);
        let (step, per_row) = (self.trellis.step, STEPS / TILE);
        for (rows, states) in rows.iter_mut().zip(&states) {
            *rows = std::array::from_fn(|row| {
                let new = |s: &u32| (s & ((1 << step) - 1)) as u64;
                let states = &states[row * per_row..][..per_row];
                states.iter().fold(0, |bits, s| bits << step | new(s))
            });
        }
    }

    /// Finds the states of the best path of each tile.
    ///
    /// With `ends`, the path's first state begins with these bits and its last state ends with
    /// them.
    fn path<const N: usize>(
        &mut self,
        targets: [&[Target]; N],
        ends: Option<[u32; N]>,
        states: &mut [[u32; STEPS]; N],
    ) {
        let step = self.trellis.step;
        let (heads, length) = (STATES >> step, targets[0].len());
        self.searches.iter_mut().for_each(|s| s.costs[..heads].fill(0));
        // Costs become relative to the least one only when all heads are reachable.
        let (settled, mut least) = (STATE_BITS.div_ceil(step) as usize, [0; N]);
        for t in 0..length - ends.is_some() as usize {
            let (blocks, mut searches) = (&self.blocks, self.searches.iter_mut());
            let steps: [SearchStep<'_>; N] = std::array::from_fn(|n| {
                let Search { front, costs } = searches.next().expect("memory of every tile");
                let (before, next) = costs[t * heads..][..2 * heads].split_at_mut(heads);
                if let Some(ends) = ends {
                    close(before, ends[n] as usize, t as u32 * step);
                }
                let target = targets[n][t];
                let floor = if t < settled { 0 } else { least[n] };
                fill_front(front, before, target.base.wrapping_sub(floor), step);
                SearchStep { quarters: target.quarters, front, next: next.as_chunks_mut().0 }
            });
            least = advance(step, blocks, steps);
        }
        for n in 0..N {
            let (costs, targets) = (&self.searches[n].costs, &targets[n]);
            let choose = |t: usize, head| {
                cheapest(self.trellis, &costs[t * heads..][..heads], targets[t].quarters, head)
            };
            let mut state = match ends {
                Some(ends) => choose(length - 1, ends[n]),
                None => (costs[length * heads..][..heads].iter().zip(0..))
                    .filter(|(cost, _)| **cost == least[n])
                    .map(|(_, head)| choose(length - 1, head))
                    .min()
                    .unwrap_or(0),
            };
            // Only the middle of an unconstrained path is used.
            let from = if ends.is_none() { SEAM - 1 } else { 0 };
            for t in (from..length).rev() {
                states[n][t] = state;
                state = if t > from { choose(t - 1, state >> step) } else { 0 };
            }
        }
    }
}

/// Raises the cost of all heads that are not reachable from `head` by `bits` new bits.
fn close(costs: &mut [u16], head: usize, bits: u32) {
    let heads = costs.len();
    if let Some(reached) = 1usize.checked_shl(bits).filter(|reached| *reached < heads) {
        let first = (head << bits) & (heads - 1);
        costs[..first].fill(UNREACHED);
        costs[first + reached..].fill(UNREACHED);
    }
}

/// Adds `base` to the costs, for both halves of a block if they follow the same head.
fn fill_front(front: &mut [[u16; 2]], costs: &[u16], base: u16, step: u32) {
    if step == 4 {
        let front = front.as_flattened_mut();
        front.iter_mut().zip(costs).for_each(|(f, c)| *f = c.wrapping_add(base));
    } else {
        front.iter_mut().zip(costs).for_each(|(f, c)| *f = [c.wrapping_add(base); 2]);
    }
}

/// Returns the cheapest state of a head, given the costs before it.
fn cheapest(trellis: Trellis, costs: &[u16], quarters: [i8; 2], head: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the check above found the instructions.
        return unsafe { x86::cheapest_avx2(trellis, costs, quarters, head) };
    }
    cheapest_of(trellis, costs, quarters, head)
}

#[inline(always)]
fn cheapest_of(trellis: Trellis, costs: &[u16], quarters: [i8; 2], head: u32) -> u32 {
    let (step, heads) = (trellis.step, costs.len() as u32);
    let before = costs[(head >> step) as usize..].iter().step_by((heads >> step) as usize);
    // Key: cost, then the oldest bits as tie-breaker.
    let mut keys = [i32::MAX; 256];
    keys.iter_mut().zip(before).for_each(|(key, cost)| *key = *cost as i32);
    let keys = &mut keys[..1 << step];
    for (high, key) in keys.iter_mut().enumerate() {
        let own = Target::cost(trellis.integers(high as u32 * heads + head), quarters);
        *key = (*key + own) << 8 | high as i32;
    }
    (keys.iter().fold(i32::MAX, |a, b| a.min(*b)) as u32 & 255) * heads + head
}

/// Advances the search by one state.
///
/// Adds the costs of states to the costs before them. States that differ only in their oldest bits
/// form a set, and the least cost of each set is written to `next`. Returns the least cost of each
/// tile.
fn advance<const N: usize>(
    step: u32,
    blocks: &[StateBlock],
    steps: [SearchStep<'_>; N],
) -> [u16; N] {
    assert!(step >= 4 && blocks.len() == STATES / LANES);
    for SearchStep { front, next, .. } in &steps {
        assert!(front.len() == STATES >> step.max(5) && next.len() == blocks.len() >> step);
    }
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the check above found the instructions, and the lengths are asserted.
            return unsafe { x86::advance_avx512(step, blocks, steps) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::advance_avx2(step, blocks, steps) };
        }
    }
    portable(step, blocks, steps)
}

/// Returns the index of the costs before block `at` for the lowest oldest bits, and the distance to
/// those of the next oldest bits.
#[inline(always)]
fn in_front(step: u32, at: usize) -> (usize, usize) {
    let shift = step.max(5);
    ((at * LANES) >> shift, STATES >> step >> shift)
}

/// Like [`advance`], on any processor.
fn portable<const N: usize>(
    step: u32,
    blocks: &[StateBlock],
    steps: [SearchStep<'_>; N],
) -> [u16; N] {
    steps.map(|SearchStep { quarters: [x, y], front, next }| {
        let mut all = u16::MAX;
        for (at, next) in next.iter_mut().enumerate() {
            let (first, stride) = in_front(step, at);
            let mut least = [u16::MAX; LANES];
            for (high, block) in blocks[at << step..][..1 << step].iter().enumerate() {
                let before = front[first + high * stride];
                for i in 0..LANES {
                    let [p, q] = block.pairs[i].map(i16::from);
                    let product = p * x as i16 + q * y as i16;
                    let own = block.squares[i].wrapping_sub(product as u16);
                    let cost = before[i % 2].wrapping_add(own);
                    least[i] = least[i].min(cost);
                }
            }
            (0..LANES).for_each(|i| next[head_of_lane(i)] = least[i]);
            all = least.into_iter().fold(all, u16::min);
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::super::quantize::gaussian;
    use super::super::{Code, Values};
    use super::*;

    const ALL: [Code; 4] = [Code::T2, Code::T25, Code::T3, Code::T4];

    fn gain_of(code: Code) -> f32 {
        let Values::Trellis { gain, .. } = code.spec().values else { panic!("no trellis code") };
        gain
    }
    /// Mean squared error on a unit Gaussian, measured with a million weights.
    const DISTORTION: [f64; 4] = [0.0702, 0.0356, 0.0183, 0.0049];

    /// Decodes the integers of a tile from the bits of its rows.
    fn integers(trellis: Trellis, rows: &[u64; TILE]) -> Vec<i32> {
        (0..TILE).flat_map(|r| trellis.decode(rows[(r + TILE - 1) % TILE], rows[r])).collect()
    }

    fn tile(values: &[f32], scale: f32) -> [f32; WEIGHTS] {
        std::array::from_fn(|i| values[i] * scale)
    }

    /// Mean squared error on a unit Gaussian. Codes are chosen with a fixed scale; then each tile
    /// gets its best scale.
    fn distortion(trellis: Trellis, tiles: usize, gain: f32) -> f64 {
        let x = gaussian(tiles * WEIGHTS, 77);
        let mut viterbi = Viterbi::new(trellis);
        let (mut square, mut cross, mut coded) = (0f64, 0f64, 0f64);
        for values in x.chunks_exact(WEIGHTS) {
            let mut rows = [[0; TILE]];
            viterbi.encode(&[tile(values, trellis.deviation() / gain)], &mut rows);
            let [rows] = rows;
            for (v, q) in values.iter().zip(integers(trellis, &rows)) {
                square += (*v as f64).powi(2);
                cross += *v as f64 * q as f64;
                coded += (q as f64).powi(2);
            }
        }
        (square - cross * cross / coded) / square
    }

    /// The distortion of 60 tiles is within about 1 % of that of many tiles. The ignored test below
    /// uses a million weights.
    #[test]
    fn distortion_is_that_of_the_card() {
        for (code, want) in ALL.into_iter().zip(DISTORTION) {
            let got = distortion(code.trellis().unwrap(), 60, gain_of(code));
            assert!((got / want - 1.0).abs() < 0.03, "{code:?}: {got:.5}, expected {want}");
        }
    }

    /// `cargo test --release --lib distortion_of_a_million -- --ignored --nocapture`
    #[test]
    #[ignore = "takes minutes"]
    fn distortion_of_a_million_weights() {
        for (code, want) in ALL.into_iter().zip(DISTORTION) {
            let got = distortion(code.trellis().unwrap(), 3907, gain_of(code));
            println!("{code:?}: {got:.5}");
            assert!((got / want - 1.0).abs() < 0.005, "{code:?}: {got:.5}, expected {want}");
        }
    }

    /// Only the choice of the shared first and last bits of the circle is approximate.
    #[test]
    fn a_path_is_the_best_one_with_its_ends() {
        let trellis = Code::T4.trellis().unwrap();
        let x = gaussian(WEIGHTS, 5);
        let targets = tile(&x, trellis.deviation()).map(|t| (t * 4.0).round());
        let pairs = targets.as_chunks::<2>().0;
        let rounded: Vec<Target> =
            pairs.iter().map(|pair| Target::new(&pair.map(|q| q / 4.0))).collect();
        let mut states = [[0; STEPS]];
        Viterbi::new(trellis).path([&rounded], Some([17]), &mut states);
        let [states] = states;
        let cost = |states: &[u32]| -> i32 {
            let square = |(q, t): (i32, &f32)| (*t as i32 - 4 * q).pow(2);
            let error = |(s, t): (&u32, &[f32; 2])| {
                trellis.integers(*s).into_iter().zip(t).map(square).sum::<i32>()
            };
            states.iter().zip(pairs).map(error).sum()
        };
        assert!(states[0] >> 8 == 17 && states[STEPS - 1] & 255 == 17);
        assert!(states.windows(2).all(|w| w[1] >> 8 == w[0] & 255));
        // Every change of one symbol, which changes two states, costs more.
        for t in 0..STEPS - 2 {
            for symbol in 0..256 {
                let mut other = states;
                for (i, s) in other[t..t + 2].iter_mut().enumerate() {
                    *s = *s & !(255 << (8 * i)) | symbol << (8 * i);
                }
                assert!(cost(&other) >= cost(&states), "{t} {symbol}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn every_instruction_set_finds_the_same_costs() {
        for code in ALL {
            let Viterbi { trellis, blocks, .. } = Viterbi::new(code.trellis().unwrap());
            let (step, heads) = (trellis.step, STATES >> trellis.step);
            let target = Target::new(&[-40.0, 19.3]);
            let costs: [Vec<u16>; 2] =
                [7919, 104_729].map(|m| (0..heads).map(|i| (i * m % 45_900) as u16).collect());
            let mut front = [(); 2].map(|()| vec![[0; 2]; STATES >> step.max(5)]);
            for (front, costs) in front.iter_mut().zip(&costs) {
                fill_front(front, costs, target.base, step);
            }
            type Advance<'a> = &'a dyn Fn([SearchStep<'_>; 2]) -> [u16; 2];
            let found = |f: Advance<'_>| {
                let mut next = [(); 2].map(|()| vec![0u16; heads]);
                let [a, b] = &mut next;
                let least = f([(&front[0], a), (&front[1], b)].map(|(front, next)| SearchStep {
                    quarters: target.quarters,
                    front,
                    next: next.as_chunks_mut().0,
                }));
                (next, least)
            };
            let want = found(&|steps| portable(step, &blocks, steps));
            let (head, highs) = (heads / 3, 0..1 << step);
            let cost = |high: usize| {
                let state = high * heads + head;
                let [x, y] = trellis.integers(state as u32);
                let product = (x + OFFSET) * target.quarters[0] as i32
                    + (y + OFFSET) * target.quarters[1] as i32;
                let own = target.base as i16 as i32 + 2 * (x * x + y * y) - product;
                costs[1][state >> step] as i32 + own
            };
            assert_eq!(want.0[1][head] as i32, highs.map(cost).min().unwrap(), "{code:?}");
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the machine has the instructions, and the lengths are right.
                let got = found(&|steps| unsafe { x86::advance_avx2(step, &blocks, steps) });
                assert!(got == want, "{code:?}, AVX2");
            }
            if x86::has_avx512() {
                // SAFETY: as above.
                let got = found(&|steps| unsafe { x86::advance_avx512(step, &blocks, steps) });
                assert!(got == want, "{code:?}, AVX-512");
            }
        }
    }

    #[test]
    fn a_tile_is_a_circle_of_the_states_chosen() {
        for code in ALL {
            let trellis = code.trellis().unwrap();
            let x = gaussian(WEIGHTS, 9);
            let targets = tile(&x, trellis.deviation());
            let mut rows = [[0; TILE]];
            Viterbi::new(trellis).encode(&[targets], &mut rows);
            let error = |q: &[i32]| {
                q.iter().zip(&targets).map(|(q, t)| (t - *q as f32).powi(2)).sum::<f32>()
            };
            let coded = integers(trellis, &rows[0]);
            let power: f32 = targets.iter().map(|t| t * t).sum();
            let most = [0.12, 0.07, 0.035, 0.012][ALL.iter().position(|c| *c == code).unwrap()];
            assert!(error(&coded) < most * power, "{code:?}: the circle does not close");
        }
    }

    /// Run by hand to find multipliers:
    /// `cargo test --release --lib search_for_multipliers -- --ignored --nocapture`.
    #[test]
    #[ignore = "a search of some minutes, run by hand"]
    fn search_for_multipliers() {
        for code in ALL {
            let mut best: Vec<(f64, u32)> = Vec::new();
            let mut state = 0x1234_5678u32;
            for _ in 0..240 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let multiplier = state >> 8 | 1 | 1 << 23;
                let trellis = Trellis { multiplier, ..code.trellis().unwrap() };
                best.push((distortion(trellis, 12, gain_of(code)), multiplier));
            }
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
            let again = |m: u32| {
                distortion(Trellis { multiplier: m, ..code.trellis().unwrap() }, 150, gain_of(code))
            };
            let mut finals: Vec<_> = best[..12].iter().map(|(_, m)| (again(*m), *m)).collect();
            finals.sort_by(|a, b| a.0.total_cmp(&b.0));
            let trellis = code.trellis().unwrap();
            let gains = [1.0, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14, 1.16]
                .map(|g| (g, distortion(trellis, 150, g)));
            println!("{code:?}: {:?}\n  by gain {gains:?}", &finals[..4]);
        }
    }
}
