//! The listing of kernel calls that `scripts/check/amd.sh` reads.

#[path = "../../examples/kernels/listing.rs"]
mod example;

use crate::common::twins::format as spelled;
use example::{ListedCall, Listing, device_info};
use gemma::compute::KvFormat;
use gemma::models::forward::{self, ForwardOptions, SparePages};
use gemma::models::{Config, Role, Weights};
use gemma::tensor::Format;
use gemma::vulkan::{Bucket, MatrixShape, SHAPE};
use serde_json::json;

/// Threads per subgroup.
const SUBGROUP: u32 = 32;
/// Shared memory per workgroup in bytes.
const SHARED: u32 = 64 << 10;

/// Returns the calls of a pass over `rows` rows of two layers in one format, with a small table.
fn pass(format: &str, shapes: &[MatrixShape], rows: usize) -> Vec<ListedCall> {
    pass_with(format, ("i8-row", 512), SUBGROUP, shapes, rows)
}

/// The same, with the table's format and rows and the device's subgroup size.
fn pass_with(
    format: &str,
    (table, vocabulary): (&str, usize),
    subgroup: u32,
    shapes: &[MatrixShape],
    rows: usize,
) -> Vec<ListedCall> {
    let bucket = Bucket::holding(rows, rows, 0, 1, false);
    let shape = ((4, 2), vocabulary, 256);
    calls_of((format, table), shape, (subgroup, SHARED), shapes, bucket)
}

/// Returns the calls of a pass of two layers, for these heads, vocabulary and context. The device
/// has this subgroup size and shared memory.
fn calls_of(
    (format, table): (&str, &str),
    ((heads, kv_heads), vocabulary, context): ((usize, usize), usize, usize),
    (subgroup, shared): (u32, u32),
    shapes: &[MatrixShape],
    bucket: Bucket,
) -> Vec<ListedCall> {
    let config = json!({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
        "sliding_window_pattern": 2, "sliding_window": 64, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "query_pre_attn_scalar": 64,
        "vocab_size": vocabulary, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "max_position_embeddings": context,
    });
    let (linear, table) = (spelled(format), spelled(table));
    let format = |role| if matches!(role, Role::Embed | Role::Head) { table } else { linear };
    let weights = Weights::synthetic(Config::from_json(&config).unwrap(), format, 1);
    let device = json!({
        "chip": "board", "integrated": false, "min_subgroup": subgroup, "max_subgroup": subgroup,
        "asks_subgroup": true,
        "max_shared": shared, "max_workgroup": 1024, "max_subgroups": 32, "int8_matrices": [],
    });
    let listing = Listing::new(&device_info(&device).unwrap().0, shapes);
    let options = ForwardOptions {
        context,
        kv: KvFormat::F16,
        max_rows: 512,
        sequences: 1,
        spare: SparePages::default(),
    };
    let model = forward::load(&weights, &mut listing.executor(), options).unwrap();
    listing.calls(model.pass, bucket).unwrap()
}

#[test]
fn every_matrix_is_multiplied_once_by_a_kernel_that_there_is() {
    let layer = 1024 * (4 + 2 * 2) * 128 + 4 * 128 * 1024 + 3 * 1024 * 2048;
    for format in ["bf16", "i8-row", "i4-g32", "i2-row+h128", "t3-row+h128", "q4_k", "q6_k"] {
        for rows in [1, 8, 64] {
            let calls = pass(format, &[], rows);
            let linear = calls.iter().filter(|call| !call.matrices.is_empty());
            let work: u64 = linear.map(|call| call.count as u64 * call.work).sum();
            assert_eq!(work as usize, rows * (2 * layer + 512 * 1024), "{format}, {rows} rows");
            for call in &calls {
                let file = format!("{}/shaders/{}.comp", env!("CARGO_MANIFEST_DIR"), call.shader);
                assert!(std::path::Path::new(&file).is_file(), "{file}");
            }
        }
    }
}

/// NVIDIA's driver does nothing in a dispatch of more than 65,535 workgroups along an axis.
#[test]
fn a_table_of_gemmas_vocabulary_fits_into_a_dispatch() {
    for table in ["f32", "bf16", "i8-row", "i4-g32", "t3-row+h128", "q6_k"] {
        for (subgroup, rows) in [(8, 1), (32, 1), (32, 4), (64, 1)] {
            let calls = pass_with("bf16", (table, 262_208), subgroup, &[], rows);
            let reads = |call: &&ListedCall| call.matrices.iter().any(|m| m.1 == 262_208);
            let head = calls.iter().find(reads).expect("the head reads the table");
            let most = head.groups.into_iter().max().unwrap();
            assert!(most <= 65_535, "{table}, subgroups of {subgroup}: {:?}", head.groups);
        }
    }
}

/// Heads and channels of 27B. A pass over a draft's rows uses a workgroup per page while the
/// partial results take at most 64 MiB.
#[test]
fn long_contexts_are_split_over_workgroups() {
    let (heads, context) = ((32, 16), 131_072);
    for (rows, positions) in [(1, context), (8, 100_000), (8, context), (16, 65_536), (32, 32_768)]
    {
        let bucket = Bucket::holding(rows, rows, 0, positions / 256, false);
        let shape = (heads, 512, context);
        let calls = calls_of(("bf16", "i8-row"), shape, (SUBGROUP, SHARED), &[], bucket);
        let attention = calls.iter().filter(|call| call.shader == "attention");
        let most = attention.map(|call| call.groups[2]).max();
        assert_eq!(most, Some(bucket.pages as u32), "{rows} rows, {positions} positions");
    }
}

#[test]
fn kernels_beside_the_passes_are_listed() {
    let shaders: Vec<&str> = Listing::beside_passes().iter().map(|call| call.shader).collect();
    for shader in ["read", "repack"] {
        assert!(shaders.contains(&shader), "{shader}: {shaders:?}");
    }
}

/// `linear_few` takes twice as many rows of formats with one scale per element. The workgroups of
/// `linear_many` are few in a small model, so several share their rows.
#[test]
fn kernels_are_those_of_the_shapes_that_a_device_multiplies() {
    for (format, few) in [("i4-g32", 16), ("i8-g32", 16), ("q4_k", 8), ("q5_0", 16), ("q6_k", 8)] {
        let kernels = |shapes: &[MatrixShape], rows: usize| -> Vec<(&str, bool)> {
            let calls = pass(format, shapes, rows);
            let multiplies = |call: &ListedCall| call.matrices.iter().any(|m| m.1 != 512);
            let kernel = |call: ListedCall| (call.shader, call.groups[2] > 1);
            calls.into_iter().filter(multiplies).map(kernel).collect()
        };
        for (shapes, rows, kernel) in [
            (&[][..], 16, ("linear", false)),
            (&[SHAPE], few, ("linear_few", false)),
            (&[SHAPE], 2 * few, ("linear_many", true)),
        ] {
            let found = kernels(shapes, rows);
            let fits = !found.is_empty() && found.iter().all(|found| *found == kernel);
            assert!(fits, "{format}, {rows} rows: {found:?}");
        }
    }
}

/// A subgroup of `linear_matrix` keeps 16 rows of a chunk of the matrix and 16 of the activations,
/// each of 128 bytes plus 16 that avoid bank conflicts. 4 KiB are left to the rotation.
#[test]
fn workgroups_have_the_subgroups_that_shared_memory_holds() {
    let (other, each, kept) = (MatrixShape { m: 16, n: 16, k: 16 }, 2 * 16 * (128 + 16), 4 << 10);
    let threads = |shared: u32| -> Vec<u32> {
        let (shape, bucket) = (((4, 2), 512, 256), Bucket::holding(16, 16, 0, 1, false));
        let formats = ("i8-row", "i8-row");
        let calls = calls_of(formats, shape, (SUBGROUP, shared), &[other], bucket);
        // Eight chunks of a row: the matrices of 1024 columns.
        let calls = calls.iter().filter(|call| call.matrices.iter().any(|m| m.2 == 1024));
        let threads = calls.map(|call| match call.shader {
            "linear_matrix" => call.constants.iter().find(|(id, _)| *id == 0).unwrap().1,
            _ => 0,
        });
        threads.collect()
    };
    for subgroups in 1..=4 {
        for (shared, fit) in
            [(kept + subgroups * each, subgroups), (kept + subgroups * each - 1, subgroups - 1)]
        {
            let found = threads(shared);
            assert!(
                !found.is_empty() && found.iter().all(|n| *n == fit * SUBGROUP),
                "{shared}: {found:?}"
            );
        }
    }
}

/// With more rows, the choice never goes back from matrix instructions to dot products, which take
/// time for each row. It never reads or decodes the weights more often.
#[test]
fn a_pass_over_more_rows_takes_no_kernel_for_fewer() {
    for format in Format::written().filter(|format| format.code.is_integer()) {
        for shapes in [&[][..], &[SHAPE]] {
            let mut before = (false, 1);
            for rows in [1, 2, 4, 8, 16, 32] {
                let calls = pass(&format.to_string(), shapes, rows);
                let layers: Vec<_> =
                    calls.iter().filter(|c| c.matrices.iter().any(|m| m.1 != 512)).collect();
                let by_matrices =
                    layers.iter().all(|c| c.shader != "linear" && c.shader != "linear_trellis");
                let times = layers.iter().map(|c| c.groups[0]).max().unwrap();
                let case = format!("{format}, {rows} rows, {} shapes", shapes.len());
                assert!(by_matrices || !before.0, "{case}");
                assert!(times >= before.1, "{case}: {times} times, fewer rows {}", before.1);
                if format.code.is_trellis() && !shapes.is_empty() {
                    assert_eq!(by_matrices, rows > 2, "{case}");
                }
                before = (by_matrices, times);
            }
        }
    }
}
