"""What the engine costs: overhead, accesses, overlap, misses."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.paging import paged_of
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice, finish_compute
from hetero.jobs import Worker
from hetero.plan.schedule import Schedule
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status
from hetero.train.engine.engine import Engine
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane


class Figure(NamedTuple):
    """A measured value and what it has to reach."""

    name: str
    value: float
    unit: str
    op: str
    reach: float


@dataclass
class Figures:
    """The rows of a benchmark and what is worth knowing besides."""

    rows: list[Figure]
    detail: dict[str, Any] = field(default_factory=dict)


def timed(call: Callable[[], Any], device: str = "cpu") -> float:
    """Return the seconds a call takes, the device's work included."""
    wait = finish_compute if device == "cuda" else nothing
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def nothing() -> None:
    """Wait for nothing: CPU work is done when the call returns."""


def train_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def overhead(device: str | None = None, pairs: int = 21) -> Figures:
    """Everything fits: hetero's step over plain torch's, paired, median."""
    device = device or "cpu"
    torch.manual_seed(0)
    config = GPTConfig(width=480, layers=8, heads=8, context=128, checkpoint_blocks=False)
    plain = GPT(config).to(device)
    twin = copy.deepcopy(plain)
    optimizer = adamw(plain)
    model, ours = prepare_tuned(twin, adamw(twin), Config.load(device=device), None)
    tokens = torch.randint(0, 256, (8, 128), device=device)
    ratios, seconds = [], []
    for pair in range(pairs + 2):
        sides = [(plain, optimizer), (model, ours)]
        order = (0, 1) if pair % 2 else (1, 0)
        took = {s: timed(partial(train_step, *sides[s], tokens), device) for s in order}
        if pair >= 2:  # the first pairs allocate states and warm up
            ratios.append(took[1] / took[0])
            seconds.append(took[0])
    detail = {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "plain_step_seconds": statistics.median(seconds),
        "ratios": ratios,
        "mode": status(model).mode,
    }
    return Figures(
        [Figure("hetero / plain", statistics.median(ratios), "ratio", "<=", 1.03)], detail
    )


def paged(device: str | None = None, pairs: int = 9) -> Figures:
    """A quarter of the states as budget: are the bits plain torch's, and what does it cost?"""
    device = device or "cpu:sim"
    place = "cuda" if device == "cuda" else "cpu"
    torch.manual_seed(0)
    plain = GPT(GPTConfig()).to(place)
    twin = copy.deepcopy(plain)
    optimizer = adamw(plain)
    hbm = sum(p.nbytes for p in plain.parameters())  # of p, g, m and v: a quarter
    model, ours = prepare_tuned(
        twin, adamw(twin), Config.load(device=device, hbm=hbm, activations="keep"), None
    )
    tokens = torch.randint(0, 256, (2, 256), device=place)
    sides = [(plain, optimizer), (model, ours)]
    seconds: list[list[float]] = [[], []]
    for pair in range(pairs + 2):
        for s in (0, 1) if pair % 2 else (1, 0):
            seconds[s].append(timed(partial(train_step, *sides[s], tokens), place))
    states = [m.state_dict().values() for m, _ in sides]
    equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*states, strict=True))
    ratios = [b / a for a, b in list(zip(*seconds, strict=True))[2:]]
    now = status(model)
    detail = {
        "step, hetero / plain": statistics.median(ratios),
        "plain_step_seconds": statistics.median(seconds[0]),
        "hbm_bytes": hbm,
        "hbm_peak_bytes": now.tiers["HBM"]["peak"],
        "mode": now.mode,
        "evictions_per_step": now.evictions,
        "misses_per_step": now.misses,
    }
    # On CUDA the homes are updated by the CPU's arithmetic, which is not CUDA's.
    rows = [Figure("all weights equal plain torch's, bit by bit", float(equal), "", "==", 1.0)]
    return Figures(rows if place == "cpu" else [], detail)


def access(device: str | None = None, rounds: int = 3000) -> Figures:
    """Microseconds of one unit access on a hit, and of one parameter bind."""
    device = device or "cpu"
    model = GPT(GPTConfig(width=64, layers=6, heads=4, context=16, checkpoint_blocks=False))
    config = Config.load(device=device, hbm="1GiB", activations="keep")
    model, _ = prepare_tuned(model, adamw(model), config, None)
    runtime = paged_of(model).runtime
    unit = next(
        i for i, u in enumerate(engine_of(model).setup.blueprint.units) if "block" in u.name
    )
    (bucket,) = runtime.needs[unit]
    pages, manager = runtime.pages, runtime.pages.manager
    n_params = len(pages.layout.buckets[bucket].segments)

    def hit() -> None:
        runtime.leave(unit, pushed=runtime.enter(unit))

    hit()  # the first access fetches
    fetches = manager.counts["fetch"]
    access_us = 1e6 * best(hit, rounds)
    manager.pin((bucket,), "bench")
    replica, bound, unbound = manager.replicas[bucket], [], []
    for _ in range(rounds):
        bound.append(timed(lambda: pages.binding.bind(replica)) / n_params)
        unbound.append(timed(lambda: pages.binding.unbind(bucket)) / n_params)
    manager.unpin((bucket,))
    bind_us = 1e6 * statistics.median(bound)
    detail = {
        "parameters_in_unit": n_params,
        "fetches_while_measuring": manager.counts["fetch"] - fetches,
        "unbind_us": 1e6 * statistics.median(unbound),
    }
    rows = [
        Figure("unit access, hit", access_us, "us", "<=", 60.0),
        Figure("parameter bind", bind_us, "us", "<=", 2.0),
    ]
    return Figures(rows, detail)


def best(call: Callable[[], Any], rounds: int, batches: int = 15) -> float:
    """Return seconds per call: the median over batches of their means."""
    means = []
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(rounds // batches):
            call()
        means.append((time.perf_counter() - start) / (rounds // batches))
    return statistics.median(means)


class Timed(torch.autograd.Function):
    """Advances the modelled clock by the compute of an access, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unit: ModelledBlock) -> torch.Tensor:
        ctx.unit = unit
        unit.device.compute(1.0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.unit.device.compute(ctx.unit.backward_seconds)
        return grads[0], None


class ModelledBlock(nn.Module):
    """A linear unit whose forward computes for one second of the device's virtual clock."""

    def __init__(self, device: SimDevice, backward_seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.device = device
        self.backward_seconds = backward_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        timed_input: torch.Tensor = Timed.apply(x, self)  # type: ignore[no-untyped-call]
        return torch.tanh(self.linear(timed_input))


UNITS, WIDTH, STEPS = 16, 64, 6
UNIT_BYTES = 4 * WIDTH * WIDTH


def overlap(device: str | None = None) -> Figures:
    """Modelled compute and links: planned step over the larger of compute and link time."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {
        "units": UNITS,
        "clock": "virtual",
        "frames": "25 % of the parameters beside the activations",
    }
    for ratio in (0.5, 1.0, 2.0):
        planned = modelled(ratio, virtual())
        demand = modelled(ratio, virtual(schedule=no_schedule))
        name = f"transfer {ratio:g}x compute"
        rows.append(Figure(name, planned.seconds / planned.bound, "ratio", "<=", 1.10))
        detail[name] = {
            "planned_seconds": planned.seconds,
            "bound_seconds": planned.bound,
            "demand_paging": demand.seconds / demand.bound,
            # An update rewrites every parameter, so forward refetches all of them, and gradients
            # go down only in backward: one phase can be bound by a lane and the other by compute.
            # No schedule beats the sum of the phases, so these are given against both bounds.
            **against_phases(
                "backward 2x forward", modelled(ratio, virtual(), backward_seconds=2.0)
            ),
            **against_phases("duplex link", modelled(ratio, virtual(), duplex=True)),
        }
    return Figures(rows, detail)


def virtual(**choices: Any) -> Tuning:
    """Updates inside `step`: a thread's real time has no place on the virtual clock."""
    return Tuning(worker=Worker(0), **choices)


def against_phases(name: str, found: Modelled) -> dict[str, float]:
    return {
        name: found.seconds / found.bound,
        f"{name}, by phase": found.seconds / found.phase_bound,
    }


class Modelled(NamedTuple):
    """Seconds of a step on the virtual clock, and what bounds it from below."""

    seconds: float
    bound: float
    phase_bound: float


def modelled(
    ratio: float, tuning: Tuning, *, backward_seconds: float = 1.0, duplex: bool = False
) -> Modelled:
    """Return a planned step's time; a transfer takes ``ratio`` times a forward access's compute.

    ``bound`` is the larger of compute and the bytes moved in the measured steps over the link's
    rate (with ``duplex``, of the busier lane); ``phase_bound`` is the sum over forward and backward
    of the largest of compute and each lane's time.
    """
    hbm = UNIT_BYTES * (UNITS // 4) + activations(backward_seconds)
    return modelled_in(hbm, ratio, tuning, backward_seconds=backward_seconds, duplex=duplex)


def modelled_in(
    hbm: int,
    ratio: float,
    tuning: Tuning,
    *,
    backward_seconds: float = 1.0,
    duplex: bool = False,
    mesh: str | None = None,
) -> Modelled:
    """As `modelled`, in some bytes of HBM; with ``mesh`` on each of several ranks."""
    rate = UNIT_BYTES / ratio
    device = SimDevice(
        seed=1, h2d_bytes_per_second=rate, d2h_bytes_per_second=rate, shared_link=not duplex
    )
    model, optimizer = modelled_model(device, backward_seconds)
    config = Config.load(device=device, hbm=hbm, chunk_bytes=4096, activations="keep", mesh=mesh)
    model, optimizer = prepare_tuned(model, optimizer, config, tuning)
    engine = engine_of(model)
    seen: list[Modelled] = []
    for _ in range(STEPS):
        start = device.now()
        modelled_step(model, optimizer)
        moved = engine.setup.stats.n_bytes
        compute = UNITS * (1.0 + backward_seconds)
        up, down = moved[Lane.H2D] / rate, moved[Lane.D2H] / rate
        link = max(up, down) if duplex else up + down
        again = up - UNITS * ratio
        back = max(again, down) if duplex else again + down
        phases = max(UNITS, UNITS * ratio) + max(UNITS * backward_seconds, back)
        seen.append(Modelled(device.now() - start, max(compute, link), phases))
    return Modelled(*(statistics.median(column) for column in zip(*seen[2:], strict=True)))


def modelled_model(device: SimDevice, backward_seconds: float) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(ModelledBlock(device, backward_seconds) for _ in range(UNITS)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def modelled_step(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def activations(backward_seconds: float) -> int:
    """Return what the modelled model keeps, measured on one step with room for everything."""
    device = SimDevice()
    model, optimizer = modelled_model(device, backward_seconds)
    config = Config.load(device=device, hbm=1 << 30, chunk_bytes=4096, activations="keep")
    model, optimizer = prepare_tuned(model, optimizer, config, None)
    model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
    return paged_of(model).hbm.activations_seen()


def no_schedule(trace: Any, shapes: Any, limit: int) -> Schedule:
    """Plan nothing: demand paging."""
    return Schedule(trace, ((),) * (len(trace.accesses) + 1), limit)


def misses(device: str | None = None) -> Figures:
    """Demand misses in planned steps of a static model, frames for 25 % of the parameters."""
    device = device or "cpu:sim"
    config = GPTConfig(width=64, layers=12, heads=4, context=32)
    tokens = torch.randint(0, 256, (2, 32), device="cuda" if device == "cuda" else "cpu")
    torch.manual_seed(0)
    model: nn.Module = GPT(config)
    params = sum(p.nbytes for p in model.parameters())
    wide = Config.load(device=device, hbm="1GiB", chunk_bytes="4KiB", activations="keep")
    probe, optimizer = prepare_tuned(copy.deepcopy(model), None, wide, None), None
    probe(tokens, tokens).backward()
    hbm = params // 4 + paged_of(probe).hbm.activations_seen() + 2 * largest(engine_of(probe))
    narrow = Config.load(device=device, hbm=hbm, chunk_bytes="4KiB", activations="keep")
    model, optimizer = prepare_tuned(model, adamw(model), narrow, None)
    per_step: list[dict[str, int]] = []
    for _ in range(6):
        train_step(model, optimizer, tokens)
        now = status(model)
        per_step.append(
            {
                "misses": now.misses,
                "hits": now.hits,
                "fetches": now.fetches,
                "evicts": now.evictions,
            }
        )
    planned = per_step[2:]
    detail = {"steps": per_step, "mode": status(model).mode, "hbm_bytes": hbm, "params": params}
    worst = float(max(row["misses"] for row in planned))
    return Figures([Figure("misses per planned step", worst, "misses", "==", 0.0)], detail)


def largest(engine: Engine) -> int:
    return max(b.n_bytes for b in engine.setup.blueprint.layout.buckets)
