"""What broke in a newcomer's first hour: 22 things, each with the test that would find it again.

Some are tested here, the others where they belong; `FOUND_BY` says where.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import hetero
from hetero.cli import main
from hetero.recipes import show
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.rehearse.plan import plan
from hetero.report.words import format_seconds

ROOT = Path(__file__).resolve().parents[1]
HERE = "tests/test_first_hour.py"
FOUND_BY = {
    "the demo runs out of memory when one of its numbers is changed": (
        f"{HERE}::test_the_demo_runs_with_other_numbers"
    ),
    "the command line refuses the bytes that its own messages advise": (
        "tests/test_cli.py::test_errors_of_commands_name_flags_and_give_one_advice"
    ),
    "empty data ends in a traceback": (
        "tests/recipes/test_language.py::test_data_without_a_byte_is_refused_by_name"
    ),
    "the page of a plan with many events shows half of it": (
        "tests/report/test_surfaces.py::test_a_plan_keeps_every_event_however_many_there_are"
    ),
    "rows of what-if contradict the plan above them": (
        "tests/report/test_surfaces.py::test_rows_of_what_if_are_on_the_clock_of_the_plan"
    ),
    "a drive lives longer on the page than in the terminal": (
        "tests/report/test_surfaces.py"
        "::test_a_drive_lives_as_many_steps_as_the_profile_says_on_every_surface"
    ),
    "`from hetero import *` fails in a base install": (
        "tests/test_face.py::test_a_base_install_has_all_names_and_says_what_some_need"
    ),
    "the doctor fails where torch is missing": (
        "tests/test_cli.py::test_doctor_answers_where_torch_is_missing_or_broken"
    ),
    "a file of figures needs accelerate, and so does a typo in a tracker's name": (
        f"{HERE}::test_figures_go_to_a_file_without_accelerate"
    ),
    "a model that stays shows its first step's traffic for ever": (
        f"{HERE}::test_a_model_that_stays_shows_no_traffic_after_its_first_step"
    ),
    "fused_loss of another model is refused in words of the code": (
        f"{HERE}::test_a_refused_fused_loss_says_what_the_model_lacks"
    ),
    "a model that cannot be reached is told after a minute, without near names": (
        "tests/recipes/test_language.py"
        "::test_a_model_that_cannot_be_reached_is_told_at_once_with_near_names"
    ),
    "a plan shows bytes twice, times as powers, and budgets that the machine lacks as its line": (
        f"{HERE}::test_a_plan_that_does_not_fit_says_what_it_lacks_once"
    ),
    "rates divide all bytes by the time of the copies that were timed": (
        "tests/report/test_measure.py::test_a_rate_is_of_moves_that_were_timed_and_of_nothing_else"
    ),
    "two sections of every report are empty": (
        "tests/report/test_html.py::test_what_was_planned_is_shown_where_it_is_there"
    ),
    "the numbers below a chart are of a moment that it does not show": (
        "tests/report/test_browser.py::test_figures_at_rest_are_of_what_the_chart_shows"
    ),
    "a report says in words of the code that graphs held what no ledger had charged": (
        f"{HERE}::test_a_report_has_no_word_of_the_code_alone"
    ),
    "what `--out` wrote of the demo loads nowhere": (
        "tests/recipes/test_language.py"
        "::test_what_is_written_of_every_preset_loads_again_and_trains_on"
    ),
    "a run that had ended does not say so, and cannot be made longer": (
        "tests/recipes/test_train.py::test_a_run_that_had_ended_says_so_and_may_be_made_longer"
    ),
    "a report of a folder of checkpoints does not find the run in it": (
        "tests/test_cli.py::test_a_report_on_a_folder_of_checkpoints_is_of_its_newest_recording"
    ),
    "a dry run advises Python, and plans budgets that say nothing of the machine": (
        "tests/test_cli.py::test_a_dry_run_ends_with_a_command_and_the_budgets_that_it_needs"
    ),
    "a calibration ends in a table of keys, without a summary and a next step": (
        "tests/recipes/test_calibrate.py::test_the_command_shows_a_table_for_people"
    ),
}

SMALL = "train --width 32 --layers 2 --heads 2 --seq 32 --steps 2 --device cpu:sim --record none"


@pytest.fixture(autouse=True)
def elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(disk)


def call(line: str) -> Result:
    return CliRunner().invoke(main, line.split())


def test_each_of_the_22_things_has_a_test() -> None:
    assert len(FOUND_BY) == len(set(FOUND_BY.values())) == 22
    for said, test in FOUND_BY.items():
        path, name = test.split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), said


@pytest.mark.parametrize(
    "line",
    [
        SMALL,
        pytest.param("train --batch 16 --steps 2 --device cpu:sim", marks=pytest.mark.slow),
        pytest.param("train --seq 2048 --steps 2 --device cpu:sim", marks=pytest.mark.slow),
    ],
)
def test_the_demo_runs_with_other_numbers(line: str) -> None:
    result = call(line)

    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.output


def test_figures_go_to_a_file_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "hetero.integrations.tracking", raising=False)
    line = f"{SMALL} --hbm 1MiB --host 1GiB --track"

    kept, wrong, other = (call(f"{line} {name}") for name in ("jsonl", "wandbb", "wandb"))

    assert kept.exit_code == 0, kept.output
    first, *steps = map(json.loads, Path("runs/1/metrics.jsonl").read_text().splitlines())
    assert first["config"]["width"] == 32
    assert [row["step"] for row in steps] == [1, 2]
    assert wrong.exit_code == other.exit_code == 2
    assert "there is no tracker 'wandbb', did you mean wandb?" in " ".join(wrong.output.split())
    assert "--track wandb needs accelerate" in " ".join(other.output.split())


def test_a_model_that_stays_shows_no_traffic_after_its_first_step() -> None:
    model = GPT(GPTConfig(width=32, layers=2, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, optimizer, hbm="64MiB", device="cpu:sim")
    tokens = torch.randint(0, 255, (2, 17))
    for _ in range(3):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = hetero.status(model)
    hetero.release(model, optimizer)

    assert seen.mode == "resident"
    assert (seen.h2d_bytes, seen.d2h_bytes, seen.misses, seen.evictions) == (0, 0, 0, 0)


def test_a_refused_fused_loss_says_what_the_model_lacks() -> None:
    model = GPT(GPTConfig(width=32, layers=2, heads=2, context=16))
    with pytest.raises(hetero.ConfigError, match="no causal model of transformers") as refused:
        hetero.prepare(model, torch.optim.AdamW(model.parameters()), fused_loss=True, device="cpu")

    assert "it has no head of words" in str(refused.value)
    assert "NoneType" not in str(refused.value)


def test_a_plan_that_does_not_fit_says_what_it_lacks_once() -> None:
    model = GPT(GPTConfig(width=32, layers=2, heads=2, context=16))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    found = plan(
        *(model, {"tokens": tokens, "targets": tokens}),
        profile="laptop-4c-avx2-ddr4",
        host="100KB",
        estimates=False,
    )
    with show.Console(record=True, width=200) as console, console.capture() as printed:
        show.planned(console, found)
    said = printed.get()
    (short,) = found.shortfalls

    assert said.count("bytes short") == 1 and f"{short.short_bytes:,} bytes short" in said
    assert "These figures, and this line, are of" in said.splitlines()[-2]
    assert "(now 97.66 KiB):" in said.splitlines()[-2]
    assert not re.search(r"\de-\d", said)
    assert format_seconds(9e-9) == "9 ns"


def test_a_report_has_no_word_of_the_code_alone(tmp_path: Path) -> None:
    model = GPT(GPTConfig(width=32, layers=2, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, optimizer, hbm="200KiB", device="cpu:sim")
    tokens = torch.randint(0, 255, (2, 17))
    with hetero.profile(model, tmp_path / "run") as run:
        for _ in range(3):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    hetero.report(run, tmp_path / "report.html")
    hetero.release(model, optimizer)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    read = re.sub(r"<(script|style)\b.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)

    assert "What was where, when" in read
    for word in ("ledger", "graphs held", "wait_update", "NoneType", "step 0 step"):
        assert word not in read, word
