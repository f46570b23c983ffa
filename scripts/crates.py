"""Lists the program's libraries, from Cargo.lock and the sources that Cargo unpacked.

    python3 scripts/crates.py check            # compares crates.txt with Cargo.lock
    python3 scripts/crates.py list             # writes crates.txt again, and keeps its notes
    python3 scripts/crates.py sbom             # prints a CycloneDX SBOM
    python3 scripts/crates.py binary FILE      # compares the SBOM with the paths in a program
    python3 scripts/crates.py licences         # prints the licences of the libraries in the program

`check` fails if a crate or a version is not in crates.txt, if a build script has no note, or if a
crate needs a newer Rust than Cargo.toml names. `check` and `list` look at all systems. The
others look at Linux on x86-64, or at the target that CRATES_TARGET names."""
import json
import os
import pathlib
import re
import subprocess
import sys

SYSTEMS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "x86_64-pc-windows-gnu",
           "aarch64-apple-darwin"]
ALL = sys.argv[1:] in (["check"], ["list"])
TARGETS = SYSTEMS if ALL else [os.environ.get("CRATES_TARGET", SYSTEMS[0])]
LIST = pathlib.Path(__file__).resolve().parent.parent / "crates.txt"
LICENCE_FILES = ("LICEN", "COPYING", "NOTICE", "UNLICENSE")
HEADER = """\
# Crates that a build or a test of gemma compiles on Linux, Windows or macOS, one a line.
# `scripts/crates.py list` writes this file, and CI compares it with Cargo.lock.
#
#   crate | where its code runs: program, build (build scripts and procedural macros), tests
#         | owner of the repository that its manifest names | `unsafe` in its sources
#         | dependencies of gemma that bring it | code that it runs during a build
#
# A procedural macro runs in the compiler. The note after `build.rs` describes the build script of
# that version on Linux. Long scripts were read only in the parts that run commands or write files.
# Other sources were not read.
# `list` marks the note of a new version with UNREAD, and CI refuses the mark.
"""


def cargo(*words):
    run = subprocess.run(["cargo", *words], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        sys.exit(f"error: cargo {words[0]} failed")
    return run.stdout


def tree(edges):
    """Returns pairs of a crate and its depth from `cargo tree`. A crate is (name, version)."""
    targets = [word for target in TARGETS for word in ("--target", target)]
    lines = cargo("tree", "--locked", "--workspace", *targets, "-e", edges, "--prefix", "depth",
                  "-f", " {p}").splitlines()
    for line in filter(None, lines):
        depth, name, version = line.split()[:3]
        yield (name, version[1:]), int(depth)


def crates(edges):
    """Returns the crates that edges of these kinds reach, without our own."""
    return sorted({crate for crate, depth in tree(edges)} - own)


def children(edges):
    """Returns the dependencies of each crate. Our own crates count as one, gemma."""
    found, path = {}, []
    for crate, depth in tree(edges):
        del path[depth:]
        crate = root if crate in own else crate
        found.setdefault(crate, set())
        if path and path[-1] != crate:
            found[path[-1]].add(crate)
        path.append(crate)
    return found


def metadata():
    filters = [word for target in TARGETS for word in ("--filter-platform", target)]
    found = json.loads(cargo("metadata", "--format-version", "1", "--locked", *filters))
    packages = {(p["name"], p["version"]): p for p in found["packages"]}
    roots = [c for c, p in packages.items() if p["id"] == found["resolve"]["root"]]
    return packages, roots[0], {c for c, p in packages.items() if p["source"] is None}


packages, root, own = metadata()


def kinds(crate):
    return {kind for target in packages[crate]["targets"] for kind in target["kind"]}


def program():
    """Returns the crates that are compiled into the program."""
    return crates("normal,no-proc-macro")


def owner(crate):
    parts = (packages[crate]["repository"] or "").removeprefix("https://").split("/")
    return "/".join(parts[:2]) if len(parts) > 1 else "unknown"


def unsafe_words(crate):
    sources = pathlib.Path(packages[crate]["manifest_path"]).parent.rglob("*.rs")
    code = (re.sub(r"//.*", "", file.read_text(errors="replace")) for file in sources)
    return sum(len(re.findall(r"\bunsafe\b", text)) for text in code)


def listing(old):
    """Returns the text of crates.txt. Notes are taken from the text `old`."""
    notes = {}
    for line in old.splitlines():
        if " | build.rs: " in line:
            name, version = line.split()[:2]
            notes[name, version] = notes[name] = line.split(" | build.rs: ")[1]
    linked, built = set(program()), set(crates("normal,build"))
    below = children("normal,build,dev")
    brings = {}
    for direct in below[root] - {root}:
        todo, seen = [direct], set()
        while todo:
            crate = todo.pop()
            if crate not in seen:
                seen.add(crate)
                brings.setdefault(crate, set()).add(direct[0])
                todo.extend(below[crate])
    lines = []
    for crate in crates("normal,build,dev"):
        place = "program" if crate in linked else "build" if crate in built else "tests"
        by = sorted(brings[crate] - {crate[0]})
        if crate in below[root]:
            by.insert(0, "gemma")
        more = f" and {len(by) - 3} more" if len(by) > 3 else ""
        fields = [f"{crate[0]} {crate[1]}", place, owner(crate), f"{unsafe_words(crate)} unsafe",
                  ", ".join(by[:3]) + more]
        if "proc-macro" in kinds(crate):
            fields.append("macro")
        if "custom-build" in kinds(crate):
            note = notes.get(crate) or f"UNREAD {notes.get(crate[0], '')}".strip()
            fields.append(f"build.rs: {note}")
        lines.append(" | ".join(fields))
    return HEADER + "".join(line + "\n" for line in lines)


def check():
    old = LIST.read_text()
    new = listing(old)
    for line in sorted(set(new.splitlines()) ^ set(old.splitlines())):
        print(f"crates.txt {'lacks' if line in new else 'has'}: {line}", file=sys.stderr)
    unread = [line for line in new.splitlines() if "build.rs: UNREAD" in line]
    for line in unread:
        print(f"the build script was not read: {line}", file=sys.stderr)

    def parts(version):
        return tuple(int(part) for part in (version + ".0.0").split(".")[:3])

    ours = packages[root]["rust_version"]
    needs = [(parts(packages[c]["rust_version"] or "0"), *c) for c in crates("normal,build,dev")]
    newer = [need for need in needs if need[0] > parts(ours)]
    for version, name, _ in newer:
        print(f"{name} needs Rust {version}, newer than {ours}", file=sys.stderr)
    if new != old or unread or newer:
        sys.exit("error: see the messages above; `scripts/crates.py list` writes crates.txt")
    version, name, _ = max(needs)
    print(f"{len(needs)} crates are listed, {len(program())} of them in the program. The newest "
          f"Rust that one of them names is {'.'.join(map(str, version))} ({name}).")


def purl(crate):
    return f"pkg:cargo/{crate[0]}@{crate[1]}"


def component(crate, scope, sums):
    package = packages[crate]
    entry = {"type": "library", "bom-ref": purl(crate), "name": crate[0], "version": crate[1],
             "scope": scope, "purl": purl(crate),
             "hashes": [{"alg": "SHA-256", "content": sums[crate]}]}
    if package["license"]:
        # An old manifest writes a slash for OR.
        expression = package["license"].replace("/", " OR ")
        entry["licenses"] = [{"expression": re.sub(" +", " ", expression)}]
    if package["repository"]:
        entry["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return entry


def sbom():
    """Returns a CycloneDX document without a date, so that equal inputs give equal bytes. The scope
    `excluded` marks crates that only run during the build."""
    lock = (LIST.parent / "Cargo.lock").read_text()
    entry = re.compile(r'name = "(.*)"\nversion = "(.*)"\nsource = ".*"\nchecksum = "(.*)"')
    sums = {(name, version): digest for name, version, digest in entry.findall(lock)}
    linked, below = set(program()), children("normal,build")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": purl(root), "name": root[0], "version": root[1],
            "purl": purl(root), "licenses": [{"expression": packages[root]["license"]}]}},
        "components": [component(c, "required" if c in linked else "excluded", sums)
                       for c in crates("normal,build")],
        "dependencies": [{"ref": purl(c), "dependsOn": sorted(map(purl, below[c]))}
                         for c in sorted(below)],
    }


def binary(file):
    """Compares an SBOM with the source paths that panics left in a program."""
    found = re.findall(rb"/registry/src/[^/\0]*/([A-Za-z0-9_-]+?)-(\d+\.\d+\.[^/\0]*)/",
                       pathlib.Path(file).read_bytes())
    seen = {(name.decode(), version.decode()) for name, version in found}
    required = {(c["name"], c["version"]) for c in sbom()["components"]
                if c["scope"] == "required"}
    if not seen or seen - required:
        sys.exit(f"error: {file} has code that the SBOM does not name: {sorted(seen - required)}")
    print(f"The SBOM names {len(required)} crates in the program, among them all {len(seen)} with "
          f"paths in it.")


def licences():
    """Prints the libraries of the program by name, then each different text once. Libraries that
    only tests, benchmarks or procedural macros use are left out."""
    libraries = [packages[crate] for crate in program()]
    print(f"The program contains {len(libraries)} libraries by others, each under the licence "
          "named here.\n")
    texts = {}
    for p in libraries:
        print(f"{p['name']} {p['version']}: {p['license'] or 'see its text'}")
        for file in sorted(pathlib.Path(p["manifest_path"]).parent.iterdir()):
            if file.is_file() and file.name.upper().startswith(LICENCE_FILES):
                lines = file.read_text(errors="replace").strip().splitlines()
                text = "\n".join(line.rstrip() for line in lines)
                texts.setdefault(text, []).append(f"{p['name']} {p['version']} ({file.name})")
    for text, users in sorted(texts.items(), key=lambda item: item[1]):
        print(f"\n{'=' * 80}\n{', '.join(users)}\n{'=' * 80}\n\n{text}")


def main():
    match sys.argv[1:]:
        case ["check"]:
            check()
        case ["list"]:
            LIST.write_text(listing(LIST.read_text() if LIST.exists() else ""))
        case ["sbom"]:
            print(json.dumps(sbom(), indent=1))
        case ["binary", file]:
            binary(file)
        case ["licences"]:
            licences()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
