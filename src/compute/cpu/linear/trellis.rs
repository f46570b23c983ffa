//! Trellis codes times a few rows, written once over sixteen lanes of 32 bits: the rows of a tile.
//!
//! A step's dwords hold the next bits of sixteen rows. The bits in front of a row's first windows are the row's before it, one
//! lane lower. Each window gives the four bytes of one state by a multiplication and a mask, already in the form that the dot
//! product instructions take; they are made once a step and meet all rows of activations.

use super::pack::LINE;
use super::{Panel, TILE};
use crate::tensor::Code;
use crate::tensor::trellis::{self, STATE_BITS, Trellis};

/// Sixteen lanes of 32 bits. Implementations are zero-cost only inside a function compiled for their instruction set.
pub trait Words: Copy {
    fn zero() -> Self;
    /// # Safety
    /// Sixteen dwords at `p`, aligned to 64 bytes.
    unsafe fn load(p: *const u8) -> Self;
    /// Adds sixteen sums to those at `p`.
    /// # Safety
    /// Sixteen writable dwords at `p`.
    unsafe fn add_to(self, p: *mut f32);
    fn add(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn and(self, mask: u32) -> Self;
    /// By less than 32.
    fn left(self, bits: u32) -> Self;
    fn right(self, bits: u32) -> Self;
    /// Modulo 2^32.
    fn times(self, factor: u32) -> Self;
    /// Lane i from lane i - 1, lane 0 from lane 15.
    fn turned(self) -> Self;
    /// The same four bytes in each lane.
    fn splat(bytes: i32) -> Self;
    /// Bytes of each lane by their places in it, the same four places in all lanes.
    fn pick(self, places: [u8; 4]) -> Self;
    /// Adds, lane by lane, the four products of unsigned bytes below 128 with signed bytes of `x` (-127..=127).
    fn dot(self, bytes: Self, x: Self) -> Self;
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

/// `bits` bits (12 at most) of each lane's string from bit `at` on; what stands above them is not cleared.
#[inline(always)]
fn bits<W: Words>(words: &[W], at: u32, bits: u32) -> W {
    let (word, end) = ((at / 32) as usize, at % 32 + bits);
    if end <= 32 { words[word].right(32 - end) } else { words[word].left(end - 32).or(words[word + 1].right(64 - end)) }
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

/// Adds a panel's products with `R` rows to `acc`, `H` halves of the tile at once; raw sums are of q + offset.
///
/// # Safety
/// The panel and `acc` are as [`Panel`] and [`super::PanelFn`] say; the instructions of `W` exist.
#[inline(always)]
pub unsafe fn tiles<W: Words, const CODE: usize, const R: usize, const H: usize>(panel: &Panel, acc: *mut f32) {
    const LANES: usize = TILE / 2;
    let t = const { shape(CODE) };
    let (dwords, parts) = const { step(CODE) };
    for first in (0..2).step_by(H) {
        // Two sums an output where few rows would wait for each other.
        let mut sums = [[[W::zero(); 2]; H]; R];
        for at in 0..panel.steps {
            let data = panel.data.wrapping_add(at * dwords * 2 * LINE);
            if first == 0 {
                panel.fetch(at * dwords * 2 * LINE, dwords * 2 * LINE);
            }
            let mut own = [[W::zero(); 5]; H];
            let mut before = [[W::zero(); 5]; H];
            for h in 0..H {
                for d in 0..dwords {
                    // SAFETY: the panel has this step.
                    own[h][d] = unsafe { W::load(data.add(d * 2 * LINE + (first + h) * LINE)) };
                    before[h][d] = own[h][d].turned();
                }
            }
            unrolled!(PART in [0 1 2 3] {
                if PART < parts {
                    let start = PART as u32 * t.row_bits();
                    // Four columns: one broadcast of activations.
                    unrolled!(FOUR in [0 1 2 3] {
                        let column = (at * parts + PART) * trellis::TILE + 4 * FOUR;
                        let states = 4 / t.weights;
                        let mut bytes = [[W::zero(); 4]; H];
                        for h in 0..H {
                            unrolled!(S in [0 1 2 3] {
                                if S < states {
                                    let i = (FOUR * states + S) as u32;
                                    bytes[h][S] = state::<W, CODE>(&own[h][..dwords], &before[h][..dwords], start, i);
                                }
                            });
                        }
                        for (r, sums) in sums.iter_mut().enumerate() {
                            // SAFETY: every row has the columns of this step.
                            let x = unsafe { panel.x.add(r * panel.x_stride + column).cast::<i32>().read_unaligned() };
                            let x = W::splat(x);
                            unrolled!(S in [0 1 2 3] {
                                if S < states {
                                    const LOW: [u8; 2] = [(2 * S) as u8 % 4, (2 * S) as u8 % 4 + 1];
                                    let x = match t.weights {
                                        1 => x.pick([S as u8; 4]),
                                        _ => x.pick([LOW[0], LOW[0], LOW[1], LOW[1]]),
                                    };
                                    for h in 0..H {
                                        sums[h][S % 2] = sums[h][S % 2].dot(bytes[h][S], x);
                                    }
                                }
                            });
                        }
                    });
                }
            });
        }
        for (r, sums) in sums.iter().enumerate() {
            for (h, sums) in sums.iter().enumerate() {
                // SAFETY: `acc` has R rows of two halves.
                unsafe { sums[0].add(sums[1]).add_to(acc.add(r * TILE + (first + h) * LANES)) };
            }
        }
    }
}

/// Any processor.
impl Words for [u32; 16] {
    #[inline(always)]
    fn zero() -> Self {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { p.cast::<[u32; 16]>().read() }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        // SAFETY: passed on to the caller.
        let to = unsafe { &mut *p.cast::<[u32; 16]>() };
        *to = self.add(*to);
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i].wrapping_add(other[i]))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        std::array::from_fn(|i| self[i] | other[i])
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        self.map(|v| v & mask)
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        self.map(|v| v << bits)
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        self.map(|v| v >> bits)
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        self.map(|v| v.wrapping_mul(factor))
    }
    #[inline(always)]
    fn turned(self) -> Self {
        std::array::from_fn(|i| self[(i + 15) % 16])
    }
    #[inline(always)]
    fn splat(bytes: i32) -> Self {
        [bytes as u32; 16]
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        self.map(|v| u32::from_le_bytes(places.map(|p| v.to_le_bytes()[p as usize])))
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        std::array::from_fn(|i| {
            let pairs = bytes[i].to_le_bytes().into_iter().zip(x[i].to_le_bytes());
            let sum: i32 = pairs.map(|(b, x)| b as i32 * (x as i8) as i32).sum();
            self[i].wrapping_add(sum as u32)
        })
    }
}
