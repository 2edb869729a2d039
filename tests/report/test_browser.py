"""The page in a browser: no request, no error, quickly there, and usable without a mouse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.report.make import report

from .browser import CHROMIUM, Browser, browser
from .synthetic import paged

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
GENEROUS_MS = 5000  # first paint takes about 0.3 s; a machine that is shared may take longer


@pytest.fixture(scope="module")
def shown(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    place = tmp_path_factory.mktemp("browser")
    report(folder, place / "report.html")
    with browser(place) as page:
        page.open(place / "report.html")
        yield page


def test_the_page_asks_for_nothing_and_complains_of_nothing(shown: Browser) -> None:
    assert [url.split("/")[-1] for url in shown.requests()] == ["report.html"]
    assert shown.complaints() == []


def test_every_chart_is_drawn(shown: Browser) -> None:
    assert shown.ask("document.querySelectorAll('.chart').length") == 7
    assert shown.ask("document.querySelectorAll('.chart canvas').length") == 7
    painted = "(c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size)"
    assert shown.ask(f"{painted}(document.querySelector('.gantt canvas'))") > 8
    legend = shown.ask("document.querySelector('[data-tier=HBM] .u-legend').textContent")
    assert "KiB" in legend  # the peak's numbers, before anybody points anywhere


def test_the_tab_key_reaches_charts_and_tables_in_the_order_of_the_page(shown: Browser) -> None:
    shown.ask("document.activeElement.blur()")
    order = []
    for _ in range(60):
        shown.press("Tab")
        order.append(
            shown.ask("document.activeElement.className || document.activeElement.tagName")
        )
    order = order[: order.index("BODY")] if "BODY" in order else order  # it begins again
    charts = [name for name in order if "chart" in name or "gantt" in name]

    assert charts == ["chart"] * 3 + ["gantt"] + ["chart small"] * 4
    assert "SUMMARY" in order and "BUTTON" in order and "A" in order


def test_what_has_the_focus_is_seen(shown: Browser) -> None:
    shown.ask("document.querySelector('.gantt').focus()")
    shown.press("ArrowDown")

    assert shown.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_buckets_life_is_told_without_a_mouse(shown: Browser) -> None:
    shown.ask("document.querySelector('.gantt').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        shown.press(key)
    said = shown.ask("document.querySelector('#said').textContent")
    shown.press("Enter", "\r")

    assert "came at" in said and "Went" in said
    assert shown.ask("document.activeElement.id") == "story"
    assert shown.ask("document.querySelectorAll('#story tbody tr').length") >= 2
    shown.press("Escape")
    assert shown.ask("document.activeElement.className") == "gantt"


def test_zooming_one_chart_zooms_all(shown: Browser) -> None:
    whole = shown.ask("document.querySelector('#range').textContent")
    shown.ask("document.querySelector('[data-lane]').focus()")
    shown.press("+", "+")
    closer = shown.ask("document.querySelector('#range').textContent")
    shown.press("0", "0")

    assert closer != whole
    assert shown.ask("document.querySelector('#range').textContent") == whole
    assert shown.complaints() == []


def test_a_hundred_thousand_events_are_there_at_once(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = paged(215, units=24)
    assert len(run.events) > 99_000
    report(run, tmp_path / "big.html")
    with browser(tmp_path, dark=True) as page:
        page.open(tmp_path / "big.html")
        paint = page.ask("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert page.complaints() == []
    record_property("first_contentful_paint_ms", paint)
    assert paint < GENEROUS_MS
