"""Mutation tests: finds small faults in the source that no test detects.

    python3 scripts/check/mutants.py build DIRECTORY        # one build with all mutants
    python3 scripts/check/mutants.py run DIRECTORY [JOBS]   # tries mutants that were not tried yet
    python3 scripts/check/mutants.py table DIRECTORY        # a row a file, then the survivors

`cargo mutants` (cargo install --locked cargo-mutants) lists the mutants. A build for each would
take days. `build` copies the tree to DIRECTORY and inserts each mutant into the function that it
changes, as a copy of the body that runs if the environment variable MUTANT has its number. A mutant
that does not compile is unviable. `run` first runs each test alone, and records the mutants that it
reaches. Then it runs each mutant with the tests that reach it, the shortest first, until one fails.

A second `build` keeps the mutants that were caught, for runs after tests were added. Remove
DIRECTORY/mutants.json after a change of the code.

Not tried: mutants of constants, of `const fn` and of functions that return `impl`, because their
copies cannot share a function. MUTANT_TESTS names the tests, "--lib --test text" by default, and
MUTANT_FILES the files. A test over MUTANT_SECONDS (60) is left out. MUTANT_SAMPLE=N takes N mutants
of each pattern in MUTANT_FILES at random, the same ones each time."""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import time

FILES = """crates/base/src/kv/pool.rs crates/model/src/sampler/*.rs crates/model/src/checkpoint/*.rs
    crates/model/src/checkpoint/gguf/*.rs crates/runtime/src/decode/verify.rs
    crates/runtime/src/decode/scheduler.rs crates/runtime/src/decode/reuse.rs
    crates/runtime/src/decode/request.rs crates/runtime/src/draft/policy/*.rs
    src/cli/commands/serve/pool.rs src/cli/commands/serve/queue.rs"""
# Prints a table for people.
OMITTED = "crates/runtime/src/draft/policy/simulator.rs"
# The kernels are fast enough, and the build takes a minute or two.
OWN = ["gemma", *(f"gemma-{name}" for name in "base model npu quant runtime vulkan".split())]
CARGO = ["cargo", "test", "--release", "--no-run", "--config", "profile.release.debug=0"]
for own in OWN:
    CARGO += ["--config", f"profile.release.package.{own}.opt-level=1"]
SWITCH = """//! Chooses the mutant that runs.
use std::io::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ACTIVE: LazyLock<usize> = LazyLock::new(|| {
    std::env::var("MUTANT").ok().and_then(|id| id.parse().ok()).unwrap_or(usize::MAX)
});
static TRACE: LazyLock<Option<std::path::PathBuf>> =
    LazyLock::new(|| std::env::var_os("MUTANT_TRACE").map(Into::into));
static SEEN: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

pub fn on(id: usize) -> bool {
    if let Some(trace) = &*TRACE && !SEEN[id].swap(true, Ordering::Relaxed) {
        let mut file = std::fs::File::options().create(true).append(true).open(trace).unwrap();
        file.write_all(format!("{id}\\n").as_bytes()).unwrap();
    }
    *ACTIVE == id
}
"""


def list_mutants(root):
    words = ["cargo", "mutants", "--workspace", "--list", "--json", "-e", OMITTED]
    patterns = os.environ.get("MUTANT_FILES", FILES).split()
    for file in patterns:
        words += ["-f", file]
    found = json.loads(subprocess.run(words, cwd=root, check=True, stdout=subprocess.PIPE).stdout)
    if "MUTANT_SAMPLE" in os.environ:
        found = sample(root, found, patterns, int(os.environ["MUTANT_SAMPLE"]))
    return [{key: m[key] for key in ("file", "function", "name", "replacement", "span")}
            for m in found]


def sample(root, found, patterns, count):
    """Takes `count` mutants of each pattern, among those that can be tried."""
    texts = {m["file"]: (root / m["file"]).read_text() for m in found}
    tried = [m for m in found if can_share(texts[m["file"]], m)]
    chosen = []
    for pattern in patterns:
        here = [m for m in tried if pathlib.PurePath(m["file"]).match(pattern)]
        chosen += random.Random(1).sample(here, min(count, len(here)))
    return chosen


def offset(lines, place):
    """Returns the offset of a line and column in a text. Both start at 1."""
    return sum(len(line) for line in lines[:place["line"] - 1]) + place["column"] - 1


def body_start(text, start, name):
    """Returns the offset of the brace that opens a function's body, and the text before it."""
    begin = re.compile(rf"\bfn\s+{re.escape(name)}\b").search(text, start).start()
    depth = 0
    for at in range(begin, len(text)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[at], 0)
        if text[at] == "{" and depth == 0:
            return at, text[start:at]
    raise ValueError(f"no body: {name}")


def weave(text, mutants):
    """Puts mutants, as pairs of a number and an entry, into a file."""
    lines, inserts = text.splitlines(keepends=True), {}
    for number, m in mutants:
        name = m["function"]["function_name"].rsplit("::", 1)[-1]
        span = m["function"]["span"]
        opening, _ = body_start(text, offset(lines, span["start"]), name)
        begin, end = offset(lines, m["span"]["start"]), offset(lines, m["span"]["end"])
        body = text[opening:begin] + m["replacement"] + text[end:offset(lines, span["end"])]
        code = (f"\n/*<{number}*/ if gemma_base::mutant_switch::on({number}) {{ return {body}; }}"
                f" /*{number}>*/\n")
        inserts[opening + 1] = inserts.get(opening + 1, "") + code
    for at in sorted(inserts, reverse=True):
        text = text[:at] + inserts[at] + text[at:]
    return text


def can_share(text, m):
    """Returns whether the function can contain a copy of its body."""
    if m["function"] is None:
        return False
    lines = text.splitlines(keepends=True)
    name = m["function"]["function_name"].rsplit("::", 1)[-1]
    start = offset(lines, m["function"]["span"]["start"])
    _, head = body_start(text, start, name)
    return "const fn" not in head and "impl" not in (m["function"]["return_type"] or "")


def faulty(message, texts, work):
    """Returns the mutants in which the compiler found an error."""
    found = set()
    if message.get("level") == "error":
        for span in message["spans"]:
            file = os.path.relpath(os.path.join(work, span["file_name"]), work)
            if file in texts:
                before = "".join(texts[file].splitlines(keepends=True)[:span["line_start"]])
                opened = re.findall(r"/\*<(\d+)\*/", before)
                if opened and f"/*{opened[-1]}>*/" not in before.rsplit("\n", 2)[0]:
                    found.add(int(opened[-1]))
        for child in message["children"]:
            found |= faulty({**child, "level": message["level"]}, texts, work)
    return found


def build(root, work):
    mutants = list_mutants(root)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    for name in tracked.stdout.decode().rstrip("\0").split("\0"):
        target = work / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (root / name).read_bytes():
            shutil.copy2(root / name, target)
    base = work / "crates/base/src"
    (base / "mutant_switch.rs").write_text(SWITCH.replace("COUNT", str(len(mutants))))
    with (base / "lib.rs").open("a") as file:
        file.write("pub mod mutant_switch;\nextern crate self as gemma_base;\n")
    originals = {m["file"]: (root / m["file"]).read_text() for m in mutants}
    known = work / "mutants.json"
    old = json.loads(known.read_text())["mutants"] if known.exists() else []
    keep = {m["name"]: m for m in old if m["state"] in ("caught", "timeout", "unviable")}
    for m in mutants:
        m["state"] = "todo" if can_share(originals[m["file"]], m) else "not tried"
        before = keep.get(m["name"], {})
        m |= {key: before[key] for key in ("state", "test") if key in before}
    tests = os.environ.get("MUTANT_TESTS", "--lib --test text").split()
    while True:
        texts = {}
        for file, text in originals.items():
            here = [(i, m) for i, m in enumerate(mutants)
                    if m["file"] == file and m["state"] not in ("unviable", "not tried")]
            texts[file] = weave(text, here)
            if (work / file).read_text() != texts[file]:
                (work / file).write_text(texts[file])
        run = subprocess.run([*CARGO, "--message-format=json", *tests], cwd=work,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        messages = [json.loads(line) for line in run.stdout.splitlines() if line[:1] == "{"]
        if run.returncode == 0:
            break
        bad, shown = set(), []
        for message in (m["message"] for m in messages if m["reason"] == "compiler-message"):
            bad |= faulty(message, texts, work)
            if message["level"] == "error":
                shown.append(message["rendered"])
        if not bad:
            sys.exit("\n".join(shown) or run.stderr)
        for number in bad:
            mutants[number]["state"] = "unviable"
        print(f"{len(bad)} mutants do not compile", flush=True)
    programs = [m["executable"] for m in messages if m.get("executable") and m["profile"]["test"]]
    known.write_text(json.dumps({"mutants": mutants, "programs": programs}))
    print(f"{sum(m['state'] == 'todo' for m in mutants)} of {len(mutants)} mutants are in "
          f"{len(programs)} programs")


def run_test(work, test, seconds, **variables):
    """Runs one test; returns "passed", "failed" or "timeout"."""
    program, name = test
    words = [program, "--exact", name, "--test-threads=1", "-q"]
    process = subprocess.Popen(words, cwd=work, env={**os.environ, **variables},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    try:
        return "failed" if process.wait(seconds) else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "timeout"


def trace(work, test):
    file = work / f"trace-{abs(hash(test))}"
    file.unlink(missing_ok=True)
    begun = time.monotonic()
    result = run_test(work, test, int(os.environ.get("MUTANT_SECONDS", 60)),
                      MUTANT_TRACE=str(file))
    reached = sorted(set(map(int, file.read_text().split()))) if file.exists() else []
    file.unlink(missing_ok=True)
    return {"test": test, "result": result, "seconds": time.monotonic() - begun,
            "reached": reached}


def judge(work, tests):
    """Returns the result of a mutant, and the test that decided it."""
    number, tests = tests
    for t in tests:
        result = run_test(work, t["test"], 20 + 10 * t["seconds"], MUTANT=str(number))
        if result != "passed":
            return number, "caught" if result == "failed" else "timeout", t["test"][1]
    return number, "survived" if tests else "not reached", ""


def run(work, jobs):
    state = json.loads((work / "mutants.json").read_text())
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        if "tests" not in state:
            names = []
            for program in state["programs"]:
                listed = subprocess.run([program, "--list", "--format=terse"], cwd=work, check=True,
                                        stdout=subprocess.PIPE, text=True).stdout
                names += [(program, line[:-6]) for line in listed.splitlines()
                          if line.endswith(": test")]
            state["tests"] = list(pool.map(lambda test: trace(work, test), names))
        for t in state["tests"]:
            if t["result"] != "passed":
                print(f"left out, {t['result']} without a mutant: {t['test'][1]}")
        good = sorted((t for t in state["tests"] if t["result"] == "passed"),
                      key=lambda t: t["seconds"])
        by_mutant = {}
        for t in good:
            for number in t["reached"]:
                by_mutant.setdefault(number, []).append(t)
        todo = [(i, by_mutant.get(i, [])) for i, m in enumerate(state["mutants"])
                if m["state"] == "todo"]
        print(f"{len(good)} tests, {len(todo)} mutants to try", flush=True)
        for future in concurrent.futures.as_completed(
                [pool.submit(judge, work, pair) for pair in todo]):
            number, fate, test = future.result()
            state["mutants"][number] |= {"state": fate, "test": test}
            (work / "mutants.json").write_text(json.dumps(state))


def table(work):
    mutants = json.loads((work / "mutants.json").read_text())["mutants"]
    states = ("caught", "timeout", "survived", "not reached", "unviable", "not tried", "todo")
    print("| file | mutants |", *(f" {state} |" for state in states), sep="")
    print("|---|---:|", "---:|" * len(states), sep="")
    for file in [*dict.fromkeys(m["file"] for m in mutants), "all"]:
        here = [m["state"] for m in mutants if file in (m["file"], "all")]
        print(f"| {file} | {len(here)} |", *(f" {here.count(state)} |" for state in states), sep="")
    for m in mutants:
        if m["state"] in ("survived", "not reached"):
            print(f"{m['state']}: {m['name']}")
        elif "MUTANT_SAMPLE" in os.environ:
            print(f"{m['state']} by {m.get('test', '')}: {m['name']}")


def main():
    root = pathlib.Path(__file__).resolve().parents[2]
    match sys.argv[1:]:
        case ["build", directory]:
            build(root, pathlib.Path(directory).resolve())
        case ["run", directory, *jobs]:
            run(pathlib.Path(directory).resolve(), int(jobs[0]) if jobs else os.cpu_count())
        case ["table", directory]:
            table(pathlib.Path(directory).resolve())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
