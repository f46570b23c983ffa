//! Steps of the search for processors with AVX2 and AVX-512.

use super::{LANES, SearchStep, StateBlock, Trellis, cheapest_of, in_front};
use std::arch::x86_64::*;
use std::array::from_fn;

/// Returns whether the machine has the instructions that [`advance_avx512`] needs.
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// Like [`super::cheapest`].
#[target_feature(enable = "avx2")]
pub fn cheapest_avx2(trellis: Trellis, costs: &[u16], quarters: [i8; 2], head: u32) -> u32 {
    cheapest_of(trellis, costs, quarters, head)
}

/// Packs the two costs into one value, to be repeated in a vector.
#[inline(always)]
fn both(front: &[u16; 2]) -> i32 {
    front[0] as i32 | (front[1] as i32) << 16
}

/// Like [`super::advance`], which checks the lengths.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn advance_avx512<const N: usize>(
    step: u32,
    blocks: &[StateBlock],
    steps: [SearchStep<'_>; N],
) -> [u16; N] {
    let quarters: [_; N] =
        from_fn(|n| _mm512_set1_epi16(i16::from_le_bytes(steps[n].quarters.map(|q| q as u8))));
    let lanes: [u16; LANES] = from_fn(|head| (head % 16 * 2 + head / 16) as u16);
    // SAFETY: an array of 64 bytes.
    let heads = unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) };
    let mut all = [_mm512_set1_epi16(-1); N];
    for at in 0..blocks.len() >> step {
        let mut least = [_mm512_set1_epi16(-1); N];
        let (mut front, stride) = in_front(step, at);
        for block in &blocks[at << step..][..1 << step] {
            // SAFETY: arrays of 64 bytes each; the caller checked the lengths.
            unsafe {
                let pairs = _mm512_load_si512(block.pairs.as_ptr().cast());
                let squares = _mm512_load_si512(block.squares.as_ptr().cast());
                for n in 0..N {
                    let before = both(steps[n].front.get_unchecked(front));
                    let product = _mm512_maddubs_epi16(pairs, quarters[n]);
                    let own = _mm512_sub_epi16(squares, product);
                    let cost = _mm512_add_epi16(_mm512_set1_epi32(before), own);
                    least[n] = _mm512_min_epu16(least[n], cost);
                }
            }
            front += stride;
        }
        for n in 0..N {
            all[n] = _mm512_min_epu16(all[n], least[n]);
            let least = _mm512_permutexvar_epi16(heads, least[n]);
            // SAFETY: an array of 64 bytes.
            unsafe { _mm512_storeu_si512(steps[n].next[at].as_mut_ptr().cast(), least) };
        }
    }
    all.map(|all| {
        let mut lanes = [0u16; LANES];
        // SAFETY: an array of 64 bytes.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), all) };
        lanes.into_iter().fold(u16::MAX, u16::min)
    })
}

/// Like [`advance_avx512`], by halves of a block.
#[target_feature(enable = "avx2")]
pub unsafe fn advance_avx2<const N: usize>(
    step: u32,
    blocks: &[StateBlock],
    steps: [SearchStep<'_>; N],
) -> [u16; N] {
    let quarters: [_; N] =
        from_fn(|n| _mm256_set1_epi16(i16::from_le_bytes(steps[n].quarters.map(|q| q as u8))));
    let none = _mm256_set1_epi16(-1);
    let mut all = [none; N];
    for at in 0..blocks.len() >> step {
        let mut found = [[none; N]; 2];
        for (half, least) in found.iter_mut().enumerate() {
            let (mut front, stride) = in_front(step, at);
            for block in &blocks[at << step..][..1 << step] {
                // SAFETY: halves of arrays of 64 bytes; the caller checked the lengths.
                unsafe {
                    let pairs = block.pairs.as_ptr().cast::<__m256i>().add(half);
                    let squares = block.squares.as_ptr().cast::<__m256i>().add(half);
                    let (pairs, squares) = (_mm256_load_si256(pairs), _mm256_load_si256(squares));
                    for n in 0..N {
                        let before = both(steps[n].front.get_unchecked(front));
                        let product = _mm256_maddubs_epi16(pairs, quarters[n]);
                        let own = _mm256_sub_epi16(squares, product);
                        let cost = _mm256_add_epi16(_mm256_set1_epi32(before), own);
                        least[n] = _mm256_min_epu16(least[n], cost);
                    }
                }
                front += stride;
            }
        }
        for n in 0..N {
            let [a, b] = found.map(|least| least[n]);
            all[n] = _mm256_min_epu16(all[n], _mm256_min_epu16(a, b));
            // The even lanes, then the odd ones.
            let low = |x| _mm256_blend_epi16::<0xaa>(x, _mm256_setzero_si256());
            let even = _mm256_packus_epi32(low(a), low(b));
            let odd = _mm256_packus_epi32(_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b));
            let next = steps[n].next[at].as_mut_ptr().cast::<__m256i>();
            // SAFETY: two halves of an array of 64 bytes.
            unsafe {
                _mm256_storeu_si256(next, _mm256_permute4x64_epi64::<0b11_01_10_00>(even));
                _mm256_storeu_si256(next.add(1), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd));
            }
        }
    }
    all.map(|all| {
        let mut lanes = [0u16; LANES / 2];
        // SAFETY: an array of 32 bytes.
        unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), all) };
        lanes.into_iter().fold(u16::MAX, u16::min)
    })
}
