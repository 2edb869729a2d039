"""Homes on HOST and on disk answer the same questions; which one it is only they know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero.device import CpuDevice
from hetero.errors import BudgetError, StateError
from hetero.events import EventLog
from hetero.io import ALIGN, Folder
from hetero.memory.extent import PinSpan, PinUse, Request
from hetero.memory.hbmhome import DeviceHome
from hetero.memory.home import DiskHome, Home, HostHome, cut, memory_of
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, ParamSpec, build_layout
from hetero.memory.ledger import Ledger
from hetero.memory.nopool import NoPool
from hetero.memory.nvme import Nvme
from hetero.memory.places import HomePlaces
from hetero.memory.pool import Pool
from hetero.types import Kind, Tier

EVERYWHERE = [(kind, bucket) for kind in Kind for bucket in range(4)]
SHAPES = ((70, 60), (9,), (3, 7, 200))  # of fp32: three extents, where tensors straddle


def make_bucket() -> Bucket:
    specs = []
    for i, shape in enumerate(SHAPES):
        value = torch.empty(shape)
        specs.append(ParamSpec(f"p{i}", 0, shape, value.stride(), torch.float32, True))
    return build_layout(specs, ["u"], 4096).buckets[0]


@pytest.fixture(params=["host", "hbm", "disk"])
def store(request: pytest.FixtureRequest, disk: Path) -> Iterator[HomeStore]:
    ledger = Ledger({Tier.HOST: 10**6})
    if request.param != "disk":
        made = HomeStore(CpuDevice(), ledger)
        made.places.on_hbm.update(range(4) if request.param == "hbm" else ())
    else:
        nvme = Nvme([Folder.open(disk)], 0, ledger=ledger, log=EventLog())
        pool = Pool(nvme, 2 * 4 * ALIGN, extent_numel=ALIGN)
        made = HomeStore(CpuDevice(), ledger, pool=pool, places=HomePlaces(on_disk=EVERYWHERE))
    yield made
    made.close()


def filled(store: HomeStore, bucket: Bucket, name: str = "param") -> tuple[Home, torch.Tensor]:
    """Return a home of random numbers, and what they are."""
    home = store.get(Kind.PARAM, name, bucket)
    values = torch.randn(bucket.segments[-1].end)
    for run in home.runs(0, len(values), PinUse.FRESH):
        home.part(run).copy_(values[run])
    return home, values


def test_a_store_makes_homes_of_its_kind(store: HomeStore) -> None:
    home = store.get(Kind.PARAM, "param", make_bucket())

    on_hbm = bool(store.places.on_hbm)
    assert type(home) is (DiskHome if store.pool.spills else DeviceHome if on_hbm else HostHome)
    assert home.stays is not store.pool.spills
    assert home.shows is (home.stays and not on_hbm)
    assert home.on_device is on_hbm
    assert len(tuple(home.needs(0, 9000, PinUse.READ))) == (3 if store.pool.spills else 0)
    assert (home.crc() is None) == store.pool.spills


def test_what_is_written_is_read_by_tensor_by_run_and_as_items(store: HomeStore) -> None:
    bucket = make_bucket()
    home, values = filled(store, bucket)

    for segment in bucket.segments:
        expected = values[segment.offset : segment.end].view(segment.spec.shape)
        assert torch.equal(home.read(segment), expected)
        assert torch.equal(home.value(segment), expected)
        home.write(segment, expected.double().mul(2))
        assert torch.equal(home.read(segment), expected * 2)
    assert torch.equal(home.load(slice(4000, 4300)), home.load(slice(0, 5000))[4000:4300])


def count(items: torch.Tensor) -> None:
    items.copy_(torch.arange(float(len(items))))


def test_items_are_filled_in_their_own_memory_or_from_a_stage(store: HomeStore) -> None:
    home, _ = filled(store, make_bucket())
    home.store(slice(4090, 4100), count)

    assert torch.equal(home.load(slice(4090, 4100)), torch.arange(10.0))


def test_a_value_is_made_in_a_blank_and_written(store: HomeStore) -> None:
    bucket = make_bucket()
    home, _ = filled(store, bucket)
    segment = bucket.segments[0]
    blank = home.blank(segment)
    blank.fill_(7.0)
    home.write(segment, blank)

    assert (blank is home.view(segment)) == home.stays
    assert home.read(segment).eq(7.0).all()


def test_only_memory_that_stays_is_read_into_directly(store: HomeStore) -> None:
    bucket = make_bucket()
    home, _ = filled(store, bucket)
    memory = memory_of(home, bucket.segments[1])

    assert (memory is None) != home.shows
    if memory is not None:
        memory.zero_()
        assert not home.read(bucket.segments[1]).any()


def test_runs_of_several_homes_are_cut_where_one_of_them_is(store: HomeStore) -> None:
    bucket = make_bucket()
    (first, _), (second, _) = filled(store, bucket), filled(store, bucket, "other")
    there = HostHome(CpuDevice().slab(bucket.n_bytes), bucket, torch.float32, bucket.codec)
    uses = (first, PinUse.READ), (there, PinUse.WRITE), (second, PinUse.READ)
    runs = list(store.runs(10, 5000, *uses))

    assert runs == (
        [slice(10, ALIGN), slice(ALIGN, 5000)] if store.pool.spills else [slice(10, 5000)]
    )


def test_a_home_that_was_dropped_is_zeros_when_it_is_made_again(store: HomeStore) -> None:
    bucket = make_bucket()
    home, _ = filled(store, bucket)
    store.drop("param", bucket.id)
    assert store._ledger.used(Tier.HOST) == 0
    again = store.get(Kind.PARAM, "param", bucket)

    assert (again is home) == store.pool.spills
    assert not again.load(slice(0, 5000)).any()


def test_without_a_disk_a_request_needs_nothing_and_is_held_for_nothing() -> None:
    store = HomeStore(CpuDevice(), Ledger({}))
    home = store.get(Kind.PARAM, "param", make_bucket())
    request = Request([PinSpan(home, 0, 5000, PinUse.WRITE)])

    assert not request.needs and request.n_bytes == 0
    with store.held(request):
        pass
    assert isinstance(store.pool, NoPool) and store.pool.ready(request)
    with pytest.raises(StateError, match="no directory on a drive"):
        store.pool.adopt(Kind.STATE, CpuDevice().slab(64), 64, 4, "a state")


def test_runs_are_cut_at_multiples() -> None:
    assert list(cut(3, 11, 4)) == [slice(3, 4), slice(4, 8), slice(8, 11)]
    assert list(cut(4, 8, 4)) == [slice(4, 8)]
    assert list(cut(5, 5, 4)) == []


def moved(store: HomeStore, bucket: Bucket) -> Home:
    """Move a home to the tier that places say."""
    move = store.copy("param", bucket)
    assert store.homes["param", bucket.id] is move.old
    store.switch(move)
    move.old.leave(move.new)
    return move.new


def rising(hbm: int = 10**6) -> tuple[HomeStore, Bucket, Home, torch.Tensor, Ledger]:
    """Return a store with one home on HOST, which has its place on HBM now, and its numbers."""
    ledger = Ledger({Tier.HOST: 10**6, Tier.HBM: hbm})
    store, bucket = HomeStore(CpuDevice(), ledger), make_bucket()
    home, values = filled(store, bucket)
    store.places.on_hbm.add(bucket.id)
    return store, bucket, home, values, ledger


def test_a_home_moves_between_tiers_with_its_bytes_and_its_charge() -> None:
    store, bucket, _, values, ledger = rising()
    n_bytes = ledger.used(Tier.HOST)
    up = moved(store, bucket)

    assert up is store.homes["param", bucket.id] and up.on_device
    assert torch.equal(up.load(slice(0, len(values))), values)
    assert (ledger.used(Tier.HOST), ledger.used(Tier.HBM)) == (0, n_bytes)
    store.places.on_hbm.clear()
    down = moved(store, bucket)
    assert type(down) is HostHome and torch.equal(down.load(slice(0, len(values))), values)
    assert (ledger.used(Tier.HOST), ledger.used(Tier.HBM)) == (n_bytes, 0)


def test_a_copy_that_is_given_up_costs_nothing_and_the_home_goes_on() -> None:
    store, bucket, home, values, ledger = rising()
    n_bytes = ledger.used(Tier.HOST)
    move = store.copy("param", bucket)
    assert (ledger.used(Tier.HOST), ledger.used(Tier.HBM)) == (n_bytes, n_bytes)
    store.forget(move)
    store.places.on_hbm.clear()

    assert store.homes["param", bucket.id] is home and not store.misplaced(bucket)
    assert torch.equal(home.load(slice(0, len(values))), values)
    assert (ledger.used(Tier.HOST), ledger.used(Tier.HBM)) == (n_bytes, 0)
    assert not store.hbm_bytes.total()


def test_a_move_without_room_leaves_the_home_where_it_is() -> None:
    store, bucket, home, _, ledger = rising(hbm=10)
    n_bytes = ledger.used(Tier.HOST)
    with pytest.raises(BudgetError):
        store.copy("param", bucket)

    assert store.homes["param", bucket.id] is home
    assert (ledger.used(Tier.HOST), ledger.used(Tier.HBM)) == (n_bytes, 0)
    store.drop("param", bucket.id)
    assert ledger.used(Tier.HOST) == 0
