"""Homes on disk, at the least HOST there can be: the numbers of plain torch, bit for bit."""

from __future__ import annotations

import copy
import errno
import functools
import hashlib
import inspect
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
from hetero.io import ALIGN, IO, FaultPlan
from hetero.train.blueprint import draw
from hetero.train.engine import Tuning
from hetero.train.worker import Worker
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
    one_step,
    note,
    same,
    sgd,
    states,
    values,
)
from tests.equivalence.test_optimizers import RULES, richest, same_states
from tests.equivalence.zoo import Case, Loop, loss_of

T = TypeVar("T")
WIDE = 128  # features: a square layer is four extents
WORDS = 200
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
    RICH,
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
    return measure(case, make, chunk_bytes)


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
    model, hbm = case.build(), budget_of(case, make).of(0.5)
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


@pytest.mark.parametrize("seed", [None, 1, 2], ids=["cpu", "sim1", "sim2"])
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_a_model_on_disk_trains_bitwise_at_the_least_host(
    case: Case, make: MakeOptimizer, seed: int | None, disk: Path
) -> None:
    compare_on_disk(case, make, disk, "cpu" if seed is None else SimDevice(seed=seed, checked=True))


@pytest.mark.parametrize("number", range(len(OTHERS)), ids=[case.name for case in OTHERS])
def test_what_models_and_loops_do_is_the_same_on_disk(number: int, disk: Path) -> None:
    """Optimizer and device take turns: with those above, each case meets each of them."""
    make = (sgd, adamw)[number % 2]
    device = "cpu" if number % 3 == 0 else SimDevice(seed=number, checked=True)
    compare_on_disk(OTHERS[number], make, disk, device)


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
    assert engine.store.pool is not None
    assert engine.ledger.peak(Tier.HOST) <= host
    assert 0 < engine.store.pool.peak <= engine.store.pool.n_bytes
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


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
@pytest.mark.parametrize("make", [sgd, adamw, adafactor])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
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

FOUR = Case("four", lambda: Wide(4), zoo.plain_step, zoo.tokens)
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


@pytest.mark.parametrize("rule", ONE_OF_EACH, ids=str)
def test_every_optimizer_steps_bitwise_on_disk(rule: Any, disk: Path) -> None:
    make, hbm = maker(rule), budget_of(FOUR, sgd).of(0.5)
    torch.manual_seed(11)
    model = FOUR.build()
    host = least_host(model, make(model), disk, device="cpu", hbm=hbm, chunk_bytes=CHUNK_BYTES)
    seen = compare(
        *(FOUR, make),
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
