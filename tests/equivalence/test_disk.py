"""Homes on disk, at the least HOST there can be: the numbers of plain torch, bit for bit."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import hashlib
import io
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import BudgetError, ConfigError, DiskFull, StateError
from hetero.io import ALIGN, IO
from hetero.jobs import Worker
from hetero.testing.faults import FaultPlan
from hetero.train.engine.blueprint import draw
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Tier
from tests.equivalence import zoo
from tests.equivalence.harness import (
    Budget,
    MakeOptimizer,
    Seen,
    adamw,
    compare,
    grads,
    measure,
    note,
    one_step,
    same,
    sgd,
    states,
    values,
)
from tests.equivalence.test_optimizers import RULES, richest, same_states
from tests.equivalence.zoo import Case, Loop, loss_of

T = TypeVar("T")
WIDE = 128  # features: a square layer is four extents
WORDS = 64
EXTENT = ALIGN  # elements, the fewest there can be
CHUNK_BYTES = 4096
STEPS = 5
ENOUGH = 1 << 40  # more HOST than any of these models needs, and than there is


# -- models --------------------------------------------------------------------------------------


class Square(zoo.Block):
    """A block of two square layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.norm = nn.LayerNorm(WIDE)
        self.up = nn.Linear(WIDE, WIDE)
        self.down = nn.Linear(WIDE, WIDE)
        self.drop = nn.Dropout(dropout)


class Wide(zoo.Stack):
    """A stack that is large enough for the disk; the zoo's own forwards run on it."""

    def __init__(self, layers: int = 5, *, tied: bool = False, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        self.embed = nn.Embedding(WORDS, WIDE)
        self.place = nn.Parameter(torch.randn(7, WIDE) * 0.1)
        self.blocks = nn.ModuleList(Square(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Rich(Wide):
    """Everything at once: tied, partly frozen, checkpointed in both ways, with dropout, with an
    expert that is used for some batches and one that never is."""

    def __init__(self) -> None:
        super().__init__(layers=4, tied=True, dropout=0.1)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)
        self.sometimes = nn.Linear(WIDE, WIDE)
        self.never = nn.Linear(WIDE, WIDE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        x = self.blocks[1](self.blocks[0](x))
        x = checkpoint(self.blocks[2], x, use_reentrant=False)
        x = checkpoint(self.blocks[3], x, use_reentrant=True)
        if tokens[0, 0] % 2:
            x = x + self.sometimes(x)
        return self.head(self.norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        layer = nn.TransformerEncoderLayer(WIDE, 4, WIDE, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDE, 4, batch_first=True)
        self.head = nn.Linear(WIDE, WORDS)

    forward = zoo.Attention.forward


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.lstm = nn.LSTM(WIDE, WIDE, batch_first=True)
        self.gru = nn.GRU(WIDE, WIDE // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDE, WORDS)

    forward = zoo.Recurrent.forward


class Convolutional(zoo.Convolutional):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.layer1 = nn.Sequential(zoo.Residual(64, 64), zoo.Residual(64, 64))
        self.layer2 = nn.Sequential(zoo.Residual(64, 96), nn.Identity())
        self.head = nn.Linear(96, zoo.VOCAB)


class Functional(Wide, zoo.Functional): ...


class Reused(Wide, zoo.Reused): ...


def twice_clipped(loop: Loop) -> list[Tensor]:
    """Two micro-steps, and the norm of their sum."""
    losses = []
    for k in range(2):
        loss = loss_of(loop.model, loop.data.roll(k, 0)) / 2
        loss.backward()
        losses.append(loss)
    if loop.prepared:
        return [*losses, loop.optimizer.clip_grad_norm_(0.1)]
    return [*losses, nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)]


def written(loop: Loop) -> list[Tensor]:
    """Writes to weights between steps, through parameters, their data and a state dict."""
    losses = zoo.plain_step(loop)
    blocks, state = loop.model.blocks, loop.model.state_dict()
    with torch.no_grad():
        blocks[1].up.weight.mul_(0.99)
        blocks[2].up.weight.data.clamp_(-0.05, 0.05)
        blocks[3].norm.weight[2:5] = 0.5
        loop.model.head.weight.copy_(loop.model.head.weight.flip(0))
        state["blocks.0.down.weight"].mul_(0.5)
        state["blocks.4.up.weight"].clamp_(max=0.05)
    blocks[4].down.bias.data = torch.full((WIDE,), 0.25)
    return losses


def channels_last(g: torch.Generator) -> Tensor:
    return zoo.images(g).to(memory_format=torch.channels_last)


RICH = Case("rich", Rich, twice_clipped, zoo.tokens)
MAIN = [
    Case("attention", Attention, zoo.plain_step, zoo.tokens),
    Case("accumulate", lambda: Wide(tied=True, dropout=0.1), zoo.accumulate, zoo.tokens),
]
OTHERS = [
    Case("recurrent", Recurrent, zoo.clip_norm_by_torch, zoo.tokens),
    Case(
        "channels_last",
        lambda: Convolutional().to(memory_format=torch.channels_last),
        zoo.clip_norm,
        channels_last,
    ),
    Case("functional", Functional, zoo.several_losses, zoo.tokens),
    Case("reused", Reused, zoo.eval_between, zoo.tokens),
    Case("written", Wide, written, zoo.tokens),
    Case("grads_edited", Wide, zoo.grads_edited, zoo.tokens),
    Case("thawing", Wide, zoo.thawing, zoo.tokens),
    Case("failing", Wide, zoo.failing, zoo.tokens),
    Case("penalty", Wide, zoo.penalty, zoo.tokens),
    Case("kept_views", Wide, zoo.kept_views, zoo.tokens),
    Case("user_hooks", Wide, zoo.user_hooks, zoo.tokens),
    Case("double_backward", Wide, zoo.double_backward, zoo.tokens),
    Case("double", lambda: Wide(3).double(), zoo.clip_value, zoo.tokens),
]


# -- budgets -------------------------------------------------------------------------------------


@functools.cache
def budget_of(case: Case, make: MakeOptimizer, chunk_bytes: int = CHUNK_BYTES) -> Budget:
    return measure(case, make, chunk_bytes, devices=("cpu", "cpu:sim"))


def least_host(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    nvme: Any,
    *,
    extent: int = EXTENT,
    **rest: Any,
) -> int:
    """Return the smallest ``host=`` that prepare accepts, which it says when it refuses."""
    config = Config.load(host=1, nvme=nvme, **rest)
    with pytest.raises(BudgetError) as failure:
        prepare_tuned(model, optimizer, config, Tuning(extent_numel=extent))
    assert failure.value.tier == "HOST"
    return failure.value.needed_bytes


def check_budgets(seen: Seen, host: int) -> None:
    """Budgets are hard, and everything was really paged and on disk."""
    assert seen.host_peak <= host
    assert 0 < seen.pool_peak <= seen.pool_bytes
    assert seen.read_bytes > seen.pool_bytes and seen.write_bytes > seen.pool_bytes
    assert seen.mode == "paged" and seen.extents >= 5
    assert seen.chunks >= 5 and seen.evictions >= 3


def compare_on_disk(case: Case, make: MakeOptimizer, disk: Path, device: Any) -> Seen:
    """Compare at the least HOST, with frames for half of the parameters."""
    torch.manual_seed(11)
    model, hbm = case.build(), budget_of(case, make).of(0.5) * 17 // 16  # copies land as they like
    host = least_host(model, make(model), disk, device=device, hbm=hbm, chunk_bytes=CHUNK_BYTES)
    seen = compare(
        *(case, make),
        device=device,
        hbm=hbm,
        host=host,
        nvme=disk,
        chunk_bytes=CHUNK_BYTES,
        tuning=Tuning(extent_numel=EXTENT),
        steps=STEPS,
    )
    check_budgets(seen, host)
    return seen


PLACES = {"cpu": None, "sim1": 1, "sim2": 2}
CROSSED = [(RICH, make, place) for make in (sgd, adamw) for place in PLACES]
CROSSED += [(case, *row) for case in MAIN for row in ((sgd, "sim1"), (adamw, "cpu"))]


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize(
    ("case", "make", "place"), CROSSED, ids=[f"{c.name}-{m.__name__}-{p}" for c, m, p in CROSSED]
)
def test_a_model_on_disk_trains_bitwise_at_the_least_host(
    case: Case, make: MakeOptimizer, place: str, disk: Path
) -> None:
    seed = PLACES[place]
    compare_on_disk(case, make, disk, "cpu" if seed is None else SimDevice(seed=seed, checked=True))


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[case.name for case in OTHERS])
def test_what_models_and_loops_do_is_the_same_on_disk(number: int, disk: Path) -> None:
    """Optimizers and devices take turns."""
    make = (sgd, adamw)[number % 2]
    device = "cpu" if number % 3 == 0 else SimDevice(seed=number, checked=True)
    compare_on_disk(OTHERS[number], make, disk, device)


def test_backward_reads_states_for_the_first_updates_of_its_step(disk: Path) -> None:
    torch.manual_seed(11)
    model = Wide()
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    host = least_host(model, optimizer, disk, device="cpu", hbm=2**24)
    parameters = sum(p.nbytes for p in model.parameters())
    config = Config.load(device="cpu", hbm=2**24, host=host + 5 * parameters // 2, nvme=disk)
    model, optimizer = prepare_tuned(model, optimizer, config, Tuning(extent_numel=EXTENT))
    store, read = engine_of(model).setup.store, []
    assert store.pool.spills
    assert {kind for kind, _ in engine_of(model).setup.budget.spill.on_disk} == {Kind.STATE}
    slots: list[int] = []
    plainly = store.pool.nvme.read
    store.pool.nvme.read = lambda slot, into: (slots.append(slot.n_bytes), plainly(slot, into))
    for step in range(STEPS):
        tokens = torch.randint(0, WORDS, (3, 7), generator=torch.Generator().manual_seed(step))
        loss = model(tokens).square().mean()
        engine_of(model).finish()
        slots.clear()
        loss.backward()
        with store.pool._changed:  # until what was begun has landed
            store.pool._changed.wait_for(lambda: not store.pool._in_flight)
        read.append(sum(slots))
        optimizer.step()
        optimizer.zero_grad()
        plain(tokens).square().mean().backward()
        theirs.step()
        theirs.zero_grad()

    same(values(model), values(plain), "values")
    same(states(model, optimizer), states(plain, theirs), "states")
    assert read[0] == 0 and all(n > 0 for n in read[1:])


def test_backward_announces_nothing_where_gradients_pass_through_the_same_memory(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Wide(2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    host = least_host(model, optimizer, disk, device="cpu", hbm=2**24)
    config = Config.load(device="cpu", hbm=2**24, host=host, nvme=disk)
    model, optimizer = prepare_tuned(model, optimizer, config, Tuning(extent_numel=EXTENT))
    announced: list[Any] = []
    monkeypatch.setattr(engine_of(model).setup.store.pool, "later", announced.append)
    for _ in range(3):
        model(torch.randint(0, WORDS, (3, 7))).square().mean().backward()
        optimizer.step()

    assert any(kind is Kind.GRAD for kind, _ in engine_of(model).setup.budget.spill.on_disk)
    assert not announced


# -- one number, however it is placed ------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One way to place a run; none of this may be in its numbers."""

    device: Any
    share: float | None
    """Of the parameters that have frames; None: hbm= is not given."""
    host_share: float
    """Of what lies between the least HOST and everything."""
    chunk_bytes: int
    extent: int
    directories: int
    buffered: bool
    short: int
    """Bytes that a transfer moves at most; 0: as many as were asked for."""
    io_threads: int
    update_threads: int
    depth: int | None


def drawn(seed: int) -> Setting:
    """Return the setting of a seed; 17 in the first 20 differ in what matters most."""
    rng = random.Random(seed)
    buffered, one_memory = seed % 4 == 1, seed % 6 == 0  # frames are a part of host= then
    return Setting(
        device="cpu" if seed % 3 == 0 else SimDevice(seed=seed),
        share=None if one_memory else rng.choice([0.4, 0.7, 1.3]),
        host_share=0.9 if one_memory else rng.choice([0.0, 0.1, 0.5, 0.9]),
        chunk_bytes=rng.choice([256, 1024, 4096, 65536]),
        extent=ALIGN * (1 if one_memory else rng.choice([1, 2, 4])),
        directories=rng.choice([1, 1, 2, 3]),
        buffered=buffered,
        short=rng.choice([0, 1000, 4095] if buffered else [0, ALIGN, ALIGN + 512, 3 * ALIGN]),
        io_threads=rng.randint(1, 8),
        update_threads=rng.randint(0, 2),
        depth=rng.choice([None, 0, 3]),
    )


def trajectory(case: Case, model: nn.Module, optimizer: Any, *, prepared: bool) -> str:
    """Train, and return the digest of every loss, gradient, weight and state on the way."""
    digest = hashlib.sha256()

    def add(tensors: list[Tensor | None]) -> None:
        for tensor in tensors:
            digest.update(b"None" if tensor is None else tensor.numpy().tobytes())

    for number in range(STEPS):
        add(one_step(case, model, optimizer, number, prepared=prepared))
        add(grads(model))
        optimizer.step()
        optimizer.zero_grad()
        add(values(model))
    add([state.clone() for state in states(model, optimizer)])
    return digest.hexdigest()


@functools.cache
def plain_trajectory(case: Case) -> str:
    torch.manual_seed(11)
    model = case.build()
    return trajectory(case, model, adamw(model), prepared=False)


def directories(disk: Path, count: int) -> list[Path]:
    found = [disk / str(number) for number in range(count)]
    for path in found:
        path.mkdir()
    return found


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_do_not_depend_on_where_anything_is(seed: int, disk: Path) -> None:
    setting, plan = drawn(seed), FaultPlan()
    budget = budget_of(RICH, adamw, setting.chunk_bytes)
    torch.manual_seed(11)
    model = RICH.build()
    optimizer = adamw(model)
    rest: dict[str, Any] = {
        "device": setting.device,
        "nvme": directories(disk, setting.directories),
        "chunk_bytes": setting.chunk_bytes,
        "hbm": None if setting.share is None else budget.of(setting.share),
    }
    host = least_host(model, optimizer, extent=setting.extent, **rest)
    everything = draw(model, optimizer, Config.load(**rest)).home_bytes
    host += int(setting.host_share * max(0, everything - host))
    if setting.buffered:
        for number in range(setting.directories):  # each tries again without O_DIRECT
            plan.fail_at("private", 2 * number, errno.EINVAL)
    if setting.short:
        plan.short_at("read", 0, setting.short, times=None)
        plan.short_at("write", 0, setting.short, times=None)
    tuning = Tuning(
        depth=setting.depth,
        worker=Worker(setting.update_threads, pick=random.Random(seed).randrange),
        extent_numel=setting.extent,
        io=plan,
        io_threads=setting.io_threads,
    )
    model, optimizer = prepare_tuned(model, optimizer, Config.load(host=host, **rest), tuning)
    assert trajectory(RICH, model, optimizer, prepared=True) == plain_trajectory(RICH)

    engine = engine_of(model)
    assert engine.setup.store.pool.spills
    assert engine.setup.ledger.peak(Tier.HOST) <= host
    assert 0 < engine.setup.store.pool.cache.peak <= engine.setup.store.pool.n_bytes
    assert hetero.status(model).written_bytes > 0 and plan.seen["read"] > 0
    assert len({op.where for op in plan.log if op.op == "write"}) == setting.directories
    assert plan.fired >= setting.directories * setting.buffered + 100 * bool(setting.short)
    hetero.release(model, optimizer)


# -- masters -------------------------------------------------------------------------------------


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def scaled_twice(loop: Loop) -> list[Tensor]:
    """As `twice_clipped`, with the loss scaling of fp16."""
    losses = []
    for k in range(2):
        loss = loss_of(loop.model, loop.data.roll(k, 0)) / 2
        hetero.backward(loss)
        losses.append(loss)
    return [*losses, loop.optimizer.clip_grad_norm_(0.1)]


def run_with_masters(
    make: MakeOptimizer, precision: str, disk: Path | None, device: Any
) -> tuple[list[Tensor], dict[str, Any], Seen]:
    """Train in two-byte weights, with or without a disk; return all numbers but the states."""
    torch.manual_seed(11)
    model = Rich()
    optimizer = make(model)
    rest: dict[str, Any] = {"device": device, "precision": precision, "chunk_bytes": CHUNK_BYTES}
    rest["hbm"] = budget_of(RICH, adamw).of(0.5)
    host = None if disk is None else least_host(model, optimizer, disk, **rest)
    config = Config.load(host=host, nvme=disk, **rest)
    model, optimizer = prepare_tuned(model, optimizer, config, Tuning(extent_numel=EXTENT))
    case, found, seen = Case("masters", Rich, scaled_twice, zoo.tokens), [], Seen()
    for number in range(STEPS):
        found += one_step(case, model, optimizer, number, prepared=True)
        found += [g for g in grads(model) if g is not None]
        optimizer.step()
        optimizer.zero_grad()
        found += values(model)
        note(seen, engine_of(model))
    if host is not None:
        check_budgets(seen, host)
    return found, copy.deepcopy(optimizer.state_dict()), seen


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize(
    ("precision", "make", "device"),
    [
        *(("bf16", adamw, "cpu"), ("bf16", adamw, "cpu:sim"), ("bf16", adafactor, "cpu")),
        *(("fp16", adamw, "cpu"), ("fp16", sgd, "cpu:sim"), ("fp16", adafactor, "cpu:sim")),
        ("bf16", sgd, "cpu"),
    ],
)
def test_masters_on_disk_are_those_in_memory(
    precision: str, make: MakeOptimizer, device: str, disk: Path
) -> None:
    expected, their_state, seen = run_with_masters(make, precision, None, device)
    found, state, _ = run_with_masters(make, precision, disk, device)
    assert seen.write_bytes == 0
    same(expected, found, "losses, gradients and weights")
    lows = [list(each.pop("masters").values()) for each in (their_state, state)]
    assert len(lows[0]) > 5
    same(*lows, "what weights leave of their masters")
    assert their_state.pop("scaler", None) == state.pop("scaler", None)
    same_states(their_state, state)


# -- every optimizer -----------------------------------------------------------------------------

THREE = Case("three", lambda: Wide(3), zoo.plain_step, zoo.tokens)
ONE_OF_EACH = [richest(cases)[-1] for cases in RULES.values()]


def maker(case: Any) -> MakeOptimizer:
    """Return what makes a case's optimizer, in two groups; Muon takes matrices only."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        muon = case.kind is torch.optim.Muon
        params = [p for p in model.parameters() if p.requires_grad and (p.ndim == 2 or not muon)]
        for param in model.parameters():
            param.requires_grad_(any(param is other for other in params))
        halves = [{"params": params[::2]}, {"params": params[1::2], "lr": case.flags["lr"] / 2}]
        return case.kind(halves, **case.flags)

    return make


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_every_optimizer_steps_bitwise_on_disk(rule: Any, disk: Path) -> None:
    make, hbm = maker(rule), budget_of(THREE, sgd).of(0.5)
    torch.manual_seed(11)
    model = THREE.build()
    host = least_host(model, make(model), disk, device="cpu", hbm=hbm, chunk_bytes=CHUNK_BYTES)
    seen = compare(
        *(THREE, make),
        hbm=hbm,
        host=host,
        nvme=disk,
        chunk_bytes=CHUNK_BYTES,
        tuning=Tuning(extent_numel=EXTENT),
        steps=STEPS,
    )
    check_budgets(seen, host)


def test_every_supported_optimizer_is_there() -> None:
    assert {case.kind for case in ONE_OF_EACH} == set(RULES)


# -- what is refused -----------------------------------------------------------------------------


class Nearly(IO):
    """A drive with a given number of bytes left."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes

    def call(self, op: str, act: Callable[..., T], *args: Any, where: str, offset: int = 0) -> T:
        found = super().call(op, act, *args, where=where, offset=offset)
        if act is os.fstatvfs:
            fields: Any = list(found)
            fields[:2], fields[4] = (1, 1), self.n_bytes  # blocks of a byte
            found = os.statvfs_result(fields)
        return found


class Refusals:
    """A model, and what prepare says to settings that cannot be honoured."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        torch.manual_seed(11)
        self.model = Rich()
        self.params = list(self.model.parameters())
        self.optimizer = adamw(self.model)
        self.rest: dict[str, Any] = {
            "device": "cpu",
            "nvme": disk,
            "hbm": budget_of(RICH, adamw).of(0.5),
            "chunk_bytes": CHUNK_BYTES,
        }
        self.least = least_host(self.model, self.optimizer, **self.rest)

    def prepare(self, *, io: IO | None = None, **settings: Any) -> Any:
        config = Config.load(**{"host": self.least, **self.rest, **settings})
        tuning = Tuning(extent_numel=EXTENT, io=io)
        return prepare_tuned(self.model, self.optimizer, config, tuning)

    def check_untouched(self) -> None:
        """The model trains in plain torch as if nothing had been asked."""
        assert all(a is b for a, b in zip(self.params, self.model.parameters(), strict=True))
        assert all(type(param) is nn.Parameter for param in self.params)
        with pytest.raises(StateError, match="not prepared"):
            hetero.status(self.model)
        gc.collect()
        assert os.listdir(self.disk) == [] and open_files(self.disk) == []
        found = trajectory(RICH, self.model, self.optimizer, prepared=False)
        assert found == plain_trajectory(RICH)

    def check_accepted(self, **settings: Any) -> None:
        """One step of a model that is built anew works."""
        again = Refusals(self.disk)
        model, optimizer = again.prepare(**settings)
        one_step(RICH, model, optimizer, 0, prepared=True)
        optimizer.step()
        assert hetero.status(model).written_bytes > 0
        hetero.release(model, optimizer)


def open_files(disk: Path) -> list[str]:
    """Return the files under a directory that this process has open, names or not."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # that of the listing itself
            continue
        if target.startswith(f"{disk}{os.sep}"):
            found.append(target)
    return found


@pytest.fixture
def refusals(disk: Path) -> Refusals:
    return Refusals(disk)


def test_too_small_a_host_is_refused_with_the_bytes_that_are_missing(refusals: Refusals) -> None:
    with pytest.raises(BudgetError, match="1 bytes short") as failure:
        refusals.prepare(host=refusals.least - 1)
    assert (failure.value.tier, failure.value.needed_bytes) == ("HOST", refusals.least)
    assert str(refusals.least) in failure.value.advice
    refusals.check_accepted(host=failure.value.needed_bytes)
    refusals.check_untouched()


def test_too_small_an_nvme_is_refused_with_the_bytes_that_are_missing(refusals: Refusals) -> None:
    with pytest.raises(BudgetError) as failure:
        refusals.prepare(nvme_bytes=ALIGN)
    needed = failure.value.needed_bytes
    assert failure.value.tier == "NVME" and needed > refusals.least
    assert f"{needed - ALIGN} bytes short" in str(failure.value)
    with pytest.raises(BudgetError, match="1 bytes short"):
        refusals.prepare(nvme_bytes=needed - 1)
    refusals.check_accepted(nvme_bytes=needed)
    refusals.check_untouched()


def test_too_little_free_space_is_refused_with_the_bytes_that_are_missing(
    refusals: Refusals,
) -> None:
    with pytest.raises(DiskFull) as failure:
        refusals.prepare(io=Nearly(50_000))
    needed = failure.value.wanted
    assert failure.value.got == 50_000 and needed > refusals.least
    assert f"{needed - 50_000} bytes short" in str(failure.value)
    with pytest.raises(DiskFull, match="1 bytes short"):
        refusals.prepare(io=Nearly(needed - 1))
    refusals.check_accepted(io=Nearly(needed))
    refusals.check_untouched()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_space_that_cannot_be_reserved_is_refused(refusals: Refusals, number: int) -> None:
    plan = FaultPlan()
    plan.fail_at("reserve", 0, number)
    with pytest.raises(DiskFull) as failure:
        refusals.prepare(io=plan)
    assert failure.value.errno == number and failure.value.wanted > refusals.least
    del failure  # its traceback keeps what was being made
    refusals.check_untouched()


def test_a_directory_that_is_missing_is_refused(refusals: Refusals) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        refusals.prepare(nvme=refusals.disk / "nowhere")
    refusals.check_untouched()


def test_nothing_goes_to_disk_where_host_holds_everything(refusals: Refusals) -> None:
    host = sum(param.nbytes for param in refusals.params) * 4 + refusals.least
    model, optimizer = refusals.prepare(host=host)
    assert trajectory(RICH, model, optimizer, prepared=True) == plain_trajectory(RICH)
    assert not engine_of(model).setup.store.pool.spills and hetero.status(model).written_bytes == 0
    assert os.listdir(refusals.disk) == [] and open_files(refusals.disk) == []


# -- state dicts ---------------------------------------------------------------------------------


class Beside:
    """A plain model and one on disk, trained side by side."""

    def __init__(self, disk: Path, make: MakeOptimizer, seed: int | None) -> None:
        torch.manual_seed(11)
        self.plain = Rich()
        self.disk = disk
        model = copy.deepcopy(self.plain)
        self.optimizer = make(self.plain)
        device = "cpu" if seed is None else SimDevice(seed=seed, checked=True)
        rest = {"device": device, "hbm": budget_of(RICH, make).of(0.5), "chunk_bytes": CHUNK_BYTES}
        optimizer = make(model)
        self.host = least_host(model, optimizer, disk, **rest)
        config = Config.load(host=self.host, nvme=disk, **rest)
        self.model, self.ours = prepare_tuned(model, optimizer, config, Tuning(extent_numel=EXTENT))
        self.number = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            left = one_step(RICH, self.plain, self.optimizer, self.number, prepared=False)
            right = one_step(RICH, self.model, self.ours, self.number, prepared=True)
            same(left, right, f"losses of step {self.number}")
            self.optimizer.step()
            self.ours.step()
            self.optimizer.zero_grad()
            self.ours.zero_grad()
            self.number += 1
        self.check()

    def check(self) -> None:
        same(values(self.plain), values(self.model), "weights")
        same_states(self.optimizer.state_dict(), copy.deepcopy(self.ours.state_dict()))

    def check_disk(self) -> None:
        engine, status = engine_of(self.model), hetero.status(self.model)
        assert engine.setup.store.pool.spills
        assert status.read_bytes > 0 and status.write_bytes > 0
        assert 0 < engine.setup.store.pool.cache.peak <= engine.setup.store.pool.n_bytes
        assert engine.setup.ledger.peak(Tier.HOST) <= self.host
        kinds = {kind for kind in Kind if engine.setup.ledger.used(Tier.NVME, kind)}
        assert {Kind.PARAM, Kind.GRAD, Kind.STATE} <= kinds

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.model.state_dict(), self.ours.state_dict()


@pytest.fixture(
    params=[
        pytest.param((adamw, 4), id="adamw-sim"),
        pytest.param((sgd, None), id="sgd-cpu", marks=pytest.mark.campaign(seconds=1)),
    ]
)
def beside(disk: Path, request: pytest.FixtureRequest) -> Beside:
    found = Beside(disk, *request.param)
    found.train(2)
    found.check_disk()
    return found


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("through", [saved, copy.deepcopy], ids=["torch.save", "deepcopy"])
def test_copies_of_state_dicts_are_plain_tensors_that_stay_as_they_are(
    beside: Beside, through: Callable[[Any], Any]
) -> None:
    weights, state = through(beside.states()[0]), through(beside.states()[1])
    before = copy.deepcopy((beside.plain.state_dict(), beside.optimizer.state_dict()))
    beside.train(2)
    assert all(type(value) is Tensor for value in weights.values())
    assert list(weights) == list(before[0])
    same(list(before[0].values()), list(weights.values()), "weights")
    same_states(before[1], state)


def test_a_state_dict_that_is_held_shows_what_is_trained(beside: Beside) -> None:
    weights, state = beside.states()
    beside.train(2)
    same(list(beside.plain.state_dict().values()), [v.clone() for v in weights.values()], "weights")
    theirs = beside.optimizer.state_dict()["state"]
    for number, entries in state["state"].items():
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if key in entries:
                same([theirs[number][key]], [entries[key].clone()], key)


def test_a_state_dict_of_the_disk_goes_on_in_plain_torch(beside: Beside) -> None:
    model = copy.deepcopy(beside.plain)
    optimizer = type(beside.optimizer)(model.parameters(), lr=1.0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(beside.model.state_dict())
    # torch's optimizers keep the very tensors that they load
    optimizer.load_state_dict(copy.deepcopy(beside.ours.state_dict()))
    beside.plain, beside.optimizer = model, optimizer
    beside.train(2)


def test_a_state_dict_of_plain_torch_goes_on_on_the_disk(beside: Beside) -> None:
    torch.manual_seed(5)
    other = Rich()
    beside.plain, beside.optimizer = other, type(beside.optimizer)(other.parameters(), lr=1e-2)
    for number in range(2):
        one_step(RICH, beside.plain, beside.optimizer, number, prepared=False)
        beside.optimizer.step()
        beside.optimizer.zero_grad()
    beside.model.load_state_dict(beside.plain.state_dict())
    beside.ours.load_state_dict(copy.deepcopy(beside.optimizer.state_dict()))
    beside.check()
    beside.train(2)
    beside.check_disk()


def test_writes_into_tensors_of_state_dicts_are_kept(beside: Beside) -> None:
    for number in range(2):
        sides = (beside.plain, beside.optimizer), (beside.model, beside.ours)
        for model, optimizer in sides:
            weights, state = model.state_dict(), optimizer.state_dict()["state"]
            with torch.no_grad():
                weights["blocks.0.up.weight"].mul_(0.5)
                weights["blocks.3.down.weight"].copy_(weights["blocks.0.up.weight"])
                weights["embed.weight"].clamp_(-1, 1)
                weights["norm.bias"].fill_(0.25 + number)
                for entries in state.values():
                    for key in ("momentum_buffer", "exp_avg"):
                        if key in entries:
                            entries[key].mul_(0.5)
        beside.check()
        beside.train(1)
    beside.check_disk()


def test_writes_inside_gathered_go_home_and_others_are_undone(beside: Beside) -> None:
    for model in (beside.plain, beside.model):
        with hetero.gathered(model.blocks[0], write=True), torch.no_grad():
            model.blocks[0].up.weight.mul_(0.5)
            model.blocks[0].up.weight[3:50, ::2] = 0.125
        with hetero.gathered(model.head.weight, write=True), torch.no_grad():
            model.head.weight[0].zero_()
    beside.check()
    with (
        pytest.raises(StateError, match="the write is undone"),
        hetero.gathered(beside.model.blocks[3]),
        torch.no_grad(),
    ):
        beside.model.blocks[3].up.weight.zero_()
    beside.train(2)
    beside.check_disk()


def test_release_gives_back_a_plain_model_and_optimizer_and_the_files_go(beside: Beside) -> None:
    assert open_files(beside.disk)
    model, optimizer = hetero.release(beside.model, beside.ours)
    assert open_files(beside.disk) == [] and os.listdir(beside.disk) == []
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert type(optimizer) is type(beside.optimizer)
    same(values(beside.plain), values(model), "weights")
    same_states(beside.optimizer.state_dict(), optimizer.state_dict())
    for number in range(2, 4):
        for side, opt in ((beside.plain, beside.optimizer), (model, optimizer)):
            one_step(RICH, side, opt, number, prepared=False)
            opt.step()
            opt.zero_grad()
        same(values(beside.plain), values(model), f"weights after step {number}")


def test_a_model_for_inference_alone_reads_its_weights_from_disk(disk: Path) -> None:
    torch.manual_seed(11)
    model = Wide().eval().requires_grad_(False)
    data = zoo.tokens(torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = [model(data), model(data.flip(1))]
    params = sum(param.nbytes for param in model.parameters())
    config = Config.load(
        device="cpu", hbm=params // 2, host=params // 2, nvme=disk, chunk_bytes=CHUNK_BYTES
    )
    model = prepare_tuned(model, None, config, Tuning(extent_numel=EXTENT))
    with torch.no_grad():
        same(expected, [model(data), model(data.flip(1))], "outputs")
    pool = engine_of(model).setup.store.pool
    assert pool.spills and 0 < pool.cache.peak <= pool.n_bytes
    assert hetero.status(model).written_bytes > 0
    assert engine_of(model).setup.ledger.peak(Tier.HOST) <= params // 2
