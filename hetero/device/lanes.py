"""The copy streams of a CUDA device, and the times of what is queued there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from hetero.device.face import LANES, Ticket, Timing
from hetero.device.process import unseen
from hetero.types import Lane

OURS = (Lane.GATHER, Lane.REDUCE, Lane.UPDATE)


class Collective(Protocol):
    """Work of another library on a stream of its own."""

    def wait(self) -> object:
        """Make the current stream wait for it, and not the host."""


class CudaLanes:
    """A persistent stream for each copy lane, one for gathers, one for sums and one for updates; it
    refers to no memory and to no device object."""

    def __init__(self, place: torch.device) -> None:
        self.streams = {lane: torch.cuda.Stream(place) for lane in (*LANES, *OURS)}
        self.is_timed = False
        """Whether begin and end of what is queued are timed on the device."""
        self._place = place
        self._anchor: tuple[torch.cuda.Event, float] | None = None

    def queue(
        self, lane: Lane, dst: torch.Tensor, src: torch.Tensor, after: Iterable[Ticket]
    ) -> Ticket:
        """Queue a copy, after tickets that have events; the host waits if it is of pageable
        memory."""
        return self._run(lane, lambda: dst.copy_(src, non_blocking=True), after)

    def launch(self, begin: Callable[[], Collective], after: Iterable[Ticket]) -> Ticket:
        """Queue a collective, after tickets that have events: ``begin`` starts it on the thread
        that asks, in order of the current stream, which is the lane's."""
        return self._run(Lane.GATHER, lambda: begin().wait(), after)

    def on_side_stream(
        self, lane: Lane, work: Callable[[], object], after: Iterable[Ticket]
    ) -> Ticket:
        """Queue operations on the device's tensors, after tickets that have events, in no order
        with compute's."""
        return self._run(lane, work, after)

    def _run(self, lane: Lane, queue: Callable[[], object], after: Iterable[Ticket]) -> Ticket:
        stream = self.streams[lane]
        for ticket in after:
            if ticket.event is not None:
                stream.wait_event(ticket.event)
        with self.on(lane), unseen():
            first = self.timing(stream)
            queue()
            # threads that wait for it sleep: the processors update parameters meanwhile
            event = torch.cuda.Event(enable_timing=first is not None, blocking=True)
            event.record(stream)
        ticket = Ticket(lane, 0.0, event=event)
        if first is not None:
            ticket.time_by(first)
        else:
            ticket.was(time.monotonic(), 0.0)
        return ticket

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Queue what a block queues on a lane.

        The current device of a new thread is the first one. `torch.cuda.stream` alone would choose
        that again in the end, which makes a context there: some 500 MB of its HBM, for each rank.
        `torch.cuda.device` does not choose one that has no context.
        """
        with torch.cuda.device(self._place), torch.cuda.stream(self.streams[lane]):
            yield

    def sync(self, ticket: Ticket) -> None:
        """Block the host until a copy is done."""
        if ticket.event is not None:
            ticket.event.synchronize()

    def settle(self) -> None:
        """Block the host until all copies are done."""
        for stream in self.streams.values():
            stream.synchronize()

    def timing(self, stream: torch.cuda.Stream) -> Timing | None:
        """Return the begin of what is queued next on a stream, if times are watched."""
        if self._anchor is None:
            return None
        first = torch.cuda.Event(enable_timing=True)
        first.record(stream)
        return Timing(first, *self._anchor)

    def watch(self, on: bool) -> None:
        """Begin, or stop, to time what is queued."""
        self._anchor, self.is_timed = None, on
        if on:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._place))
            event.synchronize()
            self._anchor = event, time.monotonic()
