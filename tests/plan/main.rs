//! `gemma plan` and `--gpu-layers`: a run uses what was planned, and a model that does not fit is
//! refused or placed elsewhere.

mod bytes;
#[path = "../common/mod.rs"]
mod common;

use assert_cmd::Command;
use common::vulkan::device;
use gemma::testing::FAIL;
use gemma::vulkan::{ALLOW_CPU_DRIVER, MEMORY};
use serde_json::Value;

fn gemma(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("gemma").unwrap();
    command.args(args).env(ALLOW_CPU_DRIVER, "1");
    command
}

fn json(command: &mut Command) -> Value {
    let out = command.assert().success().get_output().stdout.clone();
    serde_json::from_slice(&out).unwrap()
}

fn number(value: &Value, path: &str) -> u64 {
    value.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path} in {value:#}"))
}

/// Returns a plan of 27B's shape. Checks that its exit code agrees with the plan.
fn plan_27b(more: &[&str]) -> Value {
    let out = gemma(
        &[&["plan", "--synthetic", "27b", "-d", "cpu", "--bandwidth", "75", "--json"], more]
            .concat(),
    )
    .output()
    .unwrap();
    let plan: Value = serde_json::from_slice(&out.stdout).unwrap();
    // Whether it fits depends on the machine. The plan is printed in any case, and the exit code
    // shows the result.
    assert_eq!(out.status.code(), Some(if plan["fits"] == true { 0 } else { 5 }));
    assert_eq!(plan["fits"] == true, out.stderr.is_empty() && plan["misfit"].is_null());
    plan
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[test]
fn keys_and_values_of_27b_are_counted_by_window() {
    for (context, gib) in [
        (1000u64, None),
        (2048, None),
        (8192, Some(1.0)),
        (32_768, Some(2.9)),
        (131_072, Some(10.4)),
    ] {
        let plan = plan_27b(&["-c", &context.to_string()]);
        // A page has 256 positions of 16 heads and 128 channels, keys and values in f16. Rings have
        // the window, slack and a pass.
        let page = 2 * 256 * 16 * 128 * 2;
        let (all, ring) = (context.div_ceil(256), (1024 + 256 + 128u64).div_ceil(256) + 1);
        let scratch = 62 * 2 * 128 * 16 * 128 * 2;
        assert_eq!(
            number(&plan, "/cpu/bytes/kv"),
            (10 * all + 52 * all.min(ring)) * page + scratch,
            "{context}"
        );
        // Positions that queries can see: 8 KiB per layer and token, so 416 MiB for windows and 80
        // KiB for each token of the context.
        let part = |name: &str| number(&plan, &format!("/cpu/kv/{name}"));
        let seen = part("global") + part("window");
        assert_eq!(seen, number(&plan, "/cpu/read_by_a_pass/kv_when_full"));
        assert_eq!(part("global"), 80 * KIB * context);
        assert_eq!(part("window"), 416 * MIB * context.min(1024) / 1024);
        if let Some(gib) = gib {
            assert_eq!((seen as f64 / (1 << 30) as f64 * 10.0).round() / 10.0, gib, "{context}");
        }
        assert_eq!(seen + part("slack") + part("scratch"), number(&plan, "/cpu/bytes/kv"));
        let pass = number(&plan, "/cpu/bytes/weights") as f64 / 75e6;
        assert!((plan["predicted"]["ms_per_pass"].as_f64().unwrap() - pass).abs() < 1e-6 * pass);
        assert_eq!(
            (&plan["memory_speed"]["cpu"]["how"], &plan["gpu"]),
            (&"given".into(), &Value::Null)
        );
        let [low, high] =
            [0, 1].map(|i| plan["predicted"]["tokens_per_s_drafted"][i].as_f64().unwrap());
        let full = pass + seen as f64 / 75e6;
        // The passes of drafts were timed here, unless the model does not fit. Both figures are
        // those of a full context.
        let plain = 1e3 / full;
        let costs = plan["predicted"]["cost_of_rows"].as_array().map_or(&[][..], Vec::as_slice);
        let cost = |row: &Value| row[1].as_f64().unwrap();
        assert_eq!(costs.len(), if plan["fits"] == true { 5 } else { 0 });
        assert!(costs.iter().map(cost).is_sorted() && costs.iter().all(|row| cost(row) >= 1.0));
        assert!(low > 0.999 * plain && low < 1.801 * plain, "{low} {plain}");
        assert!(high > 0.999 * plain && high < 3.901 * plain, "{high} {plain}");
    }
}

#[test]
fn recipes_are_settled_for_made_up_weights_and_contexts_are_compared() {
    for (recipe, gb) in [("9gb", 9.0), ("10gb", 10.0), ("12gb", 12.0)] {
        let plan = plan_27b(&["--recipe", recipe, "-c", "8192"]);
        let bytes = number(&plan, "/model/bytes") as f64 / 1e9;
        assert!(bytes <= gb && bytes > 0.995 * gb, "{recipe}: {bytes}");
        let contexts: Vec<u64> =
            plan["contexts"].as_array().unwrap().iter().map(|c| number(c, "/context")).collect();
        assert_eq!(contexts, [2048, 8192, 32_768, 131_072]);
        let here = &plan["contexts"][1];
        assert_eq!(number(here, "/total"), number(&plan, "/cpu/total"));
        assert_eq!(
            (number(here, "/kv_bytes"), &here["fits"]),
            (number(&plan, "/cpu/bytes/kv"), &plan["fits"])
        );
    }
}

#[cfg(all(unix, feature = "npu"))]
#[test]
fn an_npu_that_was_asked_for_is_counted_with_its_copy() {
    assert_eq!(plan_27b(&[])["npu"], Value::Null);
    for context in [8192u64, 131_072] {
        let plan = plan_27b(&["--npu", "force", "-c", &context.to_string()]);
        // bf16 keys and values of the ten global layers, and little more.
        let (copy, npu) = (80 * KIB * context, number(&plan, "/npu/bytes"));
        assert!(npu >= copy && npu < copy + copy / 100 + 8 * MIB, "{npu}, {copy}");
        let of = |context: u64| {
            plan["contexts"]
                .as_array()
                .unwrap()
                .iter()
                .find(|c| number(c, "/context") == context)
                .unwrap()
                .clone()
        };
        assert_eq!(number(&of(context), "/total"), number(&plan, "/cpu/total") + npu);
    }
    // The kernel does not support these heads. The run continues without the NPU, and so does the
    // plan.
    let plan = json(&mut gemma(&["plan", "bundled", "-d", "cpu", "--npu", "force", "--json"]));
    assert_eq!(number(&plan, "/npu/bytes"), 0);
    assert!(plan["npu"]["without"].as_str().unwrap().contains("128 or 256"), "{plan:#}");
}

#[test]
fn the_text_of_a_plan_fits_a_terminal() {
    for more in [
        &["--synthetic", "270m", "-d", "cpu", "--npu", "force"][..],
        &["bundled", "-d", "cpu"],
        &["270m", "-d", "vulkan"],
    ] {
        if more.contains(&"vulkan") && device().is_none() {
            continue;
        }
        let out = gemma(&[&["plan", "--bandwidth", "75"], more].concat()).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let parts = [
            "model ",
            "fits yes: ",
            "speed about ",
            "tok/s plain; ",
            "if yours are like our test texts",
            "75.0 GB/s (given)",
        ];
        for part in parts.into_iter().chain(["predicted, not measured", "prompt ", "context "]) {
            assert!(words.contains(part.trim_end()), "no {part:?} in {text}");
        }
        // The verdict comes before the details.
        let at = |label: &str| text.lines().position(|line| line.starts_with(label)).unwrap();
        assert!(at("fits") < at("speed") && at("speed") < at("placement"), "{text}");
        assert!(more.contains(&"vulkan") == text.contains("add --measure"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    for wrong in ["0", "x", "1,2,3"] {
        gemma(&["plan", "--bandwidth", wrong, "270m"]).assert().code(2);
    }
    gemma(&["plan", "--tokens-per-pass", "3,2"]).assert().code(2);
}

/// `gemma plan` for another machine with this memory, without this machine's settings and caches.
fn elsewhere(memory: &str, args: &[&str]) -> Command {
    let mut command = gemma(&[&["plan", "--memory", memory, "--bandwidth", "60"], args].concat());
    command.env("HF_HUB_CACHE", "/nonexistent").env_remove("GEMMA_MODEL");
    command
}

#[test]
fn models_are_planned_by_name_before_they_are_here() {
    // Google's file of 27B has 17.2 GB. A machine of 32 GB is assumed to have 24 GB free.
    for name in ["27b", "gemma3:27b", "google/gemma-3-27b-it-qat-q4_0-gguf"] {
        let plan = json(elsewhere("32GB", &[name, "--json"]).args(["-c", "4096"]));
        assert_eq!(
            (number(&plan, "/cpu/free"), number(&plan, "/machine_memory")),
            (24_000_000_000, 32_000_000_000),
            "{name}"
        );
        assert_eq!((number(&plan, "/model/bytes") + 50_000_000) / 100_000_000, 172, "{name}");
        let reading = &plan["predicted"]["prompt"];
        assert!(
            number(reading, "/tokens") == 4000 && reading["seconds"].as_f64().unwrap() > 0.0,
            "{reading}"
        );
    }
    let plan = json(elsewhere("32GB", &["27b", "--recipe", "9gb", "--json"]).args(["-c", "4096"]));
    assert!(number(&plan, "/model/bytes") <= 9_000_000_000);
    // A directory with that name takes precedence.
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("27b")).unwrap();
    elsewhere("32GB", &["27b"]).current_dir(dir.path()).assert().code(3);
    elsewhere("32GB", &["28b"]).assert().code(3);
}

#[test]
fn what_does_not_fit_names_the_largest_that_does() {
    let said = |memory: &str, args: &[&str]| {
        let out = elsewhere(memory, args).assert().code(5).get_output().clone();
        let (text, error) =
            (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        assert!(
            text.contains("\nfits       no: ")
                && !text.contains("\nspeed")
                && !text.contains("\nprompt"),
            "{text}"
        );
        error
    };
    // The original has 54 GB.
    let error = said("32GB", &["google/gemma-3-27b-it"]);
    assert!(error.contains("google/gemma-3-27b-it-qat-q4_0-gguf (17.2 GB) fits"), "{error}");
    assert!(error.ends_with("\n  gemma pull 27b\n"), "{error}");
    let quantize = "gemma quantize google/gemma-3-27b-it gemma3-27b-";
    assert!(error.replace('\n', " ").contains(quantize), "{error}");
    let size = error
        .split("--target-size ")
        .nth(1)
        .and_then(|rest| rest.split("GB").next())
        .unwrap()
        .trim();
    // The named size fits, and one slightly larger does not.
    let gb: f64 = size.parse().unwrap();
    assert!((18.0..24.0).contains(&gb), "{error}");
    let error = said("16GB", &["27b"]);
    assert!(error.contains("--target-size "), "{error}");
    assert!(error.ends_with("\n  gemma pull gemma4-12b\n"), "{error}");
    // It fits with fewer tokens.
    let error = said("32GB", &["27b", "-c", "131072"]);
    assert!(error.contains("it fits with --ctx-size "), "{error}");
    let context =
        error.split("--ctx-size ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    let chat = format!("\n  gemma pull 27b\n  gemma chat -m 27b -c {context}\n");
    assert!(error.ends_with(&chat), "{error}");
    let fitting = elsewhere("32GB", &["27b", "-c", context]).assert().success();
    let text = String::from_utf8(fitting.get_output().stdout.clone()).unwrap();
    assert!(text.ends_with(&chat), "{text}");
    // No recipe makes 27B small enough for this machine, but a smaller Gemma fits.
    let error = said("8GB", &["27b"]);
    assert!(error.contains("gemma-3-4b-it") || error.contains("gemma-3-12b-it"), "{error}");
}

#[test]
fn the_last_lines_are_the_commands_to_type() {
    let last = |args: &[&str]| {
        let out = elsewhere("64GB", args).assert().success().get_output().stdout.clone();
        let text = String::from_utf8(out).unwrap();
        let at = text.rfind("\n\n").unwrap();
        text[at..].trim_start().to_owned()
    };
    assert_eq!(last(&["27b"]), "gemma pull 27b\n  gemma chat -m 27b\n");
    let made = "gemma quantize google/gemma-3-12b-it gemma3-12b-int4 --recipe int4";
    let found = last(&["12b", "--recipe", "int4"]);
    assert_eq!(found, format!("{made}\n  gemma chat -m gemma3-12b-int4\n"));
    assert_eq!(last(&["270m"]), "gemma pull 270m\n  gemma chat -m 270m\n");
    let found = last(&["12b", "--recipe", "bf16", "-c", "2048"]);
    let page = "google/gemma-3-12b-it";
    assert_eq!(found, format!("gemma pull {page}\n  gemma chat -m {page} -c 2048\n"));
    assert_eq!(last(&["bundled"]), "gemma chat\n");
    assert!(last(&["--synthetic", "1b"]).starts_with('|'), "made-up weights cannot be had");
}

/// Google publishes no 4-bit file of the smallest model.
#[test]
fn a_size_without_a_4_bit_file_is_planned_in_bf16() {
    let plan = json(elsewhere("32GB", &["270m", "--json"]).args(["-d", "cpu"]));
    assert_eq!(plan["model"]["bits_per_weight"], 16.0);
    assert!(plan["model"]["name"].as_str().unwrap().contains("bf16"), "{plan:#}");
    assert!(plan["predicted"]["isa"].is_string(), "{plan:#}");
}

#[test]
fn without_a_model_the_sizes_that_fit_are_listed() {
    let sizes = |memory: &str| {
        let json = json(elsewhere(memory, &["--json"]).args(["-d", "cpu"]));
        let rows = json["sizes"].as_array().unwrap().clone();
        let fits = |model: &str, recipe: &str| {
            let row = rows.iter().find(|r| r["model"] == model && r["recipe"] == recipe).unwrap();
            // A speed is printed only for models that fit. Only the weights, and at most the keys
            // and values, are read.
            let speed = row["tokens_per_s_plain"].as_f64();
            assert_eq!(row["fits"], speed.is_some());
            let bound = 60e9 / number(row, "/bytes") as f64;
            assert!(speed.is_none_or(|s| s < bound && s > 0.5 * bound), "{row}");
            row["fits"] == true
        };
        let all = [
            ("27b", "bf16"),
            ("27b", "q4_0"),
            ("27b", "9gb"),
            ("12b", "q4_0"),
            ("4b", "q4_0"),
            ("270m", "bf16"),
        ];
        all.map(|(model, recipe)| fits(model, recipe))
    };
    assert_eq!(sizes("128GB"), [true; 6]);
    assert_eq!(sizes("32GB"), [false, true, true, true, true, true]);
    assert_eq!(sizes("16GB"), [false, false, true, true, true, true]);
    assert_eq!(sizes("8GB"), [false, false, false, false, true, true]);
    let out = elsewhere("32GB", &[]).assert().success().get_output().stdout.clone();
    let text = String::from_utf8(out).unwrap();
    assert!(
        text.ends_with("\n  gemma pull gemma4-26b-a4b\n  gemma chat -m gemma4-26b-a4b\n")
            && text.contains("tok/s"),
        "{text}"
    );
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    // The largest model that is fast enough is the best. A larger, slower one is mentioned second.
    for (speed, best, larger) in [
        ("400", "Gemma 4 31b", None),
        ("40", "Gemma 4 26b-a4b", Some("gemma4-31b")),
        ("8", "Gemma 3 1b", Some("gemma4-31b")),
        ("0.1", "Gemma 3 270m", Some("gemma4-31b")),
    ] {
        let out = elsewhere("32GB", &["--bandwidth", speed]).assert().success();
        let text = String::from_utf8(out.get_output().stdout.clone()).unwrap();
        let advice = text.split("Best here: ").nth(1).unwrap().replace('\n', " ");
        assert!(advice.starts_with(best), "{speed} GB/s: {advice}");
        match larger {
            Some(shape) => {
                assert!(advice.contains("Gemma 4 31b fits too, but at "), "{advice}");
                assert!(advice.contains(&format!("gemma pull {shape}.")), "{advice}");
            }
            None => assert!(!advice.contains("fits too"), "{advice}"),
        }
    }
    // Options about one model need a model. The GPU of another machine is unknown.
    for wrong in [
        &["--recipe", "9gb"][..],
        &["--recipe", "9gb", "--parallel", "4"],
        &["27b", "-d", "vulkan"],
        &["27b", "--gpu-layers", "all"],
    ] {
        elsewhere("32GB", wrong).assert().code(2);
    }
    elsewhere("32", &["27b"]).assert().code(2);
    // The demo is the default model, as for generate and serve.
    for run in [&["--parallel", "4"][..], &["--cache-ram", "1GB"]] {
        let plan = json(elsewhere("32GB", &["-c", "2048", "--json"]).args(run));
        assert_eq!(plan["model"]["name"], "bundled demo model", "{run:?}");
    }
}

#[test]
fn what_is_planned_is_what_a_run_takes() {
    let places: &[&[&str]] = match device() {
        Some(_) => &[
            &["-d", "cpu"],
            &["-d", "vulkan"],
            &["--gpu-layers", "5"],
            &["-d", "vulkan", "--gpu-layers", "0"],
        ],
        None => &[&["-d", "cpu"]],
    };
    for place in places {
        let plan = json(gemma(&["plan", "bundled", "--json", "-c", "700"]).args(*place));
        let run = [
            "generate", "--raw", "The", "-n", "2", "-c", "700", "--draft", "off", "--format",
            "json",
        ];
        let run = json(gemma(&run).args(*place));
        for part in ["weights", "kv", "activations"] {
            let side = |side: &str| plan[side]["bytes"][part].as_u64().unwrap_or(0);
            assert_eq!(
                side("gpu") + side("cpu"),
                number(&run, &format!("/memory/{part}")),
                "{part}, {place:?}"
            );
        }
        let layers: Vec<u64> =
            ["gpu", "cpu"].iter().map(|s| plan[s]["layers"].as_u64().unwrap_or(0)).collect();
        assert_eq!(layers.iter().sum::<u64>(), number(&plan, "/model/layers"), "{place:?}");
        assert_eq!(layers[0] == 5, place == &["--gpu-layers", "5"], "{place:?}");
    }
}

#[test]
fn a_split_is_said_and_no_drafter_changes_its_text() {
    if device().is_none() {
        return;
    }
    let run = |draft: &[&str]| {
        let args = ["generate", "--raw", "The", "-n", "16", "--seed", "7", "--gpu-layers", "5"];
        let out = gemma(&args).args(draft).assert().success().get_output().clone();
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(
            said.contains("5 of 12 layers and the head") && said.contains("predicted at most"),
            "{said}"
        );
        out.stdout
    };
    let plain = run(&["--draft", "off"]);
    assert!(!plain.is_empty());
    for draft in [
        &["--draft", "ngram"][..],
        &["--draft", "bundled"],
        &["--draft", "bundled", "--draft-tree", "9"],
    ] {
        assert!(run(draft) == plain, "{draft:?}");
    }
}

#[test]
fn what_does_not_fit_is_refused_where_it_was_asked_for() {
    if device().is_none() {
        return;
    }
    let run = |args: &[&str], memory: &str| {
        let mut command = gemma(&["generate", "--raw", "The", "-n", "1", "--draft", "off"]);
        let out =
            command.args(args).env(MEMORY, memory).assert().code(5).get_output().stderr.clone();
        String::from_utf8(out).unwrap()
    };
    // 5 of 12 layers fit, and the help says so.
    let plan = json(&mut gemma(&["plan", "bundled", "--json", "-c", "64", "--gpu-layers", "5"]));
    let memory = number(&plan, "/gpu/total").to_string();
    for wish in ["all", "99", "6"] {
        let said = run(&["-d", "vulkan", "-c", "64", "--gpu-layers", wish], &memory);
        assert!(
            said.contains("for weights") && said.contains("help: give --gpu-layers 5 or auto"),
            "{wish}: {said}"
        );
    }
    let said = run(&["-d", "vulkan"], "100000000");
    assert!(
        said.contains("not even one layer")
            && said.contains("help: ")
            && said.contains("--device cpu"),
        "{said}"
    );
    let auto = json(
        gemma(&["plan", "bundled", "--json", "-c", "64", "-d", "vulkan"]).env(MEMORY, &memory),
    );
    assert_eq!(
        (number(&auto, "/gpu/layers"), number(&auto, "/gpu/free")),
        (5, memory.parse().unwrap())
    );
    assert!(number(&auto, "/largest_context") >= 64);
}

#[test]
fn auto_splits_what_is_too_large_and_leaves_what_does_not_fit_at_all() {
    if device().is_none() {
        return;
    }
    let plan = |memory: &str| {
        let out = gemma(&["plan", "--synthetic", "270m", "--json"])
            .env(MEMORY, memory)
            .assert()
            .success()
            .get_output()
            .clone();
        (
            serde_json::from_slice::<Value>(&out.stdout).unwrap(),
            String::from_utf8(out.stderr).unwrap(),
        )
    };
    let (none, said) = plan("300000000");
    assert_eq!((&none["device"], &none["gpu"]), (&"cpu".into(), &Value::Null));
    assert!(said.contains("note: running on the processor: not even one layer fits"), "{said}");
    let (some, said) = plan("520000000");
    assert!((1..18).contains(&number(&some, "/gpu/layers")) && said.is_empty(), "{some:#} {said}");
    assert!(number(&some, "/gpu/total") <= 520_000_000);
}

#[test]
fn auto_goes_on_where_a_device_fails() {
    if device().is_none() {
        return;
    }
    let bench =
        ["bench", "--synthetic", "270m", "--only", "decode", "--tg", "1", "--repetitions", "1"];
    let out = gemma(&bench).env(FAIL, "submit@3+").assert().success().get_output().clone();
    let (said, report) =
        (String::from_utf8(out.stderr).unwrap(), String::from_utf8(out.stdout).unwrap());
    assert!(
        said.contains("lost") && said.contains("instead: all layers on the processor"),
        "{said}"
    );
    assert!(report.contains("cpu: "), "{report}");
    gemma(&bench).args(["-d", "vulkan"]).env(FAIL, "submit@3+").assert().code(4);
}

#[test]
fn a_split_that_loses_its_gpu_is_exit_4_and_keeps_the_text_so_far() {
    if device().is_none() {
        return;
    }
    let run = || {
        gemma(&[
            "generate",
            "--raw",
            "The",
            "-n",
            "40",
            "--seed",
            "7",
            "--gpu-layers",
            "5",
            "--draft",
            "off",
            "-q",
            "--no-newline",
        ])
    };
    let whole = run().assert().success().get_output().stdout.clone();
    let (mut kept, mut early) = (0, 0);
    for after in [11, 101, 61, 31, 81, 161] {
        if kept > 0 && early > 0 {
            break;
        }
        let out = run().env(FAIL, format!("submit@{after}+")).output().unwrap();
        if out.status.success() {
            continue;
        }
        assert_eq!(out.status.code(), Some(4), "after {after}");
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(said.contains("lost") && said.contains("help: "), "{said}");
        assert!(whole.starts_with(&out.stdout) && out.stdout.len() < whole.len(), "after {after}");
        kept += !out.stdout.is_empty() as usize;
        early += out.stdout.is_empty() as usize;
    }
    assert!(
        kept > 0 && early > 0,
        "{kept} losses while writing, {early} before: the moments tried miss a case"
    );
}
