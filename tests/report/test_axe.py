"""Pages of reports under axe-core: what it finds keeps someone from reading them.

axe-core reads the page as a browser drew it (colours, names, order of headings, tables), wide and
narrow, light and dark, with all that folds unfolded. Its script comes with `axe_core_python`, of
which nothing else is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from hetero.report.examine import examine
from hetero.report.make import report
from hetero.report.ranks import RankReports
from hetero.watch.face import WatchBlock

from .browser import CHROMIUM, Browser, browser
from .synthetic import paged, plain

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
LOOKS = [(1280, False), (1280, True), (400, False), (400, True)]
UNFOLD = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
TO_REVIEW = ["empty-table-header"]  # axe-core asks for a look at what these find: here it counts
RUN = f"""axe.run(document, {{resultTypes: ['violations', 'incomplete']}}).then(found => [
    ...found.violations, ...found.incomplete.filter(rule => {TO_REVIEW}.includes(rule.id)),
].flatMap(rule => rule.nodes.map(e => `${{rule.id}}: ${{e.target}} ${{e.failureSummary}}`)))"""
PLANTED = {
    "color-contrast": "document.querySelector('main p').style.color = '#999'",
    "button-name": "document.querySelector('nav').append(document.createElement('button'))",
    "html-has-lang": "document.documentElement.removeAttribute('lang')",
    "heading-order": "document.querySelector('h2').outerHTML = '<h5>Deep</h5>'",
    "empty-table-header": "document.querySelectorAll('th').forEach(e => { e.textContent = ''; })",
    "svg-img-alt": "document.querySelector('svg[role=img]').removeAttribute('aria-label')",
    "duplicate-id-active": "document.querySelectorAll('button').forEach(e => { e.id = 'one'; })",
    "label": "document.querySelector('nav').append(document.createElement('input'))",
    "region": "document.body.prepend(document.querySelector('main p').cloneNode(true))",
    "document-title": "document.title = ''",
}


def check(page: Browser) -> list[str]:
    """Return what axe-core finds in an open page."""
    page.ask(UNFOLD)
    if not page.ask("'axe' in window"):
        page.ask(script())
    found = page.ask(RUN)
    assert found is not None, page.complaints()
    return list(found)


def script() -> str:
    spec = find_spec("axe_core_python")
    assert spec is not None and spec.origin is not None, "axe-core-python is not installed"
    return Path(spec.origin).with_name("axe.min.js").read_text(encoding="utf-8")


def one(folder: Path, path: Path) -> None:
    report(folder, path)


def plain_model(folder: Path, path: Path) -> None:
    report(plain(), path)


def two(folder: Path, path: Path) -> None:
    report(folder, path, other=paged(4))


def ranks(folder: Path, path: Path) -> None:
    runs = (paged(4), paged(4, seed=1))
    told = [replace(run, meta=replace(run.meta, rank=n, n_ranks=2)) for n, run in enumerate(runs)]
    RankReports(tuple(map(examine, told))).write(path)


def watched(folder: Path, path: Path) -> None:
    model, kept = nn.Linear(64, 64), []
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WatchBlock, "_proposal", lambda self, found, patience: found.proposal)
        with hetero.watch(path):
            for _ in range(3):
                kept.append(torch.ones(8, 64) * 2)
                model(kept[-1]).sum().backward()
                optimizer.step()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.mark.parametrize(
    "write",
    [one, two, *(pytest.param(e, marks=pytest.mark.slow) for e in (plain_model, ranks, watched))],
)
def test_axe_finds_nothing_in_a_page(
    page: Browser, folder: Path, tmp_path: Path, write: Callable[[Path, Path], None]
) -> None:
    write(folder, tmp_path / "page.html")
    for width, dark in LOOKS:
        page.look(width, dark=dark)
        page.load(tmp_path / "page.html")

        assert check(page) == [], (width, dark)


def test_what_keeps_someone_from_reading_a_page_is_found(
    page: Browser, folder: Path, tmp_path: Path
) -> None:
    report(folder, tmp_path / "page.html")
    page.look(1280)
    page.load(tmp_path / "page.html")
    for planted in PLANTED.values():
        page.ask(planted)

    assert {said.partition(":")[0] for said in check(page)} >= PLANTED.keys()
