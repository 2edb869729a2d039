"""What a package index, and who cites hetero, is told."""

from __future__ import annotations

import subprocess
from typing import Any

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

    assert {"hf", "integrations", "lightning", "plots", "disk", "test"} == set(extras)
    assert extras["hf"] == ["hetero[integrations]"]
    for name in extras:
        assert f"`{name}`" in read("docs/start/install.md")


def test_versions_agree() -> None:
    assert project()["version"] == hetero.__version__
    assert f"\nversion: {hetero.__version__}\n" in read("CITATION.cff")
