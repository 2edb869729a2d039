"""A newcomer replayed: a fresh clone, a fresh environment, and the README's own commands."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, snippets

REPOSITORY = "<this repository>"
SHORT = {"bash examples/quickstart.sh": "bash examples/quickstart.sh --steps 2"}
"""What is made shorter: the demo trains for minutes."""


def scripts() -> list[str]:
    """Return the README's blocks of commands, in order."""
    return [snippet.text for snippet in snippets("README.md", "bash")]


def environment(folder: Path) -> dict[str, str]:
    """Return a fresh environment's variables: nothing is installed there but what hetero needs,
    which is borrowed from this one, so that no package is fetched."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "HETERO"))}
    # pip reads 0 as the flag --no-build-isolation itself; what is borrowed is not looked for again
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_DEPS": "1"}
    return {**own, **offline, "PATH": f"{folder / 'bin'}:{own['PATH']}", "OMP_NUM_THREADS": "1"}


def replay(script: str, folder: Path, around: dict[str, str]) -> str:
    """Run commands as a newcomer's shell; returns what they print."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=around,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout


def shortened(script: str) -> str:
    for whole, short in SHORT.items():
        script = re.sub(f"^{re.escape(whole)}(?= |$)", short, script, flags=re.M)
    return script.replace(REPOSITORY, str(ROOT))


def check_said(said: Sequence[str]) -> None:
    """Check what a newcomer reads: where the clone's package is, the demo's banner, the plan."""
    text = "\n".join(said)
    assert "Successfully installed hetero" in text
    assert "gpt, 31,918,080 parameters" in text
    assert "step 2/2" in text
    assert "in this terminal: hetero report runs/1/run" in text
    shown = next(s.text for s in snippets("README.md", "") if "on rtx4090" in s.text)
    assert shown.splitlines()[0] in text


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_a_fresh_clone_in_their_order(tmp_path: Path) -> None:
    around = environment(tmp_path / "venv")
    first, *others = scripts()
    assert first.startswith(f"git clone {REPOSITORY} hetero && cd hetero")

    said = [replay(shortened(first), tmp_path, around)]
    clone = tmp_path / "hetero"
    (clone / ".venv").symlink_to(tmp_path / "venv")  # that of the quickstart
    said += [replay(shortened(script), clone, around) for script in others]

    check_said(said)
    where = replay("python -c 'import hetero; print(hetero.__file__)'", tmp_path, around)
    assert where.strip() == str(clone / "hetero" / "__init__.py")
