"""``hetero plan``: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hetero.cli import main

CPU = "laptop-4c-avx2-ddr4"
MODELS = """
import torch
from torch import nn
from hetero.recipes.gpt import GPT, GPTConfig

TOKENS = torch.zeros(2, 16, dtype=torch.long, device="cpu")

def small():
    shape = GPTConfig(width=32, layers=6, heads=4, context=16, checkpoint_blocks=False)
    return GPT(shape), TOKENS

def alone():
    return nn.Linear(8, 8)

def broken():
    return nn.Linear(8, int(torch.ones(()).item()))

number = 7
"""
KEYS = {
    *("model", "n_params", "profile", "fits", "shortfalls", "tiers", "step_seconds"),
    *("start_seconds", "first_step_seconds", "tokens", "tokens_per_second", "bottleneck", "shares"),
    *("checks", "mfu"),
    *("disk_write_bytes", "drive_life_steps", "policies", "settings", "what_if", "paste"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a module of models."""
    (tmp_path / "thesemodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(line: str) -> Result:
    return CliRunner().invoke(main, ["plan", *line.split()])


SMALL = f"thesemodels:small --profile {CPU} --no-estimates"


def last_json(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


def test_a_model_that_fits_ends_with_status_0_and_the_line_to_paste() -> None:
    result = call(f"{SMALL} --hbm 560KB")

    assert result.exit_code == 0, result.output
    assert "small, 93,184 parameters" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[0].endswith("fits")
    for word in ("HBM", "HOST", "step", "tokens/s", "spent on"):
        assert word in result.stdout
    assert result.stdout.splitlines()[-1] == (
        f"model, optimizer = hetero.prepare(model, optimizer, hbm=560000, profile={CPU!r})"
    )


@pytest.mark.parametrize(
    ("given", "tier", "have"), [("--hbm 150KB", "HBM", 150_000), ("--host 300KB", "HOST", 300_000)]
)
def test_a_model_that_does_not_fit_ends_with_status_1_and_names_tier_and_bytes(
    given: str, tier: str, have: int
) -> None:
    line = f"{SMALL} --hbm 560KB {given}"
    result, data = call(line), last_json(call(f"{line} --json"))

    (short,) = data["shortfalls"]
    assert result.exit_code == 1
    assert not data["fits"]
    assert (short["tier"], short["have_bytes"]) == (tier, have)
    lacks = short["needed_bytes"] - have
    assert lacks > 0
    assert f"{tier} is {lacks:,} bytes short" in result.stdout
    assert "does not fit" in result.stdout


def test_json_has_the_same_keys_whether_it_fits_or_not() -> None:
    fits = last_json(call(f"{SMALL} --hbm 560KB --json"))
    short = last_json(call(f"{SMALL} --hbm 150KB --json"))

    assert set(fits) == set(short) == KEYS
    assert set(fits["tiers"][0]) == {"tier", "budget_bytes", "peak_bytes", "kinds", "at_peak"}
    assert set(short["shortfalls"][0]) == {"tier", "have_bytes", "needed_bytes", "why"}
    assert (fits["shortfalls"], len(fits["what_if"])) == ([], 1)
    assert (fits["what_if"][0]["fits"], short["what_if"][0]["fits"]) == (True, False)


def test_estimates_are_a_table_and_rows_in_json() -> None:
    line = f"thesemodels:small --profile {CPU} --hbm 560KB"

    rows = last_json(call(f"{line} --json"))["what_if"]

    keys = {"label", "fits", "peak_bytes", "step_seconds", "change", "tokens_per_second", "how"}
    assert set(rows[0]) == keys
    assert [rows[0]["label"], rows[0]["fits"]] == ["as planned", True]
    assert "what if" in call(line).stdout


def test_a_plan_takes_adapters_codes_an_optimizer_and_slices() -> None:
    line = f"{SMALL} --hbm 560KB --lora-rank 4 --frozen nf4 --optimizer sgd --micro-batch 1"
    result = call(f"{line} --json")

    assert result.exit_code == 0, result.output
    found = last_json(result)
    assert found["n_params"] > 93_184  # with adapters
    assert {key: found["settings"][key] for key in ("frozen", "micro_batch")} == {
        "frozen": "nf4",
        "micro_batch": 1,
    }
    (host,) = (row for row in found["tiers"] if row["tier"] == "HOST")
    assert host["kinds"]["state"] == host["kinds"]["grad"]  # one moment of the adapters


def test_a_plan_may_be_a_report(tmp_path: Path) -> None:
    result = call(f"{SMALL} --hbm 560KB -o planned.html")

    assert result.exit_code == 0
    assert "predicted" in (tmp_path / "planned.html").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["kind"], summary["hbm"]["budget_bytes"]) == ("predicted", 560_000)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("thesemodels:small --profile rtx409", "did you mean rtx4090?"),
        (f"llama-3-8 --profile {CPU}", "did you mean llama-3-8b?"),
        ("thesemodels:small", "hetero calibrate"),
        (f"thesemodels:nothing --profile {CPU}", "has no attribute 'nothing'"),
        (f"nosuchmodels:small --profile {CPU}", "No module named"),
        (f"thesemodels:alone --profile {CPU}", "return model, batch"),
        (f"thesemodels:broken --profile {CPU}", "without memory"),
        (f"thesemodels:number --profile {CPU}", "function"),
        (f"{SMALL} --hbm lots", "is not a size"),
        (f"{SMALL} --device cuda", "has no [gpu]"),
    ],
)
def test_what_cannot_be_planned_ends_with_status_2_and_advice(line: str, said: str) -> None:
    result = call(line)

    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "Advice" in result.stderr
    assert "Traceback" not in result.output


def test_a_failure_is_told_in_json_too() -> None:
    data = last_json(call("thesemodels:small --json"))

    assert data["error"] == "ConfigError"
    assert "--profile rtx4090" in data["advice"]


@pytest.mark.campaign(seconds=3)
def test_the_console_script_finds_modules_in_the_working_directory(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "run.py"
    script.parent.mkdir()
    script.write_text("from hetero.cli import main\nmain()\n")
    command = [sys.executable, str(script), "plan", *SMALL.split()]

    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout


def test_a_published_model_is_planned_by_its_name() -> None:
    pytest.importorskip("transformers")

    data = last_json(call("smollm2-135m --profile rtx4090 --sequence 64 --no-estimates --json"))

    assert (data["fits"], data["tokens"]) == (True, 64)
    assert 130e6 < data["n_params"] < 140e6


def test_a_mesh_of_copies_and_shares_is_planned() -> None:
    shared, copied, whole = (
        host_peak(f"{SMALL} --json --device cpu:sim --hbm 900KB {more}")
        for more in ("--ranks 2", "--mesh dp_replicate=2,dp_shard=2", "")
    )

    assert copied == pytest.approx(shared, rel=0.1)
    assert copied < 0.8 * whole


def host_peak(line: str) -> int:
    tiers = last_json(call(line))["tiers"]
    return next(int(tier["peak_bytes"]) for tier in tiers if tier["tier"] == "HOST")


@pytest.mark.parametrize("mesh", ["dp_shard", "dp_shard=0", "rows=2", "dp_shard=a"])
def test_a_mesh_that_is_none_ends_with_2(mesh: str) -> None:
    result = call(f"{SMALL} --mesh {mesh}")
    assert result.exit_code == 2
    assert "mesh" in result.output


# -- meshes --------------------------------------------------------------------------------------

TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A decoder's configuration, and options to plan it with."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY))
    return f"{file} --profile a100-80 --precision bf16 --sequence 16"


def test_a_mesh_is_planned_stage_by_stage(tiny: str) -> None:
    result = call(f"{tiny} --mesh pp=2,tp=2,dp=2 --batch 2 --micro-batch 1 --json")
    data = last_json(result)

    assert result.exit_code == 0
    assert data["mesh"] == {"pp": 2, "dp_shard": 2, "tp": 2}
    assert (data["n_ranks"], data["n_passes"], len(data["stages"])) == (8, 2, 2)
    assert data["tokens"] == 2 * 2 * 16


def test_a_plan_of_a_mesh_fits_into_a_terminal(tiny: str) -> None:
    result = call(f"{tiny} --mesh pp=2,tp=2 --batch 2")

    assert result.exit_code == 0, result.output
    said = result.output.replace("\n", " ")
    assert "bubble" in said and "over tp" in said and "found.schedule(2, loss_of" in said
    assert max(len(line) for line in result.output.splitlines()[:12]) <= 80


def test_the_best_meshes_are_a_table_with_the_line_to_paste(tiny: str) -> None:
    result = call(f"{tiny} --ranks 2 --search --batch 1")

    assert result.exit_code == 0, result.output
    assert "pp x dp x tp" in result.output and "hetero.prepare(" in result.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--search", "--ranks"),
        ("--mesh pp=2 --optimizer sgd", "--optimizer"),
        ("--mesh pp=2 -o plan.html", "--output"),
        ("--search --ranks 2 --micro-batch 2", "a search finds that itself"),
    ],
)
def test_what_a_mesh_does_not_take_ends_with_2(tiny: str, more: str, said: str) -> None:
    result = call(f"{tiny} {more}")

    assert result.exit_code == 2
    assert said in result.output
