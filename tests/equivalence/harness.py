"""Run a case plain and prepared, side by side, and compare every number bit by bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.memory.extent import PinUse
from hetero.train.engine import budget
from hetero.train.engine.blueprint import draw
from hetero.train.engine.engine import Engine
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane, Tier
from tests.equivalence.zoo import Case, Loop

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
STEPS = 5


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Seen:
    """What a prepared run did besides giving the right numbers."""

    evictions: int = 0
    fetches: int = 0
    misses: int = 0
    chunks: int = 0
    mode: str = ""
    hbm: int = 0
    peak: int = 0
    weights: bytes = b""
    extents: int = 0
    """Of all homes that lie on disk."""
    read_bytes: int = 0
    write_bytes: int = 0
    pool_peak: int = 0
    pool_bytes: int = 0
    host_peak: int = 0


def compare(
    case: Case,
    make: MakeOptimizer = adamw,
    *,
    hbm: int | None,
    chunk_bytes: int = 256,
    device: Any = "cpu",
    tuning: Tuning | None = None,
    steps: int = STEPS,
    host: int | None = None,
    nvme: Path | None = None,
    **settings: Any,
) -> Seen:
    """Train both sides for ``steps`` steps; any difference is an AssertionError.

    Activations are kept unless ``settings`` say otherwise: frames are what these budgets are about.
    """
    settings = {"activations": "keep", **settings}
    torch.manual_seed(11)
    plain = case.build()
    prepared = copy.deepcopy(plain)
    optimizer = make(plain)
    config = Config.load(
        device=device, hbm=hbm, chunk_bytes=chunk_bytes, host=host, nvme=nvme, **settings
    )
    model, paged = prepare_tuned(prepared, make(prepared), config, tuning)
    seen = Seen(hbm=hbm or 0)
    for number in range(steps):
        left = one_step(case, plain, optimizer, number, prepared=False)
        right = one_step(case, model, paged, number, prepared=True)
        same(left, right, f"{case.name}: losses of step {number}")
        same(grads(plain), grads(model), f"{case.name}: gradients of step {number}")
        optimizer.step()
        paged.step()
        optimizer.zero_grad()
        paged.zero_grad()
        same(values(plain), values(model), f"{case.name}: weights after step {number}")
        note(seen, engine_of(model))
    same(states(plain, optimizer), states(model, paged), f"{case.name}: optimizer states")
    seen.weights = b"".join(raw(v).numpy().tobytes() for v in values(model))
    return seen


def one_step(case: Case, model: nn.Module, optimizer: Any, number: int, *, prepared: bool) -> list:
    torch.manual_seed(1000 + number)
    data = case.data(torch.Generator().manual_seed(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # create_graph=True warns about cycles
        results = case.step(Loop(model, optimizer, data, number, prepared))
    return [r.detach().clone() for r in results]


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def values(model: nn.Module) -> list[Tensor]:
    return [v.clone() for v in model.state_dict().values()]


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = []
    for state in optimizer.state_dict()["state"].values():
        found.extend(torch.as_tensor(v) for _, v in sorted(state.items()) if v is not None)
    return found


def same(left: list, right: list, what: str) -> None:
    assert len(left) == len(right), what
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is None or b is None:
            assert a is None and b is None, f"{what}: {i} is {a} and {b}"
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {i}"
        # Bits, not values: -0.0 is not 0.0, and a NaN equals the same NaN.
        bits = torch.equal(a.contiguous().view(-1).view(torch.uint8), raw(b))
        assert bits, f"{what}: number {i} differs by {(a.double() - b.double()).abs().max()}"


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def stay_paged(engine: Engine) -> Any:
    """Let a model stay paged with its frames, though it would fit; returns what divides."""
    hbm: Any = getattr(engine.residence, "hbm", SimpleNamespace())  # else nothing is divided
    hbm.fits_whole = lambda division: False
    hbm.apply = lambda division: None
    return hbm


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """Let models of a CUDA device be paged that would fit there, with homes below."""
    with mock.patch.object(budget, "stays_resident", lambda *_, **__: False):
        yield


def keep_measuring(engine: Engine) -> None:
    """As `stay_paged`, and what the meter has seen stays seen."""
    stay_paged(engine).begin = lambda: None


def note(seen: Seen, engine: Engine) -> None:
    counts = engine.setup.stats.counts
    seen.evictions += counts["evict"] + counts["discard"]
    seen.fetches += counts["fetch"]
    seen.misses += counts["miss"]
    seen.chunks = engine.setup.blueprint.layout.n_chunks
    seen.mode = engine.residence.name
    seen.host_peak = engine.setup.ledger.peak(Tier.HOST)
    pool = engine.setup.store.pool
    if pool.spills:
        homes = engine.setup.store.homes.values()
        needs = [home.needs(0, home.part(slice(None)).numel(), PinUse.READ) for home in homes]
        seen.extents = max(seen.extents, sum(len(tuple(extents)) for extents in needs))
        seen.read_bytes += engine.setup.stats.n_bytes[Lane.READ]
        seen.write_bytes += engine.setup.stats.n_bytes[Lane.WRITE]
        seen.pool_peak, seen.pool_bytes = pool.cache.peak, pool.n_bytes


@dataclass(frozen=True)
class Budget:
    """Budgets of a case: the activations it was measured to keep, and its parameters."""

    activations: int
    smallest: int
    params: int

    def of(self, share: float) -> int:
        """Return an ``hbm`` under which ``share`` of the parameters fit as frames."""
        return self.activations + max(self.smallest, int(share * self.params))


@functools.cache
def measure(
    case: Case, make: MakeOptimizer, chunk_bytes: int, *, devices: tuple[str, ...] = ("cpu",)
) -> Budget:
    """Train with room for everything, and note what the activations took: on "cpu" a bound on
    it, on "cpu:sim" every allocation. Once in a process for the same case and optimizer.
    """
    found = [measured(case, make, chunk_bytes, device) for device in devices]
    return max(found, key=lambda budget: budget.activations)


def measured(case: Case, make: MakeOptimizer, chunk_bytes: int, device: str) -> Budget:
    torch.manual_seed(11)
    model = case.build()
    plan = draw(model, make(model), Config.load(chunk_bytes=chunk_bytes))
    params = sum(b.n_bytes for b in plan.layout.buckets)
    least = plan.granules(plan.widest) * plan.granule_bytes
    buffers = sum(b.nbytes for b in model.buffers())
    config = Config.load(device=device, hbm=1 << 30, chunk_bytes=chunk_bytes, activations="keep")
    model, optimizer = prepare_tuned(model, make(model), config, None)
    top = 0
    for number in range(STEPS):
        engine = engine_of(model)
        keep_measuring(engine)
        one_step(case, model, optimizer, number, prepared=True)
        if engine.residence.name == "paged":
            top = max(top, engine.residence.hbm.activations_seen())
        optimizer.step()
        optimizer.zero_grad()
    return Budget(top + buffers, least, params)


def smallest(case: Case, budget: Budget, run: Callable[[int], Seen]) -> Seen:
    """Run at the smallest budget that works; a case that needs more frames at once says so.

    What an error names is needed at least: what comes later may need more, found in steps that grow
    once eight of them were too small.
    """
    hbm, more = budget.of(0.0), max(budget.smallest // 4, 256)
    tried = 0
    most = budget.of(1.0) + 2 * budget.smallest + budget.activations
    while True:
        try:
            return run(hbm)
        except BudgetError as error:
            assert error.needed_bytes > 0, "a BudgetError names what would have worked"
            if hbm == most or error.needed_bytes > most:
                raise
            hbm = min(max(hbm + more, error.needed_bytes), most)
            tried += 1
            more = more * 3 // 2 if tried >= 8 else more
