//! Trellis codes times a few rows, written once over vectors of 32-bit lanes: rows of a tile of
//! codes.
//!
//! A step's dwords hold the next bits of sixteen rows. The bits in front of a row's first windows
//! are the row's before it, one lane lower. Each window gives the four bytes of one state by a
//! multiplication and a mask; they are made once a step and meet all rows of activations, in one of
//! three [`Form`]s: adding the bytes up to weights costs a little once and saves most of the
//! products of every row.

use super::pack::LINE;
use super::words::Words;
use super::{Panel, TILE};
use crate::tensor::Code;
use crate::tensor::trellis::{self, STATE_BITS, Trellis};

/// How decoded weights meet the activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// The bytes of each state times its one or two activations, repeated.
    States,
    /// Pairs of 16-bit weights.
    Pairs,
    /// Four weights of one unsigned byte each; only where a state gives two weights.
    Bytes,
}

/// The codes, by the number that kernels know them by.
const CODES: [Code; 4] = [Code::T2, Code::T25, Code::T3, Code::T4];

const fn shape(number: usize) -> Trellis {
    match Trellis::of(CODES[number]) {
        Some(trellis) => trellis,
        None => unreachable!(),
    }
}

/// Dwords of a row in a step, and runs of sixteen columns.
const fn step(number: usize) -> (usize, usize) {
    [(1, 1), (5, 4), (3, 2), (2, 1)][number]
}

/// Runs the body with a constant for each number, so that shifts are by constants.
macro_rules! unrolled {
    ($i:ident in [$($n:literal)*] $body:block) => {$({ const $i: usize = $n; $body })*};
}

/// `bits` bits (12 at most) of each lane's string from bit `at` on; what stands above them is not
/// cleared.
#[inline(always)]
fn bits<W: Words>(words: &[W], at: u32, bits: u32) -> W {
    let (word, end) = ((at / 32) as usize, at % 32 + bits);
    if end <= 32 {
        words[word].right(32 - end)
    } else {
        words[word].left(end - 32).or(words[word + 1].right(64 - end))
    }
}

/// The bytes of state `i` of sixteen columns that begin at bit `start`.
#[inline(always)]
fn state<W: Words, const CODE: usize>(own: &[W], before: &[W], start: u32, i: u32) -> W {
    let t = const { shape(CODE) };
    let end = t.step * (i + 1);
    let window = if end >= STATE_BITS {
        bits(own, start + end - STATE_BITS, STATE_BITS).and((1 << STATE_BITS) - 1)
    } else {
        let n = STATE_BITS - end;
        let high = bits(before, start + t.row_bits() - n, n).and((1 << n) - 1).left(end);
        high.or(bits(own, start, end).and((1 << end) - 1))
    };
    window.times(t.multiplier).and(0x7f7f_7f7f)
}

/// Columns that meet all outputs of a tile before the next ones do: their activations, widened,
/// stay in the L1 cache.
const CHUNK: usize = 256;

/// Adds a panel's products with `R` rows to `acc`; raw sums are of q + offset. `V` vectors of
/// outputs are worked on at once, with `SETS` (1 or 2) sums an output where few rows would wait for
/// each other; `FORM` is a [`Form`].
///
/// # Safety
/// The panel and `acc` are as [`Panel`] and [`super::PanelFn`] say; the instructions of `W` exist.
#[inline(always)]
pub unsafe fn tiles<
    W: Words,
    const CODE: usize,
    const R: usize,
    const V: usize,
    const SETS: usize,
    const FORM: usize,
>(
    panel: &Panel,
    acc: *mut f32,
) {
    let t = const { shape(CODE) };
    let form = const { [Form::States, Form::Pairs, Form::Bytes][FORM] };
    let (dwords, parts) = const { step(CODE) };
    let chunk =
        if form == Form::Pairs { CHUNK / (parts * trellis::TILE) } else { panel.steps.max(1) };
    let mut wide = [[0i16; CHUNK]; R];
    for from in (0..panel.steps).step_by(chunk) {
        let to = panel.steps.min(from + chunk);
        if form == Form::Pairs {
            for (r, wide) in wide.iter_mut().enumerate() {
                let n = (to - from) * parts * trellis::TILE;
                // SAFETY: every row has the columns of these steps.
                let x = unsafe {
                    let x = panel.x.add(r * panel.x_stride + from * parts * trellis::TILE);
                    std::slice::from_raw_parts(x.cast::<i8>(), n)
                };
                wide.iter_mut().zip(x).for_each(|(wide, x)| *wide = *x as i16);
            }
        }
        for first in (0..TILE / W::LANES).step_by(V) {
            let mut sums = [[[W::zero(); SETS]; V]; R];
            for at in from..to {
                let data = panel.data.wrapping_add(at * dwords * 2 * LINE);
                if first == 0 {
                    panel.fetch(at * dwords * 2 * LINE, dwords * 2 * LINE);
                }
                let mut own = [[W::zero(); 5]; V];
                let mut before = [[W::zero(); 5]; V];
                for v in 0..V {
                    let lane = (first + v) * W::LANES;
                    for d in 0..dwords {
                        // SAFETY: the panel has this step.
                        let line = unsafe { data.add(d * 2 * LINE + lane / 16 * LINE) };
                        // SAFETY: a line of the step.
                        (own[v][d], before[v][d]) = unsafe { W::load(line, lane % 16 / W::LANES) };
                    }
                }
                unrolled!(PART in [0 1 2 3] {
                    if PART < parts {
                        let start = PART as u32 * t.row_bits();
                        // Four columns at a time.
                        unrolled!(FOUR in [0 1 2 3] {
                            let states = 4 / t.weights;
                            let mut w = [[W::zero(); 4]; V];
                            for v in 0..V {
                                unrolled!(S in [0 1 2 3] {
                                    if S < states {
                                        let i = (FOUR * states + S) as u32;
                                        w[v][S] = state::<W, CODE>(&own[v][..dwords], &before[v][..dwords], start, i);
                                    }
                                });
                                match (form, t.weights) {
                                    (Form::States, _) => {}
                                    (Form::Pairs, 1) => {
                                        w[v][0] = w[v][0].sums().or(w[v][1].sums().left(16));
                                        w[v][1] = w[v][2].sums().or(w[v][3].sums().left(16));
                                    }
                                    (Form::Pairs, _) => (w[v][0], w[v][1]) = (w[v][0].pair_sums(), w[v][1].pair_sums()),
                                    (Form::Bytes, _) => w[v][0] = w[v][0].pair_sums().even_bytes(w[v][1].pair_sums()),
                                }
                            }
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let column = (at * parts + PART) * trellis::TILE + 4 * FOUR;
                                if form == Form::Pairs {
                                    let column = column - from * parts * trellis::TILE;
                                    for pair in 0..2 {
                                        // SAFETY: inside the chunk.
                                        let x = unsafe {
                                            wide[r].as_ptr().add(column + 2 * pair).cast::<i32>().read_unaligned()
                                        };
                                        for v in 0..V {
                                            sums[v][pair % SETS] = sums[v][pair % SETS].dot_wide(w[v][pair], W::splat(x));
                                        }
                                    }
                                    continue;
                                }
                                // SAFETY: every row has the columns of this step.
                                let x = unsafe { panel.x.add(r * panel.x_stride + column).cast::<i32>().read_unaligned() };
                                let x = W::splat(x);
                                if form == Form::Bytes {
                                    for v in 0..V {
                                        sums[v][FOUR % SETS] = sums[v][FOUR % SETS].dot(w[v][0], x);
                                    }
                                    continue;
                                }
                                unrolled!(S in [0 1 2 3] {
                                    if S < states {
                                        const LOW: [u8; 2] = [(2 * S) as u8 % 4, (2 * S) as u8 % 4 + 1];
                                        let x = match t.weights {
                                            1 => x.pick([S as u8; 4]),
                                            _ => x.pick([LOW[0], LOW[0], LOW[1], LOW[1]]),
                                        };
                                        for v in 0..V {
                                            sums[v][S % SETS] = sums[v][S % SETS].dot(w[v][S], x);
                                        }
                                    }
                                });
                            }
                        });
                    }
                });
            }
            for (r, sums) in sums.iter().enumerate() {
                for (v, sums) in sums.iter().enumerate() {
                    let sum = if SETS == 2 { sums[0].add(sums[SETS - 1]) } else { sums[0] };
                    // SAFETY: `acc` has R rows of a tile's outputs.
                    unsafe { sum.add_to(acc.add(r * TILE + (first + v) * W::LANES)) };
                }
            }
        }
    }
}
