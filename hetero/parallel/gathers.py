"""Gathers inside of frames, where ranks do not read each other's homes (floor 3).

[Note: gathers on devices]  NCCL moves bytes between frames on CUDA devices, on a stream of its own.
It begins after the stream on which it was launched, and makes that stream, not the host, wait for
its end: so a gather is work on a lane like any copy (`CudaDevice.launch`). All ranks launch gathers
in one order, that of the program, after a call of gloo's in which each said what it gathers.
What a lost rank leaves unfinished would hold up the device, and every thread that waits for it, for
ever: a thread looks whether gathers end, and aborts the communicator after the timeout.

gloo would take frames on devices, too: through RAM of its own, which no budget knows, with a wait
of the host for each gather. It gathers where frames lie in RAM.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from hetero import interrupts
from hetero.device import CudaDevice, Device, Ticket
from hetero.errors import ConfigError
from hetero.parallel.waits import Waits
from hetero.types import Lane

NCCL = "nccl"
LOOK_SECONDS = 1.0
"""Between looks at gathers on a device, or less for a short timeout."""


class Gathers(Protocol):
    """Fills the others' places of frames that lie on one device."""

    def begin(
        self, whole: torch.Tensor, mine: torch.Tensor, what: str, after: Iterable[Ticket]
    ) -> Ticket:
        """Begin to fill ``whole``, of which ``mine`` is this rank's part, after tickets."""

    def wait(self, ticket: Ticket) -> None:
        """As `Comm.wait`."""

    def close(self) -> None:
        """Look at no gather any more."""


class CommTicket(Ticket):
    """A collective of gloo's under way, and the buffers that it uses."""

    __slots__ = ("held", "what", "work")

    def __init__(self, work: dist.Work, what: str, held: tuple[torch.Tensor, ...]) -> None:
        super().__init__(Lane.GATHER, 0.0)
        self.work = work
        self.what = what
        self.held = held

    def finish(self, waits: Waits) -> None:
        """Block until it is over."""
        if not self.done:
            waits.until(self.work, self.what)
            self.done, self.held = True, ()


class HostGathers:
    """Gathers of gloo's, in frames that lie in RAM."""

    def __init__(self, device: Device, group: dist.ProcessGroup, waits: Waits) -> None:
        self._device = device
        self._group = group
        self._waits = waits

    def begin(
        self, whole: torch.Tensor, mine: torch.Tensor, what: str, after: Iterable[Ticket]
    ) -> Ticket:
        for ticket in after:  # collectives of gloo's know no lanes
            self._device.sync(ticket)
        return CommTicket(all_gather(whole, mine, self._group), what, (whole, mine))

    def wait(self, ticket: Ticket) -> None:
        if isinstance(ticket, CommTicket):
            ticket.finish(self._waits)

    def close(self) -> None: ...


class DeviceGathers:
    """Gathers of NCCL's, in frames on CUDA devices; see [Note: gathers on devices]."""

    def __init__(self, device: CudaDevice, group: dist.ProcessGroup, waits: Waits) -> None:
        self._device = device
        self._group = group
        self._waits = waits
        self._watch = GatherWatch(device, waits)
        waits.communicators.append(group)
        self._connect()

    def _connect(self) -> None:
        """Gather some bytes: the first gather makes the communicator, while all ranks are here."""
        whole, at = self._device.arena(self._group.size()).block, self._group.rank()
        ticket = self.begin(whole, whole[at : at + 1], "the first gather", ())
        self._waits.poll(lambda: self._device.query(ticket), "the first gather")

    def begin(
        self, whole: torch.Tensor, mine: torch.Tensor, what: str, after: Iterable[Ticket]
    ) -> Ticket:
        self._waits.check()
        ticket = self._device.launch(lambda: all_gather(whole, mine, self._group), after)
        self._watch.expect(ticket, what)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        self._waits.check()  # else compute waits, and not the host

    def close(self) -> None:
        self._watch.close()


class GatherWatch:
    """Looks whether gathers on a device end, on a thread that lives while some are under way.

    The thread ends with the watch, or before the interpreter does: one that is inside torch then
    would abort the process.
    """

    def __init__(self, device: Device, waits: Waits) -> None:
        self._device = device
        self._waits = waits
        self._under_way: deque[tuple[Ticket, str]] = deque()
        self._changing = threading.Lock()
        self._since = 0.0  # when the oldest of them became the oldest
        self._looks = False
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []  # the last one
        self.close = weakref.finalize(self, _end, self._closed, self._threads)
        """Look no more; called at the end of the interpreter, if not before."""
        self._pause = min(LOOK_SECONDS, waits.timeout_seconds / 8)

    def expect(self, ticket: Ticket, what: str) -> None:
        """A gather is under way."""
        with self._changing:
            self._under_way.append((ticket, what))
            if self._looks:
                return
            self._looks, self._since = True, time.monotonic()
        thread = threading.Thread(target=self._look_on, name="hetero gathers", daemon=True)
        self._threads[:] = [thread]
        thread.start()

    def _look_on(self) -> None:
        while self.look(time.monotonic()) and not self._closed.wait(self._pause):
            pass

    def look(self, now: float) -> bool:
        """Forget gathers that ended; note a lost rank if the oldest one takes too long. False if
        there is nothing to look at."""
        with self._changing:
            while self._under_way and self._device.query(self._under_way[0][0]):
                self._under_way.popleft()
                self._since = now
            late = now - self._since > self._waits.timeout_seconds
            what = self._under_way[0][1] if self._under_way else ""
            if late or not self._under_way:
                self._under_way.clear()
                self._looks = False
        if what and late:
            self._waits.lose(what, self._waits.late())
        return self._looks


def _end(closed: threading.Event, threads: list[threading.Thread]) -> None:
    """End a watch's thread, which never waits for what it looks at."""
    closed.set()
    for thread in threads:
        interrupts.join(thread)


def connected(copies: Sequence[range], timeout_seconds: float) -> list[dist.ProcessGroup]:
    """Return groups that move bytes between CUDA devices, of the ranks of each copy; collective."""
    if not dist.is_nccl_available():
        raise ConfigError(
            f"ranks on CUDA devices gather shares by NCCL, and torch {torch.__version__} was built"
            " without it",
            advice="install a build of torch with NCCL (Linux); or let ranks of one machine share"
            " a copy: mesh={'dp_replicate': machines, 'dp_shard': devices of one}",
        )
    # torch ends the process when a timeout of its own has passed: ours comes first
    allowed = timedelta(seconds=2 * timeout_seconds)
    return [dist.new_group(list(copy), timeout=allowed, backend=NCCL) for copy in copies]


def all_gather(whole: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to gather equal parts."""
    begin = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
    work: dist.Work = begin(whole, mine, group=group, async_op=True)
    return work


def swap(
    found: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Begin to send each rank a part, all of one size, and to find one of each in 1-D ``found``,
    which lie in a row."""
    try:
        work: dist.Work = dist.all_to_all([*found], [*sent], group=group, async_op=True)
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):  # of gloo, in torch 2.11
            raise
        row = found[0].as_strided((sum(part.numel() for part in found),), (1,))
        work = dist.all_to_all_single(row, torch.cat([*sent]), group=group, async_op=True)
    return work
