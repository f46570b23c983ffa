//! The text depends only on the seed and the temperature.

use super::{devices, gemma, run};

/// A beginning of code, one of docs and one of prose.
const PROMPTS: [&str; 3] = [
    "def fibonacci(n):\n    \"\"\"Returns the n-th Fibonacci number.\"\"\"\n",
    "# Installation\n\nTo install the package, run the following command:\n\n",
    "The old lighthouse keeper climbed the stairs for the last time, and",
];

#[test]
#[ignore = "needs Google's weights: scripts/real-gemma.sh"]
fn drafts_threads_and_cuts_change_nothing() {
    for device in devices() {
        for prompt in PROMPTS {
            for temperature in ["0", "1"] {
                let text = |more: &[&str]| {
                    let mut command = gemma(&["generate", "--raw", "-n", "40"], &device);
                    command.args(["--seed", "7", "--temp", temperature, "-p", prompt]).args(more);
                    run(command).out
                };
                let plain = text(&["--draft", "off", "-t", "2"]);
                for more in [
                    &["--draft", "auto"][..],
                    &["--draft", "auto", "--draft-tree", "chain", "-t", "1"],
                    &["--draft", "ngram", "--draft-tree", "12"],
                    &["--draft", "off", "-t", "1", "-c", "512"],
                ] {
                    let other = text(more);
                    let [plain, other] = [&plain, &other].map(|text| String::from_utf8_lossy(text));
                    assert_eq!(other, plain, "{device}, temperature {temperature}, {more:?}");
                }
                assert!(!plain.is_empty(), "{device}: no text at temperature {temperature}");
            }
        }
    }
}
