"""Pages that are written from the sources are up to date, and all errors are explained."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from types import ModuleType

import pytest

import hetero
from hetero import errors
from hetero.cli import main
from tests.docs.pages import ROOT, read


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_pages_are_up_to_date(reference: ModuleType) -> None:
    stale = [name for name, text in reference.pages().items() if read(f"docs/{name}") != text]
    assert stale == [], "python docs/reference.py"


def test_a_page_that_is_not_up_to_date_is_named_and_written(
    reference: ModuleType, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "DOCS", tmp_path)
    monkeypatch.setattr(reference, "pages", lambda: {"page.md": "new"})
    (reference.DOCS / "page.md").write_text("old")

    assert reference.main(["--check"]) == 1
    assert (reference.DOCS / "page.md").read_text() == "old"
    assert reference.main([]) == 0
    assert (reference.DOCS / "page.md").read_text() == "new"
    assert reference.main(["--check"]) == 0


def test_reference_pages_have_every_setting_command_and_name() -> None:
    settings, commands, names = (
        read(f"docs/reference/{name}.md") for name in ("settings", "cli", "api")
    )
    for field in dataclasses.fields(hetero.Config):
        assert f"\n| `{field.name}` |" in settings
    for name, command in main.commands.items():
        assert f"\n## hetero {name}\n" in commands
        for option in (o for p in command.params for o in p.opts if o.startswith("--")):
            assert f"`{option}`" in commands
    for name in set(hetero.__all__) - {"__version__"}:
        assert f"\n### hetero.{name}\n" in names


def error_classes() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.HeteroError)
    }


def test_every_error_class_has_its_cause_and_its_cure() -> None:
    text = read("docs/help/troubleshooting.md")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))

    assert len(error_classes()) > 20
    assert error_classes() - set(sections) == set()
    for name in error_classes():
        assert "*Cause*" in sections[name] and "*Cure*" in sections[name], name
