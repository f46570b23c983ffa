//! The best path through a trellis (Viterbi 1967), closed to a circle, for one tile of weights.
//!
//! Costs are integers of 16 bits, so that every machine finds the same path, in whatever order it
//! adds: twice the squared distance of a state's integers from their targets, which are rounded to
//! quarters. Costs of paths are counted from that of the cheapest one and end at the largest number
//! of 16 bits: a path as dear as that is never the best. Equal costs go to the lower state.

use super::trellis::{OFFSET, STATE_BITS, STATES, TILE, Trellis};

/// Weights of a tile.
pub const WEIGHTS: usize = TILE * TILE;

/// States of a tile.
pub const STEPS: usize = WEIGHTS / 2;
/// States that are worked on at once. At least as many states differ in their oldest bits alone.
const LANES: usize = 32;
/// States on either side of the circle's seam that settle which state it is closed in.
const SEAM: usize = 40;
/// Largest target in quarters: -30 to 30 is what the integers reach.
const LARGEST: f32 = 127.0;
/// Cost of a path that is not allowed.
const FORBIDDEN: u16 = u16::MAX;

/// States that follow one another.
#[derive(Clone)]
#[repr(align(64))]
struct Block {
    /// The two integers of each state and [`OFFSET`].
    pairs: [[u8; 2]; LANES],
    /// Twice the sum of their squares.
    squares: [u16; LANES],
}

/// A state's two targets as costs want them.
#[derive(Clone, Copy)]
struct Target {
    quarters: [i8; 2],
    /// Makes the least possible cost 0: a cost is `base + squares - quarters * pairs`.
    base: u16,
}

/// A target in units of the integers, as costs know it.
pub fn quarters(target: f32) -> i8 {
    (target * 4.0).round().clamp(-LARGEST, LARGEST) as i8
}

impl Target {
    /// `targets` in units of the integers.
    fn new(targets: &[f32; 2]) -> Target {
        let quarters = targets.map(quarters);
        let base = |t: i8| (t as i32 * t as i32 + 7) / 8 + OFFSET * t as i32;
        Target { quarters, base: quarters.map(base).iter().sum::<i32>() as u16 }
    }

    /// At most 15,500.
    #[inline(always)]
    fn cost(self, pair: [u8; 2], squares: u16) -> u16 {
        let [x, y] = pair.map(i16::from);
        let product = x * self.quarters[0] as i16 + y * self.quarters[1] as i16;
        self.base.wrapping_add(squares).wrapping_sub(product as u16)
    }
}

/// An encoder with its tables and its memory.
pub struct Viterbi {
    trellis: Trellis,
    blocks: Vec<Block>, // [heads / LANES, 2^step]: those that differ in the oldest bits together
    best: Vec<u16>,     // [heads] least cost of the states that continue alike
    next: Vec<u16>,     // the same, a state later
    trace: Vec<u8>,     // [STEPS, heads] the oldest bits of the state with that cost
}

impl Viterbi {
    pub fn trellis(&self) -> Trellis {
        self.trellis
    }

    pub fn new(trellis: Trellis) -> Viterbi {
        let (heads, highs) = (STATES >> trellis.step, 1 << trellis.step);
        let block = |head: usize, high: usize| {
            let integers: [_; LANES] =
                std::array::from_fn(|i| trellis.integers((high * heads + head + i) as u32));
            Block {
                pairs: integers.map(|pair| pair.map(|x| (x + OFFSET) as u8)),
                squares: integers.map(|[x, y]| 2 * (x * x + y * y) as u16),
            }
        };
        let blocks = (0..heads)
            .step_by(LANES)
            .flat_map(|head| (0..highs).map(move |high| (head, high)))
            .map(|(head, high)| block(head, high))
            .collect();
        Viterbi {
            trellis,
            blocks,
            best: vec![0; heads],
            next: vec![0; heads],
            trace: vec![0; STEPS * heads],
        }
    }

    /// The bits of each row of the tile whose integers come nearest to `targets` (row-major, in
    /// units of the integers).
    ///
    /// A circle closes only where the string's last bits are what its first states were told. They
    /// are found by a free path over the seam, and kept in a second one round the circle.
    pub fn encode(&mut self, targets: &[f32; WEIGHTS]) -> [u64; TILE] {
        let (pairs, _) = targets.as_chunks::<2>();
        let targets: [Target; STEPS] = std::array::from_fn(|i| Target::new(&pairs[i]));
        let seam: [Target; 2 * SEAM] = std::array::from_fn(|i| targets[(STEPS - SEAM + i) % STEPS]);
        let mut states = [0; STEPS];
        self.path(&seam, None, &mut states);
        // The state after the last weight.
        let head = states[SEAM - 1] & ((STATES >> self.trellis.step) as u32 - 1);
        self.path(&targets, Some(head), &mut states);
        let per_row = STEPS / TILE;
        std::array::from_fn(|row| {
            let new = |s: &u32| (s & ((1 << self.trellis.step) - 1)) as u64;
            states[row * per_row..][..per_row]
                .iter()
                .fold(0, |bits, s| bits << self.trellis.step | new(s))
        })
    }

    /// The states of the best path; with `head`, of the best one whose first state begins with
    /// these bits and whose last state ends with them.
    fn path(&mut self, targets: &[Target], head: Option<u32>, states: &mut [u32; STEPS]) {
        let step = self.trellis.step;
        let heads = STATES >> step;
        self.best.fill(head.map_or(0, |_| FORBIDDEN));
        if let Some(head) = head {
            self.best[head as usize] = 0;
        }
        // Until every head can be reached nothing is taken off: three states cost less than a path
        // that is not allowed, which stays so.
        let (settled, mut least) = (STATE_BITS.div_ceil(step) as usize, 0);
        let last = targets.len() - 1;
        for (t, target) in targets[..last].iter().enumerate() {
            let Viterbi { blocks, best, next, trace, .. } = self;
            let trace = &mut trace[(t + 1) * heads..][..heads];
            let floor = if t < settled { 0 } else { least };
            let (next, trace) = (next.as_chunks_mut().0, trace.as_chunks_mut().0);
            least = advance(step, best, floor, blocks, *target, next, trace);
            std::mem::swap(&mut self.best, &mut self.next);
        }
        let mut state = self.last_state(targets[last], head);
        for t in (0..=last).rev() {
            states[t] = state;
            let continued = state >> step;
            state = (self.trace[t * heads + continued as usize] as u32) << (STATE_BITS - step)
                | continued;
        }
    }

    /// The state in which the best path ends: of all, or of those that end with `head`.
    fn last_state(&self, target: Target, head: Option<u32>) -> u32 {
        let step = self.trellis.step;
        let heads = STATES >> step;
        let (first, stride) = head.map_or((0, 1), |head| (head as usize, heads));
        let cost = |s: &usize| {
            let (head, high) = (s % heads, s / heads);
            let block = &self.blocks[(head / LANES) << step | high];
            let own = target.cost(block.pairs[head % LANES], block.squares[head % LANES]);
            self.best[s >> step] as u32 + own as u32
        };
        (first..STATES).step_by(stride).min_by_key(cost).unwrap_or(0) as u32
    }
}

/// One state further: adds the weights of the states with `best`, less `floor`, in front, and of
/// those that differ in their oldest bits only takes the cheapest to `next`, its oldest bits to
/// `trace`. Returns the least cost.
fn advance(
    step: u32,
    best: &[u16],
    floor: u16,
    blocks: &[Block],
    target: Target,
    next: &mut [[u16; LANES]],
    trace: &mut [[u8; LANES]],
) -> u16 {
    assert!(best.len() == STATES >> step && blocks.len() == STATES / LANES && step >= 4);
    assert!(next.len() == best.len() / LANES && trace.len() == next.len());
    #[cfg(target_arch = "x86_64")]
    {
        if x86::has_avx512() {
            // SAFETY: the machine has the instructions, as just asked.
            return unsafe { x86::advance_avx512(step, best, floor, blocks, target, next, trace) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            return unsafe { x86::advance_avx2(step, best, floor, blocks, target, next, trace) };
        }
    }
    portable(step, best, floor, blocks, target, next, trace)
}

/// Costs in front of the two halves of a block: of the states `(high * heads + at * LANES)..`, with
/// sixteen or more of the same head.
#[inline(always)]
fn in_front(step: u32, best: &[u16], floor: u16, at: usize, high: usize) -> [u16; 2] {
    let first = (high * best.len() + at * LANES) >> step;
    let second = (high * best.len() + at * LANES + LANES / 2) >> step;
    [best[first].saturating_sub(floor), best[second].saturating_sub(floor)]
}

/// The same on any processor.
fn portable(
    step: u32,
    best: &[u16],
    floor: u16,
    blocks: &[Block],
    target: Target,
    next: &mut [[u16; LANES]],
    trace: &mut [[u8; LANES]],
) -> u16 {
    let mut all = u16::MAX;
    for (at, (next, trace)) in next.iter_mut().zip(trace).enumerate() {
        (*next, *trace) = ([u16::MAX; LANES], [0; LANES]);
        for (high, block) in blocks[at << step..][..1 << step].iter().enumerate() {
            let before = in_front(step, best, floor, at, high);
            for i in 0..LANES {
                let own = target.cost(block.pairs[i], block.squares[i]);
                let cost = before[2 * i / LANES].saturating_add(own);
                if cost < next[i] {
                    (next[i], trace[i]) = (cost, high as u8);
                }
            }
        }
        all = next.iter().fold(all, |a, b| a.min(*b));
    }
    all
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Block, LANES, Target, in_front};
    use std::arch::x86_64::*;

    /// Whether the machine has what [`advance_avx512`] is compiled for.
    pub fn has_avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
    }

    /// As [`super::advance`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub fn advance_avx512(
        step: u32,
        best: &[u16],
        floor: u16,
        blocks: &[Block],
        target: Target,
        next: &mut [[u16; LANES]],
        trace: &mut [[u8; LANES]],
    ) -> u16 {
        let quarters = _mm512_set1_epi16(i16::from_le_bytes(target.quarters.map(|q| q as u8)));
        let base = _mm512_set1_epi16(target.base as i16);
        let mut all = _mm512_set1_epi16(-1);
        for (at, (next, trace)) in next.iter_mut().zip(trace).enumerate() {
            let (mut least, mut from) = (_mm512_set1_epi16(-1), _mm512_setzero_si512());
            for (high, block) in blocks[at << step..][..1 << step].iter().enumerate() {
                let [low, up] = in_front(step, best, floor, at, high).map(|c| c as i16);
                let before = _mm512_mask_set1_epi16(_mm512_set1_epi16(low), 0xffff_0000, up);
                // SAFETY: arrays of 64 bytes each.
                let (pairs, squares) = unsafe {
                    (
                        _mm512_load_si512(block.pairs.as_ptr().cast()),
                        _mm512_load_si512(block.squares.as_ptr().cast()),
                    )
                };
                let own = _mm512_sub_epi16(
                    _mm512_add_epi16(squares, base),
                    _mm512_maddubs_epi16(pairs, quarters),
                );
                let cost = _mm512_adds_epu16(own, before);
                let less = _mm512_cmplt_epu16_mask(cost, least);
                least = _mm512_min_epu16(least, cost);
                from = _mm512_mask_mov_epi16(from, less, _mm512_set1_epi16(high as i16));
            }
            all = _mm512_min_epu16(all, least);
            // SAFETY: arrays of 64 and 32 bytes.
            unsafe {
                _mm512_storeu_si512(next.as_mut_ptr().cast(), least);
                _mm256_storeu_si256(trace.as_mut_ptr().cast(), _mm512_cvtepi16_epi8(from));
            }
        }
        let mut lanes = [0u16; LANES];
        // SAFETY: an array of 64 bytes.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), all) };
        lanes.into_iter().fold(u16::MAX, u16::min)
    }

    /// The same by halves of a block.
    #[target_feature(enable = "avx2")]
    pub fn advance_avx2(
        step: u32,
        best: &[u16],
        floor: u16,
        blocks: &[Block],
        target: Target,
        next: &mut [[u16; LANES]],
        trace: &mut [[u8; LANES]],
    ) -> u16 {
        const HALF: usize = LANES / 2;
        let quarters = _mm256_set1_epi16(i16::from_le_bytes(target.quarters.map(|q| q as u8)));
        let base = _mm256_set1_epi16(target.base as i16);
        let mut lowest = u16::MAX;
        for (at, (next, trace)) in next.iter_mut().zip(trace).enumerate() {
            let (mut least, mut from) = ([_mm256_set1_epi16(-1); 2], [_mm256_setzero_si256(); 2]);
            for (high, block) in blocks[at << step..][..1 << step].iter().enumerate() {
                let before = in_front(step, best, floor, at, high);
                for half in 0..2 {
                    // SAFETY: halves of arrays of 64 bytes.
                    let (pairs, squares) = unsafe {
                        (
                            _mm256_load_si256(block.pairs[half * HALF..].as_ptr().cast()),
                            _mm256_load_si256(block.squares[half * HALF..].as_ptr().cast()),
                        )
                    };
                    let own = _mm256_sub_epi16(
                        _mm256_add_epi16(squares, base),
                        _mm256_maddubs_epi16(pairs, quarters),
                    );
                    let cost = _mm256_adds_epu16(own, _mm256_set1_epi16(before[half] as i16));
                    // A minimum that stays equal was not lessened. AVX2 has no comparison of
                    // unsigned numbers.
                    let lessened = _mm256_min_epu16(least[half], cost);
                    let same = _mm256_cmpeq_epi16(lessened, least[half]);
                    from[half] =
                        _mm256_blendv_epi8(_mm256_set1_epi16(high as i16), from[half], same);
                    least[half] = lessened;
                }
            }
            let mut highs = [0u16; LANES];
            for half in 0..2 {
                // SAFETY: halves of arrays of 64 bytes.
                unsafe {
                    _mm256_storeu_si256(next[half * HALF..].as_mut_ptr().cast(), least[half]);
                    _mm256_storeu_si256(highs[half * HALF..].as_mut_ptr().cast(), from[half]);
                }
            }
            *trace = highs.map(|h| h as u8);
            lowest = next.iter().fold(lowest, |a, b| a.min(*b));
        }
        lowest
    }
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
    /// Mean squared error on a unit Gaussian, of a million weights.
    const DISTORTION: [f64; 4] = [0.0702, 0.0356, 0.0183, 0.0049];

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

    /// The distortion of 60 tiles is within about 1 % of that of many. The ignored test below has a
    /// million weights.
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

    /// The path that the circle's first and last bits agree on is the only thing that is
    /// approximate.
    #[test]
    fn a_path_is_the_best_one_with_its_ends() {
        let trellis = Code::T4.trellis().unwrap();
        let x = gaussian(WEIGHTS, 5);
        let targets = tile(&x, trellis.deviation()).map(|t| (t * 4.0).round());
        let pairs = targets.as_chunks::<2>().0;
        let rounded: Vec<Target> =
            pairs.iter().map(|pair| Target::new(&pair.map(|q| q / 4.0))).collect();
        let mut states = [0; STEPS];
        Viterbi::new(trellis).path(&rounded, Some(17), &mut states);
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
    fn every_instruction_set_finds_the_same_path() {
        for code in ALL {
            let Viterbi { trellis, blocks, .. } = Viterbi::new(code.trellis().unwrap());
            let heads = STATES >> trellis.step;
            // The cheapest ones are below the floor, the dearest ones saturate.
            let best: Vec<u16> = (0..heads).map(|i| (100 + i * 7919 % 65_436) as u16).collect();
            type Advance<'a> = &'a dyn Fn(&mut [[u16; LANES]], &mut [[u8; LANES]]) -> u16;
            let found = |f: Advance<'_>| {
                let (mut next, mut trace) = (vec![0u16; heads], vec![0u8; heads]);
                let least = f(next.as_chunks_mut().0, trace.as_chunks_mut().0);
                (next, trace, least)
            };
            let (step, floor, target) = (trellis.step, 120, Target::new(&[-40.0, 19.3]));
            let want =
                found(&|next, trace| portable(step, &best, floor, &blocks, target, next, trace));
            if is_x86_feature_detected!("avx2") {
                // SAFETY: the machine has the instructions.
                let got = found(&|next, trace| unsafe {
                    x86::advance_avx2(step, &best, floor, &blocks, target, next, trace)
                });
                assert!(got == want, "{code:?}, AVX2");
            }
            if x86::has_avx512() {
                // SAFETY: the machine has the instructions.
                let got = found(&|next, trace| unsafe {
                    x86::advance_avx512(step, &best, floor, &blocks, target, next, trace)
                });
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
