"""`hetero run`: scripts that know nothing of hetero train under its budgets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("transformers")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import Trainer

from hetero.cli import main

FLAGS = ["--device", "cpu:sim", "--hbm", "200KB", "--chunk-bytes", "1KiB"]

OF_ACCELERATE = """
import json, sys
import torch
from torch import nn
from accelerate import Accelerator

class Own(Accelerator):
    def twice(self, loss):
        self.backward(2 * loss)

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
accelerator = {kind}(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
losses = []
for _ in range(4):
    loss = model(torch.ones(2, 64)).square().mean()
    getattr(accelerator, "twice", accelerator.backward)(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
where = [type(accelerator).__mro__[0].__name__, hasattr(model, "_hetero_engine")]
json.dump([losses, where, sys.argv[1:], __name__], open(sys.argv[1], "w"))
"""

OF_TRAINER = """
import json, sys
from transformers import Trainer
from tests.integrations.trainers import built, history, llama

class Mine(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)

run = built(Mine, sys.argv[2], llama(), max_steps=3)
run.train()
json.dump([history(run), sum(row.get("hetero/evictions", 0) for row in run.state.log_history)],
          open(sys.argv[1], "w"))
"""

PLAIN = """
import sys
print("plain", sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def afresh() -> Any:
    """Every script has accelerate's state for itself."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, words)])


def said(path: Path) -> Any:
    return json.loads(path.read_text())


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def plainly(path: Path, *args: str | Path) -> None:
    exec(  # as the interpreter would, in this process, which has imported what it takes
        "import sys; sys.argv = argv\n" + path.read_text(),
        {"argv": [str(path), *map(str, args)], "__name__": "__main__"},
    )


@pytest.mark.parametrize("kind", ["Accelerator", "Own"])
def test_a_script_of_accelerate_trains_under_budgets(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, OF_ACCELERATE.replace("{kind}", kind))
    monkeypatch.setattr(sys, "argv", sys.argv)
    plainly(path, tmp_path / "stock")
    AcceleratorState._reset_state()

    result = call(*FLAGS, "--json", path, tmp_path / "ours", "--json", "-x")

    assert result.exit_code == 0, result.output
    expected, found = said(tmp_path / "stock"), said(tmp_path / "ours")
    assert found[0] == expected[0]
    assert (expected[1][1], found[1][1]) == (False, True)
    assert found[2:] == [[str(tmp_path / "ours"), "--json", "-x"], "__main__"]
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "script": str(path),
        "exit_status": 0,
        "accelerators": 1,
        "trainers": [],
    }


@pytest.mark.parametrize("by", ["flags", "--config", "HETERO_CONFIG"])
def test_a_script_of_transformers_trains_under_budgets(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = script(tmp_path, OF_TRAINER)
    monkeypatch.setattr(sys, "argv", sys.argv)
    plainly(path, tmp_path / "stock", tmp_path / "stock-run")
    file = tmp_path / "run.toml"
    file.write_text('device = "cpu:sim"\nhbm = 200000\nchunk_bytes = 1024\n')
    words: dict[str, list[Any]] = {"flags": FLAGS, "--config": ["--config", file]}
    if by == "HETERO_CONFIG":
        monkeypatch.setenv("HETERO_CONFIG", str(file))

    result = call(*words.get(by, []), "--json", path, tmp_path / "ours", tmp_path / "ours-run")

    assert result.exit_code == 0, result.output
    expected, found = said(tmp_path / "stock"), said(tmp_path / "ours")
    assert found[0] == expected[0]
    assert found[1] > 3 and expected[1] == 0
    assert json.loads(result.stdout.splitlines()[-1])["trainers"] == ["Mine"]


def test_what_was_changed_for_a_script_is_undone(tmp_path: Path) -> None:
    before = Accelerator.__init__, Trainer.__init__, list(sys.meta_path), sys.argv, list(sys.path)
    path = script(tmp_path, "from accelerate import Accelerator; Accelerator(cpu=True); 1 / 0")

    result = call(*FLAGS, path)

    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    after = Accelerator.__init__, Trainer.__init__, list(sys.meta_path), sys.argv, list(sys.path)
    assert after == before


@pytest.mark.parametrize("status", [0, 3])
def test_a_plain_script_keeps_its_exit_status_and_is_told(status: int, tmp_path: Path) -> None:
    result = call(script(tmp_path, PLAIN), str(status))

    assert result.exit_code == status
    assert f"plain ['{status}']" in result.stdout
    assert ("hetero had nothing to do" in result.stderr) == (status == 0)


@pytest.mark.parametrize(
    ("behind", "own", "hbm", "late"),
    [
        (["--hbm", "7KiB", "--lr", "1", "--host", "x"], ["--lr", "1", "--host", "x"], 7168, 1),
        (["--hbm=7KiB", "--", "--host", "x"], ["--host", "x"], 7168, 0),
        (["--config", "own.yaml", "--hbm=1"], ["--config", "own.yaml", "--hbm=1"], None, 1),
        (["--", "--hbm", "1"], ["--hbm", "1"], None, 0),
        (["0", "--", "1"], ["0", "--", "1"], None, 0),
    ],
)
def test_budgets_may_stand_right_behind_the_script(
    behind: list[str], own: list[str], hbm: int | None, late: int, tmp_path: Path
) -> None:
    text = "import sys, accelerate\n"
    text += "print(sys.argv[1:], accelerate.Accelerator(cpu=True).hetero_config.hbm)"

    result = call("--device", "cpu", script(tmp_path, text), *behind)

    assert result.exit_code == 0, result.output
    assert f"{own} {hbm}" in result.stdout
    assert result.stderr.count("was passed to the script") == late


@pytest.mark.parametrize(
    ("text", "status", "told"),
    [
        ("import sys; sys.exit('enough')", 1, "enough"),
        ("raise SystemExit", 0, ""),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_a_script_ends_as_python_would_end_it(
    text: str, status: int, told: str, tmp_path: Path
) -> None:
    result = call(script(tmp_path, text))

    assert result.exit_code == status
    assert told in result.stderr


def test_wrong_settings_are_told_before_the_script_runs(tmp_path: Path) -> None:
    path = script(tmp_path, "raise SystemExit(7)")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("hbmm = 1\n")

    for words, expected in (
        (["--hbm", "much", path], "is not a size"),
        (["--config", wrong, path], "did you mean hbm"),
        ([tmp_path / "missing.py"], "there is no script"),
        (["--hbmm", "1", path], "No such option"),
    ):
        result = call(*words)
        assert result.exit_code == 2
        assert expected in " ".join(result.stderr.split())


LAUNCHERS = {
    "accelerate": [sys.executable, "-m", "accelerate.commands.launch", "--cpu"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"],
}


@pytest.mark.slow  # each takes the imports of two processes
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_it_as_a_module(launcher: str, tmp_path: Path) -> None:
    path = script(tmp_path, OF_ACCELERATE.replace("{kind}", "Accelerator"))
    words = [*LAUNCHERS[launcher], "-m", "hetero", "run", *FLAGS, path, tmp_path / "found"]
    here = os.pathsep.join(sys.path)

    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert said(tmp_path / "found")[1][1]


@pytest.mark.campaign(seconds=3)
def test_a_script_that_imports_a_library_late_is_acted_upon(tmp_path: Path) -> None:
    text = "def late():\n    from accelerate import Accelerator\n    return Accelerator(cpu=True)\n"
    path = script(tmp_path, text + "print(type(late()).__name__)")
    words = ["-m", "hetero", "run", "--device", "cpu", "--json", str(path)]

    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)

    assert done.stdout.splitlines()[0] == "HeteroAccelerator", done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["accelerators"] == 1


def test_options_are_settings_of_hetero() -> None:
    names = {p.name for p in main.commands["run"].params if isinstance(p, click.Option)}

    assert names >= {"hbm", "host", "nvme", "nvme_bytes", "device", "precision", "config"}
