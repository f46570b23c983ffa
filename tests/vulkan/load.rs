//! Weights that are read in pieces and converted on the way have the same bits on the device as
//! matrices that are converted as a whole. `twins::embeddings` compares their values.

use crate::common;
use common::gguf::{File, Tensor, logits};
use common::vulkan::{config, device};
use common::{TinyModel, gguf};
use gemma::checkpoint::Checkpoint;
use gemma::checkpoint::gguf::types;
use gemma::compute::{Executor, ExecutorExt, KvFormat, LoadJob, Part};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Role, Weights};
use gemma::quant::{QuantizeOptions, Recipe, quantize};
use gemma::tensor::{Code, Format, Matrix, StoredMatrix};
use gemma::vulkan::VulkanExecutor;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// Loads matrices both ways and compares them.
fn check(exec: &mut VulkanExecutor, list: Vec<(String, Matrix<'_>, StoredMatrix<'_>)>) {
    let (mut jobs, mut want) = (Vec::new(), Vec::new());
    for (label, matrix, stored) in list {
        assert_eq!(
            (stored.format, stored.rows, stored.cols),
            (matrix.format, matrix.rows, matrix.cols),
            "{label}"
        );
        want.push((exec.load_matrix(&label, Part::Head, &matrix).unwrap(), label.clone()));
        jobs.push(LoadJob { label, part: Part::Head, matrix: stored });
    }
    for (got, (want, label)) in exec.load(jobs).unwrap().into_iter().zip(want) {
        let (want, got) = (exec.weight_bytes(want).unwrap(), exec.weight_bytes(got).unwrap());
        let first = want[0].iter().zip(&got[0]).position(|(a, b)| a != b);
        assert_eq!((want[0].len(), None), (got[0].len(), first), "codes of {label}");
        assert!(want[1] == got[1], "scales of {label}");
        assert!(want[0].iter().any(|b| *b != 0), "{label}");
    }
}

/// 1024 as f16.
const SCALE_1024: u16 = 0x6400;

/// Returns random blocks. Their f16 values are finite and sometimes subnormal.
fn blocks(code: Code, weights: usize, rng: &mut SmallRng) -> Vec<u8> {
    let ggml = code.spec().ggml.unwrap();
    let mut data: Vec<u8> = (0..ggml.bytes_of(weights)).map(|_| rng.random::<u8>()).collect();
    let floats: &[usize] = match code {
        Code::F32 | Code::Bf16 => &[],
        Code::Q4_1 | Code::Q5_1 | Code::Q4K | Code::Q5K => &[0, 2],
        Code::Q6K => &[208],
        Code::Q2K => &[80, 82],
        Code::Q3K => &[108],
        _ => &[0],
    };
    for block in data.chunks_exact_mut(ggml.bytes) {
        for at in floats {
            let mut bits: u16 = rng.random();
            // Larger scales are refused.
            if bits & 0x7fff > SCALE_1024 {
                bits &= !0x4000;
            }
            block[*at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    data
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn blocks_of_gguf_files() {
    let Some(open) = device() else { return };
    let (mut rng, mut file, mut names) = (SmallRng::seed_from_u64(1), File::default(), Vec::new());
    for number in [0, 1, 30, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23] {
        let code = types::code(number).unwrap();
        let ggml = code.spec().ggml.unwrap();
        // Rows of one step, of several but less than eight, of eight and one, of many. The last one
        // takes several staging blocks.
        let mut shapes = vec![(1, 1), (5, 3), (33, 9), (70, 21)];
        if matches!(code, Code::I4 | Code::Q6K) {
            shapes.push((60_000_000 / 24 / ggml.bytes, 24));
        }
        for (rows, blocks_of_row) in shapes {
            // Rows of integer codes are multiples of 16.
            let cols = blocks_of_row * ggml.weights.max(16);
            let name = format!("{}.{rows}.{cols}", ggml.name);
            let dims = vec![cols as u64, rows as u64];
            file.tensors.push(Tensor {
                name: name.clone(),
                dims,
                kind: number,
                data: blocks(code, rows * cols, &mut rng),
            });
            names.push(name);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    file.write(&dir.path().join("m.gguf"));
    let checkpoint = Checkpoint::open(&dir.path().join("m.gguf")).unwrap();
    let both = |name: &String| {
        (name.clone(), checkpoint.matrix(name).unwrap(), checkpoint.stored_matrix(name).unwrap())
    };
    check(&mut open(), names.iter().map(both).collect());
    // Small and large matrices in another order share staging blocks differently.
    check(&mut open(), names.iter().rev().map(both).collect());
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn made_up_matrices_of_every_format() {
    let Some(open) = device() else { return };
    let formats = [
        "f32",
        "bf16",
        "i8-row",
        "i8a-row",
        "i8-g32",
        "i4-row+h128",
        "i4-g64",
        "i2-g128",
        "i2-row",
        "t2-row",
        "t3-row+h128",
    ];
    for format in formats {
        let format: Format = format.parse().unwrap();
        let weights = Weights::synthetic(config(70), |_| format, 3);
        let roles = weights.matrices().map(|t| (t.role, t.layer));
        let both = |(role, layer)| {
            let (matrix, stored) =
                (weights.matrix(role, layer).unwrap(), weights.stored(role, layer).unwrap());
            (format!("{role:?} {layer} as {format}"), matrix, stored)
        };
        check(&mut open(), roles.map(both).collect());
    }
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn artifacts() {
    let Some(open) = device() else { return };
    let model = TinyModel::tiny(12);
    let dir = tempfile::tempdir().unwrap();
    let source = Weights::open(
        Checkpoint::open(&gguf::directory(&model, dir.path(), gemma::checkpoint::Dtype::F32))
            .unwrap(),
    )
    .unwrap();
    for (linear, embed) in [(Format::I4_G32, Format::I8_G32), (Format::BF16, Format::I4_G32)] {
        let path = dir.path().join(format!("{linear}-{embed}"));
        quantize(
            &source,
            &path,
            &Recipe::inline(linear, embed),
            &QuantizeOptions::default(),
            &mut |_| Ok(()),
        )
        .unwrap();
        let weights = Weights::open(Checkpoint::open(&path).unwrap()).unwrap();
        let roles = weights.matrices().map(|t| (t.role, t.layer));
        let both = |(role, layer)| {
            (
                format!("{role:?}"),
                weights.matrix(role, layer).unwrap(),
                weights.stored(role, layer).unwrap(),
            )
        };
        check(&mut open(), roles.map(both).collect());
    }
}

/// A file that becomes shorter while it is used causes an error that says so.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_file_that_was_cut_off_is_an_error() {
    let Some(open) = device() else { return };
    let file = gguf::float_file(&TinyModel::tiny(13), gguf::BF16);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let load = |weights: &Weights| {
        let options = EngineOptions { context: 64, kv: KvFormat::F32 };
        PlannedEngine::new(weights, Box::new(open()), options)
    };
    file.write(&path);
    let weights = Weights::open(Checkpoint::open(&path).unwrap()).unwrap();
    let mut engine = load(&weights).unwrap();
    assert_eq!(weights.bytes_read(), weights.bytes_to_read().unwrap());
    let mut scores = Scores::default();
    let ids: Vec<u32> = (0..24).map(|i| 2 + i * 53 % 150).collect();
    engine.forward(&TokenTree::chain(&ids), Rows::All, &mut scores).unwrap();
    let want: Vec<f32> = logits(&weights).into_iter().map(f32::from_bits).collect();
    assert_eq!(
        weights.bytes_read(),
        2 * weights.bytes_to_read().unwrap(),
        "on the processor matrices count as they are taken"
    );
    let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
    assert!(want.iter().zip(&scores.logits).all(|(a, b)| (a - b).abs() <= 0.02 * largest));

    let length = std::fs::metadata(&path).unwrap().len();
    let matrix = weights.name(Role::Down, 0);
    let bytes = weights.checkpoint().unwrap().tensor(&matrix).unwrap().data.len() as u64;
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(length - length.min(8 * bytes))
        .unwrap();
    let error = format!("{:#}", load(&weights).err().expect("the file is too short"));
    assert!(error.contains("m.gguf") && error.contains("cut off"), "{error}");
}
