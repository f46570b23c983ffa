//! [`Words`] in NEON with dotprod.

use super::words::Words;
use crate::compute::cpu::simd::intrinsics;
use std::arch::aarch64::*;
use std::arch::asm;

/// A quarter of a line.
#[derive(Clone, Copy)]
pub struct Quad(uint32x4_t);

impl Words for Quad {
    const LANES: usize = 4;
    #[inline(always)]
    fn zero() -> Self {
        intrinsics!(Quad(vdupq_n_u32(0)))
    }
    #[inline(always)]
    unsafe fn load(line: *const u8, part: usize) -> (Self, Self) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe {
            let [own, before] =
                [part, (part + 3) % 4].map(|i| vld1q_u32(line.cast::<u32>().add(4 * i)));
            (Quad(own), Quad(vextq_u32::<3>(before, own)))
        }
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        // SAFETY: the caller upholds the contract; otherwise as in `intrinsics`.
        unsafe { vst1q_u32(p.cast(), vaddq_u32(vld1q_u32(p.cast()), self.0)) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        intrinsics!(Quad(vaddq_u32(self.0, other.0)))
    }
    #[inline(always)]
    fn or(self, other: Self) -> Self {
        intrinsics!(Quad(vorrq_u32(self.0, other.0)))
    }
    #[inline(always)]
    fn and(self, mask: u32) -> Self {
        intrinsics!(Quad(vandq_u32(self.0, vdupq_n_u32(mask))))
    }
    #[inline(always)]
    fn left(self, bits: u32) -> Self {
        intrinsics!(Quad(vshlq_u32(self.0, vdupq_n_s32(bits as i32))))
    }
    #[inline(always)]
    fn right(self, bits: u32) -> Self {
        intrinsics!(Quad(vshlq_u32(self.0, vdupq_n_s32(-(bits as i32)))))
    }
    #[inline(always)]
    fn times(self, factor: u32) -> Self {
        intrinsics!(Quad(vmulq_n_u32(self.0, factor)))
    }
    #[inline(always)]
    fn splat(dword: i32) -> Self {
        intrinsics!(Quad(vdupq_n_u32(dword as u32)))
    }
    #[inline(always)]
    fn pick(self, places: [u8; 4]) -> Self {
        intrinsics! {
            let places = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(places)));
            Quad(vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(self.0), places)))
        }
    }
    #[inline(always)]
    fn dot(self, bytes: Self, x: Self) -> Self {
        intrinsics! {
            let [sums, bytes, x] = [self, bytes, x].map(|v| vreinterpretq_s32_u32(v.0));
            let [bytes, x] = [bytes, x].map(|v| vreinterpretq_s8_s32(v));
            Quad(vreinterpretq_u32_s32(dot(sums, bytes, x)))
        }
    }
    #[inline(always)]
    fn byte_sums(words: [Self; 4]) -> Self {
        // Adds pairs of bytes of two words in alternation, then fours.
        let halves = |a: Self, b: Self| {
            intrinsics! {
                let [a, b] = [a, b].map(|v| vreinterpretq_u8_u32(v.0));
                vreinterpretq_u16_u8(vaddq_u8(vtrn1q_u8(a, b), vtrn2q_u8(a, b)))
            }
        };
        let [a, b, c, d] = words;
        let (ab, cd) = (halves(a, b), halves(c, d));
        intrinsics! {
            let sums = vaddq_u16(vtrn1q_u16(ab, cd), vtrn2q_u16(ab, cd));
            Quad(vreinterpretq_u32_u16(sums))
        }
    }
}

/// Adds to each sum the products of its four bytes of `w` and `x`.
///
/// # Safety
/// The machine has dotprod, for which the caller is compiled.
#[inline(always)]
pub unsafe fn dot(sums: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    let mut sums = sums;
    // SAFETY: the caller upholds the contract, and the instruction only uses registers.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums,
            in(vreg) w,
            in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}
