//! A pass is split into submissions that are too short for a watchdog, and splitting does not
//! change a bit.

use crate::common;
use common::vulkan::{device, large_config};
use gemma::compute::KvFormat;
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::Weights;
use gemma::vulkan::{LIMIT, MadeUp, VulkanExecutor};
use std::sync::{Arc, Mutex};

/// Seconds per multiply-add of a row on a Radeon 780M that is limited by its memory, from a model.
const LAPTOP: f64 = 7e-12;

/// Rows of a piece of a prompt: more than the kernels for few rows handle, in two blocks.
const PIECE: u32 = 72;

/// Returns the scores of two pieces of a prompt, of single rows and of a tree of 16. Each pass is
/// run twice.
pub fn scores(exec: VulkanExecutor, format: &str) -> Vec<Vec<u32>> {
    let format = format.parse().unwrap();
    let weights = Weights::synthetic(large_config(), |_| format, 5);
    let options = EngineOptions { context: 300, kv: KvFormat::F16 };
    let mut engine = PlannedEngine::new(&weights, Box::new(exec), options).unwrap();
    let (mut scores, mut all) = (Scores::default(), Vec::new());
    for rows in [PIECE, PIECE, 1, 1, 16, 16] {
        let tokens: Vec<u32> = (0..rows).map(|i| (i * 31 + rows) % 96).collect();
        engine.forward(&TokenTree::chain(&tokens), Rows::All, &mut scores).unwrap();
        engine.commit(&[(0, &(0..rows).collect::<Vec<_>>())]).unwrap();
        all.push(scores.logits.iter().map(|x| x.to_bits()).collect());
    }
    all
}

/// Returns the first of six passes with different logits, and the place.
pub fn difference(got: &[Vec<u32>], want: &[Vec<u32>]) -> Option<String> {
    let pass = got.iter().zip(want).position(|(a, b)| a != b)?;
    let (a, b) = (&got[pass], &want[pass]);
    let differ: Vec<usize> = (0..a.len()).filter(|i| a[*i] != b[*i]).collect();
    let vocab = large_config().vocab;
    let (first, last) = (differ[0], differ[differ.len() - 1]);
    let places = format!("row {} column {} to row {}", first / vocab, first % vocab, last / vocab);
    Some(format!("pass {pass}: {} of {} logits differ, from {places}", differ.len(), a.len()))
}

fn made_up(each: f64) -> Arc<Mutex<MadeUp>> {
    Arc::new(Mutex::new(MadeUp::taking(each)))
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_device_50_times_slower_than_a_laptops_is_given_no_submission_over_the_bound() {
    let Some(open) = device() else { return };
    let want = scores(open(), "i8-row");
    let mut counts = Vec::new();
    for slower in [0.01, 1.0, 50.0] {
        let laptop = made_up(slower * LAPTOP);
        let found = difference(&scores(open().pretending(&laptop), "i8-row"), &want);
        assert_eq!(found, None, "{slower} times as slow");
        let given = laptop.lock().unwrap().clone();
        // A call that cannot be divided may take longer: gate and up of a piece, with the kernels
        // for the next power of two of rows.
        let whole = 2.0 * f64::from(PIECE.next_power_of_two()) * 1280.0 * 2304.0 * slower * LAPTOP;
        let most = if open().info().divides_calls { LIMIT } else { LIMIT.max(whole) };
        assert!(given.longest <= most * 1.001, "{} s, {slower} times as slow", given.longest);
        counts.push(given.submissions);
    }
    // Six passes. On the fastest device only the first of each kind may need a few more
    // submissions. Whole calls leave fewer places to divide a pass.
    let fewest = if open().info().divides_calls { 2 * counts[0] } else { counts[0] };
    assert!(counts[0] <= 12 && counts[2] > fewest, "{counts:?} submissions");
}

/// Calls are divided down to single workgroups, even if their last workgroups continue with the
/// next operation.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_call_in_many_parts_computes_the_same() {
    let Some(open) = device() else { return };
    for format in ["i4-g32", "t2-row+h128"] {
        let want = scores(open(), format);
        let crawling = made_up(1e-7);
        assert_eq!(
            difference(&scores(open().pretending(&crawling), format), &want),
            None,
            "{format}"
        );
        let given = crawling.lock().unwrap().submissions;
        // Six passes of at least 15 calls. If calls cannot be divided, each is a submission.
        let least = if open().info().divides_calls { 1000 } else { 6 * 15 };
        assert!(given >= least, "{given} submissions");
    }
}
