//! The operations of an instruction set that the trellis kernels use, and their version in plain
//! Rust.

/// Lanes of 32 bits. Implementations are zero-cost only inside a function compiled for their
/// instruction set.
pub trait Words: Copy {
    /// 16, or fewer where a line takes several vectors.
    const LANES: usize;
    fn zero() -> Self;
    /// The lanes of a line from `part * LANES` on, and the lanes one lower (that of lane 0 is lane
    /// 15).
    /// # Safety
    /// Sixteen dwords at `line`, aligned to 64 bytes.
    unsafe fn load(line: *const u8, part: usize) -> (Self, Self);
    /// Adds the sums to those at `p`.
    /// # Safety
    /// `LANES` writable dwords at `p`.
    unsafe fn add_to(self, p: *mut f32);
    fn add(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn and(self, mask: u32) -> Self;
    /// By less than 32.
    fn left(self, bits: u32) -> Self;
    fn right(self, bits: u32) -> Self;
    /// Modulo 2^32.
    fn times(self, factor: u32) -> Self;
    /// The same dword in each lane.
    fn splat(dword: i32) -> Self;
    /// Bytes of a splat by their places, the same four places in all lanes.
    fn pick(self, places: [u8; 4]) -> Self;
    /// Adds, lane by lane, the four products of unsigned bytes (below 64) with signed bytes of `x`
    /// (-127..=127).
    fn dot(self, bytes: Self, x: Self) -> Self;
    /// Adds four products of bytes below 16 as [`dot`](Self::dot) does, to `sums` in turn.
    #[inline(always)]
    fn dot_four<const SETS: usize>(sums: &mut [Self; SETS], bytes: [Self; 4], x: [Self; 4]) {
        for i in 0..4 {
            sums[i % SETS] = sums[i % SETS].dot(bytes[i], x[i]);
        }
    }
    /// The sums of the four bytes (below 16) of each of four words, lane by lane, a byte each.
    fn byte_sums(words: [Self; 4]) -> Self;
}

/// Any processor.
impl Words for [u32; 16] {
    const LANES: usize = 16;
    #[inline(always)]
    fn zero() -> Self {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load(line: *const u8, _part: usize) -> (Self, Self) {
        // SAFETY: passed on to the caller.
        let own = unsafe { line.cast::<[u32; 16]>().read() };
        (own, std::array::from_fn(|i| own[(i + 15) % 16]))
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
    #[inline(always)]
    fn byte_sums(words: [Self; 4]) -> Self {
        let sum = |word: u32| word.to_le_bytes().iter().sum::<u8>();
        std::array::from_fn(|i| u32::from_le_bytes(words.map(|word| sum(word[i]))))
    }
}
