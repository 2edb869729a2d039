"""Wrong turns of newcomers, by the page of docs/start that they misread: each is told, in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hetero.cli import main
from hetero.config import parse_bytes
from hetero.recipes import train
from hetero.types import format_bytes

SMALL = "train --width 32 --layers 2 --heads 2 --seq 32 --steps 2 --device cpu:sim"
PLAN = "plan {} --profile rtx4090"


@pytest.fixture(autouse=True)
def elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = disk / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


def call(line: str, *more: str) -> Result:
    return CliRunner().invoke(main, [*line.split(), *more])


def said(result: Result) -> str:
    """Return what a refused command says, on one line."""
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return " ".join(result.output.split())


# -- the first run -------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["file", "file/inside"])
@pytest.mark.parametrize("option", ["--save-dir", "--out"])
def test_a_folder_that_cannot_be_made_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch, option: str, given: str
) -> None:
    """It was told after the last step, whose checkpoint was lost."""
    Path("file").write_text("")
    monkeypatch.setattr(train, "prepare", None)  # training would call it

    told = said(call(SMALL, option, given))

    assert f"{option} {given}: file is a file" in told
    assert f"name another directory with {option}" in told


def test_a_folder_in_which_this_user_may_not_write_is_told_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    assert "this user may not write in" in said(call(SMALL, "--save-dir", "runs"))


def test_a_number_of_steps_to_record_is_not_taken_for_a_directory() -> None:
    told = said(call(SMALL, "--record", "16"))

    assert "--record 16 is a number: it takes a directory, or none" in told
    assert not Path("16").exists()


@pytest.mark.parametrize("line", [f"{SMALL} runs/1", f"{SMALL} --resume runs/1"])
def test_a_runs_folder_without_its_option_is_told_the_option(line: str) -> None:
    assert "--save-dir FOLDER (with --resume, to go on)" in said(call(line))


def test_a_run_in_a_folder_with_a_space_is_resumed_reported_and_checked() -> None:
    begun = call(f"{SMALL} --hbm 300K --host 1G --save-dir", "my runs/a")
    assert begun.exit_code == 0, begun.output
    assert "hetero report 'my runs/a/run'" in begun.output
    over = call(f"{SMALL} --hbm 300K --host 1G --resume --save-dir", "my runs/a")

    assert over.exit_code == 0 and "this run had ended after 2" in over.output
    assert "writes " not in over.output  # nothing is written by a run that is over
    for line in ("report", "verify"):
        assert call(line, "my runs").exit_code == 0


def test_more_device_memory_than_the_system_maps_is_refused() -> None:
    """A simulated device is RAM, mapped whole: this was a traceback."""
    told = said(call(SMALL, "--hbm", "2EiB"))

    assert "of RAM to map" in told and "--hbm" in told


# -- your loop -----------------------------------------------------------------------------------


def test_a_size_whose_unit_was_forgotten_is_no_budget_of_a_few_bytes() -> None:
    for line in (f"{SMALL} --hbm 24", PLAN.format("smollm2-135m --gpu-memory 24")):
        told = said(call(line))
        assert "--hbm 24 would be 24 bytes" in told and "24GiB" in told
    assert parse_bytes("1024") == 1024


# -- will it fit? --------------------------------------------------------------------------------


@pytest.mark.parametrize("power", range(0, 63, 3))
def test_sizes_of_any_machine_are_printed_as_they_are_read(power: int) -> None:
    n_bytes = 2**power
    assert power < 10 or parse_bytes(format_bytes(n_bytes)) == n_bytes
    assert "e+" not in format_bytes(999 * n_bytes)


@pytest.mark.slow
def test_a_plan_of_very_long_sequences_says_what_they_lack() -> None:
    result = call(PLAN.format("smollm2-135m --sequence 100000000"))

    assert result.exit_code == 1, result.output
    assert "PiB" in result.output


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise ValueError('boo')", "ValueError: boo (mine.py, line 1)"),
        ("import nothing_there", "No module named 'nothing_there' (mine.py, line 1)"),
        ("\ndef f():\n    return {}['w']", "failed: KeyError: 'w' (mine.py, line 3)"),
        ("def f(", "SyntaxError"),
    ],
)
def test_an_error_of_the_users_function_is_told_with_its_line(
    monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    Path("mine.py").write_text(source)
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    assert told in said(call(PLAN.format("mine:f")))


def test_what_is_no_model_says_what_it_is() -> None:
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/config.json").write_text('{"a": 1}')
    Path("train.py").write_text("")

    assert "directory empty has no config.json" in said(call(PLAN.format("empty")))
    assert "does not say its model_type" in said(call(PLAN.format("other")))
    assert "name the function, as train:small" in said(call(PLAN.format("train.py")))


def test_an_unknown_model_type_is_refused_without_hundreds_of_names() -> None:
    pytest.importorskip("transformers")
    Path("other").mkdir()
    Path("other/config.json").write_text('{"model_type": "lama"}')
    told = said(call(PLAN.format("other")))

    assert "model_type='lama'" in told and len(told) < 400
