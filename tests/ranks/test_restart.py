"""Under torchrun a rank that is killed is started again with all others, and training goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hetero.testing.ranks import free_port

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import hetero
from tests.ranks.models import Run, built, loss_of

torch.distributed.init_process_group("gloo")
rank, folder, kills = torch.distributed.get_rank(), Path(sys.argv[1]), sys.argv[2] == "kill"
run = Run(settings={"device": "cpu", "hbm": "1MiB"})
model, plain = built(run)
model, optimizer = hetero.prepare(model, plain, mesh="world", timeout_seconds=60, **run.settings)
first = 0
if (folder / "saved").exists():
    first = hetero.load_checkpoint(folder / "saved", model, optimizer)["steps"]
for step in range(first, 4):
    loss_of(model, run, step, rank).backward()
    if kills and rank == 1 and step == 2 and first == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    hetero.save_checkpoint(folder / "saved", model, optimizer, {"steps": step + 1}, step=step)
if rank == 0:
    torch.save({"first": first, **model.state_dict()}, folder / "weights.pt")
hetero.release(model, optimizer)
torch.distributed.destroy_process_group()
"""


def launched(folder: Path, how: str) -> dict[str, torch.Tensor]:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    place = ["--max-restarts", "1", "--rdzv-backend", "c10d"]
    end = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(script), str(folder), how]
    # what a rank that was killed left in the agent's store would be taken for its successor's
    # (github.com/pytorch/pytorch/issues/135712)
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    env = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*torchrun, *place, *end]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return found


@pytest.mark.campaign(seconds=2)
def test_torchrun_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    whole = launched(tmp_path / "whole", "live")
    again = launched(tmp_path / "again", "kill")

    assert (whole.pop("first"), again.pop("first")) == (0, 2)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
