//! The page that `gemma bench --report` writes.

use super::*;

/// Returns the titles of a page's plots.
fn plots(page: &str) -> Vec<&str> {
    page.split("<h2>").skip(1).map(|s| s.split("</h2>").next().unwrap()).collect()
}

/// Checks that a browser can show the page by itself: nothing is fetched or run.
#[track_caller]
fn stands_alone(page: &str) {
    let page = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for what in ["http:", "https:", "<script", "<link", "<img", "url(", "@import", "NaN", "inf"] {
        assert!(!page.contains(what), "{what}");
    }
    assert!(page.starts_with("<!doctype html>") && page.contains("lang=\"en\""));
    for tag in ["svg", "figure", "figcaption", "pre", "p", "text"] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    let drawn = page.matches("<svg role=\"img\" aria-label=").count();
    assert_eq!(drawn, page.matches("<figcaption>").count(), "each has words");
}

#[test]
fn a_report_is_a_page_of_what_was_measured() {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let bench = |more: &[&str]| {
        let args = [
            "bench",
            "-q",
            "--tg",
            "4",
            "--rows",
            "1,2,4",
            "--repetitions",
            "1",
            "--text-tokens",
            "12",
            "--kernel-rows",
            "1,2",
        ];
        gemma_in(dir.path(), &[&args, more].concat(), b"")
    };
    let run = bench(&[
        "--only",
        "decode,verify",
        "kernels",
        "text",
        "--draft-tree",
        "7",
        "--json",
        "--report",
        "a.html",
    ])
    .ok();
    let page = read("a.html");
    stands_alone(&page);
    let all = [
        "Cost of a pass by its rows, c(M)",
        "Tokens a second by kind of prompt",
        "Acceptance by depth",
        "Acceptance by source",
        "Memory by arena",
        "Time by kernel while decoding",
        "Time by kernel in passes of 2 rows",
    ];
    assert_eq!(plots(&page), all);
    let json = run.json();
    // A layer's gate and up multiply every channel of a row with all of their weights.
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("draft/demo-target/config.json");
    let config: Value = serde_json::from_slice(&fs::read(config).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap();
    let of_a_row = 2 * size("hidden_size") * size("intermediate_size") * size("num_hidden_layers");
    for rows in [1, 2] {
        let kernels = json["kernels"].as_array().unwrap().iter();
        let kernel =
            kernels.filter(|k| k["rows"] == rows).find(|k| k["label"] == "gate_up").unwrap();
        assert_eq!(
            (&kernel["passes"], &kernel["macs"]),
            (&json!(4), &json!(4 * rows * of_a_row)),
            "{rows} rows"
        );
    }
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    assert!(
        page.contains(&text(&json["machine"]["device"]))
            && page.contains(&text(&json["model"]["name"])),
        "what was measured on what"
    );
    for kind in json["text"]["kinds"].as_array().unwrap() {
        assert!(page.contains(&format!("{}, with drafts", text(&kind["kind"]))), "{kind}");
    }
    let accepted = &json["text"]["acceptance"];
    let figure = |value: &Value| value.as_f64().unwrap();
    let per_pass = figure(&accepted["by_depth"][0][1]) / figure(&accepted["passes"]);
    assert!(page.contains(&format!("{per_pass:.2} (")), "{per_pass}");

    // The same from the figures alone, and only what they hold.
    fs::write(dir.path().join("run.json"), &run.out).unwrap();
    let again = bench(&["--from", "run.json", "--report", "b.html"]).ok();
    assert!(again.text().contains("verify 4 rows") && read("b.html") == page);
    assert!(again.text().lines().all(|line| line.chars().count() <= 100), "{}", again.text());
    // Beside an older run the page has what that measured too, and says when both ran.
    bench(&["--from", "run.json", "--compare", "run.json", "--report", "d.html"]).ok();
    let both = read("d.html");
    stands_alone(&both);
    for what in [" before | change ", " same |", "tokens in the cache, before", "<p>Before: "] {
        assert!(both.contains(what) && !page.contains(what), "{what}");
    }
    let date = json["date"].as_str().unwrap();
    assert!(
        date.ends_with(" GMT") && page.contains(date) && page.contains("\ngemma bench -q"),
        "{date}"
    );
    // Texts of twelve tokens say nothing about drafts.
    let doubts = json["doubts"].as_array().unwrap();
    assert!(
        doubts.iter().any(|doubt| doubt.as_str().unwrap().contains("too few to judge")),
        "{doubts:?}"
    );
    assert!(page.contains("too few to judge") && again.text().contains("too few"));
    let help = gemma(&["bench", "--help"], b"").ok();
    assert!(
        help.text().contains("[default: prefill,decode,verify,kernels,text]"),
        "{}",
        help.text()
    );
    assert!(help.text().contains("[default: 1,2,4,8,16,32]"), "{}", help.text());
    bench(&["--only", "kernels", "--kernel-rows", "4096"]).fails(2, &["--kernel-rows 4096"]);
    bench(&["--only", "decode", "--report", "c.html"]).ok();
    assert_eq!(plots(&read("c.html")), ["Memory by arena"]);
    bench(&["--from", "a.html"]).fails(3, &["a.html is not a result"]);
    bench(&["--from", "run.json", "--synthetic", "270m"]).fails(2, &["--from"]);
    bench(&["--replay", "run.json", "--report", "e.html"]).fails(2, &["--report"]);
}
