"""NCCL between emulated devices of several processes: `torch.distributed`'s backend "fakenccl".

As NCCL it launches on a stream of its own, after all that is queued on the current stream; `wait`
makes the current stream wait for its end, and not the host; and what a rank is missing for never
ends, until `abort`. It reads this rank's part when it is launched, and writes the others' when it
happens: when they are there, and a stream or the host comes to wait for it (`shim.Cuda.late`). The
detector knows of both accesses from the launch on. Bytes move by gloo.
"""

from __future__ import annotations

import ctypes
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetero.parallel import gathers
from tests.emulator import fake
from tests.emulator.shim import DEVICE

BACKEND = "fakenccl"
STREAM = 63  # none of the pool's
FOREVER = timedelta(days=1)
POLL_SECONDS = 0.0005


def install() -> None:
    """Let ranks of this process gather by it."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, opened, extended_api=True, devices=[DEVICE])
    fake.load().name_stream(STREAM, "NCCL")
    gathers.NCCL = BACKEND
    dist.is_nccl_available = lambda: True


def opened(options: Any, _: object) -> Communicator:
    return Communicator(options.store, options.group_rank, options.group_size)


class Communicator(dist.ProcessGroup):
    """The ranks of a group; each has a device of its own."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._sockets = dist.ProcessGroupGloo(store, rank, size, FOREVER)
        self._name = ""
        self.is_aborted = threading.Event()

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def all_gather_single(self, whole: torch.Tensor, mine: torch.Tensor, _: object) -> Gather:
        assert whole.device.type == mine.device.type == DEVICE
        work = Gather(self, whole, mine)
        fake.cuda().late.append(work)
        return work

    _allgather_base = all_gather_single  # as torch until 2.12 calls it

    def begin(self, parts: list[torch.Tensor], mine: torch.Tensor) -> dist.Work:
        work: dist.Work = self._sockets.allgather([parts], [mine])
        return work

    def abort(self) -> None:
        self.is_aborted.set()

    def shutdown(self) -> None:
        self.is_aborted.set()


class Gather:
    """A gather under way, in place."""

    def __init__(self, group: Communicator, whole: torch.Tensor, mine: torch.Tensor) -> None:
        extension = fake.load()
        launched = extension.Event()
        launched.record(extension.get_stream())
        extension.stream_wait(STREAM, launched)
        size, rank = mine.numel(), group.rank()
        starts = [whole.data_ptr() + at * size for at in range(group.size())]
        assert mine.data_ptr() == starts[rank]
        uses = [(start, size, at != rank) for at, start in enumerate(starts)]
        extension.work_on(STREAM, uses, "gather")
        self.end = extension.Event()
        self.end.record(STREAM)
        self._others = {at: start for at, start in enumerate(starts) if at != rank}
        self._held: object = (whole, mine)  # as NCCL's, until a stream waits
        self._group = group
        self._parts = [torch.empty(size, dtype=torch.uint8) for _ in starts]
        self._work = group.begin(self._parts, bytes_at(starts[rank], size).clone())
        self._happening = threading.Lock()
        self._happened = False

    def wait(self) -> bool:
        extension = fake.load()
        extension.stream_wait(extension.get_stream(), self.end)
        self._held = None
        return True

    def is_completed(self) -> bool:
        return self.can_happen()

    def can_happen(self) -> bool:
        return self._group.is_aborted.is_set() or self._has_come()

    def happen(self) -> None:
        while not self.can_happen():
            time.sleep(POLL_SECONDS)
        with self._happening:
            if not self._happened and self._has_come():
                for at, start in self._others.items():
                    bytes_at(start, self._parts[at].numel()).copy_(self._parts[at])
            self._happened = True

    def _has_come(self) -> bool:
        """Whether all parts are here; one of a lost rank never is."""
        if not self._work.is_completed():
            return False
        try:
            return bool(self._work.wait())
        except RuntimeError:  # connection closed by peer
            return False


def bytes_at(address: int, n_bytes: int) -> torch.Tensor:
    """Return memory of the device as RAM, which it is: no one sees that."""
    memory = (ctypes.c_ubyte * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)
