"""The page: whole, closed, small, with the numbers behind every picture."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from hetero.report import series
from hetero.report.advice import advise, headline
from hetero.report.html import LONGEST, asset, digest, pages, render
from hetero.report.levels import reduced
from hetero.report.measure import Measured, measure, summarize
from hetero.report.run import Allocation, Allocations, Run
from hetero.report.series import delta, series_of, undelta, windows
from hetero.report.still import outline, sampled, still_levels
from hetero.report.svg import HIGH, WIDE, Rectangle, fits, squarify
from hetero.report.views import Sidecar, WhatIf, compared
from hetero.types import format_bytes

from .synthetic import paged, plain

VOID = {"meta", "br", "rect", "link", "img", "input", "hr"}
KIB = 1024


def page_of(measured: Measured, sidecar: Sidecar | None = None) -> str:
    return render(measured, summarize(measured), advise(measured), sidecar or Sidecar())


@pytest.fixture(scope="module")
def page(measured: Measured) -> str:
    return page_of(measured)


class Reader(HTMLParser):
    """Checks that elements nest, and keeps what was read."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.seen if name == tag]


RUNS = {
    "recorded": None,
    "synthetic": paged(3),
    "plain": plain(),
    "no step": Run.of(plain().meta, [e for e in plain().events if e.what != "step"]),
    "levels only": Run.of(plain().meta, [e for e in plain().events if e.what == "level"]),
    "no levels": Run.of(plain().meta, [e for e in plain().events if e.what != "level"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_page_of_any_run_is_well_formed_and_has_every_view(
    name: str, measured: Measured
) -> None:
    made = RUNS[name]
    read = Reader(page_of(measured if made is None else measure(made)))

    assert read.open == []
    ids = [attrs["id"] for _, attrs in read.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    views = ("verdict", "timelines", "residency", "lanes", "step", "peak", "traffic")
    assert set(ids) >= {*views, "provenance"}
    assert not {"whatif", "predicted"} & set(ids)  # no plan is next to it
    assert {a["href"][1:] for a in read.all("a") if a["href"]} <= set(ids)


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    read = Reader(page)

    for _, attrs in read.seen:
        assert not {"src", "srcset", "action", "formaction", "style"} & set(attrs)
        assert not [name for name in attrs if name.startswith("on")]
        assert str(attrs.get("href") or "#").startswith("#")
    assert read.all("link") == [] and read.all("iframe") == []
    for style in read.inside["style"]:
        assert "url(" not in style and "@import" not in style


def test_the_policy_lets_in_one_script_and_one_style(page: str) -> None:
    read = Reader(page)
    (policy,) = [m["content"] for m in read.all("meta") if "http-equiv" in m]
    (style,), (data, script) = read.inside["style"], read.inside["script"]

    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert f"script-src '{digest(script)}'" in policy and f"style-src '{digest(style)}'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert "eval(" not in script and "new Function" not in script
    assert json.loads(data)["tiers"]


@pytest.mark.campaign(seconds=3)
def test_sizes_keep_their_limits(page: str) -> None:
    read = Reader(page)
    code = len(read.inside["script"][1]) + len(read.inside["style"][0])

    assert code <= 120_000
    assert len(page.encode()) <= 600_000
    assert len(page_of(measure(paged(300, units=16))).encode()) <= 5_000_000


def test_every_picture_has_a_table(page: str) -> None:
    for figure in re.findall(
        r"<figure>.*?</figure>|<section id=\"lanes\".*?</section>", page, re.S
    ):
        if "data-lane" not in figure or figure.startswith("<section"):
            assert "<details>" in figure and "<table>" in figure
    assert page.count('class="treemap"') == 3 and page.count('class="chart" data-tier=') == 3
    assert page.count('class="chart small" data-lane=') == 4 and page.count('class="gantt"') == 1


def test_sizes_say_their_bytes(page: str, measured: Measured) -> None:
    for peak in measured.peaks.values():
        assert f'title="{peak.n_bytes:,} bytes"' in page


def test_names_of_a_model_cannot_leave_their_place(measured: Measured) -> None:
    run = paged(3)
    evil = "</script><img src=x onerror=alert(1)>"
    made = Allocations(2, [Allocation(evil, evil, 2), Allocation("", evil, 1)])
    meta = replace(run.meta, model=evil, units=[evil] * 8, allocations=made)
    read = Reader(page_of(measure(Run.of(meta, run.events))))

    assert read.open == [] and read.all("img") == []
    assert len(read.all("script")) == 2


def test_what_was_planned_is_shown_where_it_is_there(measured: Measured) -> None:
    without = page_of(measured)
    guessed = {
        "hbm": {"peak_bytes": 2 * measured.peaks["HBM"].n_bytes},
        "step": {"mean_seconds": 1},
    }
    row = WhatIf("24 GB", True, 3 * KIB, 0.5, "larger batch")
    planned = page_of(measured, Sidecar(guessed, (row,)))

    assert 'id="whatif"' not in without and 'id="predicted"' not in without
    assert 'id="whatif"' in planned and 'id="predicted"' in planned
    assert "+100.0 %" in planned and "larger batch" in planned


def test_predictions_are_compared_by_key_with_signed_errors() -> None:
    rows = dict(compared({"a_bytes": 90, "b_seconds": 3.0, "c": 1}, {"a_bytes": 100, "c": 1}))

    assert rows == {"a_bytes": "-10.0 %"}


def test_a_long_table_says_how_much_is_left() -> None:
    text = (
        '{% from "macros.html" import table, th %}'
        '{% call(row) table(("<a>", "#b"), rows) %}{{ th(row) }}{% endcall %}'
    )
    made = pages().from_string(text).render(rows=["<x>"] * (LONGEST + 2))

    assert made.count("&lt;x&gt;") == LONGEST and "<x>" not in made
    assert '<td colspan="2">and 2 more in summary and log</td>' in made
    assert '<th scope="col">&lt;a&gt;</th><th scope="col" class=num>b</th>' in made


# -- what the script gets ------------------------------------------------------------------------


def test_deltas_are_undone() -> None:
    for values in ([], [5], [3, 3, 9, -2, 0]):
        assert undelta(delta(values)) == values


def test_timelines_of_the_script_are_those_that_were_measured(measured: Measured) -> None:
    for tier in series_of(measured)["tiers"]:
        line = reduced(measured.timelines[tier["tier"]], windows(measured))
        sums = [sum(row) for row in zip(*map(undelta, tier["v"]), strict=True)]
        assert sums == list(line.totals)
        assert sums[tier["peakRow"]] == tier["peak"] == max(line.totals)


def test_all_stays_of_a_short_run_are_drawn(measured: Measured) -> None:
    found = series_of(measured)["gantt"]

    assert len(found["stays"]["row"]) == len(measured.residency.stays)
    assert len(found["uses"]["unit"]) == len(measured.residency.accesses)
    assert found["merged"] == 0


def test_a_long_run_is_thinned_out_but_not_in_its_typical_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(series, "STAYS", 200)
    made = measure(paged(60))
    found, step = series_of(made)["gantt"], made.steps.typical()
    assert step is not None
    inside = [s for s in made.residency.stays if step.begin_ns <= s.begin_ns < step.end_ns]
    begins = undelta(found["stays"]["begin"])
    low, high = ((t - made.begin_ns) // 1000 for t in (step.begin_ns, step.end_ns))

    assert found["merged"] > 0
    assert len(found["stays"]["row"]) < len(made.residency.stays)
    assert len([t for t in begins if low <= t < high]) >= len(inside) == 16


@pytest.mark.parametrize("sizes", [[1.0], [5, 4, 3, 2, 1], [100, 1, 1, 1], [7] * 20])
def test_a_treemaps_areas_are_in_proportion_and_fill_the_plane(sizes: list[float]) -> None:
    cells = squarify(sizes)

    assert sum(c.width * c.height for c in cells) == pytest.approx(WIDE * HIGH)
    for cell, size in zip(cells, sizes, strict=True):
        assert cell.width * cell.height == pytest.approx(size * WIDE * HIGH / sum(sizes))
        assert cell.x >= -1e-6 and cell.x + cell.width <= WIDE + 1e-6
        assert cell.y >= -1e-6 and cell.y + cell.height <= HIGH + 1e-6


def test_the_licence_of_uplot_is_in_the_page(page: str) -> None:
    assert "Copyright (c) 2022 Leon Sorokin" in asset("uplot/LICENSE")
    assert page.count("Leon Sorokin") == 2


def test_ram_is_page_locked_only_where_hetero_manages_it(page: str) -> None:
    made = plain()
    ram = [e._replace(tier="HOST") if e.tier else e for e in made.events]

    assert "HOST (page-locked) at its peak" in page
    assert "RAM at its peak" in page_of(measure(Run.of(made.meta, ram)))


def test_what_the_allocator_counted_is_said_beside_what_is_attributed(page: str) -> None:
    made = plain()
    counted = made.events[-1]._replace(what="live", tier="", category="reserved", n_bytes=12_345)

    assert "allocator counted" not in page
    assert "12,345 bytes" in page_of(measure(Run.of(made.meta, [*made.events, counted])))


# -- without JavaScript, and on paper ------------------------------------------------------------


def test_pictures_are_there_without_javascript(page: str, measured: Measured) -> None:
    lanes = page.count("data-lane=") - asset("report.js").count("data-lane=")
    stills = page.count('<svg class="still"')

    assert stills == len(measured.timelines) + lanes + 1  # and the stays
    assert page.count("<noscript>") == 1
    assert ".still { display: block; }" in asset("report.css").split("@media print")[1]
    for line in measured.timelines.values():
        picture = still_levels(measured, line)
        assert len(picture.areas) == sum(any(column) for column in line.columns)
        assert [mark.at for mark in picture.times] == [0, 25, 50, 75, 100]


def test_a_still_picture_keeps_the_peak(measured: Measured) -> None:
    for line in measured.timelines.values():
        rows = sampled(line, measured.begin_ns, measured.end_ns)
        assert max(line.totals[row] for row in rows) == max(line.totals)
        top = still_levels(measured, line, 2 * max(line.totals)).top
        assert top == format_bytes(2 * max(line.totals))


def test_an_outline_goes_up_and_down_with_its_heights() -> None:
    assert outline([0.5, 0.5, 1.0]) == "M0 100H0V50.0H2V0.0H3V100Z"


# -- for everybody -------------------------------------------------------------------------------


def test_every_picture_and_field_has_a_name_and_headings_are_in_order(page: str) -> None:
    read = Reader(page)

    for tag, attrs in read.seen:
        if attrs.get("role") in ("img", "application", "group"):
            assert attrs.get("aria-label"), (tag, attrs)
        if "tabindex" in attrs and "class" in attrs and "chart" in str(attrs["class"]):
            assert attrs["role"] == "img"
    assert "<label" in page and all(i["type"] == "search" for i in read.all("input"))
    levels = [int(tag[1]) for tag, _ in read.seen if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    heads = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", page)
    assert heads and all(heads)


def test_labels_of_a_treemap_are_written_where_they_fit() -> None:
    cell = Rectangle(0, 0, 0, 200, 100)

    assert (fits("b", cell), fits("blocks.12", cell)) == ("always", "roomy")
    assert fits("param, 12.06 MiB (9.9 %), no module recorded", cell) == ""


def test_the_first_sentence_is_one_to_send(measured: Measured, page: str) -> None:
    states = 16 * measured.meta.n_params  # fp32 under AdamW, without what pads chunks
    peak = format_bytes(measured.peaks["HBM"].n_bytes)
    sentence = f"{format_bytes(states)} of states trained in {peak} of HBM."

    assert headline(measured) == sentence
    assert f'<p class="lead">{sentence}</p>' in page
    said = headline(measured, plain_seconds=measured.step_seconds / 1.04)
    assert said.endswith("of HBM, 4 % slower than without hetero.")


def test_search_knows_every_parameter(measured: Measured) -> None:
    rows = series_of(measured)["gantt"]["buckets"]

    assert all(row["params"] for row in rows)
    assert sum(len(row["params"]) for row in rows) == sum(
        len(bucket.names) for bucket in measured.meta.buckets
    )


def test_homes_have_their_modules_where_all_of_a_kind_are_in_one_tier() -> None:
    run = paged(3)
    n_bytes = run.meta.buckets[0].n_bytes
    buckets = [replace(bucket, kinds={"state": 2 * n_bytes}) for bucket in run.meta.buckets]
    made = measure(Run.of(replace(run.meta, buckets=buckets), run.events))
    less = [replace(bucket, kinds={"state": n_bytes}) for bucket in run.meta.buckets]
    part = measure(Run.of(replace(run.meta, buckets=less), run.events))

    shares = {(s.category, s.module): s.n_bytes for s in made.peaks["HOST"].shares}
    assert shares["state", "blocks.3"] == 2 * n_bytes and ("state", "") not in shares
    assert ("state", "") in {(s.category, s.module) for s in part.peaks["HOST"].shares}


def test_the_head_of_a_page_says_what_ran_and_when(measured: Measured) -> None:
    told = replace(measured.meta, program="train.py", began="2026-11-25 02:10 UTC")
    page = page_of(replace(measured, run=replace(measured.run, meta=told)))
    head = page.partition("<header")[2].partition("</h1>")[0]
    assert 'train.py, <span class="whole">2026-11-25 02:10 UTC</span>' in head


def test_settings_are_shown_as_people_write_them(measured: Measured) -> None:
    given = {"hbm": 12 * 2**20, "nvme": ["runs", "/other disk"], "sum_group": 1}
    told = replace(measured.meta, settings=given)
    page = page_of(replace(measured, run=replace(measured.run, meta=told)))
    assert "hbm=12 MiB; nvme=runs, /other disk; sum_group=1" in page
