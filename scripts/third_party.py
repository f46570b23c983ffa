"""Licences of the libraries inside the binary: a list by name, then each different text once. Reads
Cargo's metadata.

    python3 scripts/third_party.py > THIRD-PARTY.txt

Libraries that only tests, benchmarks or procedural macros use are not in the binary and are left
out."""
import json
import pathlib
import subprocess

TARGET = "x86_64-unknown-linux-gnu"
FILES = ("LICEN", "COPYING", "NOTICE", "UNLICENSE")

command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
metadata = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
packages = {p["id"]: p for p in metadata["packages"]}
nodes = {n["id"]: n for n in metadata["resolve"]["nodes"]}


def is_macro(package):
    return any("proc-macro" in t["kind"] for t in package["targets"])


root = metadata["resolve"]["root"]
found, todo = set(), [root]
while todo:
    for dep in nodes[todo.pop()]["deps"]:
        linked = any(kind["kind"] is None for kind in dep["dep_kinds"])
        if linked and dep["pkg"] not in found and not is_macro(packages[dep["pkg"]]):
            found.add(dep["pkg"])
            todo.append(dep["pkg"])

libraries = sorted((packages[i] for i in found), key=lambda p: (p["name"], p["version"]))
print(f"The program contains {len(libraries)} libraries by others, each under the licence named "
      f"here.\n")
texts = {}
for p in libraries:
    print(f"{p['name']} {p['version']}: {p['license'] or 'see its text'}")
    for file in sorted(pathlib.Path(p["manifest_path"]).parent.iterdir()):
        if file.is_file() and file.name.upper().startswith(FILES):
            text = "\n".join(
                line.rstrip() for line in file.read_text(errors="replace").strip().splitlines()
            )
            texts.setdefault(text, []).append(f"{p['name']} {p['version']} ({file.name})")
for text, users in sorted(texts.items(), key=lambda item: item[1]):
    print(f"\n{'=' * 80}\n{', '.join(users)}\n{'=' * 80}\n\n{text}")
