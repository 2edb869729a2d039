"""Two runs side by side: the figures are those of each, and the difference is theirs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from hetero.cli import main
from hetero.errors import ConfigError
from hetero.report.examine import SUMMARY
from hetero.report.make import examined, report, told_apart
from hetero.report.pair import PairReport, Row
from hetero.report.run import Run

from .synthetic import paged, plain
from .test_html import Reader


def pair() -> PairReport:
    made = examined(paged(4), paged(4, units=3, seed=1))
    assert isinstance(made, PairReport)
    return made


def test_rows_are_the_figures_of_both_runs() -> None:
    made = pair()
    first, second = (each.summary.figures() for each in made.both)
    rows = {row.key: row for row in made.rows()}

    assert {"step.mean_seconds", "hbm.peak_bytes", "time.compute_forward_seconds"} <= rows.keys()
    for key, row in rows.items():
        assert (row.first, row.second) == (first.get(key), second.get(key))


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(2.0, 3.0, "50 % more"), (4.0, 3.0, "25 % less"), (1.0, 1.0, "the same"), (None, 1.0, "-")],
)
def test_a_change_is_measured_by_the_first(
    first: float | None, second: float | None, said: str
) -> None:
    assert Row("a", "a", first, second).change == said


def test_no_id_is_twice_on_a_page_of_two(folder: Path, tmp_path: Path) -> None:
    examined(folder, folder).write(tmp_path / "both.html")
    ids = re.findall(r' id="([^"]+)"', (tmp_path / "both.html").read_text())

    assert any(each.startswith("hatch-") for each in ids)
    assert len(ids) == len(set(ids))


def test_the_page_of_two_is_whole_closed_and_small(tmp_path: Path) -> None:
    for number, runs in enumerate(((paged(4), paged(6)), (paged(3), plain()))):
        made = examined(*runs)
        made.write(tmp_path / f"{number}.html")
        text = (tmp_path / f"{number}.html").read_text()
        read = Reader(text)

        assert read.open == [] and read.all("script") == [] and "<style>" in text
        assert text.count('class="still"') >= 2
        assert not any("src" in attrs or "style" in attrs for _, attrs in read.seen)
        assert len(text.encode()) < 600_000
    data = json.loads((tmp_path / SUMMARY).read_text())
    assert data["mode"] == "plain" and data["against"]["mode"] == "paged"


def test_both_pictures_of_a_tier_have_one_scale(tmp_path: Path) -> None:
    first = paged(3)
    more = replace(first.meta, budgets={**first.meta.budgets, "HBM": 700 * 1024})
    examined(first, Run.of(more, first.events)).write(tmp_path / "pair.html")
    tops = re.findall(r'<text x="4" y="13">(.*?)</text>', (tmp_path / "pair.html").read_text())

    assert len(tops) == 4 and (tops[0], tops[2]) == (tops[1], tops[3])
    assert tops[0] == "700 KiB"


def test_the_command_compares_and_judges_the_other(folder: Path, tmp_path: Path) -> None:
    claim = "hbm.peak <= 1MiB"
    page = tmp_path / "pair.html"
    words = ["report", str(folder), str(folder), "-o", str(page), "--assert", claim, "--json"]
    done = CliRunner().invoke(main, words)
    data = json.loads(done.stdout.splitlines()[-1])

    assert done.exit_code == 0 and page.exists()
    assert data["claims"][0]["holds"] and data["against"]["hbm"] == data["hbm"]
    shown = CliRunner().invoke(main, ["report", str(folder), str(folder)])
    assert "the same" in shown.stdout


def test_pictures_of_one_run_are_not_those_of_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="of two runs"):
        pair().write_files(None, str(tmp_path / "x.png"), None)


def test_runs_are_named_by_what_differs_in_their_paths(folder: Path, tmp_path: Path) -> None:
    assert told_apart("runs/1/run", "runs/2/run") == ("1/run", "2/run")
    assert told_apart("a", "a") == ("a (first)", "a (second)")
    assert report(folder, tmp_path / "p.html", other=folder).model == "GPT"
