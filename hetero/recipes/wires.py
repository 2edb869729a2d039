"""What joins the ranks of a launch, within a machine and between machines, as all of them time it.

Every rank makes the same probes, and each sample is the same on all: the time of the slowest one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hetero.device import open_device
from hetero.parallel.circles import (
    Call,
    Carrier,
    Circle,
    Circles,
    Machines,
    carrier_of,
    machines_of,
)
from hetero.parallel.launch import Launch
from hetero.plan.figures import Figure
from hetero.plan.machine import InterNet, Net
from hetero.recipes.probes import Pace, Probe, Rig
from hetero.recipes.readings import Readings, Watch, take_readings

ROW_BYTES = 256  # that a rank tells in a roll call
LONGEST_SECONDS = 0.05  # of a collective; larger ones are not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRig(Rig):
    """A rig of every rank, whose times are those of the slowest one."""

    ranks: Launch

    def seconds(self, call: Callable[[], object], times: int = 1) -> float:
        mine = partial(Rig.seconds, self, call, times)
        return max(self.ranks.each(mine, "seconds of collectives"))


class Wiring(NamedTuple):
    """What was measured: which ranks, and what moved their bytes."""

    machines: Machines
    carrier: Carrier

    def __str__(self) -> str:
        n_machines, ranks_each = self.machines
        where = "one machine" if n_machines == 1 else f"each of {n_machines} machines"
        return f"{ranks_each} rank{'s' * (ranks_each > 1)} on {where}, by {self.carrier}"


def measure_wires(
    ranks: Launch, pace: Pace, device: str | None, watch: Watch
) -> tuple[Readings, Wiring | None]:
    """Measure what joins the ranks; nothing if this one is alone. Collective."""
    if ranks.size == 1:
        return Readings(()), None
    machines = machines_of(ranks)
    carrier = carrier_of(ranks, machines, on_cuda=device in (None, "cuda"))
    name = "cuda" if carrier == "nccl" else "cpu"
    with (
        closing(ranks.ready(lambda: open_device(name), "a device of each rank")) as opened,
        closing(Circles(ranks, machines, carrier, opened.torch_device)) as circles,
    ):
        rig = SharedRig(opened, pace, ranks=ranks)
        found = take_readings(rig, {"ranks": partial(wires, circles)}, watch)
    return found, Wiring(machines, carrier)


def wires(circles: Circles, rig: Rig) -> Iterator[Probe]:
    """Collectives within the first machine; between machines, of one rank each and of all."""
    ranks, near, far, leading = circles.ranks, circles.near, circles.far, circles.leading
    sizes = common_sizes(ranks, rig, circles.machines.ranks_each)
    if near is not None:
        yield from within(ranks, rig, near, sizes)
    if far is None or leading is None:
        return
    largest = yield from between(ranks, rig, far, leading, sizes)
    if near is not None:
        call = ranks.ready(partial(leading.exchange, largest), "memory of an exchange")
        yield Probe("net.inter.alone", (largest,), bus(rig, call, largest, far.size))


def within(ranks: Launch, rig: Rig, near: Circle, sizes: Sequence[int]) -> Iterator[Probe]:
    yield latency(ranks, rig, near, "net.latency", messages=1)
    for n_bytes, call in bearable(ranks, rig, near.gather, whole_parts(sizes, near.size)):
        yield Probe("net.gather", (n_bytes,), bus(rig, call, n_bytes, near.size))
    call = ranks.ready(partial(near.exchange, n_bytes), "memory of an exchange")
    yield Probe("net.exchange", (n_bytes,), bus(rig, call, n_bytes, near.size))


def between(
    ranks: Launch, rig: Rig, far: Circle, leading: Circle, sizes: Sequence[int]
) -> Generator[Probe, None, int]:
    """Yield the probes of all ranks at once; return the bytes of the exchange."""
    yield latency(ranks, rig, leading, "net.inter.latency", messages=far.size - 1)
    for n_bytes, call in bearable(ranks, rig, far.exchange, whole_parts(sizes, far.size)):
        largest, last = n_bytes, call
    yield Probe("net.inter.exchange", (largest,), bus(rig, last, largest, far.size))
    return largest


def latency(ranks: Launch, rig: Rig, circle: Circle, key: str, *, messages: int) -> Probe:
    """Return the probe of a roll call: seconds of each of its messages in a row."""
    call = ranks.ready(partial(circle.gather, ROW_BYTES * circle.size), "memory of a roll call")
    times = rig.repeats(call)
    return Probe(key, (), lambda: rig.seconds(call, times) / times / messages)


def bearable(
    ranks: Launch, rig: Rig, make: Callable[[int], Call], sizes: Sequence[int]
) -> Iterator[tuple[int, Call]]:
    """Yield sizes and their calls, up to the first one that takes long."""
    for n_bytes in sizes:
        call = ranks.ready(partial(make, n_bytes), "memory of a collective")
        yield n_bytes, call
        if n_bytes < sizes[-1] and rig.least_seconds(call) > LONGEST_SECONDS:
            return


def bus(rig: Rig, call: Call, n_bytes: int, n_ranks: int) -> Callable[[], float]:
    """Return a sample of the bus bandwidth of a collective."""
    times = rig.repeats(call)
    return lambda: bus_rate(n_bytes, n_ranks, rig.seconds(call, times) / times)


def bus_rate(n_bytes: int, n_ranks: int, seconds: float) -> float:
    """Return the bytes per second that a rank sends, and receives: its own part stays where it is.

    That is the bus bandwidth of nccl-tests, for gathers of ``n_bytes`` in all and for exchanges of
    ``n_bytes`` from each rank.
    """
    return n_bytes * (n_ranks - 1) / n_ranks / seconds


def common_sizes(ranks: Launch, rig: Rig, sharers: int) -> list[int]:
    """Return the sizes that fit on every rank, of which as many as ``sharers`` share a machine."""
    free, limit = rig.device.memory.free_bytes(), rig.limit_bytes // sharers
    room = min(ranks.each(lambda: limit if free is None else min(free, limit), "free memory"))
    return [n for n in rig.pace.copy_bytes if 8 * n <= room] or [rig.pace.copy_bytes[0]]


def whole_parts(sizes: Sequence[int], n_ranks: int) -> list[int]:
    """Return sizes that are parts of equal length, one for each rank."""
    return [n - n % n_ranks for n in sizes]


# -- the profile ---------------------------------------------------------------------------------


def net_of(readings: Readings, wiring: Wiring | None) -> Net | None:
    """Return the section of what joins ranks; None if nothing was measured of it."""
    if wiring is None:
        return None
    near = wiring.machines.ranks_each > 1
    net = Net(
        intra=wiring.carrier if near else "none",
        bytes_per_second=readings.last("net.exchange"),
        latency_seconds=readings.figure("net.latency"),
        busbw=readings.table("net.gather"),
        inter=inter_of(readings, wiring.machines.ranks_each),
    )
    return None if net == Net(intra=net.intra) else net


def inter_of(readings: Readings, n_devices: int) -> InterNet | None:
    """Return the section of machines; a device among others is never faster than alone."""
    part, alone = readings.last("net.inter.exchange"), readings.last("net.inter.alone")
    if part is None:
        return None
    if alone is not None and alone.value < part.value:
        part = Figure(alone.value, part.source, part.spread)
    return InterNet(
        bytes_per_second=part,
        latency_seconds=readings.figure("net.inter.latency"),
        devices_per_node=n_devices,
    )
