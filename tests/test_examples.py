"""The examples run as they stand."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run an example and return what it printed: in this process, which imports torch once."""

    def here(name: str, *given: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, given)])
        monkeypatch.chdir(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return here


def test_the_plain_loop_trains_inside_its_budget(run: Run) -> None:
    out = run("plain_loop.py", 16)
    words = out.splitlines()[-1].split()
    assert 0 < int(words[2]) <= int(words[4]) == 8_000_000
    assert "0 misses" in out


def test_a_plain_loop_is_profiled_in_two_lines(run: Run, tmp_path: Path) -> None:
    out = run("profile_only.py", tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["step"]["count"] == 10
    assert summary["mode"] == "plain"
    tier = out.split()[0]
    assert out.startswith(f"{tier} held {summary[tier]['peak_bytes']:,} bytes at most")
    assert (tmp_path / "report.html").exists()


def test_a_plan_says_what_fits_before_anything_runs(run: Run) -> None:
    out = run("plan.py").splitlines()

    assert out[0] == "Sequential on rtx4090: fits"
    assert out[1].startswith("  HBM holds ")
    assert int(out[1].split()[2].replace(",", "")) <= 512 * 2**20
    assert any(line.startswith("  model, optimizer = hetero.prepare(") for line in out)


def test_a_model_larger_than_the_device_generates_the_same_tokens(run: Run) -> None:
    pytest.importorskip("transformers")
    same, held, moved = (line.split() for line in run("generate.py").splitlines()[-3:])

    whole = int(held[3])
    assert same[:2] == ["the", "same"]
    assert int(held[8]) <= whole // 3
    assert 0 < int(moved[4]) < whole
    assert moved[-2:] == ["0", "misses"]


WITH_TRANSFORMERS = {
    "accelerate_loop": ("accelerate",),
    "bert_masked_lm": (),
    "causal_lm": (),
    "lightning_loop": ("lightning",),
    "lora": ("peft",),
    "sft": ("trl", "datasets"),
    "trainer": ("accelerate",),
}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("name", WITH_TRANSFORMERS)
def test_an_example_with_transformers_learns_inside_its_budget(name: str, run: Run) -> None:
    for needed in ("transformers", *WITH_TRANSFORMERS[name]):
        pytest.importorskip(needed)
    state = pytest.importorskip("accelerate.state")
    for kind in (state.AcceleratorState, state.GradientState, state.PartialState):
        kind._reset_state()

    out = run(f"{name}.py", 6)

    losses = [float(found) for found in re.findall(r"\bloss'?:? +'?(\d+\.\d+)", out)]
    assert losses[-1] < losses[0]
    if name == "lora":
        assert "they load to the same model" in out
    else:
        held, most = re.findall(r"HBM held ([\d,]+) of ([\d,]+) bytes", out)[-1]
        assert 0 < int(held.replace(",", "")) <= int(most.replace(",", ""))


def test_an_adapter_trains_over_a_base_of_half_a_byte_a_parameter(run: Run) -> None:
    pytest.importorskip("peft")
    out = run("qlora.py").splitlines()

    losses = [float(line.split()[-1]) for line in out if line.startswith("step")]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    (said,) = [line for line in out if "at rest" in line]
    assert 0.53 < float(said.split(":")[1].split()[0]) < 0.6


def launched(script: str, steps: int, folder: Path, *given: str, n_ranks: int = 2) -> str:
    """Return what an example printed on several ranks."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(n_ranks),
    ]
    done = subprocess.run(
        [*launch, str(EXAMPLES / script), str(steps), *given],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FOLDER": str(folder)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow  # 15 s of processes that import
def test_ranks_divide_the_tensors_of_a_model(tmp_path: Path) -> None:
    out = launched("tensor_parallel.py", 12, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 1.0
    assert [int(n) > 3 for n in re.findall(r"(\d+) evictions", out)] == [True, True]
    assert (tmp_path / ".metadata").is_file()


@pytest.mark.slow  # 15 s of processes that import
def test_ranks_run_a_pipeline(tmp_path: Path) -> None:
    out = launched("pipeline.py", 12, tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 1.0
    seen = re.findall(r"(\d+) evictions, (\d+) misses", out)
    assert [(int(evictions) > 3, misses) for evictions, misses in seen] == [(True, "0")] * 2


@pytest.mark.slow  # two minutes of processes that import
def test_ranks_along_three_axes_have_stages_parts_and_shares(tmp_path: Path) -> None:
    out = launched("three_d.py", 6, tmp_path, n_ranks=8)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 0.5
    assert [int(n) > 3 for n in re.findall(r"(\d+) evictions", out)] == [True] * 8
    assert "blocks.3-5, norm, head" in out and "128 x 64" in out


@pytest.mark.slow  # 15 s of processes that import
@pytest.mark.parametrize("how", ["zigzag", "ulysses"])
def test_ranks_have_parts_of_sequences(how: str, tmp_path: Path) -> None:
    out = launched("context_parallel.py", 12, tmp_path, how)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 1.0
    assert [int(n) > 3 for n in re.findall(r"(\d+) evictions", out)] == [True, True]


@pytest.mark.slow  # 15 s of processes that import
def test_ranks_share_a_model(tmp_path: Path) -> None:
    out = launched("ranks.py", 6, tmp_path)
    kept = [int(n.replace(",", "")) for n in re.findall(r"keeps ([\d,]+) bytes", out)]
    (whole,) = {int(n.replace(",", "")) for n in re.findall(r"states are ([\d,]+)", out)}
    assert len(kept) == 2 and sum(kept) < 1.03 * whole
    assert (tmp_path / "step-6").is_dir()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 1.0
