"""Licences of the libraries inside the binary: a list by name, then each different text once. Reads
Cargo's metadata.

    python3 scripts/third_party.py > THIRD-PARTY.txt

Libraries that only tests, benchmarks or procedural macros use are not in the binary and are left
out."""
import pathlib

from crates import packages, program

FILES = ("LICEN", "COPYING", "NOTICE", "UNLICENSE")

libraries = [packages[crate] for crate in program()]
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
