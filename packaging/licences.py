#!/usr/bin/env python3
"""Prints the licences of memfold and of all that is linked into its binary, or into the Python package's library.

    packaging/licences.py [--python] [TARGET]

Of each crate all licence files in its sources, so those of the C libraries it brings, too; and that of the C library where it
is linked, from Debian's or Ubuntu's package. Fails where a crate has none. (Rust's own: share/doc/rust/COPYRIGHT-library.html
of the toolchain.)
"""

import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
IS_PYTHON = "--python" in sys.argv[1:]
FOLDER, PACKAGE, WHAT, USUAL_TARGET = (
    (ROOT / "bindings/python", "memfold-python", "library", "x86_64-unknown-linux-gnu") if IS_PYTHON
    else (ROOT, "memfold-cli", "binary", "x86_64-unknown-linux-musl")
)
TARGET = next((word for word in sys.argv[1:] if not word.startswith("--")), USUAL_TARGET)
# The C library that is linked, and where Debian's packages (musl of musl-tools, libc6) have its licence.
C_LIBRARY, ITS_LICENCE = (
    ("musl", "/usr/share/doc/musl/copyright") if TARGET.endswith("-musl") else ("glibc", "/usr/share/doc/libc6/copyright")
)
IS_LICENCE = re.compile(r"(licen[cs]e|copying|notice|copyright)", re.IGNORECASE)
# Of folders that are built into nothing, and the second licence of zstd, which we do not take.
IS_UNUSED = re.compile(r"/(tests?|examples|programs|contrib|benches|fuzz)/|/zstd/COPYING$")
RULE = "=" * 80


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments], cwd=FOLDER, check=True, text=True, stdout=subprocess.PIPE).stdout


def linked():
    """Names and versions of the crates that are linked, without ours."""
    lines = cargo(
        "tree", "--locked", f"--package={PACKAGE}", "--edges=normal,no-proc-macro", "--prefix=none",
        f"--target={TARGET}", "--format={p}",
    ).splitlines()
    packages = (line.split() for line in lines if "/" not in line)
    return sorted({(words[0], words[1].removeprefix("v")) for words in packages})


def texts(folder):
    """The licence files below a folder, by what they say."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if IS_LICENCE.match(path.name) and path.suffix not in {".rs", ".c", ".h", ".html"} and path.is_file():
            name = path.relative_to(folder).as_posix()
            if not IS_UNUSED.search(f"/{name}"):
                found.setdefault(path.read_text(errors="replace").strip(), name)
    return found


def main():
    metadata = json.loads(cargo("metadata", "--locked", "--format-version=1"))
    packages = {(one["name"], one["version"]): one for one in metadata["packages"]}
    # Crates of one repository mostly have one text: it is printed once.
    users = {}
    missing = []
    for key in linked():
        package = packages[key]
        found = texts(pathlib.Path(package["manifest_path"]).parent)
        if not found:
            missing.append(f"{' '.join(key)} ({package['license']}, {package['repository']})")
        for text, name in found.items():
            users.setdefault(text, []).append(f"{' '.join(key)}: {package['license']} ({name})")
    if not IS_PYTHON:
        try:
            users.setdefault(pathlib.Path(ITS_LICENCE).read_text().strip(), []).append(f"{C_LIBRARY}, the C library")
        except FileNotFoundError:
            missing.append(f"{C_LIBRARY} (Debian and Ubuntu have it in {ITS_LICENCE})")
    if missing:
        sys.exit("licences.py: no licence file of " + "; ".join(missing))
    print("memfold is available under either of two licences, as you like: MIT or Apache-2.0.\n")
    print((ROOT / "LICENSE-MIT").read_text())
    print((ROOT / "LICENSE-APACHE").read_text())
    print(f"The {WHAT} contains the following, each under its own licence.\n")
    for text, names in users.items():
        print(RULE, *names, RULE, "", text, "", sep="\n")


main()
