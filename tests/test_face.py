"""The public face as a person at a prompt, an editor or a notebook meets it."""

from __future__ import annotations

import doctest
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.parse import toml_of
from hetero.types import format_bytes
from tests.docs.pages import ROOT, read
from tests.typing.face import Net, typed

OF_TRANSFORMERS = ("enable", "from_pretrained", "trainer")
FUNCTIONS = sorted(name for name in hetero.__all__ if name[0].islower())


# -- names ---------------------------------------------------------------------------------------


def test_dir_has_every_public_name() -> None:
    assert set(hetero.__all__) <= set(dir(hetero))


@pytest.fixture
def base_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without transformers and accelerate."""
    for name in [name for name in sys.modules if name.startswith("hetero.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "accelerate", None)


def test_a_base_install_has_all_names_and_says_what_some_need(base_install: None) -> None:
    found: dict[str, Any] = {}
    exec("from hetero import *", found)

    assert set(hetero.__all__) <= set(found)
    for name in OF_TRANSFORMERS:
        with pytest.raises(hetero.ConfigError, match=rf"hetero\.{name} needs") as error:
            found[name](None)
        assert "hf" in error.value.advice
    with pytest.raises(AttributeError):
        hetero.nothing_of_the_kind  # noqa: B018


def test_a_module_of_ours_that_is_broken_is_no_missing_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(hetero._LAZY, "trainer", "hetero.integrations.not_there")
    with pytest.raises(ModuleNotFoundError):
        hetero.__getattr__("trainer")


def test_the_optimizers_are_there_and_imported_on_first_use() -> None:
    told = "import sys, hetero; print('torch' in sys.modules, hetero.optim.Lion.__name__)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)

    assert done.stdout == "False Lion\n" and "optim" in dir(hetero)


# -- types ---------------------------------------------------------------------------------------


def test_types_are_what_a_checker_is_told() -> None:
    assert "tests/typing" in toml_of(read("pyproject.toml"))["tool"]["mypy"]["files"]
    assert typed() == [Net, hetero.Optimizer, hetero.Status, Net, torch.optim.SGD, Net]


# -- examples in docstrings ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OF_TRANSFORMERS else ())
        for name in FUNCTIONS
    ],
)
def test_the_example_of_a_docstring_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function = getattr(hetero, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        inspect.unwrap(function), name, module=False, globs={}
    )
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    result = runner.run(test, out=said.append)

    assert result.failed == 0, "".join(said)
    assert result.attempted > 1, "no example"


# -- status --------------------------------------------------------------------------------------


def test_a_status_is_short_as_text_and_a_table_in_a_notebook() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = hetero.prepare(
        model, torch.optim.AdamW(model.parameters()), device="cpu:sim", hbm="200KiB"
    )
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()
    status = hetero.status(model)
    text, html = str(status), status._repr_html_()
    used = status.tiers["HOST"]["used"]

    assert text.splitlines()[0].startswith("cpu:sim, paged; 2 steps; ")
    assert len(text) < 600 and len(text.splitlines()) == 4
    assert used is not None and format_bytes(used) in text
    assert f"{status.misses} misses" in text and "state " in text
    assert html.count("<tr>") == 2 and html.count("<td>") == 4 and "cpu:sim, paged" in html
    hetero.release(model, optimizer)


# -- logging -------------------------------------------------------------------------------------


def net(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for _ in range(steps):
        model(torch.ones(64, model[0][0].in_features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_paged_model_tells_why_its_first_steps_are_slow_and_what_changes(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "hetero")
    model = net(128)
    settings = {"hbm": "400KiB", "host": "1000KiB", "nvme": tmp_path, "chunk_bytes": 4096}
    plain = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, plain, device="cpu:sim", **settings)
    train(model, optimizer)
    first, slow, spilled, *later = caplog.messages
    status = hetero.status(model)
    policies = set(status.policies.values())
    hetero.release(model, optimizer)

    assert first.startswith("Sequential with 99,072 parameters is prepared on cpu:sim: paged")
    assert "400 KiB of HBM and 1000 KiB of HOST" in first
    assert "first two steps are slow: the first runs with the fewest frames" in slow
    assert "homes on disk" in spilled and str(tmp_path) in spilled
    assert later and all("activations after step" in line for line in later)
    assert all(policy in later[-1] for policy in policies)
    assert {record.name for record in caplog.records} == {"hetero"}


def test_a_model_that_comes_to_stay_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hetero")
    model = net()
    plain = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, plain, device="cpu:sim", hbm="4MiB")
    train(model, optimizer)
    assert hetero.status(model).mode == "resident"
    hetero.release(model, optimizer)

    assert sum("is resident after step" in line for line in caplog.messages) == 1


def test_nothing_is_said_by_default_and_by_rehearsals(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    model = net()
    model, optimizer = hetero.prepare(
        model, torch.optim.AdamW(model.parameters()), device="cpu:sim", hbm="300KiB"
    )
    train(model, optimizer, steps=2)
    hetero.release(model, optimizer)
    assert capfd.readouterr() == ("", "") and caplog.messages == []
    caplog.set_level(logging.INFO, "hetero")
    batch = torch.ones(4, 64)
    hetero.plan(net(), batch, profile="rtx4090", hbm="300KiB", estimates=False)

    assert caplog.messages == []


# -- the notebook --------------------------------------------------------------------------------


def test_the_notebook_runs_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = json.loads((ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    for number, text in enumerate(cells):
        exec(compile(text, f"cell {number}", "exec"), names)

    assert book["nbformat"] == 4 and len(cells) >= 5
    assert all(cell.get("outputs", []) == [] for cell in book["cells"])  # nothing to go stale
    assert names["same"] is True
    assert (tmp_path / "report.html").exists()
