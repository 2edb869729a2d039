"""What ranks read of one that left: the error that nothing caught, or that it came to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.parallel.farewell import AT_ITS_END
from hetero.testing.ranks import free_port

SCRIPT = """
import sys
import torch
import hetero
from tests.ranks.models import Net

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = Net()
plain = torch.optim.AdamW(model.parameters())
model, optimizer = hetero.prepare(model, plain, mesh="world", device="cpu", timeout_seconds=60)
for step in range(2 + (rank == 0)):
    model(torch.randn(3, 10)).sum().backward()
    if rank == 1 and step == 1 and sys.argv[1] == "error":
        raise ValueError("a batch of this rank is damaged")
    optimizer.step()
"""


@pytest.mark.campaign(seconds=16)
@pytest.mark.parametrize("end", ["error", "uneven"])
def test_a_rank_that_ends_by_itself_says_why(end: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    port = str(free_port())
    ranks = []
    for rank in range(2):
        given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env = {**os.environ, **given, **place, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, str(script), end]
        ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    first, _ = (process.communicate(timeout=120)[1] for process in ranks)

    assert "RankLost" in first
    why = "ValueError: a batch of this rank is damaged" if end == "error" else AT_ITS_END
    assert why in first
