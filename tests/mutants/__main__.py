"""Plants mutants, one at a time, in a copy of this checkout: the tests they name must fail.

python -m tests.mutants [NAME ...] [--sample N] [--seed SEED]

Its status is 1 where one survives, does not apply, or breaks its tests before they can fail.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal, get_args

from tests.draw import ROOT, commit
from tests.mutants.mutant import DoesNotApply, Mutant, applied, mutants

Verdict = Literal["killed", "survived", "does not apply", "broken"]
RUNS = ROOT / "runs"
LEFT_OUT = ("runs", "build", "dist", "__pycache__", ".*")
BY_HASH = py_compile.PycInvalidationMode.CHECKED_HASH
"""How bytecode tells that its source is another: files change within a second, and back."""
SECONDS = 300
"""After which a mutant counts as killed: its tests, which take seconds, stand still."""
FAILED = {0: "survived", 1: "killed"}
"""By pytest's status; others are of tests that cannot be imported or do not exist."""


def main() -> int:
    chosen = choose(arguments())
    RUNS.mkdir(exist_ok=True)
    counts: dict[Verdict, int] = dict.fromkeys(get_args(Verdict), 0)
    with tempfile.TemporaryDirectory(dir=RUNS) as folder:  # on a disk, as the checkout is
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        compileall.compile_dir(tree / "hetero", quiet=1, invalidation_mode=BY_HASH)
        for mutant in chosen:
            began = time.monotonic()
            verdict, said = judge(mutant, tree)
            counts[verdict] += 1
            print(f"{verdict:14} {time.monotonic() - began:5.0f} s  {mutant.name}", flush=True)
            if verdict != "killed":
                print(f"  {mutant.bug}\n{said}", flush=True)
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n))
    return int(counts["killed"] < len(chosen))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of patches; by default all")
    parser.add_argument("--sample", type=int, metavar="N", help="N of them, drawn by the seed")
    parser.add_argument("--seed", default=commit(), help="by default the commit")
    return parser.parse_args()


def choose(given: argparse.Namespace) -> list[Mutant]:
    found = {mutant.name: mutant for mutant in mutants()}
    chosen = [found[name] for name in given.names or found]
    if given.sample is None:
        return chosen
    print(f"{given.sample} mutants drawn by the seed {given.seed}")
    return random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))


def judge(mutant: Mutant, tree: Path) -> tuple[Verdict, str]:
    """Return what becomes of a mutant in a tree, which is restored, and what was said."""
    paths = [tree / edit.path for edit in mutant.edits]
    before = {path: path.read_text() for path in paths}
    try:
        for edit, path in zip(mutant.edits, paths, strict=True):
            path.write_text(applied(edit, path.read_text()))
        return run(mutant.tests, tree)
    except DoesNotApply as error:
        return "does not apply", str(error)
    finally:
        for path, text in before.items():
            path.write_text(text)


def run(tests: tuple[str, ...], tree: Path) -> tuple[Verdict, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-p", "no:cacheprovider", *tests]
    rest = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment = {"HETERO_PARANOID": "1", **os.environ, **rest}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return "killed", "its tests stand still"
    return FAILED.get(done.returncode, "broken"), done.stdout[-2000:]


if __name__ == "__main__":
    sys.exit(main())
