//! Operations of an instruction set that the trellis kernels use, and their version in plain Rust.

/// Lanes of 32 bits. The methods cost nothing extra only inside a function that is compiled for the
/// instruction set.
pub trait Words: Copy {
    /// 16, or fewer if a line needs several vectors.
    const LANES: usize;
    fn zero() -> Self;
    /// Returns the lanes of a line from `part * LANES` on, and the lanes before each of them (lane
    /// 15 comes before lane 0).
    /// # Safety
    /// Sixteen dwords at `line`, aligned to 64 bytes.
    unsafe fn load(line: *const u8, part: usize) -> (Self, Self);
    /// Adds the sums in `self` to those at `p`.
    /// # Safety
    /// `LANES` writable dwords at `p`.
    unsafe fn add_to(self, p: *mut f32);
    fn add(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn and(self, mask: u32) -> Self;
    /// Shifts by less than 32 bits.
    fn left(self, bits: u32) -> Self;
    fn right(self, bits: u32) -> Self;
    /// Multiplies modulo 2^32.
    fn times(self, factor: u32) -> Self;
    /// Returns the same dword in each lane.
    fn splat(dword: i32) -> Self;
    /// Selects bytes of a splat by their indices, the same four in all lanes.
    fn pick(self, places: [u8; 4]) -> Self;
    /// Adds, lane by lane, the four products of unsigned bytes (below 64) with signed bytes of `x`
    /// (-127..=127).
    fn dot(self, bytes: Self, x: Self) -> Self;
    /// Adds four products of bytes below 16 like [`dot`](Self::dot), to the `sums` in alternation.
    #[inline(always)]
    fn dot_four<const SETS: usize>(sums: &mut [Self; SETS], bytes: [Self; 4], x: [Self; 4]) {
        dot_in_turn(sums, bytes, x);
    }
    /// Returns the sums of the four bytes (below 16) of each of four words, lane by lane, one byte
    /// each.
    fn byte_sums(words: [Self; 4]) -> Self;
}

/// Adds four products, one by one, to the `sums` in alternation.
#[inline(always)]
pub fn dot_in_turn<W: Words, const SETS: usize>(sums: &mut [W; SETS], bytes: [W; 4], x: [W; 4]) {
    for i in 0..4 {
        sums[i % SETS] = sums[i % SETS].dot(bytes[i], x[i]);
    }
}

/// Operations for any processor.
impl Words for [u32; 16] {
    const LANES: usize = 16;
    #[inline(always)]
    fn zero() -> Self {
        [0; 16]
    }
    #[inline(always)]
    unsafe fn load(line: *const u8, _part: usize) -> (Self, Self) {
        // SAFETY: the caller upholds the contract.
        let own = unsafe { line.cast::<[u32; 16]>().read() };
        (own, std::array::from_fn(|i| own[(i + 15) % 16]))
    }
    #[inline(always)]
    unsafe fn add_to(self, p: *mut f32) {
        // SAFETY: the caller upholds the contract.
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
