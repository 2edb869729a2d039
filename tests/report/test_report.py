"""`hetero.report` and ``hetero report``: from what is a run to files, words and exit status."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result

import hetero
from hetero.cli import main
from hetero.errors import ConfigError
from hetero.report.measure import figures, measure
from hetero.report.run import EVENTS, META, Meta, Run

from .synthetic import paged

ROOT = Path(__file__).parent.parent.parent


def save(run: Run, folder: Path) -> Path:
    """Write a run as a recorder would."""
    folder.mkdir()
    (folder / META).write_text(json.dumps(run.meta.as_json()))
    with gzip.open(folder / EVENTS, "wt") as file:
        file.writelines(json.dumps(event) + "\n" for event in run.events)
    return folder


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


# -- the function --------------------------------------------------------------------------------


def test_a_report_is_a_page_and_a_summary_beside_it(folder: Path, tmp_path: Path) -> None:
    summary = hetero.report(folder, tmp_path / "deep" / "r.html")
    data = json.loads((tmp_path / "deep" / "summary.json").read_text())

    assert (tmp_path / "deep" / "r.html").read_text().startswith("<!doctype html>")
    assert figures(data) == summary.figures()
    assert data["advice"] and data["schema"] == 1


def test_a_run_a_profile_and_a_directory_give_the_same_figures(
    folder: Path, tmp_path: Path
) -> None:
    given = (Run.load(folder), SimpleNamespace(directory=folder), str(folder))
    found = [hetero.report(each, tmp_path).figures() for each in given]

    assert found[0] == found[1] == found[2]
    assert (tmp_path / "report.html").exists()


def test_a_prepared_model_remembers_its_last_events(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, device="cpu", hbm="8KiB", chunk_bytes=1024)
    for _ in range(4):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state_dict()  # waits for updates that work on behind the last step
    status = hetero.status(model)
    first, again = (hetero.report(model, tmp_path / f"{i}.html") for i in range(2))
    hetero.release(model, optimizer)

    assert first.figures() == again.figures()  # to look changes nothing
    assert first.step.count == 4
    assert first.tiers["hbm"].peak_bytes == status.tiers["HBM"]["peak"]
    assert first.tiers["host"].peak_bytes >= sum(p.numel() for p in model.parameters()) * 4


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), 3, None], ids=["plain", "int", "none"])
def test_what_is_no_run_is_refused_with_advice(thing: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        hetero.report(thing, tmp_path / "r.html")

    assert "hetero.profile" in raised.value.advice
    assert list(tmp_path.iterdir()) == []


def test_an_empty_run_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        hetero.report(save(Run.of(Meta(), []), tmp_path / "run"), tmp_path / "r.html")

    assert "hetero.profile" in raised.value.advice


def test_a_run_that_a_kill_cut_off_is_reported_up_to_there(folder: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / META).write_bytes((folder / META).read_bytes())
    whole = (folder / EVENTS).read_bytes()
    (cut / EVENTS).write_bytes(whole[: len(whole) // 2])
    summary = hetero.report(cut, tmp_path / "r.html")

    assert 100 < summary.events < measure(Run.load(folder)).run.events.__len__()
    assert 0 < summary.step.count < 5
    assert summary.tiers["hbm"].peak_bytes > 0


def test_events_of_buckets_that_nobody_knows_do_no_harm(tmp_path: Path) -> None:
    run = paged(3)
    meta = replace(run.meta, buckets=[], units=[])
    summary = hetero.report(Run.of(meta, run.events), tmp_path / "r.html")

    assert summary.tiers["hbm"].unattributed_bytes > 0


def test_what_was_planned_beside_a_run_is_read(tmp_path: Path) -> None:
    folder = save(paged(4), tmp_path / "run")
    row = {"label": "12 GB", "fits": False, "peak_bytes": 5, "step_seconds": 1.5, "change": "x"}
    (folder / "whatif.json").write_text(json.dumps([{**row, "new": 1}]))
    (folder / "predicted.json").write_text(json.dumps({"hbm": {"peak_bytes": 1}}))
    hetero.report(folder, tmp_path / "r.html")

    assert "12 GB" in (tmp_path / "r.html").read_text()
    for name, bad in (("whatif.json", "[{}]"), ("predicted.json", "[]"), ("predicted.json", "{")):
        (folder / name).write_text(bad)
        with pytest.raises(ConfigError, match=name):
            hetero.report(folder, tmp_path / "r.html")


@pytest.mark.parametrize(
    "first",
    ["import hetero.report.run", "from hetero.report.run import Run", "hetero.report",
     "from hetero import report", "import hetero.report.make, hetero.report.html"],
)  # fmt: skip
def test_the_function_and_the_modules_live_under_one_name(first: str) -> None:
    code = (
        f"import hetero\n{first}\nimport hetero.report.run\n"
        "from hetero.report.run import Run\nfrom hetero import report\n"
        "print(callable(hetero.report), report is hetero.report, Run.__name__)"
    )

    assert python(code).split() == ["True", "True", "Run"]


def test_rendering_needs_no_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nimport hetero\n"
        f"hetero.report({str(folder)!r}, {str(tmp_path / 'r.html')!r})\n"
        "from hetero.report import terminal, perfetto, png, claims\nprint('rendered')"
    )

    assert python(code) == "rendered\n"


# -- the command ---------------------------------------------------------------------------------


def call(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)])


def test_the_command_shows_a_summary_and_writes_what_is_asked_for(
    folder: Path, tmp_path: Path
) -> None:
    page, trace = tmp_path / "r.html", tmp_path / "t.json.gz"
    done = call(folder, "-o", page, "--perfetto", trace)

    assert done.exit_code == 0
    assert "hetero report" in done.stdout and "r.html" in done.stdout
    assert page.exists() and trace.exists() and (tmp_path / "summary.json").exists()


def test_without_files_the_command_says_how_to_get_the_page(folder: Path) -> None:
    done = call(folder)

    assert done.exit_code == 0 and "-o report.html" in done.stdout


def test_claims_decide_the_exit_status(folder: Path) -> None:
    held = call(folder, "--assert", "hbm.peak <= 1MiB", "--assert", "step.count == 5")
    broken = call(folder, "--assert", "step.count == 5", "--assert", "hbm.peak <= 1KiB")
    unknown = call(folder, "--assert", "hbm.peek <= 1KiB")

    assert (held.exit_code, broken.exit_code, unknown.exit_code) == (0, 1, 2)
    assert "does not hold, measured" in broken.stdout
    assert "hbm.peak_bytes" in unknown.output


def test_json_is_the_summary_with_its_claims(folder: Path) -> None:
    done = call(folder, "--json", "--assert", "hbm.peak <= 1KiB")
    data = json.loads(done.stdout.splitlines()[-1])

    assert done.exit_code == 1
    assert data["hbm"]["peak_bytes"] == data["claims"][0]["measured"]
    assert data["claims"][0]["holds"] is False


def test_a_directory_that_is_no_run_is_unusable(tmp_path: Path) -> None:
    done = call(tmp_path)

    assert done.exit_code == 2 and "Advice: name the directory" in done.output


@pytest.mark.parametrize("option", ["--output", "--png", "--perfetto"])
def test_a_file_that_cannot_be_written_is_unusable(
    folder: Path, tmp_path: Path, option: str
) -> None:
    if option == "--png":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")

    result = call(folder, option, tmp_path / "file" / "r")

    assert result.exit_code == 2
    assert "DiskWriteError" in result.stderr
    assert "Traceback" not in result.output


# -- the package ---------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["assets", "templates"])
def test_a_wheel_carries_the_assets(folder: str) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    names = {file.distribution_path for file in builder.recurse_included_files()}
    assets = [path for path in (ROOT / "hetero/report" / folder).rglob("*") if path.is_file()]

    assert assets
    for path in assets:
        assert str(path.relative_to(ROOT)) in names
