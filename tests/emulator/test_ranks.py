"""Ranks that share a model on emulated CUDA devices: bits of one process, and nothing found.

Each rank is a process of its own: torch makes the device's thread in a process's first backward.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero.testing.ranks import free_port
from tests.emulator.process import ROOT

TIGHT = {"hbm": 60_000, "chunk_bytes": 1024}
SECONDS = 300
LOST = 7  # as of `lost_rank`, which imports the emulator
READ: list[tuple[int, dict[str, Any]]] = [
    (2, {"settings": {"max_grad_norm": 0.5}}),
    (3, {}),
    (2, {"settings": {"pinned": 2**17, "activations": "offload"}}),
    (
        4,
        {
            "settings": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "max_grad_norm": 0.5},
            "machines": [0, 0, 1, 1],
        },
    ),
]
CODED = {"precision": "bf16", "frozen": "int8", "hbm": 80_000}
ON_HBM = {"precision": "bf16", "hbm": 120_000, "max_grad_norm": 0.5}
ON_DISK = {"hbm": 4_000_000, "chunk_bytes": 4096, "host": 3_600_000, "nvme": "a folder"}
RECOMPUTES = {"hbm": 120_000, "activations": "recompute"}
UNLIKE = [2, 24, 5]
GATHERED: list[tuple[int, dict[str, Any]]] = [
    (2, {"settings": {"max_grad_norm": 0.5}, "machines": [0, 1]}),
    (2, {"settings": {**CODED, "max_grad_norm": 0.5}, "frozen": [1, 2], "machines": [0, 1]}),
    (4, {"settings": {"max_grad_norm": 0.5}, "machines": [0, 0, 1, 1]}),
    (4, {"settings": {"mesh": {"dp_replicate": 2, "dp_shard": 2}}, "machines": [0, 1, 0, 1]}),
    (2, {"settings": {"pinned": 2**17, "activations": "offload"}, "machines": [0, 1]}),
    (2, {"settings": ON_DISK, "width": 128, "n_blocks": 14}),
    (2, {"settings": ON_HBM, "machines": [0, 1], "on_hbm": True}),
    (2, {"settings": {**ON_HBM, "gather_shares": True}, "on_hbm": True}),
    (4, {"settings": {**ON_HBM, "pinned": 2**17}, "machines": [0, 0, 1, 1], "on_hbm": True}),
    (2, {"settings": {"hbm": 140_000}, "machines": [0, 1], "rows": UNLIKE}),
    (2, {"settings": {**RECOMPUTES, "gather_shares": True}, "rows": UNLIKE}),
    (2, {"settings": {**ON_HBM, "gather_shares": True}, "rows": UNLIKE}),
]
"""Of ranks whose copy is on several machines, or weights on disk: they gather shares in frames on
their devices."""


@contextmanager
def running(
    n_ranks: int, case: dict[str, Any], module: str, *options: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run ranks, which end with the block."""
    given = json.dumps({**case, "settings": {**TIGHT, **case.get("settings", {})}})
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    sizes = {"WORLD_SIZE": str(n_ranks), "LOCAL_WORLD_SIZE": str(n_ranks)}
    common = {**os.environ, **group, **sizes, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, given, *options],
            env={**common, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def check_ranks(n_ranks: int, case: dict[str, Any]) -> None:
    with running(n_ranks, case, "tests.emulator.rank") as ranks:
        for rank, process in enumerate(ranks):
            _, said = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"rank {rank}: {said[-4000:]}"


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(
    ("n_ranks", "case"),
    READ,
)
def test_ranks_on_cuda_devices_are_micro_batches(n_ranks: int, case: dict[str, Any]) -> None:
    check_ranks(n_ranks, case)


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize(
    ("n_ranks", "case"),
    GATHERED,
)
def test_ranks_of_several_machines_gather_in_frames_on_their_devices(
    n_ranks: int, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETERO_PARANOID", "0")  # poison orders what else only tickets do
    settings = dict(case["settings"])
    if "nvme" in settings:
        settings["nvme"] = str(tmp_path)
    check_ranks(n_ranks, {**case, "settings": settings, "gathers": True})


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_gather_on_a_device_that_never_ends_is_a_lost_rank(how: str) -> None:
    """All had said that they gather; NCCL itself would wait for ever."""
    case = {"settings": {"timeout_seconds": 4.0}, "machines": [0, 1]}
    with running(2, case, "tests.emulator.lost_rank", how) as (first, _):
        _, said = first.communicate(timeout=SECONDS)
        assert first.returncode == LOST, said[-4000:]
        assert "in vain: rank 1" in said  # a gather, or gradients that cross meanwhile
