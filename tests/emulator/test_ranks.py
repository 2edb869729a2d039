"""Ranks that share a model on emulated CUDA devices: bits of one process, and nothing found.

Each rank is a process of its own: torch makes the device's thread in a process's first backward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hetero.testing.ranks import free_port
from tests.emulator.process import ROOT

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"max_grad_norm": 0.5}),
    (3, {}),
    (2, {"pinned": 2**17, "activations": "offload"}),
    (4, {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "max_grad_norm": 0.5}),
]


@pytest.mark.parametrize(
    ("n_ranks", "settings"),
    [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:])],
)
def test_ranks_on_cuda_devices_are_micro_batches(n_ranks: int, settings: dict[str, Any]) -> None:
    given = json.dumps({"hbm": 60_000, "chunk_bytes": 1024, **settings})
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    sizes = {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    common = {**os.environ, **group, **sizes, "GLOO_SOCKET_IFNAME": "lo"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.emulator.rank", given],
            env={**common, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    for rank, process in enumerate(running):
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, f"rank {rank}: {said[-4000:]}"
