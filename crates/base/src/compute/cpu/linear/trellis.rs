//! Trellis codes times a few rows, written once over vectors of 32-bit lanes: rows of a tile of
//! codes.
//!
//! A step's dwords hold the next bits of sixteen rows. The bits in front of a row's first windows
//! are the row's before it, one lane lower. Each window gives the four bytes of nibbles of two
//! weights by a multiplication, a shift and masks. They are made once a step and meet all rows of
//! activations in one of two [`Form`]s. Adding the nibbles up to weights costs a little once and
//! saves most of the products of every row.

use super::panel::Panel;
use super::tile::{LINE, TILE};
use super::words::Words;
use crate::tensor::Code;
use crate::tensor::trellis::{self, STATE_BITS, Trellis};

/// How decoded weights meet the activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// The nibbles of each weight, a byte each, times its activation, repeated.
    Nibbles,
    /// Four weights of one unsigned byte each.
    Bytes,
}

/// The codes, by the number that kernels know them by.
const CODES: [Code; 4] = [Code::T2, Code::T25, Code::T3, Code::T4];

const fn shape(number: usize) -> Trellis {
    match CODES[number].trellis() {
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

/// `bits` bits (16 at most) of each lane's string from bit `at` on; what stands above them is not
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

/// The word of state `i` of sixteen columns that begin at bit `start`.
#[inline(always)]
fn word<W: Words, const CODE: usize>(own: &[W], before: &[W], start: u32, i: u32) -> W {
    let t = const { shape(CODE) };
    let end = t.step * (i + 1);
    let window = if end >= STATE_BITS {
        bits(own, start + end - STATE_BITS, STATE_BITS).and((1 << STATE_BITS) - 1)
    } else {
        let n = STATE_BITS - end;
        let high = bits(before, start + t.row_bits() - n, n).and((1 << n) - 1).left(end);
        high.or(bits(own, start, end).and((1 << end) - 1))
    };
    window.times(t.multiplier)
}

const NIBBLES: u32 = 0x0f0f_0f0f;

/// Loads the words of a step for `V` vectors of outputs from `first`, each with the words before
/// it.
///
/// # Safety
/// `data` has a step of `dwords` pairs of lines. The instructions of `W` exist.
#[inline(always)]
unsafe fn words_of_step<W: Words, const V: usize>(
    data: *const u8,
    first: usize,
    dwords: usize,
) -> ([[W; 5]; V], [[W; 5]; V]) {
    let mut own = [[W::zero(); 5]; V];
    let mut before = [[W::zero(); 5]; V];
    for v in 0..V {
        let lane = (first + v) * W::LANES;
        for d in 0..dwords {
            // SAFETY: the caller's promise.
            let line = unsafe { data.add(d * 2 * LINE + lane / 16 * LINE) };
            // SAFETY: a line of the step.
            (own[v][d], before[v][d]) = unsafe { W::load(line, lane % 16 / W::LANES) };
        }
    }
    (own, before)
}

/// Adds a panel's products with `R` rows to `acc`; raw sums are of q + offset. `V` vectors of
/// outputs are worked on at once, with `SETS` (1 or 2) sums an output where few rows would wait for
/// each other; `FORM` is a [`Form`].
///
/// # Safety
/// The panel and `acc` are as [`Panel`] and [`super::panel::PanelFn`] say. The instructions of `W`
/// exist.
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
    let form = const { [Form::Nibbles, Form::Bytes][FORM] };
    let (dwords, parts) = const { step(CODE) };
    for first in (0..TILE / W::LANES).step_by(V) {
        let mut sums = [[[W::zero(); SETS]; V]; R];
        for at in 0..panel.steps {
            let data = panel.data.wrapping_add(at * dwords * 2 * LINE);
            if first == 0 {
                panel.fetch(at * dwords * 2 * LINE, dwords * 2 * LINE);
            }
            // SAFETY: the panel has this step.
            let (own, before) = unsafe { words_of_step::<W, V>(data, first, dwords) };
            unrolled!(PART in [0 1 2 3] {
                if PART < parts {
                    let start = PART as u32 * t.row_bits();
                    // Four columns at a time.
                    unrolled!(FOUR in [0 1 2 3] {
                        let mut w = [[W::zero(); 4]; V];
                        for v in 0..V {
                            unrolled!(S in [0 1] {
                                let i = (2 * FOUR + S) as u32;
                                let words = (&own[v][..dwords], &before[v][..dwords]);
                                let word = word::<W, CODE>(words.0, words.1, start, i);
                                w[v][2 * S] = word.and(NIBBLES);
                                w[v][2 * S + 1] = word.right(4).and(NIBBLES);
                            });
                            if form == Form::Bytes {
                                w[v][0] = W::byte_sums(w[v]);
                            }
                        }
                        for (r, sums) in sums.iter_mut().enumerate() {
                            let column = (at * parts + PART) * trellis::TILE + 4 * FOUR;
                            // SAFETY: every row has the columns of this step.
                            let x = unsafe {
                                let x = panel.x.add(r * panel.x_stride + column);
                                x.cast::<i32>().read_unaligned()
                            };
                            let x = W::splat(x);
                            if form == Form::Bytes {
                                for v in 0..V {
                                    sums[v][FOUR % SETS] = sums[v][FOUR % SETS].dot(w[v][0], x);
                                }
                                continue;
                            }
                            let x = [0, 1, 2, 3].map(|place| x.pick([place; 4]));
                            for v in 0..V {
                                W::dot_four(&mut sums[v], w[v], x);
                            }
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
