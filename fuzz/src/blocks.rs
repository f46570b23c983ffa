//! Blocks of GGUF's types with random contents: all decoders and products give the same floats.

use super::made_up::Cursor;
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use gemma::checkpoint::gguf::types;
use gemma::compute::act::{ActValues, ActView};
use gemma::compute::cpu::Isa;
use gemma::compute::cpu::linear::{OutputPlace, PackedMatrix, linear};
use gemma::compute::reference::linear as twin;
use gemma::tensor::block::BLOCKS;
use gemma::tensor::{Code, GgmlType, Matrix, StoredMatrix};
use std::sync::LazyLock;

/// The types that have blocks.
static TYPES: LazyLock<Vec<(Code, GgmlType)>> = LazyLock::new(|| {
    let types = BLOCKS.iter().filter_map(|block| Some((block.code, block.ggml?)));
    types.filter(|(_, ggml)| ggml.split.is_some()).collect()
});

/// Returns candle's name of a type; `None` if candle does not decode it.
fn in_candle(name: &str) -> Option<GgmlDType> {
    Some(match name {
        "Q4_0" => GgmlDType::Q4_0,
        "Q4_1" => GgmlDType::Q4_1,
        "Q5_0" => GgmlDType::Q5_0,
        "Q5_1" => GgmlDType::Q5_1,
        "Q8_0" => GgmlDType::Q8_0,
        "Q2_K" => GgmlDType::Q2K,
        "Q3_K" => GgmlDType::Q3K,
        "Q4_K" => GgmlDType::Q4K,
        "Q5_K" => GgmlDType::Q5K,
        "Q6_K" => GgmlDType::Q6K,
        _ => return None,
    })
}

/// Returns whether two floats are equal. NaN equals NaN, because a block's scale may be NaN or
/// infinite.
fn is_same(a: f32, b: f32) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

#[track_caller]
fn assert_same(name: &str, what: &str, got: &[f32], want: &[f32]) {
    let differs = got.iter().zip(want).position(|(a, b)| !is_same(*a, *b));
    assert!(got.len() == want.len(), "{name}, {what}");
    assert!(differs.is_none(), "{name}, {what}: {:?}", differs.map(|i| (i, got[i], want[i])));
}

pub fn blocks(data: &[u8]) {
    let mut cursor = Cursor::new(data);
    let (code, ggml) = cursor.one_of(&TYPES);
    let (rows, cols) = (1 + cursor.index(17), ggml.weights * (1 + cursor.index(2)));
    let acts = 1 + cursor.index(9);
    let seed = cursor.byte();
    let contents = cursor.rest();
    if contents.is_empty() {
        return;
    }
    let data: Vec<u8> = contents.iter().copied().cycle().take(rows * ggml.bytes_of(cols)).collect();
    let matrix = types::matrix(code, rows, cols, &data, 1).expect("it has the right size");
    let want = matrix.dequantize();
    if let Some(dtype) = in_candle(ggml.name) {
        let tensor = qtensor_from_ggml(dtype, &data, vec![rows, cols], &Device::Cpu);
        let other = tensor.and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all());
        let other: Vec<f32> = other.and_then(|tensor| tensor.to_vec1()).expect("it is good");
        assert_same(ggml.name, "candle", &want, &other);
    }
    if let Some(written) = types::encode(&matrix, 0..rows) {
        assert!(written == data, "{}: other blocks are written", ggml.name);
    }
    kernels(ggml.name, &matrix, &want, acts, seed);
}

/// Compares the layouts and products of every instruction set with the scalar definition.
fn kernels(name: &str, matrix: &Matrix<'_>, want: &[f32], acts: usize, seed: u8) {
    let (format, cols) = (matrix.format, matrix.cols);
    let ints: Vec<i8> = (0..acts * cols).map(|i| ((i * 37 + i / 7) as u8 ^ seed) as i8).collect();
    let ints: Vec<i8> = ints.into_iter().map(|x| x.max(-127)).collect();
    let groups = ints.chunks(format.group_cols(cols));
    let sums: Vec<i32> = groups.map(|group| group.iter().map(|x| i32::from(*x)).sum()).collect();
    let scales: Vec<f32> = (1..=sums.len()).map(|i| 1.0 / i as f32).collect();
    let values = ActValues::I8(&ints);
    let act = ActView { rows: acts, cols, values, scales: &scales, sums: &sums };
    let mut product = vec![0.0; acts * matrix.rows];
    twin::linear(matrix, &act, &mut product);
    for isa in Isa::all_supported() {
        let packed = PackedMatrix::load(&StoredMatrix::of(matrix), isa).expect("it fits");
        let mut row = vec![0.0; cols];
        for (i, want) in want.chunks_exact(cols).enumerate() {
            packed.dequantize_row(i, &mut row);
            assert_same(name, "packed", &row, want);
        }
        let mut out = vec![0.0; acts * matrix.rows];
        let place = OutputPlace::of(out.as_mut_ptr(), matrix.rows);
        // SAFETY: `out` has a place for each product, and no other user.
        unsafe { linear(isa, &packed, &act, 0..packed.tiles(), place) };
        assert_same(name, "product", &out, &product);
    }
}
