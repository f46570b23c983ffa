//! Layout of the objects that a core reads, and of the result that it writes.
//!
//! `npu-kernels/flash_partial.h` has the same layout in C++, and `manifest.txt` records this
//! version for built arrays. A core reads objects of 8 KB: a header, the queries, then tiles of
//! keys and values. Two cores, called a *pair*, read the objects of one stream in alternation. The
//! objects of a pair are adjacent in memory, so every transfer is linear.

use gemma_base::kv::PAGE;
use half::bf16;

pub const MAGIC: u32 = 0x3150_4647;
/// Version of everything in this file.
pub const ABI: u32 = 1;
/// Bytes of an object.
pub const OBJECT: usize = 8192;
/// Number of limits in a header, and of maxima and sums in a result.
pub const MAX_ROWS: usize = 32;
/// Words that follow the sums in a result.
const ECHO_WORDS: usize = 16;
/// Index of the first row's limit in a header, in words.
const LIMITS: usize = 8;
/// Cores that read from one shim channel.
pub const PAIR: usize = 2;
/// Pairs in the array: two in each of four columns.
pub const PAIRS: usize = 8;
/// Maximum of a row that has no keys.
pub const NONE: f32 = -3.0e38;

/// The kernel's sizes for one head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelShape {
    pub head_dim: usize,
}

impl KernelShape {
    /// Returns the sizes of a kernel, or `None` for a head dimension without one.
    pub const fn new(head_dim: usize) -> Option<KernelShape> {
        match head_dim {
            128 | 256 => Some(KernelShape { head_dim }),
            _ => None,
        }
    }

    /// Returns the number of query rows in a core.
    pub const fn rows(self) -> usize {
        4096 / self.head_dim
    }

    /// Returns the number of keys in a tile.
    pub const fn keys(self) -> usize {
        2048 / self.head_dim
    }

    pub const fn tiles_per_page(self) -> usize {
        PAGE / self.keys()
    }

    /// Returns the bytes of a page for one pair of heads.
    pub const fn page_bytes(self) -> usize {
        PAIR * self.tiles_per_page() * OBJECT
    }

    /// Returns the bytes of the headers and queries of a pair.
    pub const fn query_bytes(self) -> usize {
        2 * PAIR * OBJECT
    }

    /// Returns the bytes of a core's result.
    pub const fn out_bytes(self) -> usize {
        (self.rows() * self.head_dim + 2 * MAX_ROWS + ECHO_WORDS) * 4
    }

    /// Returns the smallest supported row count, for a header, that is at least `rows`.
    pub fn bucket(self, rows: usize) -> Option<usize> {
        [4, 16, 32].into_iter().find(|b| rows <= *b && *b <= self.rows())
    }
}

/// Content of a header object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub shape: KernelShape,
    /// Number of tiles that follow the queries.
    pub tiles: usize,
    /// 0, 4, 16 or 32.
    pub rows: usize,
    /// Serial number, which the result repeats.
    pub serial: u32,
    /// Number of tiles that each row attends to, counted from the first.
    pub limits: [u32; MAX_ROWS],
}

impl Header {
    /// Writes the header to its object.
    pub fn write(&self, object: &mut [u8]) {
        let head = [
            MAGIC,
            ABI,
            self.shape.head_dim as u32,
            self.tiles as u32,
            self.rows as u32,
            self.serial,
            0,
            0,
        ];
        for (i, word) in head.into_iter().chain(self.limits).enumerate() {
            object[4 * i..][..4].copy_from_slice(&word.to_le_bytes());
        }
        object[4 * (LIMITS + MAX_ROWS)..OBJECT].fill(0);
    }
}

/// Returns word `index` of an object.
pub fn word(object: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(object[4 * index..][..4].try_into().expect("four bytes"))
}

/// Returns the limits of a header object.
pub fn limits(object: &[u8]) -> [u32; MAX_ROWS] {
    std::array::from_fn(|i| word(object, LIMITS + i))
}

/// Writes element `index` of an object as bf16.
fn put(object: &mut [u8], index: usize, value: f32) {
    object[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_bits().to_le_bytes());
}

/// Returns the index of a query's element in its object: blocks of 4 rows and 8 channels.
pub fn query_at(shape: KernelShape, row: usize, d: usize) -> usize {
    ((row / 4 * (shape.head_dim / 8) + d / 8) * 4 + row % 4) * 8 + d % 8
}

/// Returns the index of a key's element in its tile: blocks of 8 channels and 4 keys.
pub fn key_at(shape: KernelShape, key: usize, d: usize) -> usize {
    ((key / 4 * (shape.head_dim / 8) + d / 8) * 8 + d % 8) * 4 + key % 4
}

/// Returns the index of a value's element in its tile, after the keys: blocks of 8 keys and 4
/// channels.
pub fn value_at(shape: KernelShape, key: usize, d: usize) -> usize {
    OBJECT / 4 + ((key / 8 * (shape.head_dim / 4) + d / 4) * 8 + key % 8) * 4 + d % 4
}

/// Returns the index of an output element in a result: blocks of 4 rows and 4 channels.
pub fn out_at(shape: KernelShape, row: usize, d: usize) -> usize {
    ((row / 4 * (shape.head_dim / 4) + d / 4) * 4 + row % 4) * 4 + d % 4
}

/// Writes a row of queries, multiplied by `scale`, to the query object.
pub fn write_query(shape: KernelShape, object: &mut [u8], row: usize, q: &[f32], scale: f32) {
    for (d, q) in q.iter().enumerate() {
        put(object, query_at(shape, row, d), q * scale);
    }
}

/// Writes the page of one head, keys and values `[PAGE, head_dim]`, into the page of its pair.
/// `slot` is the head's index in the pair.
pub fn write_page(
    shape: KernelShape,
    pair_page: &mut [u8],
    slot: usize,
    keys: &[f32],
    values: &[f32],
) {
    let dim = shape.head_dim;
    for tile in 0..shape.tiles_per_page() {
        let object = &mut pair_page[(tile * PAIR + slot) * OBJECT..][..OBJECT];
        for key in 0..shape.keys() {
            let at = (tile * shape.keys() + key) * dim;
            for d in 0..dim {
                put(object, key_at(shape, key, d), keys[at + d]);
                put(object, value_at(shape, key, d), values[at + d]);
            }
        }
    }
}

/// A core's result.
#[derive(Clone, Copy, Debug)]
pub struct ResultView<'a> {
    shape: KernelShape,
    bytes: &'a [u8],
}

impl<'a> ResultView<'a> {
    /// Returns a view of a result, which must have [`KernelShape::out_bytes`] bytes.
    pub fn new(shape: KernelShape, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len(), shape.out_bytes());
        ResultView { shape, bytes }
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(word(self.bytes, index))
    }

    fn tail(&self) -> usize {
        self.shape.rows() * self.shape.head_dim
    }

    /// Returns the sum of exponentials times values, before division by `l`.
    pub fn o(&self, row: usize, d: usize) -> f32 {
        self.float(out_at(self.shape, row, d))
    }

    /// Returns the largest score in the base-2 domain, or [`NONE`] for a row without keys.
    pub fn m(&self, row: usize) -> f32 {
        self.float(self.tail() + row)
    }

    /// Returns the sum of exponentials.
    pub fn l(&self, row: usize) -> f32 {
        self.float(self.tail() + MAX_ROWS + row)
    }

    /// Returns magic number, version, tiles, rows and serial number, as the core has read them.
    pub fn echo(&self) -> [u32; 5] {
        std::array::from_fn(|i| word(self.bytes, self.tail() + 2 * MAX_ROWS + i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_own_place() {
        for shape in [128, 256].map(|d| KernelShape::new(d).unwrap()) {
            let dim = shape.head_dim;
            let mut seen = vec![0u8; OBJECT / 2];
            (0..shape.keys()).for_each(|k| (0..dim).for_each(|d| seen[key_at(shape, k, d)] += 1));
            (0..shape.keys()).for_each(|k| (0..dim).for_each(|d| seen[value_at(shape, k, d)] += 1));
            assert!(seen.iter().all(|n| *n == 1));
            let mut seen = vec![0u8; OBJECT / 2];
            (0..shape.rows()).for_each(|r| (0..dim).for_each(|d| seen[query_at(shape, r, d)] += 1));
            assert!(seen.iter().all(|n| *n == 1));
            let mut seen = vec![0u8; shape.rows() * dim];
            (0..shape.rows()).for_each(|r| (0..dim).for_each(|d| seen[out_at(shape, r, d)] += 1));
            assert!(seen.iter().all(|n| *n == 1));
        }
        assert_eq!(KernelShape::new(64), None);
    }

    #[test]
    fn rows_go_to_the_smallest_bucket_that_fits() {
        let (a, b) = (KernelShape::new(128).unwrap(), KernelShape::new(256).unwrap());
        assert_eq!(
            [1, 4, 5, 16, 17, 32, 33].map(|r| a.bucket(r)),
            [Some(4), Some(4), Some(16), Some(16), Some(32), Some(32), None]
        );
        assert_eq!([4, 16, 17].map(|r| b.bucket(r)), [Some(4), Some(16), None]);
    }
}
