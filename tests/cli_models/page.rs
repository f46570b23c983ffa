//! The page that `gemma bench --report` writes.

use super::*;

/// Titles of a page's sections.
pub fn sections(page: &str) -> Vec<&str> {
    page.split("<h2>").skip(1).map(|s| s.split("</h2>").next().unwrap()).collect()
}

/// A page that a browser can show by itself: every tag is closed, nothing is fetched or run.
#[track_caller]
pub fn stands_alone(page: &str) {
    for what in ["http:", "https:", "<script", "<link", "<img", "url(", "@import", "NaN", "inf%"] {
        assert!(!page.contains(what), "{what}");
    }
    assert!(
        page.starts_with("<!doctype html>")
            && page.contains("lang=\"en\"")
            && page.contains("prefers-color-scheme: dark")
    );
    for tag in [
        "svg",
        "section",
        "figure",
        "figcaption",
        "table",
        "tr",
        "td",
        "th",
        "p",
        "div",
        "span",
        "text",
        "details",
    ] {
        let opened =
            page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
        assert_eq!(opened, page.matches(&format!("</{tag}>")).count(), "{tag}");
    }
    let plots = page.matches("<svg role=\"img\" aria-label=").count();
    assert_eq!(
        (plots, plots),
        (page.matches("<figcaption>").count(), page.matches("<summary>").count()),
        "each has words and a table"
    );
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
        "--format",
        "json",
        "--report",
        "a.html",
    ])
    .ok();
    let page = read("a.html");
    stands_alone(&page);
    let all = [
        "Prefill and decode",
        "Cost of a pass by its rows, c(M)",
        "Tokens a second by kind of prompt",
        "Acceptance by depth",
        "Acceptance by source",
        "Memory by arena",
        "Time by kernel while decoding",
        "Time by kernel in passes of 2 rows",
    ];
    assert_eq!(sections(&page), all);
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
        assert!(page.contains(&format!("<td>{}</td>", text(&kind["kind"]))), "{kind}");
    }
    let accepted = json["text"]["acceptance"]["by_depth"][0][1].as_u64().unwrap();
    assert!(page.contains(&format!("<td>{accepted}</td>")), "{accepted}");

    // The same from the figures alone, and only what they hold.
    fs::write(dir.path().join("run.json"), &run.out).unwrap();
    let again = bench(&["--from", "run.json", "--report", "b.html"]).ok();
    assert!(again.text().contains("verify 4 rows") && read("b.html") == page);
    assert!(again.text().lines().all(|line| line.chars().count() <= 100), "{}", again.text());
    // Beside an older run the page has what that measured too, and says when both ran.
    bench(&["--from", "run.json", "--compare", "run.json", "--report", "d.html"]).ok();
    let both = read("d.html");
    stands_alone(&both);
    for what in [
        "<th>before</th><th>change</th>",
        "<td>same</td>",
        "tokens in the cache, before",
        "<th>ratio before</th>",
        "<dt>before</dt>",
    ] {
        assert!(both.contains(what) && !page.contains(what), "{what}");
    }
    let date = json["date"].as_str().unwrap();
    assert!(
        date.len() == 16
            && page.contains(&format!("{date} UTC"))
            && page.contains("<dt>command</dt><dd>gemma bench -q"),
        "{date}"
    );
    // Texts of twelve tokens say nothing about drafts.
    let doubts = json["doubts"].as_array().unwrap();
    assert!(
        doubts.iter().any(|doubt| doubt.as_str().unwrap().contains("too few to judge")),
        "{doubts:?}"
    );
    assert!(page.contains("too few to judge") && again.text().contains("too few"));
    let csv = bench(&["--from", "run.json", "--format", "csv"]).ok();
    assert!(
        csv.text().contains("\ntest,\"tg4\",tok/s,") && csv.text().contains("\nkernel,"),
        "{}",
        csv.text()
    );
    let help = gemma(&["bench", "--help"], b"").ok();
    assert!(
        help.text().contains("[default: prefill,decode,verify,kernels,text]"),
        "{}",
        help.text()
    );
    assert!(help.text().contains("[default: 1,2,4,8,16,32]"), "{}", help.text());
    bench(&["--only", "kernels", "--kernel-rows", "4096"]).fails(2, &["--kernel-rows 4096"]);
    bench(&["--only", "decode", "--report", "c.html"]).ok();
    assert_eq!(sections(&read("c.html")), ["Prefill and decode", "Memory by arena"]);
    bench(&["--from", "a.html"]).fails(3, &["a.html is not a result"]);
    bench(&["--from", "run.json", "--synthetic", "270m"]).fails(2, &["--from"]);
}
