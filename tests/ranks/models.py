"""A model to share between ranks, its batches, and what N ranks must come to: one rank's N
micro-batches, added up as `hetero.train.gradients.exchange` says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.train.engine.tuning import Tuning

Values = dict[str, torch.Tensor]
Optimizers = Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
ADDING: Optimizers = {
    "decayed sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "decayed adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.01),
    "decayed rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, weight_decay=0.01),
}
"""Rules that begin by adding to the gradient."""
WHOLE: Optimizers = {
    "lamb": lambda params: hetero.optim.LAMB(params, lr=1e-2),
    "lars": lambda params: hetero.optim.LARS(params, lr=1e-1),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=1e-2),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "8bit": lambda params: hetero.optim.AdamW8bit(params, lr=1e-2),
}
"""Rules that need whole tensors."""


class Net(nn.Module):
    """Blocks whose sizes no number of ranks divides."""

    def __init__(self, width: int = 24, n_blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(10, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 3 * width + 1), nn.GELU(), nn.Linear(3 * width + 1, width)
            )
            for _ in range(n_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, 7)
        self.skipped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = x + block(x)
        out: torch.Tensor = self.last(self.norm(x)).float()
        return out


@dataclass(frozen=True)
class Run:
    """What a run does: ``steps`` of ``passes`` backward passes each."""

    optimizer: str = "adamw"
    steps: int = 4
    passes: int = 1
    clip: float | None = 0.5
    frozen: tuple[int, ...] = ()
    """Blocks without gradients."""
    skips: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The block that a rank leaves out in a pass, by (pass since the beginning, rank)."""
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
    )
    one_sided: bool = True
    homes_on_hbm: bool | None = None
    """As `Tuning.homes_on_hbm`."""
    slow: int | None = None
    """The rank whose updates take long."""
    width: int = 24
    n_blocks: int = 4
    mesh: Any = "world"
    rows: tuple[int, ...] = (5,)
    """Of batches: each rank goes through them, one further than the rank before it."""


def built(run: Run) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(run.width, run.n_blocks)
    for number in run.frozen:
        model.blocks[number].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, {**OPTIMIZERS, **ADDING, **WHOLE}[run.optimizer](trained)


def loss_of(model: Net, run: Run, micro: int, rank: int) -> torch.Tensor:
    skipped = run.skips.get((micro, rank))
    model.skipped = set() if skipped is None else {skipped}
    rows = run.rows[(micro + rank) % len(run.rows)]
    batch = torch.randn(rows, 10, generator=torch.Generator().manual_seed(1000 * micro + rank))
    out: torch.Tensor = model(batch)
    return out.pow(2).mean()


@dataclass
class Found:
    """What a run came to."""

    weights: Values
    states: dict[int, dict[str, Any]]
    norms: list[float]
    status: Any = None
    on_hbm: frozenset[int] = frozenset()
    """Buckets whose homes were on HBM at the end."""


def by_torch(run: Run, n_ranks: int) -> Found:
    """One process of plain torch, with the micro-batches of all ranks, group by group."""
    model, optimizer = built(run)
    params = [param for param in model.parameters() if param.requires_grad]
    norms, in_group = [], run.settings.get("sum_group", 1)
    for step in range(run.steps):
        for micro in range(step * run.passes, (step + 1) * run.passes):
            for first in range(0, n_ranks, in_group):
                sums: dict[nn.Parameter, torch.Tensor] = {}
                for rank in range(first, first + in_group):
                    loss = loss_of(model, run, micro, rank)
                    grads = torch.autograd.grad(loss, params, allow_unused=True)
                    for param, grad in zip(params, grads, strict=True):
                        if grad is not None:
                            grad = grad * (1 / n_ranks)
                            sums[param] = sums[param].add_(grad) if param in sums else grad
                for param, grad in sums.items():
                    param.grad = grad if param.grad is None else param.grad.add_(grad)
        if run.clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(params, run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return found(model, optimizer, norms)


def by_one_rank(run: Run, n_ranks: int) -> Found:
    """One rank of hetero, with the micro-batches of all ranks; right for powers of two."""
    return _trained(run, [(rank, 1 / n_ranks) for rank in range(n_ranks)], None)


def by_ranks(rank: int, run: Run) -> Found:
    """One of several ranks that share the model."""
    return _trained(run, [(rank, 1.0)], run.mesh)


def _trained(run: Run, ranks: list[tuple[int, float]], mesh: Any) -> Found:
    model, plain = built(run)
    config = Config.load(mesh=mesh, **run.settings)
    late = partial(time.sleep, 0.03) if run.slow in [rank for rank, _ in ranks] else None
    tuning = Tuning(one_sided=run.one_sided, homes_on_hbm=run.homes_on_hbm, pause=late)
    _, optimizer = prepare_tuned(model, plain, config, tuning)
    norms = []
    for step in range(run.steps):
        for micro in range(step * run.passes, (step + 1) * run.passes):
            for rank, share in ranks:
                loss = loss_of(model, run, micro, rank)
                hetero.backward(loss if share == 1.0 else loss * share)
        if run.clip is not None:
            norms.append(float(optimizer.clip_grad_norm_(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    status = hetero.status(model)
    on_hbm = frozenset(engine_of(model).setup.store.places.on_hbm)
    before = found(model, optimizer, norms)
    _, plain = hetero.release(model, optimizer)
    after = found(model, plain, norms)
    after.status, after.on_hbm = status, on_hbm
    assert_same(before, after, exact=run.settings.get("precision", "fp32") == "fp32")
    return after


def found(model: nn.Module, optimizer: torch.optim.Optimizer, norms: list[float]) -> Found:
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    states = {
        number: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for number, state in optimizer.state_dict()["state"].items()
    }
    return Found(weights, states, norms)


def assert_same(one: Found, other: Found, *, exact: bool = True) -> None:
    """Assert equal bits of weights (of masters they differ by a rounding), states and norms."""
    if exact:
        wrong = [
            name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])
        ]
        assert not wrong, f"weights {wrong}"
    assert one.states.keys() == other.states.keys()
    for number, state in one.states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other.states[number][key]), f"state {number} {key}"
    assert one.norms == other.norms
