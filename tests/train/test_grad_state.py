"""The states of a gradient at home: which moves are legal, and what each of them waits for."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from hetero.cores import Cores
from hetero.device import CpuDevice, SimDevice
from hetero.errors import StateError
from hetero.events import EventLog
from hetero.jobs import Job, Worker
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import ParamSpec, build_layout
from hetero.memory.ledger import Ledger
from hetero.memory.link import Link
from hetero.train.gradients.ring import GradRing
from hetero.train.gradients.slot import LEGAL, GradSlot, GradState, LazyGrad
from hetero.train.gradients.store import GradStore

ARRIVING, HOME, LENT, TAKEN = GradState
SHAPE = (6, 5)


class World:
    """A store of one parameter's gradients, on a device whose copies land when they must."""

    def __init__(self, device: CpuDevice | SimDevice | None = None) -> None:
        device = device or SimDevice(checked=True, lazy=0.0)
        ledger, link = Ledger({}), Link(device, EventLog())
        spec = ParamSpec("w", 0, SHAPE, (5, 1), torch.float32, trainable=True)
        self.param = nn.Parameter(torch.zeros(SHAPE))
        layout = build_layout([spec], ["unit"], chunk_bytes=64)
        self.bucket = layout.buckets[0]
        self.worker = Worker(0)
        self.grads = GradStore(
            [self.param],
            layout,
            device=device,
            ring=GradRing(device, link, ledger, sizes_bytes=[spec.numel * 4], most_bytes=2**20),
            store=HomeStore(device, ledger),
            worker=self.worker,
            cores=Cores(0),
        )

    def arrive(self) -> tuple[GradSlot, torch.Tensor]:
        """Let a gradient come; return its slot and the numbers that it has."""
        self.param.grad = torch.randn(SHAPE)
        numbers = self.param.grad.clone()
        self.grads.arrived(self.param)
        self.grads.flush_pending()
        grad = self.param.grad
        assert isinstance(grad, LazyGrad)
        return grad.slot, numbers


def test_only_the_moves_of_the_table_are_legal() -> None:
    world = World()
    slot, _ = world.arrive()
    reasons = sorted({why for _, _, why in LEGAL})
    for old, new, why in itertools.product(GradState, GradState, reasons):
        slot.state = old
        if (old, new, why) in LEGAL:
            slot.become(new, why)
            assert slot.state is new
        else:
            with pytest.raises(StateError, match=rf"'w': {old.name} -> {new.name} by {why}"):
                slot.become(new, why)
            assert slot.state is old


def test_every_state_can_be_reached_and_left_but_a_private_tensor_stays() -> None:
    assert {new for _, new, _ in LEGAL} == set(GradState)
    assert {old for old, _, _ in LEGAL} == set(GradState) - {TAKEN}


def test_a_gradient_is_at_home_after_its_copy_was_waited_for() -> None:
    world = World()
    slot, numbers = world.arrive()
    assert slot.state is ARRIVING
    assert not slot.is_landed

    slot.land()

    assert slot.state is HOME
    assert slot.is_landed
    assert torch.equal(slot.stored(), numbers)


def test_an_addition_makes_it_arrive_again() -> None:
    world = World()
    slot, numbers = world.arrive()
    slot.land()

    world.grads.accumulate(slot, torch.ones(SHAPE))

    assert slot.state is ARRIVING
    assert torch.equal(slot.read(), numbers + 1)
    assert slot.state is HOME
    assert not world.grads.jobs


@pytest.mark.parametrize("device", [CpuDevice(), SimDevice(lazy=0.0)], ids=lambda d: d.name)
def test_pieces_fly_until_their_jobs_are_given(device: CpuDevice | SimDevice) -> None:
    world = World(device)
    slot, _ = world.arrive()
    slot.land()

    world.grads.accumulate(slot, torch.ones(SHAPE))

    assert slot.n_flying == (0 if device.same_ram else 1)
    world.grads.ring.finish()
    assert slot.n_flying == 0
    assert slot.is_landed


def test_an_addition_comes_after_the_update_that_reads_the_gradient() -> None:
    world = World()
    slot, numbers = world.arrive()
    slot.land()
    seen: list[torch.Tensor] = []
    update = Job([lambda: seen.append(slot.home.view(slot.segment).clone())])
    world.grads.lend(world.bucket, update, ())
    assert slot.state is LENT

    world.grads.accumulate(slot, torch.ones(SHAPE))

    assert torch.equal(slot.read(), numbers + 1)
    assert torch.equal(seen[0], numbers)


def test_whoever_takes_a_gradient_that_is_lent_waits_for_the_update() -> None:
    world = World()
    slot, numbers = world.arrive()
    slot.land()
    update = Job([lambda: None])
    world.grads.lend(world.bucket, update, ())

    private = slot.keep()

    assert update.done
    assert slot.state is TAKEN
    assert torch.equal(private, numbers)


def test_the_update_of_a_later_step_may_read_it_too() -> None:
    world = World()
    slot, numbers = world.arrive()
    slot.land()
    first, second = (Job([lambda: None]) for _ in range(2))
    world.grads.lend(world.bucket, first, ())

    world.grads.lend(world.bucket, second, ())

    assert slot.state is LENT
    assert torch.equal(slot.read(), numbers)
    assert second.done


def test_an_update_waits_for_what_still_writes_the_gradients_home() -> None:
    world = World()
    slot, _ = world.arrive()
    assert world.grads.adding(world.bucket) == []

    addition = world.grads.jobs[slot.segment.index] = Job([lambda: None])
    assert world.grads.adding(world.bucket) == [addition]
    slot.land()
    assert addition.done
    assert world.grads.adding(world.bucket) == []


def test_a_private_tensor_is_not_lent() -> None:
    world = World()
    slot, _ = world.arrive()
    slot.keep()

    world.grads.lend(world.bucket, Job([lambda: None]), ())

    assert slot.state is TAKEN
    assert not world.grads.jobs


def test_a_gradient_whose_update_failed_is_at_home_as_it_was() -> None:
    world = World()
    slot, numbers = world.arrive()
    slot.land()
    update = Job([lambda: None])
    world.grads.lend(world.bucket, update, ())
    update.fail(RuntimeError("a rule"))

    world.grads.abandon()

    assert slot.state is HOME
    assert torch.equal(slot.read(), numbers)


def test_a_gradient_keeps_neither_its_store_nor_its_job() -> None:
    world = World()
    slot, _ = world.arrive()
    slot.land()
    del world.grads

    with pytest.raises(StateError, match="went with its prepared model"):
        slot.read()


def test_a_gradient_on_its_way_is_waited_for_though_its_updates_were_given_up() -> None:
    world = World()
    slot, numbers = world.arrive()
    assert slot.landing is not None
    world.grads.abandon()
    assert slot.state is ARRIVING
    assert torch.equal(slot.read(), numbers)


def test_pieces_are_counted_before_handing_them_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    slot, _ = world.arrive()
    slot.land()
    seen: list[int] = []

    def failing(*_: object, **__: object) -> None:
        seen.append(slot.n_flying)
        raise RuntimeError("told to")

    monkeypatch.setattr(world.grads.ring, "hand", failing)
    with pytest.raises(RuntimeError, match="told to"):
        world.grads.accumulate(slot, torch.ones(SHAPE))
    assert seen == [1] and slot.n_flying == 1
