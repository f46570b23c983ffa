//! What the host and the kernel agree on: the objects that a core reads, and the result it writes.
//! `npu-kernels/flash_partial.h` says the same in C++; `manifest.txt` ties a built array to this
//! version of it.
//!
//! A core reads objects of 8 KB: a header, the queries, then tiles of keys and values. Two cores, a
//! *pair*, share one stream: object by object in turn. So does the memory: what a pair reads lies
//! in one piece, and every transfer is linear.

use crate::kv::PAGE;
use half::bf16;

pub const MAGIC: u32 = 0x3150_4647;
/// Version of everything in this file.
pub const ABI: u32 = 1;
/// Bytes of a fifo object.
pub const OBJECT: usize = 8192;
/// Limits of a header; maxima and sums of a result.
pub const MAX_ROWS: usize = 32;
/// Words behind the sums of a result.
const ECHO_WORDS: usize = 16;
/// Word of a header that holds the first row's limit.
const LIMITS: usize = 8;
/// Cores that a shim channel feeds.
pub const PAIR: usize = 2;
/// Pairs of the array: two in each of four columns.
pub const PAIRS: usize = 8;
/// The maximum of a row that has seen no key.
pub const NONE: f32 = -3.0e38;

/// The kernel's sizes for one head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    pub head_dim: usize,
}

impl Shape {
    /// `None` for head dimensions that no kernel is built for.
    pub const fn new(head_dim: usize) -> Option<Shape> {
        match head_dim {
            128 | 256 => Some(Shape { head_dim }),
            _ => None,
        }
    }

    /// Query rows that a core holds.
    pub const fn rows(self) -> usize {
        4096 / self.head_dim
    }

    /// Keys of a tile.
    pub const fn keys(self) -> usize {
        2048 / self.head_dim
    }

    pub const fn tiles_per_page(self) -> usize {
        PAGE / self.keys()
    }

    /// Bytes of a page of one pair of heads.
    pub const fn page_bytes(self) -> usize {
        PAIR * self.tiles_per_page() * OBJECT
    }

    /// Bytes of the header and the queries of a pair.
    pub const fn query_bytes(self) -> usize {
        2 * PAIR * OBJECT
    }

    /// Bytes of a core's result.
    pub const fn out_bytes(self) -> usize {
        (self.rows() * self.head_dim + 2 * MAX_ROWS + ECHO_WORDS) * 4
    }

    /// The row count that a header may name for `rows` query rows.
    pub fn bucket(self, rows: usize) -> Option<usize> {
        [4, 16, 32].into_iter().find(|b| rows <= *b && *b <= self.rows())
    }
}

/// What the header object says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub shape: Shape,
    /// Tiles that follow the queries.
    pub tiles: usize,
    /// 0, 4, 16 or 32.
    pub rows: usize,
    /// Comes back with the result.
    pub serial: u32,
    /// Tiles that each row sees: the first so many.
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

/// Word `index` of an object.
pub fn word(object: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(object[4 * index..][..4].try_into().expect("four bytes"))
}

/// Limits of a header object.
pub fn limits(object: &[u8]) -> [u32; MAX_ROWS] {
    std::array::from_fn(|i| word(object, LIMITS + i))
}

fn put(object: &mut [u8], index: usize, value: f32) {
    object[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_bits().to_le_bytes());
}

/// Place of a query's element in its object: blocks of 4 rows and 8 channels.
pub fn query_at(shape: Shape, row: usize, d: usize) -> usize {
    ((row / 4 * (shape.head_dim / 8) + d / 8) * 4 + row % 4) * 8 + d % 8
}

/// Place of a key's element in its tile: blocks of 8 channels and 4 keys.
pub fn key_at(shape: Shape, key: usize, d: usize) -> usize {
    ((key / 4 * (shape.head_dim / 8) + d / 8) * 8 + d % 8) * 4 + key % 4
}

/// Place of a value's element in its tile, behind the keys: blocks of 8 keys and 4 channels.
pub fn value_at(shape: Shape, key: usize, d: usize) -> usize {
    OBJECT / 4 + ((key / 8 * (shape.head_dim / 4) + d / 4) * 8 + key % 8) * 4 + d % 4
}

/// Place of an output element in a result: blocks of 4 rows and 4 channels.
pub fn out_at(shape: Shape, row: usize, d: usize) -> usize {
    ((row / 4 * (shape.head_dim / 4) + d / 4) * 4 + row % 4) * 4 + d % 4
}

/// Writes a row of queries, times `scale`, to the query object.
pub fn write_query(shape: Shape, object: &mut [u8], row: usize, q: &[f32], scale: f32) {
    for (d, q) in q.iter().enumerate() {
        put(object, query_at(shape, row, d), q * scale);
    }
}

/// Writes one head's page, keys and values `[PAGE, head_dim]`, into its pair's page; `slot` is the
/// head's place in the pair.
pub fn write_page(shape: Shape, pair_page: &mut [u8], slot: usize, keys: &[f32], values: &[f32]) {
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
    shape: Shape,
    bytes: &'a [u8],
}

impl<'a> ResultView<'a> {
    /// `bytes` are [`Shape::out_bytes`].
    pub fn new(shape: Shape, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len(), shape.out_bytes());
        ResultView { shape, bytes }
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(word(self.bytes, index))
    }

    fn tail(&self) -> usize {
        self.shape.rows() * self.shape.head_dim
    }

    /// Sum of exponentials times values, not divided.
    pub fn o(&self, row: usize, d: usize) -> f32 {
        self.float(out_at(self.shape, row, d))
    }

    /// Largest score, in powers of two; [`NONE`] where the row saw nothing.
    pub fn m(&self, row: usize) -> f32 {
        self.float(self.tail() + row)
    }

    /// Sum of exponentials.
    pub fn l(&self, row: usize) -> f32 {
        self.float(self.tail() + MAX_ROWS + row)
    }

    /// Magic, version, tiles, rows and serial number as the core understood them.
    pub fn echo(&self) -> [u32; 5] {
        std::array::from_fn(|i| word(self.bytes, self.tail() + 2 * MAX_ROWS + i))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_its_own_place() {
        for shape in [128, 256].map(|d| Shape::new(d).unwrap()) {
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
        assert_eq!(Shape::new(64), None);
    }

    #[test]
    fn rows_go_to_the_smallest_bucket_that_fits() {
        let (a, b) = (Shape::new(128).unwrap(), Shape::new(256).unwrap());
        assert_eq!(
            [1, 4, 5, 16, 17, 32, 33].map(|r| a.bucket(r)),
            [Some(4), Some(4), Some(16), Some(16), Some(32), Some(32), None]
        );
        assert_eq!([4, 16, 17].map(|r| b.bucket(r)), [Some(4), Some(16), None]);
    }
}
