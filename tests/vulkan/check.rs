//! `--check` on Vulkan: a correct run passes with the device's own numbers, and a wrong result is
//! found and named wherever it is.

use crate::common;
use assert_cmd::Command;
use common::trees::{prefill, random_tree, tokens};
use common::vulkan::{config, config_of, device, wide_config};
use gemma::compute::{Executor, KvFormat};
use gemma::engine::planned::EngineOptions;
use gemma::engine::{Engine, EngineExt, Input, Output, PlannedEngine, Rows, Scores, TokenTree};
use gemma::models::{Config, Role, Weights};
use gemma::tensor::Format;
use gemma::testing::WRONG_RESULT;
use gemma::vulkan::{ALLOW_CPU_DRIVER, CheckedExecutor, InjectedFault, VulkanExecutor};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Makes an engine with a different format in each place, so that several kinds of preparation
/// follow one another.
fn engine(exec: Box<dyn Executor>) -> PlannedEngine {
    let format = |role| match role {
        Role::Embed => "i8a-row",
        Role::Q | Role::Up => "i4-row+h128",
        Role::K => "bf16",
        Role::V | Role::Gate => "i4-g32",
        Role::O => "i8-row",
        _ => "t3-row+h128",
    };
    engine_of(exec, config(50), move |role| format(role).parse().unwrap())
}

fn engine_of(
    exec: Box<dyn Executor>,
    config: Config,
    format: impl Fn(Role) -> Format + Send + Sync + 'static,
) -> PlannedEngine {
    let weights = Weights::synthetic(config, format, 11);
    PlannedEngine::new(&weights, exec, EngineOptions { context: 600, kv: KvFormat::F16 }).unwrap()
}

/// Runs a prefill of `prompt` tokens in chunks, a tree, lists of the best tokens, and a commit.
/// Returns the tree's logits, then the lists.
fn session(mut engine: PlannedEngine, prompt: usize) -> anyhow::Result<(Vec<f32>, Scores)> {
    let mut rng = SmallRng::seed_from_u64(3);
    let text = tokens(&mut rng, prompt);
    prefill(&mut engine, &text, &mut rng);
    let mut scores = Scores::default();
    engine.forward(&random_tree(&mut rng, 20), Rows::All, &mut scores)?;
    let logits = scores.logits.clone();
    let chain = TokenTree::chain(&[3, 1, 4]);
    let best = Output::Best { n: 5, usable: 90 };
    engine.run(&[Input::new(0, &chain, Rows::All)], best, &mut scores)?;
    engine.commit(&[(0, &[0, 1])])?;
    Ok((logits, scores))
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_checked_run_gives_the_devices_own_numbers() {
    let Some(open) = device() else { return };
    // Across a page's edge.
    let (logits, lists) = session(engine(Box::new(CheckedExecutor::new(open()))), 270).unwrap();
    assert!(logits.len() == 20 * 96 && lists.best.len() == 3);
    let (plain, plain_lists) = session(engine(Box::new(open())), 270).unwrap();
    assert!(plain == logits && plain_lists.best == lists.best);
}

#[test]
#[ignore = "a driver on the processor compiles the kernels of all formats for a quarter of an hour"]
fn every_format_passes() {
    let Some(open) = device() else { return };
    let turned = Format::all().map(|format| Format { hadamard: true, ..format });
    let known = |format: &Format| format.to_string().parse::<Format>().is_ok();
    // The model is too narrow for blocks of 256, which the next test covers.
    let fits = |format: &Format| known(format) && format.check_cols(128).is_ok();
    for format in Format::all().chain(turned).filter(fits) {
        let exec = Box::new(CheckedExecutor::new(open()));
        let engine = engine_of(exec, config_of(2, 2, 50), move |_| format);
        let (logits, _) = session(engine, 40).unwrap_or_else(|e| panic!("{format}: {e:#}"));
        assert!(logits.iter().all(|v| v.is_finite()), "{format}");
    }
}

#[test]
#[ignore = "a driver on the processor compiles the kernels of all formats for minutes"]
fn every_format_of_files_passes() {
    let Some(open) = device() else { return };
    for format in Format::all().filter(|format| format.code.is_stored()) {
        let exec = Box::new(CheckedExecutor::new(open()));
        // The output of attention is too narrow for blocks of 256.
        let narrow = format.check_cols(128).is_err();
        let formats = move |role| if narrow && role == Role::O { Format::I8_G32 } else { format };
        let (logits, _) = session(engine_of(exec, wide_config(), formats), 40)
            .unwrap_or_else(|e| panic!("{format}: {e:#}"));
        assert!(logits.iter().all(|v| v.is_finite()), "{format}");
    }
}

/// Returns the error of a pass of two rows with one wrong result.
fn said_of_fault(open: &impl Fn() -> VulkanExecutor, fault: InjectedFault) -> Option<String> {
    let mut exec = CheckedExecutor::new(open());
    exec.inject_fault(fault);
    let mut engine = engine(Box::new(exec));
    engine
        .forward(&TokenTree::chain(&[5, 6]), Rows::All, &mut Scores::default())
        .err()
        .map(|e| e.to_string())
}

#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_wrong_result_is_found_and_named() {
    let Some(open) = device() else { return };
    let (sign, last_bit, code) = (1 << 31, 1, 1 << 9);
    // The faults are in the second row of outputs: `[rows, 128]` floats and bytes, `[rows, 64]`
    // keys, `[rows, 256]`, and rows with one scale.
    for (dispatch, output, word, mask, found) in [
        (
            0,
            0,
            128 + 7,
            sign,
            "dispatch 0, `embed`, differs from its twin in the embeddings: row 1, column 7: ",
        ),
        (
            1,
            0,
            128 + 7,
            sign,
            "dispatch 1, `norm` of layer 0, differs from its twin in the norm: row 1, column 7: ",
        ),
        (
            2,
            0,
            32 + 7,
            code,
            "dispatch 2, `quantise` of layer 0, differs from its twin in the codes: \
                row 1, column 29: code ",
        ),
        (2, 1, 1, sign, "in the scales: row 1, column 0: "),
        (2, 2, 1, last_bit, "in the sums: row 1, column 0: "),
        // Here only the values can be wrong. Wrong queries and keys are found in the rotation after
        // the products.
        (
            4,
            0,
            64 + 7,
            sign,
            "dispatch 4, `qkv` of layer 0, differs from its twin in the products: \
                row 1, column 7: ",
        ),
        (
            5,
            0,
            128 + 7,
            sign,
            "dispatch 5, `rope` of layer 0, differs from its twin in the queries: \
                row 1, column 7: ",
        ),
        (5, 1, 64 + 7, sign, "in the keys: row 1, column 7: "),
        // Eight channels of a row of keys are adjacent.
        (5, 2, 4 + 2, sign, "in the scratch keys: row 1, column 5: "),
        (5, 3, 32 + 2, sign, "in the scratch values: row 1, column 5: "),
        // The rounding after attention finds a fault in attention.
        (
            7,
            0,
            32 + 7,
            code,
            "dispatch 7, `quantise` of layer 0, differs from its twin in the codes: \
                row 1, column 29: code ",
        ),
        (
            8,
            0,
            128 + 7,
            last_bit,
            "dispatch 8, `o` of layer 0, differs from its twin in the products: row 1, column 7: ",
        ),
    ] {
        let error = said_of_fault(&open, InjectedFault { dispatch, output, word, mask });
        let error =
            error.unwrap_or_else(|| panic!("dispatch {dispatch}, output {output}: not found"));
        assert!(error.contains(found), "{error}\n{found}");
    }
}

/// The command stops with the exit code of a failure at run time, and names the place.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_checked_command_passes_or_is_exit_1() {
    if device().is_none() {
        return;
    }
    let generate = |args: &[&str]| {
        let mut command = Command::cargo_bin("gemma").unwrap();
        command
            .args([
                "generate", "-d", "vulkan", "--draft", "off", "--temp", "0", "--raw", "-n", "2",
                "The", "-q",
            ])
            .args(args);
        command.env(ALLOW_CPU_DRIVER, "1");
        command
    };
    let plain = generate(&[]).assert().success().get_output().stdout.clone();
    generate(&["--check"]).assert().success().stdout(plain);
    let sign = 1u32 << 31;
    let failed = generate(&["--check"]).env(WRONG_RESULT, format!("0,0,3,{sign}")).assert().code(1);
    let said = String::from_utf8(failed.get_output().stderr.clone()).unwrap();
    assert!(
        said.contains(
            "error: dispatch 0, `embed`, differs from its twin in the embeddings: row 0, column 3"
        ),
        "{said}"
    );
}

/// Records that share passes have the same answers as alone, on a device and the processor
/// together.
#[test]
#[cfg_attr(not(vulkan_driver), ignore = "no Vulkan driver")]
fn a_batch_at_once_is_that_of_one_by_one() {
    if device().is_none() {
        return;
    }
    let record = |n: usize| {
        let prompt = ["Why is the sky blue?", "Tell me about rivers.", "What is 2 + 2?"][n % 3];
        format!(
            "{{\"id\": {n}, \"prompt\": \"{prompt}\", \"max_tokens\": {}, \"temperature\": {}}}\n",
            2 + n % 4,
            n % 2
        )
    };
    let records: String = (0..5).map(record).collect();
    let batch = |more: &[&str]| {
        let mut command = Command::cargo_bin("gemma").unwrap();
        command.args([
            "generate",
            "--batch",
            "-q",
            "--seed",
            "2",
            "-d",
            "vulkan",
            "--gpu-layers",
            "2",
        ]);
        command.args(more).env(ALLOW_CPU_DRIVER, "1").write_stdin(records.clone());
        command.assert().success().get_output().stdout.clone()
    };
    assert!(batch(&["--parallel", "4", "--draft-tree", "3"]) == batch(&["--draft", "off"]));
}
