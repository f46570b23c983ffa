//! The CPU's linear kernels against their scalar twin, bit for bit, on every instruction set of
//! this machine.

use gemma::compute::act::{ActValues, ActView};
use gemma::compute::cpu::isa::Isa;
use gemma::compute::cpu::linear::{OutputPlace, PackedMatrix, TILE, gate_up, linear};
use gemma::compute::reference::linear as twin;
use gemma::tensor::{Code, Format, Matrix, StoredMatrix};
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const ROWS: [usize; 9] = [1, 2, 3, 5, 8, 9, 16, 17, 33];

/// Returns a matrix of random codes and scales, not quantised from weights. Every code occurs.
fn matrix(format: Format, rows: usize, cols: usize, rng: &mut StdRng) -> Matrix<'static> {
    let codes: Vec<u8> = match format.code {
        Code::F32 => {
            (0..rows * cols).flat_map(|_| rng.random_range(-1f32..1.0).to_le_bytes()).collect()
        }
        Code::Bf16 => (0..rows * cols)
            .flat_map(|_| bf16::from_f32(rng.random_range(-1f32..1.0)).to_le_bytes())
            .collect(),
        _ => (0..format.stored_rows(rows) * format.row_bytes(cols))
            .map(|_| rng.random::<u8>())
            .collect(),
    };
    let mut side: Vec<u8> = (0..rows * format.row_side(cols)).map(|_| rng.random::<u8>()).collect();
    // The f16 values of each element come first.
    let kind = format.code.spec().side;
    let floats = if kind.has_min() { 4 } else { 2 };
    for group in side.chunks_exact_mut(kind.bytes().max(1)) {
        for float in group[..floats].as_chunks_mut::<2>().0 {
            *float = f16::from_f32(rng.random_range(-0.05f32..0.05)).to_le_bytes();
        }
    }
    Matrix::new(format, rows, cols, codes, side).unwrap()
}

fn pack(matrix: &Matrix<'_>, isa: Isa) -> PackedMatrix {
    PackedMatrix::load(&StoredMatrix::of(matrix), isa).unwrap()
}

/// Activations that own their parts.
struct Acts {
    rows: usize,
    cols: usize,
    floats: Vec<f32>,
    ints: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
    integer: bool,
}

impl Acts {
    fn new(
        format: Format,
        rows: usize,
        cols: usize,
        mut value: impl FnMut(usize) -> i8,
        rng: &mut StdRng,
    ) -> Acts {
        let ints: Vec<i8> = (0..rows * cols).map(&mut value).collect();
        let group = format.group_cols(cols);
        let sums = ints
            .chunks(cols)
            .flat_map(|row| row.chunks(group).map(|g| g.iter().map(|x| *x as i32).sum::<i32>()))
            .collect();
        Acts {
            rows,
            cols,
            floats: (0..rows * cols).map(|_| rng.random_range(-2f32..2.0)).collect(),
            ints,
            scales: (0..rows * format.groups(cols))
                .map(|_| rng.random_range(0.001f32..0.1))
                .collect(),
            sums,
            integer: format.code.is_integer(),
        }
    }

    fn random(format: Format, rows: usize, cols: usize, rng: &mut StdRng) -> Acts {
        let mut values = StdRng::seed_from_u64(rng.random());
        Acts::new(format, rows, cols, move |_| values.random_range(-127..=127), rng)
    }

    fn view(&self) -> ActView<'_> {
        let values =
            if self.integer { ActValues::I8(&self.ints) } else { ActValues::F32(&self.floats) };
        ActView { rows: self.rows, cols: self.cols, values, scales: &self.scales, sums: &self.sums }
    }
}

/// Initial bits of outputs: a NaN that no kernel computes.
const POISON: f32 = f32::from_bits(gemma::compute::poison::WORD);

fn assert_same_bits(got: &[f32], want: &[f32], what: &str) {
    let differs = got.iter().zip(want).position(|(g, w)| g.to_bits() != w.to_bits());
    assert_eq!(differs.map(|i| (i, got[i], want[i])), None, "{what}");
}

/// Computes the product into rows with a stride wider than the outputs. Checks that the gap is
/// untouched.
fn product(isa: Isa, packed: &PackedMatrix, act: &ActView<'_>, splits: &[usize]) -> Vec<f32> {
    let (n, stride) = (packed.rows(), packed.rows() + 3);
    let mut out = vec![POISON; act.rows * stride];
    let mut from = 0;
    for to in splits.iter().copied().chain([packed.tiles()]) {
        // SAFETY: `out` has rows * stride floats and no other user.
        unsafe { linear(isa, packed, act, from..to, OutputPlace::of(out.as_mut_ptr(), stride)) };
        from = to;
    }
    let is_untouched = |v: &f32| v.to_bits() == POISON.to_bits();
    assert!(out.chunks(stride).all(|row| row[n..].iter().all(is_untouched)));
    out.chunks(stride).flat_map(|row| row[..n].to_vec()).collect()
}

#[test]
fn every_format_width_and_row_count_equals_the_twin() {
    let mut rng = StdRng::seed_from_u64(1);
    for format in Format::all() {
        for (n, cols) in [(1, 128), (15, 640), (16, 256), (17, 1152), (100, 768), (33, 5376)] {
            if format.check_cols(cols).is_err() {
                continue;
            }
            let m = matrix(format, n, cols, &mut rng);
            let most = Acts::random(format, 33, cols, &mut rng);
            let mut want = vec![0.0; 33 * n];
            twin::linear(&m, &most.view(), &mut want);
            for isa in Isa::all_supported() {
                let packed = pack(&m, isa);
                for rows in if n == 33 { &ROWS[8..] } else { &ROWS[..] } {
                    let act = ActView { rows: *rows, ..most.view() };
                    let what = format!("{format} [{n}, {cols}] x {rows} rows, {isa}");
                    assert_same_bits(&product(isa, &packed, &act, &[]), &want[..rows * n], &what);
                }
            }
        }
    }
}

#[test]
fn narrow_and_odd_widths_equal_the_twin() {
    let mut rng = StdRng::seed_from_u64(2);
    for (spelled, widths) in [
        ("f32", vec![1, 7, 129]),
        ("bf16", vec![1, 7, 255]),
        ("i8-row", vec![8, 24, 1000]),
        ("i8a-row", vec![8, 24, 1000]),
        ("t3-row", vec![64, 192]),
        ("i4-row", vec![8, 24, 1000]),
        ("i2-row", vec![8, 24, 1000]),
        ("i4-g32", vec![32, 992]),
        ("i2-g32", vec![32, 992]),
        ("q5_0", vec![32, 288, 992]),
        ("iq4_nl", vec![32, 288]),
        ("q6_k", vec![256, 768]),
        ("q2_k", vec![256, 768]),
        ("iq2_xxs", vec![256, 768]),
        ("iq3_s", vec![256, 768]),
    ] {
        let format: Format = spelled.parse().unwrap();
        for cols in widths {
            let (m, act) =
                (matrix(format, 40, cols, &mut rng), Acts::random(format, 6, cols, &mut rng));
            let mut want = vec![0.0; 6 * 40];
            twin::linear(&m, &act.view(), &mut want);
            for isa in Isa::all_supported() {
                let got = product(isa, &pack(&m, isa), &act.view(), &[]);
                assert_same_bits(&got, &want, &format!("{spelled} width {cols}, {isa}"));
            }
        }
    }
}

#[test]
fn strips_blocks_and_tile_splits_change_nothing() {
    let mut rng = StdRng::seed_from_u64(3);
    for spelled in [
        "bf16", "i8-row", "i8a-row", "i4-row", "i4-g32", "i2-g64", "t2-row", "t3-row", "q3_k",
        "q4_k", "iq2_xs",
    ] {
        let format: Format = spelled.parse().unwrap();
        let (n, cols, rows) = (3 * TILE + 5, 256, 140);
        let (m, act) =
            (matrix(format, n, cols, &mut rng), Acts::random(format, rows, cols, &mut rng));
        let mut want = vec![0.0; rows * n];
        twin::linear(&m, &act.view(), &mut want);
        for isa in Isa::all_supported() {
            let packed = pack(&m, isa);
            assert_same_bits(
                &product(isa, &packed, &act.view(), &[1, 1, 3]),
                &want,
                &format!("{spelled}, {isa}"),
            );
        }
    }
}

#[test]
fn the_largest_sums_do_not_saturate() {
    let mut rng = StdRng::seed_from_u64(4);
    for spelled in [
        "i8-row", "i8a-row", "i8-g128", "i4-row", "i4-g128", "i2-row", "i2-g128", "t2-row",
        "t2.5-row", "t3-row", "t4-row", "q5_1", "q5_k", "q6_k", "iq4_xs", "iq2_s", "iq3_xxs",
    ] {
        let format: Format = spelled.parse().unwrap();
        // The widest layer of 27B's shape. Codes of -128, -8 and -1.5, then the largest ones.
        let (n, cols, rows) = (TILE, 21504, 9);
        for fill in [0x00u8, 0x80, 0x7f, 0xff] {
            let codes = vec![fill; n * format.row_bytes(cols)];
            let kind = format.code.spec().side;
            let mut element = vec![fill; kind.bytes()];
            let floats = if kind.has_min() { 4 } else { 2 };
            element[..floats].copy_from_slice(&f16::ONE.to_le_bytes().repeat(floats / 2));
            let side = element.repeat(n * format.row_side(cols) / kind.bytes());
            let m = Matrix::new(format, n, cols, codes, side).unwrap();
            for sign in [-127i8, 127] {
                let act = Acts::new(
                    format,
                    rows,
                    cols,
                    |i| if (i / cols).is_multiple_of(2) { sign } else { -sign },
                    &mut rng,
                );
                let mut want = vec![0.0; rows * n];
                twin::linear(&m, &act.view(), &mut want);
                for isa in Isa::all_supported() {
                    let got = product(isa, &pack(&m, isa), &act.view(), &[]);
                    assert_same_bits(
                        &got,
                        &want,
                        &format!("{spelled} of {fill:#x} times {sign}, {isa}"),
                    );
                }
            }
        }
    }
}

#[test]
fn gate_up_equals_its_twin_also_for_mixed_formats() {
    let mut rng = StdRng::seed_from_u64(5);
    for (gate, up) in
        [("i4-row", "i4-row"), ("i2-g128", "i4-g32"), ("i8-row", "bf16"), ("q5_0", "q4_1")]
    {
        let (gate_format, up_format): (Format, Format) =
            (gate.parse().unwrap(), up.parse().unwrap());
        let (n, cols) = (70, 640);
        let (g, u) = (matrix(gate_format, n, cols, &mut rng), matrix(up_format, n, cols, &mut rng));
        for rows in [1, 8, 13, 130] {
            let act_g = Acts::random(gate_format, rows, cols, &mut rng);
            let act_u = Acts::random(up_format, rows, cols, &mut rng);
            let mut want = vec![0.0; rows * n];
            twin::gate_up(&g, &act_g.view(), &u, &act_u.view(), &mut want);
            for isa in Isa::all_supported() {
                let (pg, pu) = (pack(&g, isa), pack(&u, isa));
                let mut got = vec![POISON; rows * n];
                for tiles in [0..1, 1..pg.tiles()] {
                    // SAFETY: `got` has rows * n floats and no other user.
                    unsafe {
                        gate_up(
                            isa,
                            &pg,
                            &act_g.view(),
                            &pu,
                            &act_u.view(),
                            tiles,
                            0,
                            OutputPlace::of(got.as_mut_ptr(), n),
                        )
                    };
                }
                assert_same_bits(&got, &want, &format!("{gate} and {up}, {rows} rows, {isa}"));
            }
        }
    }
}

#[test]
fn the_twin_agrees_with_double_precision() {
    let mut rng = StdRng::seed_from_u64(6);
    for format in Format::all() {
        let (n, cols, rows) = (5, 768, 3);
        let (m, act) =
            (matrix(format, n, cols, &mut rng), Acts::random(format, rows, cols, &mut rng));
        let mut got = vec![0.0; rows * n];
        twin::linear(&m, &act.view(), &mut got);
        let (group, groups) = (format.group_cols(cols), format.groups(cols));
        let mut weights = vec![0.0; cols];
        for i in 0..n {
            m.decode_row(i, &mut weights);
            for r in 0..rows {
                let terms: Vec<f64> = (0..cols)
                    .map(|k| {
                        let x = match act.integer {
                            true => {
                                act.ints[r * cols + k] as f64
                                    * act.scales[r * groups + k / group] as f64
                            }
                            false => act.floats[r * cols + k] as f64,
                        };
                        x * weights[k] as f64
                    })
                    .collect();
                let (want, size) =
                    (terms.iter().sum::<f64>(), terms.iter().map(|t| t.abs()).sum::<f64>());
                let error = (got[r * n + i] as f64 - want).abs();
                assert!(error <= 1e-6 * size, "{format}: {} for {want}", got[r * n + i]);
            }
        }
    }
}

#[test]
fn packed_rows_dequantise_like_the_matrix() {
    let mut rng = StdRng::seed_from_u64(7);
    let rotated = ["i4-row+h128", "i8-row+h128", "i2-g64+h128", "bf16+h128"];
    let rotated = rotated.into_iter().map(|spelled| spelled.parse::<Format>().unwrap());
    for format in Format::all().chain(rotated) {
        let widths = if format.hadamard { [128, 384, 512] } else { [128, 640, 512] };
        for cols in widths.into_iter().filter(|cols| format.check_cols(*cols).is_ok()) {
            let m = matrix(format, 45, cols, &mut rng);
            for isa in Isa::all_supported() {
                let packed = pack(&m, isa);
                assert!(
                    packed.bytes() >= m.bytes() && (packed.rows(), packed.cols()) == (45, cols)
                );
                let (mut got, mut want) = (vec![0.0; cols], vec![0.0; cols]);
                for row in 0..45 {
                    packed.dequantize_row(row, &mut got);
                    m.dequantize_row(row, &mut want);
                    assert_same_bits(&got, &want, &format!("{format} row {row}, {isa}"));
                }
            }
        }
    }
    let odd = matrix("i2-row".parse().unwrap(), 3, 24, &mut rng);
    let (mut got, mut want) = (vec![0.0; 24], vec![0.0; 24]);
    pack(&odd, Isa::Scalar).dequantize_row(2, &mut got);
    odd.dequantize_row(2, &mut want);
    assert_same_bits(&got, &want, "half a step");
}
