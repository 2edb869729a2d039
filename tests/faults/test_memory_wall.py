"""The memory wall: states three times larger than what the kernel allows a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hetero
from hetero.config import cgroup_folders
from tests.faults.wall import LIMIT_BYTES, STATE_BYTES, build

ROOT = Path(__file__).parent.parent.parent


class Cage(NamedTuple):
    """A memory cgroup of our own, version 1 or 2."""

    folder: Path
    limit: str
    peak: str

    def peak_bytes(self) -> int:
        return int((self.folder / self.peak).read_text())


@pytest.fixture
def cage() -> Iterator[Cage]:
    """A child cgroup whose limit is a third of the states; this fails where there is none."""
    made = make_cage()
    yield made
    made.folder.rmdir()


def make_cage() -> Cage:
    tried = []
    for above, limit, _ in reversed(cgroup_folders(Path("/"))):
        first = limit == "memory.limit_in_bytes"
        if limit == "memory.high":
            continue
        folder = above / f"hetero-wall-{os.getpid()}"
        try:
            folder.mkdir()
            if not (folder / "cgroup.procs").exists():
                raise OSError("a plain directory, and no cgroup")
            (folder / limit).write_text(str(LIMIT_BYTES))
            swap = folder / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
            with suppress(OSError):  # no swap is counted here: there is none, or it is no matter
                swap.write_text(str(LIMIT_BYTES) if first else "0")
            return Cage(folder, limit, "memory.max_usage_in_bytes" if first else "memory.peak")
        except OSError as error:
            tried.append(f"{folder}: {error}")
            with suppress(OSError):
                folder.rmdir()
    pytest.fail(f"no memory cgroup can be made here, and the wall needs one: {tried}")


def run(side: str, weights: Path, disk: Path, cage: Cage | None) -> subprocess.CompletedProcess:
    """Run one side in a process of its own, inside the cage or outside."""
    command = [sys.executable, "-m", "tests.faults.wall", side, str(weights), str(disk)]
    if cage is not None:  # the shell goes in, and becomes the side
        enter = f'echo $$ > "{cage.folder}/cgroup.procs" && exec "$@"'
        command = ["bash", "-c", enter, "bash", *command]
    # one arena of malloc: freed memory of another would count against the limit
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "HETERO_PARANOID": "0"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_states_three_times_the_kernels_limit_train_to_plain_torchs_bits(
    disk: Path, cage: Cage
) -> None:
    torch.manual_seed(0)
    weights = disk / "weights"
    hetero.export(build(), weights)

    free = run("plain", weights, disk, None)
    killed = run("plain", weights, disk, cage)
    ours = run("hetero", weights, disk, cage)

    assert free.returncode == 0, free.stderr
    assert killed.returncode == -signal.SIGKILL, "plain torch is more than the kernel allows"
    assert ours.returncode == 0, ours.stderr
    plain, found = json.loads(free.stdout), json.loads(ours.stdout)
    assert found["digest"] == plain["digest"]
    assert found["tiers"]["HOST"]["peak"] <= found["tiers"]["HOST"]["budget"]
    assert found["tiers"]["NVME"]["used"] + found["tiers"]["HOST"]["peak"] > 0.9 * STATE_BYTES
    assert found["read"] > 0
    assert found["write"] > 0
    print(f"kernel's peak {cage.peak_bytes()} of {LIMIT_BYTES}, states {STATE_BYTES}")
    assert cage.peak_bytes() <= LIMIT_BYTES
    assert [path.name for path in disk.iterdir()] == ["weights"]
