"""Every Python snippet of the documentation runs, or compiles with names and settings that exist.

A snippet runs as it stands, with a small model, its data and what else a program has (`Program`).
``<!-- prepared -->`` before it lets it find the model prepared. ``<!-- compiled only: why -->``,
and pages of several ranks, leave it at looking up its names.
"""

from __future__ import annotations

import ast
import dataclasses
import logging
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
import hetero.api
from hetero.device import open_device
from tests.docs.pages import PAGES, RANKS, ROOT, SIGNATURES, Snippet, snippets

ALL = [snippet for page in PAGES for snippet in snippets(page, "python")]
RUN = [
    snippet
    for snippet in ALL
    if snippet.page not in (*RANKS, SIGNATURES) and not snippet.mark.startswith("compiled")
]
SETTINGS = {field.name for field in dataclasses.fields(hetero.Config)}
MAPPINGS = ("hetero", "hetero_plugin")  # keywords whose values are settings


# -- names ---------------------------------------------------------------------------------------


@cache
def defined(module: str) -> dict[str, ast.stmt]:
    """Return the definitions in a module of hetero, by name; empty if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    body = ast.parse(file.read_text()).body if file.exists() else []
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def dotted(node: ast.expr) -> str:
    """Return a name with dots, as hetero.optim.Lion; "" for any other expression."""
    text = ast.unparse(node)
    return text if all(part.isidentifier() for part in text.split(".")) else ""


def public(name: str) -> ast.stmt | None:
    """Return the definition of a name in ``hetero.__all__``, from its source."""
    modules = (hetero._LAZY.get(name, "hetero.errors"), "hetero.config")
    return next((node for m in modules if (node := defined(m).get(name)) is not None), None)


def exists(name: str) -> bool:
    """Whether hetero has a name, as hetero.prepare, hetero.Config.load or hetero.optim.Lion."""
    head, *rest = name.split(".")[1:]
    if head in hetero.__all__:
        own = {node.name for node in ast.walk(public(head)) if isinstance(node, ast.FunctionDef)}
        return not rest or rest[0] in own
    inside = defined(f"hetero.{head}")
    return bool(inside) and (not rest or rest[0] in inside)


def keywords_of(name: str) -> set[str] | None:
    """Return the keywords that a function takes, settings among them; None: not looked up."""
    if name in ("hetero.Config", "hetero.Config.load") or name.endswith(("Strategy", "Plugin")):
        return SETTINGS
    node = public(name.removeprefix("hetero.")) if name.startswith("hetero.") else None
    if not isinstance(node, ast.FunctionDef):
        return None
    names = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return names | (SETTINGS if node.args.kwarg else set())


def unknown(text: str) -> set[str]:
    """Return the names and settings in a snippet that hetero does not have."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hetero."):
            found |= {alias.name for alias in node.names} - defined(str(node.module)).keys()
        elif isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("hetero."):
            found |= set() if exists(name) else {name}
        elif isinstance(node, ast.Call):
            found |= unknown_keywords(node)
    return found


def unknown_keywords(call: ast.Call) -> set[str]:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    known = keywords_of(dotted(call.func))
    found = set() if known is None else given.keys() - known
    for key in given.keys() & set(MAPPINGS):
        if isinstance(given[key], ast.Dict):
            found |= set(ast.literal_eval(given[key])) - SETTINGS
    return found


@pytest.mark.parametrize("page", sorted({snippet.page for snippet in ALL}))
def test_snippets_compile_with_names_and_settings_that_exist(page: str) -> None:
    for snippet in (snippet for snippet in ALL if snippet.page == page):
        compile(snippet.text, str(snippet), "exec")
        assert unknown(snippet.text) == set(), snippet


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hetero.prepair(model)", "hetero.prepair"),
        ("hetero.optim.Lyon(params)", "hetero.optim.Lyon"),
        ("hetero.prepare(model, hmb='1GiB')", "hmb"),
        ("hetero.save_checkpoint('a', model, keep=3)", "keep"),
        ("hetero.trainer(T)(hetero={'hmb': 1})", "hmb"),
        ("from hetero.integrations.lightning import HeteroStrategie", "HeteroStrategie"),
        ("HeteroStrategy(hmb='1GiB')", "hmb"),
    ],
)
def test_a_name_that_hetero_does_not_have_is_found(text: str, name: str) -> None:
    assert unknown(text) == {name}


# -- runs ----------------------------------------------------------------------------------------


class MyModel(nn.Module):
    """A model whose output has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> SimpleNamespace:
        dtype = self.first.weight.dtype
        made = self.head(self.norm(self.first(batch.to(dtype)).relu().to(self.norm.weight.dtype)))
        return SimpleNamespace(loss=made.float().pow(2).mean())


class Counter:
    """A scheduler, or a data loader, that counts."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(4, 8)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def program(is_prepared: bool) -> dict[str, Any]:
    """Return what a snippet finds."""
    torch.manual_seed(0)
    model = MyModel()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if is_prepared:
        model, optimizer = hetero.prepare(model, optimizer, hbm="64MiB")
        train(model, optimizer)
    things = {
        "torch": torch,
        "hetero": hetero,
        "MyModel": MyModel,
        "train": train,
        "model": model,
        "optimizer": optimizer,
        "scheduler": Counter(),
        "loader": Counter(),
        "data": [torch.ones(4, 8)] * 3,
        "batch": torch.ones(4, 8),
    }
    fused = {
        "hidden": torch.ones(2, 3, 8),
        "head": nn.Linear(8, 5),
        "labels": torch.ones(2, 3, dtype=torch.int64),
    }
    return things | fused


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Snippets name no device: their models are on the CPU here, in a folder of their own. What
    they do to logging ends with them."""
    monkeypatch.setattr(hetero.api, "open_device", lambda spec: open_device(spec or "cpu"))
    monkeypatch.setattr(logging, "basicConfig", lambda: None)
    monkeypatch.setattr(logging.getLogger("hetero"), "level", logging.NOTSET)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("snippet", RUN, ids=str)
def test_a_snippet_runs_as_it_stands(snippet: Snippet) -> None:
    exec(compile(snippet.text, str(snippet), "exec"), program(snippet.mark == "prepared"))


def test_snippets_that_only_compile_say_why() -> None:
    only = [s for s in ALL if s.mark.startswith("compiled only: ")]

    assert len(RUN) >= 10
    assert len(RUN) + len(only) + sum(s.page in (*RANKS, SIGNATURES) for s in ALL) == len(ALL)
