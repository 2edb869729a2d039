"""Steps of several micro-batches: how often weights cross the link, counted."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules

from benchmarks.engine import Figure, Figures
from benchmarks.paging import paged_of
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.memory.frame import FrameMap
from hetero.plan.planner import Planner, next_use
from hetero.plan.schedule import Schedule, Shape, verify
from hetero.plan.trace import Access, Trace
from hetero.status import status
from hetero.types import Phase

UNITS, MICRO_BATCHES, RANKS = 8, 8, 4
FRAMES = (2, 4, 6, 8)
"""For so many of the units."""
GRANULES = 4
WIDTH, STEPS = 32, 4
UNIT_BYTES = 4 * WIDTH * WIDTH


def pipeline_fetches(device: str | None = None) -> Figures:
    """Fetches of a step whose units are visited again and again / the fewest, one frame streams."""
    rows: list[Figure] = []
    detail: dict[str, Any] = {"units": UNITS, "micro-batches": MICRO_BATCHES, "ranks": RANKS}
    for name, traces in all_traces().items():
        found = {
            f"{n} frames": [(fetches_of(trace, n), fewest(trace, n)) for trace in traces]
            for n in FRAMES
        }
        detail[name] = found
        worst = max(ours / least for pairs in found.values() for ours, least in pairs)
        rows.append(Figure(f"{name}: fetches / fewest", worst, "ratio", "<=", 1.15))
    for name, most in (("accumulation", 0), ("forwards first", MICRO_BATCHES)):
        runs = {frames: run(most, frames, device or "cpu:sim") for frames in FRAMES[:-1]}
        detail[f"run, {name}"] = runs
        worst = max(ran["fetches"] / ran["planned"] for ran in runs.values())
        rows.append(Figure(f"{name}, run: fetches / planned", worst, "ratio", "==", 1.0))
        equal = all(ran["equal"] for ran in runs.values())
        rows.append(Figure(f"{name}, run: weights equal", float(equal), "bool", "==", 1.0))
    return Figures(rows, detail)


# -- planned -------------------------------------------------------------------------------------


def all_traces() -> dict[str, list[Trace]]:
    """Return the accesses of a step, of every rank, by what makes their order."""
    ranks = range(RANKS)
    return {
        "GPipe": [trace_of(order_of(schedules.ScheduleGPipe, [rank], RANKS)) for rank in ranks],
        "1F1B": [trace_of(order_of(schedules.Schedule1F1B, [rank], RANKS)) for rank in ranks],
        "ZBV": [
            trace_of(
                order_of(schedules.ScheduleZBVZeroBubble, [rank, 2 * RANKS - 1 - rank], 2 * RANKS)
            )
            for rank in ranks
        ],
        "accumulation": [accumulation()],
    }


def order_of(kind: Any, stages: Sequence[int], n_stages: int, n_ranks: int = RANKS) -> list[Any]:
    """Return torch's order of the actions of the rank that has these stages."""
    rank = stages[0]
    fakes = [
        SimpleNamespace(
            stage_index=index,
            num_stages=n_stages,
            group_size=n_ranks,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == n_stages - 1,
            submod=nn.Identity(),
        )
        for index in stages
    ]
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(fakes[0] if single else fakes, MICRO_BATCHES, loss_fn=nn.MSELoss())
    return [action for action in schedule.pipeline_order[rank] if action is not None]


def trace_of(actions: Iterable[Any]) -> Trace:
    """Return the accesses of a rank whose units are divided evenly among its stages."""
    actions = list(actions)
    stages = sorted({action.stage_index for action in actions})
    each = UNITS // len(stages)
    accesses: list[Access] = []
    for action in actions:
        first = stages.index(action.stage_index) * each
        units = range(first, first + each)
        match action.computation_type.name:
            case "FORWARD":
                accesses += [Access(Phase.FORWARD, unit, (unit,)) for unit in units]
            case "FULL_BACKWARD" | "BACKWARD_INPUT" | "BACKWARD_WEIGHT":
                accesses += [Access(Phase.BACKWARD, unit, (unit,)) for unit in reversed(units)]
    return Trace(tuple(accesses))


def accumulation() -> Trace:
    there = [Access(Phase.FORWARD, unit, (unit,)) for unit in range(UNITS)]
    back = [Access(Phase.BACKWARD, unit, (unit,)) for unit in reversed(range(UNITS))]
    return Trace(tuple((there + back) * MICRO_BATCHES))


def fetches_of(trace: Trace, frames: int) -> int:
    """Return the fetches of the planned step, with its misses."""
    shapes = {unit: Shape(GRANULES, rewritten=True) for unit in range(UNITS)}
    limit = GRANULES * frames
    return counted(Planner(trace, shapes, FrameMap(limit), limit).build(), shapes)


def counted(schedule: Schedule, shapes: dict[int, Shape]) -> int:
    verdict = verify(schedule, shapes)
    return verdict.fetches + verdict.demand_misses


def fewest(trace: Trace, frames: int) -> int:
    """Return the fewest fetches of any schedule in which each access finds its bucket there while
    the next one's comes: Belady's rule for buckets of one size, two of which are needed at once.

    Belady with a frame less, which no more than streams, fetches at least as often.
    """
    order, uses = [access.buckets[0] for access in trace.accesses], trace.uses()
    there: set[int] = set()
    fetches = 0
    for at, bucket in enumerate(order):
        needed = {bucket, order[min(at + 1, len(order) - 1)]}
        for missing in needed - there:
            fetches += 1
            if len(there) == frames:
                there.remove(max(there - needed, key=lambda each: next_use(uses[each], at)))
            there.add(missing)
    return fetches


# -- run -----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A unit of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def run(most: int, frames: int, device: str) -> dict[str, Any]:
    """Train steps of micro-batches, of which ``most`` wait for their backwards, and plain torch's;
    return the fetches of one, those of its plan, and whether all weights are equal."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(UNITS)))
    hbm = frames * UNIT_BYTES + activations(plain, most, device)
    model, optimizer = prepared(copy.deepcopy(plain), device, hbm)
    theirs = sgd(plain)
    for number in range(STEPS):
        for side, stepped in ((plain, theirs), (model, optimizer)):
            passes(side, most, number, "cuda" if device == "cuda" else "cpu")
            stepped.step()
            stepped.zero_grad()
    residence = paged_of(model)
    schedule = residence.schedule()
    buckets = residence.setup.blueprint.layout.buckets
    shapes = {bucket.id: Shape(bucket.granules, bucket.trainable) for bucket in buckets}
    states = (side.state_dict().values() for side in (plain, model))
    return {
        "fetches": status(model).fetches,
        "planned": 0 if schedule is None else counted(schedule, shapes),
        "equal": all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*states, strict=True)),
    }


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def prepared(model: nn.Module, device: str, hbm: int) -> tuple[nn.Module, Any]:
    where = SimDevice(seed=1) if device == "cpu:sim" else device
    config = Config.load(device=where, hbm=hbm, chunk_bytes=1024, activations="keep")
    model, optimizer = prepare_tuned(model, sgd(model), config, None)
    return model, optimizer


def passes(model: nn.Module, most: int, number: int, place: str) -> None:
    torch.manual_seed(number)
    losses: list[torch.Tensor] = []
    for _ in range(MICRO_BATCHES):
        losses.append(model(torch.randn(4, WIDTH).to(place)).square().mean())
        if len(losses) > most:
            losses.pop(0).backward()
    while losses:
        losses.pop(0).backward()


def activations(plain: nn.Module, most: int, device: str) -> int:
    """Return what a step holds outside frames, measured with room for everything."""
    model, _ = prepared(copy.deepcopy(plain), device, 1 << 30)
    passes(model, most, 0, "cuda" if device == "cuda" else "cpu")
    return paged_of(model).hbm.activations_seen()
