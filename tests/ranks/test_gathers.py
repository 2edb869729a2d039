"""Gathers in frames on devices: which ranks may, and how one that never ends is noticed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.device import Accelerator, Ticket
from hetero.errors import ConfigError, RankLost
from hetero.members import all_of
from hetero.parallel.gathers import GatherWatch
from hetero.parallel.news import News
from hetero.parallel.waits import Waits
from hetero.train.engine.alike import check_device
from hetero.types import Lane

TIMEOUT_SECONDS = 1000.0


class Communicator:
    n_aborts = 0

    def abort(self) -> None:
        self.n_aborts += 1


@pytest.fixture
def group() -> Communicator:
    return Communicator()


@pytest.fixture
def waits(group: Any) -> Waits:
    silent: Any = SimpleNamespace(recv=lambda *args: None, send=lambda *args: None)
    made = Waits(News(silent, all_of(2), 0), TIMEOUT_SECONDS)
    made.communicators.append(group)
    return made


@pytest.fixture
def watch(waits: Waits) -> Iterator[GatherWatch]:
    device: Any = SimpleNamespace(query=lambda ticket: ticket.done)
    made = GatherWatch(device, waits)
    yield made
    made.close()


def gather() -> Ticket:
    return Ticket(Lane.GATHER, 0.0)


def test_a_gather_that_takes_too_long_is_a_lost_rank_and_aborts_what_it_runs_on(
    watch: GatherWatch, waits: Waits, group: Communicator
) -> None:
    watch.expect(gather(), "bucket 3 to HBM")
    waits.check()

    assert not watch.look(time.monotonic() + TIMEOUT_SECONDS + 1)
    with pytest.raises(RankLost, match="rank 0 of 2 waits for bucket 3 to HBM in vain"):
        waits.check()
    with pytest.raises(RankLost, match="bucket 3"):  # whatever it waits for
        waits.poll(lambda: False, "a roll call")
    assert group.n_aborts == 1


def test_each_gather_has_the_whole_timeout_from_the_one_before(
    watch: GatherWatch, waits: Waits
) -> None:
    first, second = gather(), gather()
    began = time.monotonic()
    watch.expect(first, "bucket 1 to HBM")
    watch.expect(second, "bucket 2 to HBM")
    first.done = True

    assert watch.look(began + 0.9 * TIMEOUT_SECONDS)
    assert watch.look(began + 1.8 * TIMEOUT_SECONDS)
    waits.check()
    assert not watch.look(began + 2.0 * TIMEOUT_SECONDS)
    with pytest.raises(RankLost, match="bucket 2"):
        waits.check()


def test_what_ended_is_looked_at_no_more(watch: GatherWatch, waits: Waits) -> None:
    ticket = gather()
    watch.expect(ticket, "bucket 1 to HBM")
    ticket.done = True

    assert not watch.look(time.monotonic() + 2 * TIMEOUT_SECONDS)
    waits.check()


def test_nothing_looks_at_the_end_of_the_interpreter(watch: GatherWatch) -> None:
    watch.expect(gather(), "bucket 1 to HBM")  # it never ends
    (thread,) = (each for each in threading.enumerate() if each.name == "hetero gathers")
    assert watch.close.atexit

    watch.close()

    assert not thread.is_alive()


def test_a_rank_that_another_wait_lost_aborts_gathers_too(
    waits: Waits, group: Communicator
) -> None:
    closed: Any = SimpleNamespace(is_completed=lambda: True, wait=fails)
    with pytest.raises(RankLost, match=r"the division of HBM in vain: .*Connection closed"):
        waits.until(closed, "the division of HBM")
    assert group.n_aborts == 1


def fails() -> None:
    raise RuntimeError("Connection closed by peer\nsomewhere")


def device_of(uuid: str) -> Any:
    return SimpleNamespace(is_cuda=True, facts=lambda: Accelerator("fake", "sm_90", 1, 1, uuid))


def comm_of(*uuids: str, n_shares: int, node: Any = None) -> Any:
    rows = [uuid.encode() for uuid in uuids]
    given = {"agree": lambda row, what: rows, "members": all_of(len(uuids))}
    return SimpleNamespace(size=len(uuids), n_shares=n_shares, node=node, **given)


def test_ranks_of_a_copy_gather_on_a_device_each() -> None:
    check_device(device_of("a"), comm_of("a", "b", "a", "b", n_shares=2))
    check_device(device_of("a"), comm_of("a", "a", n_shares=2, node="they read each other's"))
    with pytest.raises(ConfigError, match="ranks 2, 3 compute on one CUDA device") as caught:
        check_device(device_of("a"), comm_of("a", "b", "b", "b", n_shares=2))
    assert "torch.cuda.set_device" in caught.value.advice
