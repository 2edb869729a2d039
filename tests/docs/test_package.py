"""What a package index, and who cites hetero, is told."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import hetero
from hetero.parse import toml_of
from tests.docs.pages import ROOT, read


def project() -> dict[str, Any]:
    found: dict[str, Any] = toml_of(read("pyproject.toml"))["project"]
    return found


def test_the_package_has_the_licence_of_what_it_carries() -> None:
    carried = {str(path.relative_to(ROOT)) for path in ROOT.glob("hetero/**/LICENSE")}

    assert project()["license"] == "Apache-2.0 AND MIT"
    assert set(project()["license-files"]) == {"LICENSE", *carried}
    for name in project()["license-files"]:
        text = read(name)
        assert "Apache License" in text or "Permission is hereby granted" in text


def test_the_package_carries_its_types() -> None:
    marker = ROOT / "hetero/py.typed"
    ignored = subprocess.run(["git", "check-ignore", "-q", str(marker)], cwd=ROOT).returncode

    assert marker.read_text() == ""
    assert ignored != 0  # what git ignores is not packaged
    assert "Typing :: Typed" in project()["classifiers"]


def test_extras_that_pages_name_are_there() -> None:
    extras = project()["optional-dependencies"]

    assert {"hf", "integrations", "lightning", "plots", "disk"} == set(extras)
    assert extras["hf"] == ["hetero[integrations]"]
    for name in extras:
        assert f"`{name}`" in read("docs/start/install.md")


def built(folder: Path, **environment: str) -> Path:
    """Build a wheel, without a network and without an environment of its own."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    around = {**os.environ, **environment}
    subprocess.run(command, cwd=ROOT, env=around, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_has_all_that_runs_whole_metadata_and_no_tools_of_tests(tmp_path: Path) -> None:
    wheel = built(tmp_path, HETERO_PURE_WHEEL="1")

    assert wheel.name == f"hetero-{hetero.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(file.read(metadata).decode())
    tracked = subprocess.check_output(
        ["git", "ls-files", "hetero", "profiles"], cwd=ROOT, text=True
    )
    wanted = {re.sub("^profiles/", "hetero/profiles/", name) for name in tracked.splitlines()}
    assert {name for name in wanted - names if not name.endswith("/README.md")} == set()
    assert not any(name.endswith((".so", ".pyc")) or name.startswith("tests") for name in names)
    assert about["License-Expression"] == "Apache-2.0 AND MIT"
    assert set(about.get_all("License-File", [])) == set(project()["license-files"])
    assert "Typing :: Typed" in about.get_all("Classifier", [])
    assert about["Keywords"] and about["Author"] and about["Requires-Python"] == ">=3.10"
    assert set(about.get_all("Provides-Extra", [])) == set(project()["optional-dependencies"])
    needed = " ".join(about.get_all("Requires-Dist", []))
    assert not re.search("pytest|mypy|ruff|hypothesis|trl|hatchling", needed)


@pytest.mark.slow  # compiles
def test_a_wheel_with_a_kernel_says_which_platform_it_is_for(tmp_path: Path) -> None:
    wheel = built(tmp_path)

    names = zipfile.ZipFile(wheel).namelist()
    assert ("hetero/_update.so" in names) == (shutil.which("cc") is not None)
    assert wheel.name.endswith("-none-any.whl") == ("hetero/_update.so" not in names)


def test_every_extra_that_an_error_advises_is_there() -> None:
    sources = [path.read_text() for path in ROOT.glob("hetero/**/*.py")]
    advised = set(re.findall(r"hetero\[([a-z,]+)\]", " ".join(sources)))

    assert advised
    assert {name for each in advised for name in each.split(",")} <= set(
        project()["optional-dependencies"]
    )


def test_the_tools_of_tests_are_a_group_and_no_extra() -> None:
    groups = toml_of(read("pyproject.toml"))["dependency-groups"]

    assert {re.split("[>=]", tool)[0] for tool in groups["test"]} >= {"pytest", "mypy", "hatchling"}
    found = subprocess.check_output(
        ["bash", "-c", "source tests/setup_venv.sh; tools_of . test"], cwd=ROOT, text=True
    )
    assert found.splitlines() == groups["test"]


def test_versions_agree() -> None:
    assert project()["version"] == hetero.__version__
    assert f"\nversion: {hetero.__version__}\n" in read("CITATION.cff")
