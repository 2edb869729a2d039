"""Copies on their way: what they keep alive, what comes after them, and how many there may be."""

from __future__ import annotations

import weakref

import torch

from hetero.device import SimDevice
from hetero.events import EventLog
from hetero.memory.link import Link
from hetero.memory.transfers import Landing, Transfers
from hetero.types import Kind, Lane


class Flying:
    """The end of a copy that lands when it is told to, or when it is waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.done = False
        self._log = log
        self._name = name

    def wait(self) -> None:
        self.done = True
        self._log.append(self._name)


class Bytes:
    """What a copy needs until it has landed."""


def three(log: list[str]) -> tuple[Transfers[None], list[Flying]]:
    """Return a queue of three copies of 10 bytes each, which log their end."""
    transfers: Transfers[None] = Transfers()
    ends = [Flying(log, name) for name in "abc"]
    for end, name in zip(ends, "ABC", strict=True):
        transfers.queue(end, None, n_bytes=10, then=lambda name=name: log.append(name))
    return transfers, ends


def test_what_has_landed_is_let_go_and_what_comes_after_it_is_done() -> None:
    log: list[str] = []
    transfers, ends = three(log)
    ends[0].done = True

    transfers.poll()

    assert log == ["a", "A"]
    assert transfers.bytes_in_flight == 20


def test_a_copy_that_lands_before_an_older_one_waits_for_its_turn() -> None:
    log: list[str] = []
    transfers, ends = three(log)
    ends[1].done = ends[2].done = True

    transfers.poll()

    assert log == []
    ends[0].done = True
    transfers.poll()
    assert log == ["a", "A", "b", "B", "c", "C"]


def test_a_limit_waits_for_the_oldest_until_it_is_kept() -> None:
    log: list[str] = []
    transfers, _ = three(log)

    transfers.poll(limit_bytes=15)

    assert log == ["a", "A", "b", "B"]
    assert transfers.bytes_in_flight == 10
    transfers.poll(limit_bytes=10)
    assert transfers.bytes_in_flight == 10


def test_finishing_waits_for_all_in_their_order() -> None:
    log: list[str] = []
    transfers, _ = three(log)

    transfers.finish()

    assert log == ["a", "A", "b", "B", "c", "C"]
    assert transfers.bytes_in_flight == 0


def test_bytes_live_until_their_copy_has_landed_and_no_longer() -> None:
    transfers: Transfers[Bytes] = Transfers()
    source, end = Bytes(), Flying([], "a")
    found = weakref.ref(source)
    transfers.queue(end, source)
    del source

    transfers.poll()
    assert list(transfers.kept()) == [found()]
    assert found() is not None

    end.done = True
    transfers.poll()
    assert list(transfers.kept()) == []
    assert found() is None


def test_what_comes_after_a_copy_may_queue_another() -> None:
    log: list[str] = []
    transfers: Transfers[None] = Transfers()
    second = Flying(log, "second")
    transfers.queue(Flying(log, "first"), None, then=lambda: transfers.queue(second, None))

    transfers.finish()

    assert log == ["first", "second"]


def test_the_end_of_a_copy_on_a_link_is_its_ticket() -> None:
    device = SimDevice(checked=True, lazy=0.0)
    link = Link(device, EventLog())
    target = torch.zeros(64, dtype=torch.uint8)
    source = torch.full_like(target, 7)
    ticket = link.move(Lane.D2H, target, source, kind=Kind.GRAD)
    landing = Landing(link, ticket, Kind.GRAD)

    assert landing.done == link.has_landed(ticket)
    landing.wait()

    assert landing.done
    assert target.eq(7).all()
