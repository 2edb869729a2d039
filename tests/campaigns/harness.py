"""Programs run plain and prepared; whatever they record is compared bit by bit.

A program sees only torch and the side it runs on: ``side.prepare`` stands for the one line that a
user adds, and is nothing on the plain side. The budget of the prepared side is the smallest that
works, found by trying.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.errors import BudgetError
from tests.equivalence.harness import raw

TRIES = 12  # views that hold frames are found one by one
STEPS = 5


class Side:
    """One side of a comparison: plain torch where ``settings`` is None, else hetero."""

    def __init__(self, settings: dict[str, Any] | None) -> None:
        self.settings = settings
        self.records: list[tuple[str, Tensor | None]] = []
        self.models: list[nn.Module] = []

    @property
    def is_plain(self) -> bool:
        """Whether this is the side without hetero."""
        return self.settings is None

    def prepare(self, model: nn.Module, optimizer: Any = None, **more: Any) -> tuple[Any, Any]:
        """Return what the rest of the program uses."""
        if self.settings is None:
            return model, optimizer
        self.models.append(model)
        return hetero.prepare(model, optimizer, **{"chunk_bytes": 256, **self.settings, **more})

    def record(self, name: str, *values: Any) -> None:
        """Write down tensors, numbers or None."""
        for value in values:
            kept = None if value is None else torch.as_tensor(value).detach().clone()
            self.records.append((name, kept))

    def record_all(self, name: str, model: nn.Module, optimizer: Any = None) -> None:
        """Write down a model's state, its gradients, and the states of an optimizer."""
        self.record(f"{name}: state", *(v.clone() for v in model.state_dict().values()))
        self.record(f"{name}: gradients", *(p.grad for p in model.parameters()))
        if optimizer is not None:
            for _, state in sorted(optimizer.state_dict()["state"].items()):
                found = (v for _, v in sorted(state.items()) if v is not None)
                self.record(f"{name}: optimizer", *(torch.as_tensor(v) for v in found))

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        loss_of: Callable[[nn.Module, int], Tensor] | None = None,
        steps: int = STEPS,
    ) -> None:
        """Run a plain loop and write down every loss, gradient, weight and state."""
        for number in range(steps):
            torch.manual_seed(1000 + number)
            random.seed(number)
            np.random.seed(number)
            loss = (loss_of or loss_of_tokens)(model, number)
            loss.backward()
            self.record(f"loss {number}", loss)
            self.record(f"gradients {number}", *(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
            self.record_all(f"step {number}", model, optimizer)


Program = Callable[[Side], None]
VOCAB = 23


class Net(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(
        self, n_blocks: int = 6, d: int = 32, block: Callable[[], nn.Module] | None = None
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, d)
        self.blocks = nn.ModuleList((block or (lambda: Block(d)))() for _ in range(n_blocks))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tokens_of(number: int, batch: int = 2, length: int = 7) -> Tensor:
    """Return the tokens of one step."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(number))


def loss_of_tokens(model: nn.Module, number: int) -> Tensor:
    """Return the next-token loss of a model that makes logits of tokens."""
    tokens = tokens_of(number)
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A program, and what it is prepared with."""

    program: Program
    settings: dict[str, Any] = field(default_factory=dict)
    refusal: tuple[type[Exception], str] | None = None
    """The error that the prepared side has to end in, and words of it; None: no error."""

    @property
    def name(self) -> str:
        """The program's name with what it is prepared with."""
        return "-".join([self.program.__name__, *(f"{k}={v}" for k, v in self.settings.items())])


def ran(program: Program, settings: dict[str, Any] | None) -> Side:
    """Run a program on one side, from the same seed."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    side = Side(settings)
    program(side)
    return side


def smallest(program: Program, settings: dict[str, Any]) -> Side:
    """Run the prepared side at the smallest budget that works: the one that errors name."""
    hbm = 1_000
    for _ in range(TRIES):
        try:
            return ran(program, {**settings, "hbm": hbm})
        except BudgetError as error:
            hbm = max(hbm + 1, error.needed_bytes)
    raise AssertionError(f"{program.__name__} needs more than {hbm} bytes")


def prepared(case: Case) -> Side:
    """Run a case's prepared side; without ``hbm`` among its settings at the smallest that works."""
    settings = {"device": "cpu", **case.settings}
    if settings.get("nvme") is True:  # somewhere
        with TemporaryDirectory() as directory:
            return prepared(replace(case, settings={**settings, "nvme": directory}))
    return ran(case.program, settings) if "hbm" in settings else smallest(case.program, settings)


def check(case: Case) -> Side:
    """Compare every record of both sides; returns the prepared one."""
    plain, ours = ran(case.program, None), prepared(case)
    names = [name for name, _ in plain.records]
    assert [name for name, _ in ours.records] == names, f"{case.name}: other records"
    differ = [
        f"{name} {at}"
        for at, ((name, a), (_, b)) in enumerate(zip(plain.records, ours.records, strict=True))
        if not equal(a, b)
    ]
    assert not differ, f"{case.name}: {len(differ)} of {len(names)} differ, first {differ[:4]}"
    return ours


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two records have the same bits: -0.0 is not 0.0, and a NaN equals the same NaN."""
    if a is None or b is None:
        return a is None and b is None
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw(a), raw(b))
