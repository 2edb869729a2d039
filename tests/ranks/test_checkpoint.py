"""A checkpoint of N ranks loads on M, and training goes on bit for bit."""

from __future__ import annotations

import errno
import random
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hetero
from hetero import CheckpointError, DivergenceError
from hetero.api import engine_of, prepare_tuned
from hetero.checkpoint import own_buffers, writer
from hetero.checkpoint.folders import Joined
from hetero.checkpoint.load import read_weights
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.save import KINDS
from hetero.checkpoint.shard import ShardWriter
from hetero.checkpoint.verify import verify
from hetero.config import Config
from hetero.errors import CheckpointCorrupt, DiskFull, RankLost
from hetero.testing.faults import FaultPlan
from hetero.testing.ranks import Died, outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import Found, Run, assert_same, built, by_torch, found, loss_of

TIGHT: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
HALF = 3

BATCHES = 4
"""Micro-batches of a step; a power of two, so that 1, 2 and 4 ranks divide sums alike."""
WHOLE = Run(steps=2 * HALF, settings=TIGHT)


def by_halves(
    rank: int,
    n_ranks: int,
    folder: Path,
    first: int,
    asynchronous: bool = False,
    one_sided: bool = True,
) -> Found:
    """Train half of the steps, after a load unless they are the first half, and save."""
    model, plain = built(WHOLE)
    config = Config.load(mesh="world" if n_ranks > 1 else None, **TIGHT)
    _, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    if first:
        assert hetero.load_checkpoint(folder, model, optimizer) == {"steps": first}
    norms = []
    for step in range(first, first + HALF):
        for i in range(BATCHES // n_ranks):
            loss = loss_of(model, WHOLE, step, i * n_ranks + rank)
            (loss * (n_ranks / BATCHES)).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    extra = {"steps": first + HALF}
    save = hetero.save_checkpoint(folder, model, optimizer, extra, asynchronous=asynchronous)
    if asynchronous:  # the next step waits until it was read
        loss_of(model, WHOLE, 0, rank).backward()
        optimizer.step()
    save.wait()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


def trained(n_ranks: int, *args: Any) -> list[Found]:
    return run_ranks(n_ranks, by_halves, n_ranks, *args)


MESHES = [(1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("before", "after"), MESHES)
def test_what_ranks_saved_others_go_on_with(
    before: int, after: int, asynchronous: bool, one_sided: bool, tmp_path: Path
) -> None:
    expected = by_torch(WHOLE, BATCHES)
    first = trained(before, tmp_path, 0, asynchronous, one_sided)
    second = trained(after, tmp_path, HALF, False, one_sided)
    assert verify(tmp_path).ok

    for each in second:
        each.norms = [*first[0].norms, *each.norms]
        assert_same(each, expected)


def loaded(rank: int, folder: Path) -> Found:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    hetero.load_checkpoint(folder, model, optimizer)
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


def test_shares_that_no_rank_had_before_are_loaded(tmp_path: Path) -> None:
    before = trained(2, tmp_path, 0)[0]
    before.norms = []

    for each in run_ranks(3, loaded, tmp_path):
        assert_same(each, before)


def save_twice(rank: int, folder: Path) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    for _ in range(2):
        hetero.save_checkpoint(folder, model, optimizer, step=1)


def test_a_save_that_the_first_rank_cannot_make_fails_on_all(tmp_path: Path) -> None:
    first, second = outcomes(2, save_twice, tmp_path)

    assert isinstance(first.error, CheckpointError) and "step-1" in str(first.error)
    assert isinstance(second.error, CheckpointError) and "step-1" in str(second.error)


def save_after_one_that_failed(rank: int, folder: Path, failing: int) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    full = FaultPlan()
    full.fail_at("write", 0, errno.ENOSPC, times=None)
    io = full if rank == failing else None
    hetero.save_checkpoint(folder, model, optimizer, step=1, asynchronous=True, io=io)
    hetero.save_checkpoint(folder, model, optimizer, step=2)


@pytest.mark.parametrize("failing", range(2))
def test_what_the_last_save_failed_with_reaches_all_at_the_next(
    failing: int, tmp_path: Path
) -> None:
    found = outcomes(2, save_after_one_that_failed, tmp_path, failing)

    mine, other = found[failing], found[1 - failing]
    assert isinstance(mine.error, DiskFull), mine.text
    assert isinstance(other.error, CheckpointError), other.text
    assert f"failed on rank {failing}" in str(other.error)
    assert list(tmp_path.iterdir()) == []


def load_alone(rank: int, folder: Path) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    hetero.save_checkpoint(folder, model, optimizer)
    if rank == 0:
        hetero.load_checkpoint(folder, model, optimizer)
    model(torch.zeros(2, 10)).sum().backward()


def load_otherwise(rank: int, folder: Path, what: str) -> None:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    for at in range(2):
        hetero.save_checkpoint(folder / str(at), model, optimizer, step=1)
        with torch.no_grad():
            next(iter(model.parameters())).mul_(2)
    where = folder / str(rank if what == "checkpoints of one step" else 0)
    kinds = KINDS[rank:] if what == "kinds of parts" else KINDS
    hetero.load_checkpoint(where, model, optimizer, kinds=kinds)


@pytest.mark.parametrize("what", ["checkpoints of one step", "kinds of parts"])
def test_ranks_that_would_load_different_things_load_nothing(what: str, tmp_path: Path) -> None:
    for each in outcomes(2, load_otherwise, tmp_path, what):
        assert isinstance(each, Died) and type(each.error) is DivergenceError, each
        assert f"ranks load different {what} (rank 0: " in str(each.error)


def test_a_load_on_one_rank_alone_is_an_error_on_all(tmp_path: Path) -> None:
    for each in outcomes(2, load_alone, tmp_path):
        assert isinstance(each.error, DivergenceError), each.text
        assert "a load" in str(each.error)


class Images(nn.Module):
    """Weights in channels_last and transposed, frozen codes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 40, 5).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(3))
        self.frozen = nn.Linear(40, 96, bias=False).requires_grad_(False)
        self.turned = nn.Linear(96, 40, bias=False)
        self.turned.weight = nn.Parameter(torch.randn(96, 40).t() * 0.1)
        self.out = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = self.conv(x.to(self.conv.weight.dtype)).mean((2, 3))
        out: torch.Tensor = self.out(self.turned(self.frozen(x)))
        return out


IMAGES: dict[str, Any] = {"device": "cpu:sim", "hbm": 200_000, "chunk_bytes": 1024}
IMAGES |= {"frozen": "int8", "precision": "bf16"}


def of_images(rank: int, n_ranks: int, folder: Path, load: bool, one_sided: bool) -> Found:
    torch.manual_seed(0)
    model = Images()
    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    config = Config.load(mesh="world" if n_ranks > 1 else None, **IMAGES)
    _, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    if load:
        assert hetero.load_checkpoint(folder, model, optimizer)["at"].tolist() == [3]
    else:
        for step in range(2):
            images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(step))
            model(images).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        extra = {"at": torch.tensor([3 + 4 * rank])}  # the first rank's counts
        hetero.save_checkpoint(folder, model, optimizer, extra)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["frozen.weight"] = model.frozen.weight.detach().clone()
    state = Found(weights, found(model, optimizer, []).states, [])
    hetero.release(model, optimizer)
    return state


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_strided_coded_and_plain_tensors_are_saved_in_shares(
    before: int, after: int, one_sided: bool, tmp_path: Path
) -> None:
    saved = run_ranks(before, of_images, before, tmp_path, False, one_sided)[0]

    for each in run_ranks(after, of_images, after, tmp_path, True, one_sided):
        assert_same(each, saved)


def drawn(rank: int, folder: Path, load: bool) -> tuple[float, float, float]:
    """Return what this rank's generators draw after a save, or after its load."""
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    if load:
        hetero.load_checkpoint(folder, model, optimizer)
    else:
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        hetero.save_checkpoint(folder, model, optimizer)
    values = float(torch.rand(())), random.random(), float(numpy.random.rand())
    hetero.release(model, optimizer)
    return values


@pytest.mark.filterwarnings("ignore:the checkpoint is of fewer ranks")
def test_each_rank_goes_on_with_random_numbers_of_its_own(tmp_path: Path) -> None:
    saved = run_ranks(2, drawn, tmp_path, False)
    assert len(set(saved)) == 2

    assert run_ranks(2, drawn, tmp_path, True) == saved
    three = run_ranks(3, drawn, tmp_path, True)
    assert three[:2] == saved and len(set(three)) == 3
    assert run_ranks(3, drawn, tmp_path, True) == three


class Centred(nn.Module):
    """Takes a running mean of its outputs away; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("turned", torch.ones(4, dtype=torch.complex64).conj())  # a view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layers(x)
        shown = made - self.mean
        with torch.no_grad():
            self.mean.lerp_(made.detach().mean(0), 0.25)
            self.turned *= 1 + x.mean() * 1j
            self.count += 1 + (x.sum() > 0).long()
        return shown


def centred(rank: int, folder: Path, steps: range, load: bool, kinds: Any = None) -> Any:
    torch.manual_seed(0)
    model: Any = Centred()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, mesh="world", **TIGHT)
    if load:
        hetero.load_checkpoint(folder, model, optimizer, **({} if kinds is None else kinds))
    for step in steps:
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        ).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            hetero.save_checkpoint(folder, model, optimizer)
    values = ((name, value.clone().resolve_conj()) for name, value in model.state_dict().items())
    state = {name: value.numpy().tobytes() for name, value in values}
    hetero.release(model, optimizer)
    return state


@pytest.mark.filterwarnings("ignore:the checkpoint is of fewer ranks")
def test_each_rank_goes_on_with_buffers_of_its_own(tmp_path: Path) -> None:
    """A running mean is of a rank's own batches: all went on with the first rank's."""
    whole = run_ranks(2, centred, tmp_path, range(6), False)
    assert whole[0]["mean"] != whole[1]["mean"] and whole[0]["count"] != whole[1]["count"]

    assert run_ranks(2, centred, tmp_path, range(3, 6), True) == whole
    first, second, third = run_ranks(3, centred, tmp_path, range(0), True)
    assert first["mean"] == third["mean"] != second["mean"]  # the checkpoint has no third one's
    (alone,) = run_ranks(1, centred, tmp_path, range(0), True)
    assert alone == first
    given = {"kinds": ("param", "master", "state")}
    for each in run_ranks(2, centred, tmp_path, range(0), True, given):
        assert each["mean"] == bytes(16) and each["layers.0.weight"] == first["layers.0.weight"]


def queued(rank: int, folder: Path, load: bool) -> float:
    """Return a value of a buffer that is larger than what a manifest may have."""
    model: Any = nn.Linear(4, 4)
    model.register_buffer("queue", torch.full((2**15,), rank + 1.0))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, mesh="world", **{**TIGHT, "hbm": 300_000})
    if load:
        hetero.load_checkpoint(folder, model, optimizer)
    else:
        model.queue.fill_(rank + 1.0)
        hetero.save_checkpoint(folder, model, optimizer)
    return float(model.queue[-1])


def test_own_buffers_are_in_each_ranks_shard_whatever_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They went into the manifest: with 48 MiB of them no save succeeded."""
    monkeypatch.setattr(writer, "MAX_MANIFEST_BYTES", 2**16)
    assert run_ranks(2, queued, tmp_path, False) == [1.0, 2.0]

    assert run_ranks(2, queued, tmp_path, True) == [1.0, 2.0]
    weights, _ = read_weights(tmp_path)
    assert weights.keys() == {"weight", "bias", "queue"} and float(weights["queue"][-1]) == 1.0
    with CheckpointReader.open(tmp_path) as reader:
        number = reader.find(own_buffers.KIND, "queue")
        assert number is not None and [shard for shard, _ in reader.shares(number)] == [1]
        assert reader.entries[number].n_bytes == 2**17
    assert verify(tmp_path).ok
    shard = tmp_path / "step-0" / "model-1.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5000] ^= 1
    shard.write_bytes(raw)
    assert "own_buffer queue" in verify(tmp_path).checkpoints[0].problem


def load_damaged(rank: int, folder: Path) -> tuple[str, bool]:
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    before = found(model, optimizer, [])
    try:
        hetero.load_checkpoint(folder, model, optimizer)
    except CheckpointCorrupt as error:
        after = found(model, optimizer, [])
        assert_same(before, after)
        hetero.release(model, optimizer)
        return str(error), True
    return "", False


def test_damage_that_one_rank_finds_is_refused_by_all(tmp_path: Path) -> None:
    trained(2, tmp_path, 0)
    shard = tmp_path / f"step-{HALF}" / "model-1.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-5000] ^= 1
    shard.write_bytes(raw)

    found = run_ranks(2, load_damaged, tmp_path)

    assert all(refused for _, refused in found)
    assert sum("failed on rank" in text for text, _ in found) == 1


def saves_while_the_first_fails(rank: int, folder: Path, at: int) -> None:
    """Rank 0 fails in a call, and takes the directory away before rank 1 comes to it."""
    model, plain = built(WHOLE)
    _, optimizer = hetero.prepare(model, plain, mesh="world", **TIGHT)
    comm: Any = engine_of(model).setup.comm
    agree, calls = comm.agree, 0

    def heard(row: bytes, what: str) -> Any:
        nonlocal calls
        calls += what.startswith("a save of step")
        if (rank, calls) == (0, at):
            raise ValueError("planted")
        return agree(row, what)

    comm.agree = heard
    if rank:
        for place in (Joined, ShardWriter):
            delay(place)
    hetero.save_checkpoint(folder, model, optimizer)


def delay(place: type) -> None:
    begin = place.__init__

    def late(self: Any, *args: Any, **named: Any) -> None:
        time.sleep(0.5)
        begin(self, *args, **named)

    pytest.MonkeyPatch().setattr(place, "__init__", late)  # this process is a fork


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_rank_whose_directory_the_first_took_away_says_that_it_left(
    at: int, tmp_path: Path
) -> None:
    first, second = outcomes(2, saves_while_the_first_fails, tmp_path, at)

    assert isinstance(first.error, ValueError), first.text
    assert isinstance(second.error, RankLost), second.text
    assert "rank 0 left" in str(second.error)
    assert not list(tmp_path.iterdir())
