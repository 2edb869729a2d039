"""Programs that the suites of FSDP2, DeepSpeed and Colossal-AI run on several ranks, as loops that
one process of plain torch can make too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.train.engine.tuning import Tuning
from tests.ranks.models import Values

STEPS = 4
SIZES = (7, 15, 16, 17, 16, 15, 7)


class Loop(Protocol):
    """Who runs a program."""

    def prepared(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        """Return both, as they train."""

    def backward(
        self, loss_of: Callable[[int], torch.Tensor], *, retain_graph: bool = False
    ) -> None:
        """Go backward from the loss of each rank."""

    def clip(self, model: nn.Module, optimizer: Any, limit: float) -> float:
        """Clip the gradients; returns their norm."""


class OnARank:
    """One of the ranks that share the model."""

    def __init__(self, rank: int, hbm_bytes: int, *, one_sided: bool) -> None:
        self.rank = rank
        self._hbm = hbm_bytes
        self.models: list[nn.Module] = []
        self._tuning = Tuning(one_sided=one_sided)

    def prepared(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self.models.append(model)
        config = Config.load(mesh="world", device="cpu:sim", hbm=self._hbm, chunk_bytes=1024)
        return prepare_tuned(model, optimizer, config, self._tuning)

    def backward(
        self, loss_of: Callable[[int], torch.Tensor], *, retain_graph: bool = False
    ) -> None:
        loss_of(self.rank).backward(retain_graph=retain_graph)

    def clip(self, model: nn.Module, optimizer: Any, limit: float) -> float:
        return float(optimizer.clip_grad_norm_(limit))


class InOneProcess:
    """Plain torch, with the micro-batches of all ranks, added up as ranks add them."""

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._params: list[nn.Parameter] = []

    def prepared(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        self._params += model.parameters()
        return model, optimizer

    def backward(
        self, loss_of: Callable[[int], torch.Tensor], *, retain_graph: bool = False
    ) -> None:
        for rank in range(self.n_ranks):
            sums = [param.grad for param in self._params]
            for param in self._params:
                param.grad = None
            loss_of(rank).backward(retain_graph=retain_graph)
            for param, total in zip(self._params, sums, strict=True):
                if param.grad is None:
                    param.grad = total
                else:
                    grad = param.grad * (1 / self.n_ranks)
                    param.grad = grad if total is None else total.add_(grad)

    def clip(self, model: nn.Module, optimizer: Any, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_(model.parameters(), limit))


def batch(step: int, rank: int, rows: int = 4, width: int = 7) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def values(model: nn.Module, optimizer: torch.optim.Optimizer, **also: float) -> Values:
    """Return copies of weights and states, and what else is compared."""
    out = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            out[f"{number}.{key}"] = torch.as_tensor(value).clone()
    return {**out, **{name: torch.tensor(value) for name, value in also.items()}}


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def steps(loop: Loop, model: Any, optimizer: Any, loss_at: Callable[[int, int], Any]) -> Values:
    """Make `STEPS` clipped steps of one pass, whose loss is ``loss_at(step, rank)``."""
    norms = {}
    for step in range(STEPS):
        loop.backward(lambda rank: loss_at(step, rank))  # noqa: B023 # it is called at once
        norms[f"norm {step}"] = loop.clip(model, optimizer, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer, **norms)


class Body(nn.Module):
    """Blocks of odd sizes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


# -- 1, 3 to 6: shapes and paths through a model ---------------------------------------------------


def sizes_that_no_number_of_ranks_divides(loop: Loop) -> Values:
    body = Body(*SIZES, 1)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    return steps(loop, model, optimizer, lambda step, rank: model(batch(step, rank)).pow(2).mean())


def a_part_alone_then_the_root(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))

    def loss_at(step: int, rank: int) -> torch.Tensor:
        if step % 2:
            return model(batch(step, rank)).pow(2).mean()  # untyped model
        return model.layers[1](batch(step, rank, width=15)).pow(2).mean()  # untyped model

    return steps(loop, model, optimizer, loss_at)


def one_module_used_several_times(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))

    def loss_at(step: int, rank: int) -> torch.Tensor:
        x = batch(step, rank)
        for _ in range(3):
            x = model(x)
        return x.pow(2).mean()

    return steps(loop, model, optimizer, loss_at)


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Body(*SIZES)
        self.one, self.other = nn.Linear(7, 30), nn.Linear(7, 50)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.one(x), self.other(x)


def an_output_that_the_loss_does_not_use(loop: Loop) -> Values:
    body = TwoOutputs()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))

    def loss_at(step: int, rank: int) -> torch.Tensor:
        one, other = model(batch(step, rank))
        loss = one.pow(2).mean()
        return loss if step >= 2 else loss + other.pow(2).mean()  # untyped model

    return steps(loop, model, optimizer, loss_at)


class Pair(NamedTuple):
    first: torch.Tensor
    rest: list[torch.Tensor]


class Collections(nn.Module):
    """Units pass tensors on inside containers."""

    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(16, 16)

        def forward(self, found: dict[str, Pair]) -> dict[str, Pair]:
            first, (second, *_) = found["x"]
            return {"x": Pair(self.weight(second), [first, self.weight(first)])}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Opens() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = {"x": Pair(x, [x * 2])}
        for block in self.blocks:
            found = block(found)
        return found["x"].first + found["x"].rest[0] + found["x"].rest[1]


def activations_in_containers(loop: Loop) -> Values:
    body = Collections()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    return steps(
        loop, model, optimizer, lambda step, rank: model(batch(step, rank, width=16)).pow(2).mean()
    )


# -- 12, 14, 17, 18, 20, 21, 26, 27: programs that change what they train --------------------------


def gradients_times_a_factor_of_the_users(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    for step in range(STEPS):
        loop.backward(lambda rank: model(batch(step, rank)).pow(2).mean())  # noqa: B023
        for param in model.parameters():
            param.grad.mul_(0.25)
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer)


def weights_loaded_between_forwards(loop: Loop) -> Values:
    body = Body(*SIZES)
    start = {name: value.clone() * 0.5 for name, value in body.state_dict().items()}
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    view = model.state_dict()["layers.0.weight"]

    def loss_at(step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank)).pow(2).mean()  # untyped model

    loop.backward(lambda rank: loss_at(0, rank))
    model.load_state_dict(start)
    loop.backward(lambda rank: loss_at(1, rank))
    optimizer.step()
    optimizer.zero_grad()
    out = steps(loop, model, optimizer, loss_at)
    assert torch.equal(view, out["layers.0.weight"])
    return out


def frozen_parts_have_no_states(loop: Loop) -> Values:
    body = Body(*SIZES)
    body.layers[1].requires_grad_(False)
    model, optimizer = loop.prepared(body, adamw(p for p in body.parameters() if p.requires_grad))
    return steps(loop, model, optimizer, lambda step, rank: model(batch(step, rank)).pow(2).mean())


class Odd(nn.Module):
    """Parameters without elements, of one, and of fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.ones(()))
        self.pair = nn.Parameter(torch.randn(2))
        self.body = Body(*SIZES, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.pair + self.empty.sum()


def parameters_of_no_and_of_one_element(loop: Loop) -> Values:
    body = Odd()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    return steps(loop, model, optimizer, lambda step, rank: model(batch(step, rank)).pow(2).mean())


def a_forward_in_a_loop(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))

    def loss_at(step: int, rank: int) -> torch.Tensor:
        return sum(
            model(batch(10 * step + i, rank)).pow(2).mean() for i in range(3)
        )  # sum of tensors

    return steps(loop, model, optimizer, loss_at)


def training_evaluation_and_another_path(loop: Loop) -> Values:
    body = TwoOutputs()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    judged = {}
    for step in range(STEPS):
        model.train()
        which = step // 2  # another head from the third step on
        loop.backward(lambda rank: model(batch(step, rank))[which].pow(2).mean())  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            judged[f"judged {step}"] = float(model(batch(99, 0))[0].sum())
    return values(model, optimizer, **judged)


def a_limit_that_changes_between_steps(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    norms = {}
    for step, limit in enumerate((1e-3, 10.0, 1e-2, 1e-4)):
        loop.backward(lambda rank: model(batch(step, rank)).pow(2).mean())  # noqa: B023
        norms[f"norm {step}"] = loop.clip(model, optimizer, limit)
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer, **norms)


def one_parameter_read_and_written_by_name(loop: Loop) -> Values:
    body = Body(*SIZES)
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    seen = {}
    for step in range(STEPS):
        loop.backward(lambda rank: model(batch(step, rank)).pow(2).mean())  # noqa: B023
        param = dict(model.named_parameters())["layers.1.weight"]
        seen[f"grad {step}"] = float(param.grad.sum())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            param.mul_(0.9)
            optimizer.state[param]["exp_avg"].mul_(0.5)
        seen[f"value {step}"] = float(param.detach().sum())
        seen[f"state {step}"] = float(optimizer.state[param]["exp_avg_sq"].sum())
    return values(model, optimizer, **seen)


# -- 22 to 24: backward passes of other kinds -------------------------------------------------


class Checkpointed(nn.Module):
    """A block that is used twice inside checkpoints, one of them of the other kind."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Body(*SIZES), nn.Linear(7, 30)
        self.fails = False

    def _again(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            raise ValueError("planted: the forward is made again")
        return self.block(x)  # torch's modules return Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._again, x, use_reentrant=False)
        x = checkpoint(self._again, x, use_reentrant=False)
        return self.last(x)  # torch's modules return Any


def checkpointed_blocks_that_fail_once(loop: Loop) -> Values:
    body = Checkpointed()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))

    def loss_at(step: int, rank: int) -> torch.Tensor:
        return model(batch(step, rank)).pow(2).mean()  # untyped model

    first = steps(loop, model, optimizer, loss_at)
    model.fails = True
    try:
        loop.backward(lambda rank: loss_at(0, rank))
    except ValueError:
        pass
    else:
        raise AssertionError("the second forward did not fail")
    model.fails = False
    for param in model.parameters():
        param.grad = None
    again = steps(loop, model, optimizer, loss_at)
    return {**{f"first {k}": v for k, v in first.items()}, **again}


def two_models_in_one_loss(loop: Loop) -> Values:
    one, other = Body(*SIZES), Body(*SIZES)
    one, first = loop.prepared(one, adamw(one.parameters()))
    other, second = loop.prepared(other, adamw(other.parameters()))
    for step in range(STEPS):
        loop.backward(lambda rank: other(one(batch(step, rank))).pow(2).mean())  # noqa: B023
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return {
        **{f"one {k}": v for k, v in values(one, first).items()},
        **{f"other {k}": v for k, v in values(other, second).items()},
    }


def two_losses_of_one_forward(loop: Loop) -> Values:
    """Two passes through one graph, of which each exchanges."""
    body = TwoOutputs()
    model, optimizer = loop.prepared(body, adamw(body.parameters()))
    for step in range(STEPS):
        outputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def loss_at(rank: int, which: int) -> torch.Tensor:
            if which == 0:
                outputs[rank] = model(batch(step, rank))  # noqa: B023 # it is called at once
            return outputs[rank][which].pow(2).mean()  # noqa: B023

        loop.backward(lambda rank: loss_at(rank, 0), retain_graph=True)
        loop.backward(lambda rank: loss_at(rank, 1))
        optimizer.step()
        optimizer.zero_grad()
    return values(model, optimizer)


HBM_BYTES: dict[Callable[[Loop], Values], int] = {
    sizes_that_no_number_of_ranks_divides: 9_000,
    a_part_alone_then_the_root: 9_000,
    one_module_used_several_times: 14_000,
    an_output_that_the_loss_does_not_use: 10_000,
    activations_in_containers: 9_000,
    gradients_times_a_factor_of_the_users: 9_000,
    weights_loaded_between_forwards: 9_000,
    frozen_parts_have_no_states: 9_000,
    parameters_of_no_and_of_one_element: 9_000,
    a_forward_in_a_loop: 14_000,
    training_evaluation_and_another_path: 10_000,
    a_limit_that_changes_between_steps: 9_000,
    one_parameter_read_and_written_by_name: 9_000,
    checkpointed_blocks_that_fail_once: 14_000,
    two_models_in_one_loss: 9_000,
    two_losses_of_one_forward: 14_000,
}
"""Programs, each with nearly the smallest budget that it trains in."""
