"""The memory wall: states that are larger than what the kernel allows a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import hetero
from hetero.config import cgroup_folders
from tests.faults.wall import WALLS, Wall, build, trained

ROOT = Path(__file__).parent.parent.parent


class Cage(NamedTuple):
    """A memory cgroup of our own, version 1 or 2."""

    folder: Path
    limit: str
    peak: str

    def peak_bytes(self) -> int:
        return int((self.folder / self.peak).read_text())


@contextmanager
def caged(wall: Wall) -> Iterator[Cage]:
    """A child cgroup with a wall's limit; this fails where there can be none."""
    made = make_cage(str(wall.limit_bytes))
    try:
        yield made
    finally:
        made.folder.rmdir()


def make_cage(n_bytes: str) -> Cage:
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
            (folder / limit).write_text(n_bytes)
            swap = folder / ("memory.memsw.limit_in_bytes" if first else "memory.swap.max")
            with suppress(OSError):  # no swap is counted here: there is none, or it is no matter
                swap.write_text(n_bytes if first else "0")
            return Cage(folder, limit, "memory.max_usage_in_bytes" if first else "memory.peak")
        except OSError as error:
            tried.append(f"{folder}: {error}")
            with suppress(OSError):
                folder.rmdir()
    pytest.fail(f"no memory cgroup can be made here, and the wall needs one: {tried}")


def run(side: str, wall: str, weights: Path, disk: Path, cage: Cage) -> subprocess.CompletedProcess:
    """Run one side in a process of its own, inside the cage."""
    command = [sys.executable, "-m", "tests.faults.wall", side, wall, str(weights), str(disk)]
    # the shell goes in, and becomes the side
    enter = f'echo $$ > "{cage.folder}/cgroup.procs" && exec "$@"'
    command = ["bash", "-c", enter, "bash", *command]
    # one arena of malloc: freed memory of another would count against the limit
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "HETERO_PARANOID": "0"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.campaign(seconds=4)  # four processes, of which one fills the wall
@pytest.mark.parametrize("name", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_states_that_the_kernel_does_not_allow_train_to_plain_torchs_bits(
    disk: Path, name: str
) -> None:
    torch.manual_seed(0)
    wall, weights = WALLS[name], disk / "weights"
    hetero.export(build(wall), weights)

    with caged(wall) as cage:
        killed = run("plain", name, weights, disk, cage)
        ours = run("hetero", name, weights, disk, cage)
        peak_bytes = cage.peak_bytes()

    assert killed.returncode == -signal.SIGKILL, "plain torch is more than the kernel allows"
    assert ours.returncode == 0, ours.stderr
    plain, found = trained("plain", name, str(weights), str(disk)), json.loads(ours.stdout)
    assert found["digest"] == plain["digest"]
    assert found["tiers"]["HOST"]["peak"] <= found["tiers"]["HOST"]["budget"]
    assert found["tiers"]["NVME"]["used"] + found["tiers"]["HOST"]["peak"] > 0.9 * wall.state_bytes
    assert found["read"] > 0
    assert found["write"] > 0
    print(f"kernel's peak {peak_bytes} of {wall.limit_bytes}, states {wall.state_bytes}")
    assert peak_bytes <= wall.limit_bytes
    assert [path.name for path in disk.iterdir()] == ["weights"]
