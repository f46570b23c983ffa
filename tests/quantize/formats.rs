//! The quantiser: its output is the rounded source, the same bytes each time, complete or absent.

use crate::common;
use common::{Dims, Form, TinyModel, write_model};
use gemma::checkpoint::{Checkpoint, Dtype};
use gemma::error::{Kind, fault_of};
use gemma::models::{Role, TensorSpec, Weights};
use gemma::quant::{
    Importance, Nearest, QuantPlan, QuantProgress, QuantizeOptions, Recipe, quantize, verify,
};
use gemma::tensor::Format;
use gemma::tensor::quantize::quantize as round;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn open(dir: &Path) -> Weights {
    Weights::open(Checkpoint::open(dir).unwrap()).unwrap()
}

fn recipe(linear: &str, embedding: &str) -> Recipe {
    Recipe::inline(linear.parse().unwrap(), embedding.parse().unwrap())
}

fn options(threads: usize, shard_bytes: u64) -> QuantizeOptions {
    QuantizeOptions { threads, shard_bytes, ..QuantizeOptions::default() }
}

fn silent(_: QuantProgress<'_>) -> anyhow::Result<()> {
    Ok(())
}

/// Returns every file of a directory by name.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |e: fs::DirEntry| {
        (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).unwrap())
    };
    fs::read_dir(dir).unwrap().map(|e| read(e.unwrap())).collect()
}

/// Returns the names in a directory, including hidden ones.
fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_what_rounding_gives() {
    let dir = tempfile::tempdir().unwrap();
    let model = TinyModel::tiny(4);
    for (i, (form, dtype, linear, embedding)) in [
        (Form::TextV4, Dtype::BF16, "i4-row+h128", "i8-row"),
        (Form::Multimodal, Dtype::F16, "i4-g32", "i4-g64"),
        (Form::MultimodalV5, Dtype::F32, "i2-g128", "i2-row+h128"),
        (Form::TextV5, Dtype::BF16, "bf16", "f32"),
        (Form::Bare, Dtype::F32, "bf16+h128", "i8-row+h128"),
    ]
    .into_iter()
    .enumerate()
    {
        let (src, dst) = (dir.path().join(format!("src{i}")), dir.path().join(format!("dst{i}")));
        model.write(&src, form, dtype, 1 + i % 2);
        fs::write(src.join("tokenizer.json"), "{\"tokens\": 1}").unwrap();
        let source = open(&src);
        let report =
            quantize(&source, &dst, &recipe(linear, embedding), &options(3, 100_000), &mut silent)
                .unwrap();
        let written = open(&dst);
        assert_eq!(written.config(), source.config());
        for (&TensorSpec { role, layer, .. }, told) in source.tensors().iter().zip(&report.tensors)
        {
            assert_eq!(told.name, written.name(role, layer));
            if !role.is_matrix() {
                assert_eq!(
                    written.vector(role, layer).unwrap(),
                    source.vector(role, layer).unwrap()
                );
                assert_eq!(told.format, dtype.to_string().to_lowercase(), "norms keep their type");
                continue;
            }
            let format: Format =
                if role == Role::Embed { embedding } else { linear }.parse().unwrap();
            let matrix = source.matrix(role, layer).unwrap();
            let values = matrix.dequantize();
            let want = round(format, matrix.rows, matrix.cols, &values).unwrap();
            let got = written.matrix(role, layer).unwrap();
            assert_eq!(
                (got.format, &got.codes, &got.side),
                (format, &want.codes, &want.side),
                "{}",
                told.name
            );
            let decoded = want.dequantize();
            let error: f64 =
                values.iter().zip(&decoded).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum();
            let power: f64 = values.iter().map(|v| (*v as f64).powi(2)).sum();
            assert!(
                (told.relative_error - (error / power).sqrt()).abs() < 1e-6,
                "{}: {}",
                told.name,
                told.relative_error
            );
            assert_eq!(told.bytes, want.bytes() as u64);
        }
        assert_eq!(fs::read(dst.join("tokenizer.json")).unwrap(), b"{\"tokens\": 1}");
        assert!(
            dst.join("generation_config.json").is_file() && dst.join("quant-report.json").is_file()
        );
    }
}

#[test]
fn a_dry_run_knows_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    TinyModel::tiny(5).write(&src, Form::Multimodal, Dtype::BF16, 1);
    let (source, recipe) = (open(&src), recipe("i4-g32", "i8-row"));
    let plan = QuantPlan::new(
        &source,
        &recipe,
        &options(2, 60_000),
        &Nearest::new(1),
        Importance::Relative(&|_, _| 1.0),
    )
    .unwrap();
    let layout = &plan.layout;
    assert!(layout.shards > 2, "{}", layout.shards);
    let report = quantize(&source, &dst, &recipe, &options(2, 60_000), &mut silent).unwrap();
    for shard in 0..layout.shards {
        let len = fs::metadata(dst.join(layout.file(shard))).unwrap().len();
        assert_eq!(len, layout.file_bytes(shard).unwrap());
        assert!(len < 70_000, "{len}");
    }
    assert_eq!(report.bytes, layout.bytes());
    assert_eq!(layout.classes().iter().map(|c| c.codes + c.scales).sum::<u64>(), layout.bytes());
    assert_eq!(plan.total_bytes, files(&dst).values().map(|f| f.len() as u64).sum::<u64>());
    // The crate that other programs read these files with accepts them too.
    let bytes = fs::read(dst.join(layout.file(0))).unwrap();
    assert!(!safetensors::SafeTensors::deserialize(&bytes).unwrap().is_empty());
}

#[test]
fn reruns_are_identical_whatever_threads_and_source_shards() {
    let dir = tempfile::tempdir().unwrap();
    let model = TinyModel::new(Dims { vocab: 1000, ..Dims::default() }, 6);
    let mut first = None;
    for (i, (threads, shards)) in [(1, 1), (2, 1), (7, 3)].into_iter().enumerate() {
        let (src, dst) = (dir.path().join(format!("src{i}")), dir.path().join(format!("dst{i}")));
        model.write(&src, Form::TextV5, Dtype::BF16, shards);
        quantize(
            &open(&src),
            &dst,
            &recipe("i4-g64", "i8-row"),
            &options(threads, u64::MAX),
            &mut silent,
        )
        .unwrap();
        let files = files(&dst);
        assert_eq!(
            *first.get_or_insert_with(|| files.clone()),
            files,
            "{threads} threads, {shards} shards"
        );
    }
}

#[test]
fn padding_rows_are_dropped_and_an_own_head_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    let model = TinyModel::tiny(7);
    let mut config = model.config(Form::TextV4);
    config["vocab_size"] = 150.into();
    config["tie_word_embeddings"] = false.into();
    let mut tensors = model.named(Form::TextV4);
    tensors.push((
        "lm_head.weight".into(),
        vec![160, 128],
        (0..160 * 128).map(|i| (i % 7) as f32).collect(),
    ));
    write_model(&src, &config, &tensors, Dtype::BF16, 1);
    let source = open(&src);
    assert!(source.has_own_head());
    quantize(&source, &dst, &recipe("i4-g32", "i8-row"), &QuantizeOptions::default(), &mut silent)
        .unwrap();
    let written = open(&dst);
    for role in [Role::Embed, Role::Head] {
        let (want, got) = (source.matrix(role, 0).unwrap(), written.matrix(role, 0).unwrap());
        assert_eq!((got.rows, got.cols), (150, 128));
        let (want, got) = (want.dequantize(), got.dequantize());
        assert!(want.iter().zip(&got).all(|(a, b)| (a - b).abs() < 0.05), "{role:?}");
    }
    assert!(written.has_own_head());
}

/// Norms may be int8 with one scale, with an error of at most half a step.
#[test]
fn norms_can_be_packed_too() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    TinyModel::tiny(12).write(&src, Form::MultimodalV5, Dtype::BF16, 1);
    let recipe = Recipe::parse("norms", "[formats]\nnorms = 'i8-row'\n'**' = 'i8-row'").unwrap();
    let (source, checked) =
        (open(&src), QuantizeOptions { verify: true, ..QuantizeOptions::default() });
    let report = quantize(&source, &dst, &recipe, &checked, &mut silent).unwrap();
    let written = open(&dst);
    let tensors = source.tensors().iter().zip(&report.tensors);
    for (&TensorSpec { role, layer, .. }, told) in tensors.filter(|(t, _)| !t.is_matrix()) {
        let (want, got) =
            (source.vector(role, layer).unwrap(), written.vector(role, layer).unwrap());
        let step = want.iter().fold(0f32, |m, v| m.max(v.abs())) / 127.0;
        assert!(
            want.iter().zip(&got).all(|(a, b)| (a - b).abs() <= 0.51 * step + 0.001 * a.abs()),
            "{role:?} {layer}"
        );
        assert_eq!((told.bytes, told.shape.len()), (want.len() as u64 + 2, 1));
    }
}

#[test]
fn refusals_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    let model = TinyModel::tiny(8);
    model.write(&src, Form::TextV4, Dtype::BF16, 1);
    let run = |src: &Path, dst: &Path, linear: &str| {
        let error = quantize(
            &open(src),
            dst,
            &recipe(linear, "i8-row"),
            &options(2, u64::MAX),
            &mut silent,
        )
        .unwrap_err();
        let fault = fault_of(&error).unwrap_or_else(|| panic!("no fault in {error:#}")).clone();
        assert!(fault.help.is_some(), "{error:#}");
        (fault.kind, format!("{error:#}"))
    };

    fs::create_dir(&dst).unwrap();
    fs::write(dst.join("precious"), "x").unwrap();
    assert_eq!(run(&src, &dst, "i4-g32").0, Kind::Usage);
    assert_eq!(names(&dst), ["precious"]);
    assert_eq!(run(&src, &dir.path().join("no/such/dst"), "i4-g32").0, Kind::Failure);
    assert_eq!(run(&src, &src, "i4-g32").0, Kind::Usage);

    fs::remove_dir_all(&dst).unwrap();
    let narrow = dir.path().join("narrow");
    TinyModel::new(Dims { ffn_dim: 100, ..Dims::default() }, 8).write(
        &narrow,
        Form::TextV4,
        Dtype::BF16,
        1,
    );
    assert!(run(&narrow, &dst, "i4-g32").1.contains("columns"));

    let bad = dir.path().join("bad");
    let mut tensors = model.named(Form::TextV4);
    tensors.iter_mut().find(|t| t.0.contains("layers.2.mlp.up_proj")).unwrap().2[128 * 9 + 3] =
        f32::INFINITY;
    write_model(&bad, &model.config(Form::TextV4), &tensors, Dtype::BF16, 1);
    let (kind, what) = run(&bad, &dst, "i4-g32");
    assert_eq!(kind, Kind::Model);
    assert!(what.contains("layers.2.mlp.up_proj.weight") && what.contains("row 9"), "{what}");

    assert_eq!(names(dir.path()), ["bad", "narrow", "src"]);

    quantize(&open(&src), &dst, &recipe("i4-g32", "i8-row"), &options(2, u64::MAX), &mut silent)
        .unwrap();
    let (kind, what) = run(&dst, &dir.path().join("again"), "i4-g64");
    assert_eq!(kind, Kind::Model);
    assert!(what.contains("quantised already"), "{what}");
}

#[test]
fn verify_finds_a_flipped_bit_and_names_its_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let (src, dst) = (dir.path().join("src"), dir.path().join("dst"));
    TinyModel::tiny(11).write(&src, Form::TextV4, Dtype::BF16, 1);
    for (linear, embedding) in [("i4-row+h128", "i8-row"), ("i2-g32", "i4-g64"), ("bf16", "f32")] {
        let checked = QuantizeOptions { verify: true, ..options(2, u64::MAX) };
        quantize(&open(&src), &dst, &recipe(linear, embedding), &checked, &mut silent).unwrap();
        let verified = verify(&open(&dst), 2, &mut |_| Ok(())).unwrap();
        assert_eq!((verified.tensors, verified.hashed), (54, 54));
        assert!(verified.backends.len() >= 2, "{verified:?}");

        let file = dst.join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        // The norm after the last layer is the last tensor.
        for (back, expected) in [
            (1, "`model.norm.weight`"),
            (128 * 2 + 1, "`model.layers.3.post_feedforward_layernorm.weight`"),
        ] {
            let mut bad = bytes.clone();
            bad[bytes.len() - back] ^= 1;
            fs::write(&file, bad).unwrap();
            let error = verify(&open(&dst), 2, &mut |_| Ok(())).unwrap_err();
            assert_eq!(fault_of(&error).unwrap().kind, Kind::Model);
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
        fs::write(&file, &bytes).unwrap();
        fs::remove_file(dst.join("quant-report.json")).unwrap();
        assert_eq!(verify(&open(&dst), 1, &mut |_| Ok(())).unwrap().hashed, 0);
        fs::remove_dir_all(&dst).unwrap();
    }
}
