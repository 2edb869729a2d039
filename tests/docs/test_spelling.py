"""Pages, docstrings and messages have no word that is known to be misspelt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import FRONT, ROOT

LEFT_OUT = "*.svg,*.ipynb,*.png,*/assets/uplot/*,*.so"


def misspelt(*paths: str, within: Path = ROOT) -> list[str]:
    """Return the words in files of a folder that are misspelt, each with its place."""
    command = [sys.executable, "-m", "codespell_lib", "--skip", LEFT_OUT, *paths]
    done = subprocess.run(command, cwd=within, capture_output=True, text=True)
    assert done.returncode in (0, 65), done.stderr  # 65: words were found
    return done.stdout.splitlines()


def test_no_word_of_a_page_or_of_the_package_is_misspelt() -> None:
    assert misspelt(*FRONT, "docs", "examples", "benchmarks", "hetero") == []


def test_a_misspelt_word_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A model trians.\n")
    assert len(misspelt("page.md", within=tmp_path)) == 1
