"""Stages of a pipeline, cut from a model (floor 3).

A stage is the whole model, in which the modules of other stages are replaced by ones without
parameters: its forward is the model's own code, and its modules have the names that they have
there. torch's own `pipeline` and `SplitPoint` export the model to a graph, which keeps no modules
to page, no checkpoints, and one shape; here nothing is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero.errors import ConfigError, StateError
from hetero.parallel.anatomy import LOSS, Anatomy, result_of
from hetero.parallel.waists import first_of
from hetero.plan.cut import Weight, cut
from hetero.train.model.units import STANDS_FOR
from hetero.types import format_bytes

PLAIN = (bool, int, float, str, type(None))
"""Kinds of attributes of a block that the model's code may ask for."""
INNER = "model"
"""The name, in a stage, of the whole model."""


@dataclass
class Handing:
    """What a stage was given, and what the next one is."""

    received: torch.Tensor | None = None
    left: torch.Tensor | None = None
    is_trained: Callable[[], bool] | None = None
    """Whether gradients go back through the stage that runs with gradients; None if none does."""

    def check(self) -> None:
        """Raise StateError where blocks compute without a graph that the stage needs."""
        asks = self.is_trained
        if asks is not None and not torch.is_grad_enabled() and asks():
            raise StateError(
                "a block of a stage is computed without gradients, and those of other stages would"
                " end there: by torch.utils.checkpoint with use_reentrant=True, or torch.no_grad",
                advice="checkpoint with use_reentrant=False, or freeze what is not trained",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Handing:
        memo[id(self)] = found = Handing()
        return found


class Elsewhere(nn.Module):
    """Stands for a module of another stage, and gives on what it is given."""

    def __init__(self, module: nn.Module, passage: Handing) -> None:
        super().__init__()
        self.passage = passage
        setattr(self, STANDS_FOR, type(module))
        for name, value in vars(module).items():
            if type(value) in PLAIN and not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


class Entering(Elsewhere):
    """Stands for the last block before a stage's own: gives on what the stage was given."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.passage.received is not None
        self.passage.check()
        return self.passage.received


class HandingOn(Elsewhere):
    """Stands for the first module after a stage's own: what it is given goes to the next stage."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.passage.received is not None:  # else a part of a block is computed again
            self.passage.check()
            self.passage.left = x
        return like(x)


class Preceding(Elsewhere):
    """Stands for what comes before all blocks: gives a tensor as a stage was given, of no use."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert self.passage.received is not None
        return like(self.passage.received)


class Nothing(Elsewhere):
    """Stands for what a block adds to its input in its first part, which is elsewhere."""

    n_outputs = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = first_of(args, kwargs)
        assert x is not None
        zeros = x.detach().new_full((), -0.0).expand(x.shape)  # x + -0.0 is x, of every number
        return (zeros, *[None] * (self.n_outputs - 1)) if self.n_outputs else zeros


def like(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same geometry, which takes no memory and leads back to nothing."""
    return x.detach().new_zeros(()).expand(x.shape)


class ModelStage(nn.Module):
    """A part of a model that is called in its turn, with what the stage before it returned.

    Args:
        model: the whole one.
        own: names of the modules that are this stage's.
        index: of the stage.
        call: further arguments of each call of the model.
        labels: the name of an argument that the last stage alone looks at.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        own: Own,
        call: Mapping[str, Any],
        labels: str | None = None,
    ) -> None:
        super().__init__()
        self.labels = labels
        self.passage = Handing()
        self.is_first, self.is_last = own.start == 0, own.has_after
        self.takes_ids = anatomy.takes_ids
        self.call = dict(call)
        self._takes_more = self.is_last and anatomy.own_loss_takes_more
        named = model.named_parameters(remove_duplicate=False)
        places = {name: at for at, (name, _) in enumerate(named)}
        self.model = carved(model, self._stand_ins(model, anatomy, own))
        self.order = {name: places[name] for name, _ in self.model.named_parameters()}
        """Of its parameters, by their names in the whole model: their places there."""
        self.training = model.training

    def _stand_ins(self, model: nn.Module, anatomy: Anatomy, own: Own) -> dict[str, nn.Module]:
        """Return what replaces the modules of other stages."""
        items = anatomy.items()
        kinds: dict[str, type[Elsewhere]] = {}
        mine = items[own.start : own.end]
        blocks = [anatomy.chain.index(name) for name, _ in mine] or [len(anatomy.chain)]
        for at, name in enumerate(anatomy.chain):
            if at == blocks[0] - 1:
                kinds[name] = Entering
            elif not blocks[0] <= at <= blocks[-1]:
                kinds[name] = Elsewhere
        following = [*items[own.end : own.end + 1]]
        if mine and mine[0][1] == 2:  # its first part is elsewhere
            first = anatomy.names((mine[0][0], 1))
            kinds |= {**dict.fromkeys(first, Elsewhere), first[-1]: Nothing}
        if following and following[0][1] == 2:
            second = anatomy.names(following[0])
            kinds |= {**dict.fromkeys(second, Elsewhere), second[0]: HandingOn}
        elif following and mine:
            kinds[following[0][0]] = HandingOn
        if not self.is_first:
            kinds |= dict.fromkeys(anatomy.before, Preceding)
        if not self.is_last:
            kinds |= dict.fromkeys(anatomy.after, Elsewhere)
            if own.end == len(items):
                kinds[anatomy.after[0]] = HandingOn
        found: dict[str, nn.Module] = {}
        for name, kind in kinds.items():
            found[name] = kind(model.get_submodule(name), self.passage)
        for name in (name for name, kind in kinds.items() if kind is Nothing):
            vars(found[name])["n_outputs"] = anatomy.waists[name.rpartition(".")[0]].n_outputs
        return found

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        passage = self.passage
        passage.received, given = x, x
        if torch.is_grad_enabled():
            passage.is_trained = lambda: x.requires_grad or self._has_trained()
        if self.labels is not None and not self.is_last:
            kwargs.pop(self.labels, None)
        if not self.is_first and self.takes_ids:
            given = torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)
        try:
            output = self.model(given, *args, **self.call, **kwargs)
            if self._takes_more and getattr(output, "loss", None) is not None:
                raise ConfigError(
                    "the model's own loss may take what blocks of other stages make apart from"
                    " what they return (router logits, hidden states)",
                    advice="give the schedule a loss of the logits, and the stages no labels; or"
                    " turn such outputs off (output_router_logits=False)",
                )
            found = result_of(output) if self.is_last else passage.left
        finally:
            passage.received = passage.left = None
            passage.is_trained = None
        assert found is not None
        return found if found.dim() else found.view(1)  # schedules join results of micro-batches

    def _has_trained(self) -> bool:
        return any(param.requires_grad for param in self.parameters())

    def in_whole(self, name: str) -> str:
        """Return the name in the whole model of a parameter, a buffer or a module of the stage."""
        return name.removeprefix(INNER).removeprefix(".")


def carved(model: nn.Module, stand_ins: Mapping[str, nn.Module]) -> nn.Module:
    """Return a model with some modules replaced: those around them are copied, others are shared
    with the whole one."""
    below: dict[str, dict[str, nn.Module]] = {}
    for name, module in stand_ins.items():
        head, _, rest = name.partition(".")
        below.setdefault(head, {})[rest] = module
    found = copy.copy(model)
    for key in ("_modules", "_parameters", "_buffers"):
        found.__dict__[key] = dict(model.__dict__[key])
    for head, inside in below.items():
        child = model._modules[head]
        assert child is not None
        found._modules[head] = inside[""] if "" in inside else carved(child, inside)
    return found


# -- the cut -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Own:
    """What a stage has: items of the chain from one to before another, and what comes after."""

    start: int
    end: int
    has_after: bool


@dataclass(frozen=True)
class CutStage:
    """What became of a stage; its names and weights are those of the whole model's modules."""

    index: int
    rank: int
    """Of the pipeline."""
    own: Own
    names: tuple[str, ...]
    weight: Weight


@dataclass(frozen=True)
class Cut:
    """Where a model is cut; prints as a table."""

    n_ranks: int
    stages: tuple[CutStage, ...]
    is_timed: bool
    """Whether weights are seconds; else they are operations of matrix products."""

    @property
    def imbalance(self) -> float:
        """How much longer than the mean the slowest stage takes, as a part of the mean."""
        seconds = [stage.weight.seconds for stage in self.stages]
        mean = sum(seconds) / len(seconds)
        return max(seconds) / mean - 1 if mean else 0.0

    def of_rank(self, rank: int) -> list[CutStage]:
        return [stage for stage in self.stages if stage.rank == rank]

    def __str__(self) -> str:
        what = "ms" if self.is_timed else "Gflop"
        factor = 1e3 if self.is_timed else 1e-9
        total = sum(stage.weight.seconds for stage in self.stages)
        rows = [("stage", "rank", "modules", what, "", "weights")]
        for stage in self.stages:
            seconds = stage.weight.seconds
            part = f"{seconds / total:.1%}" if total else ""
            size = format_bytes(stage.weight.n_bytes)
            shown = f"{seconds * factor:.3f}"
            rows.append((f"{stage.index}", f"{stage.rank}", runs(stage.names), shown, part, size))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(
            [*lines, f"the slowest stage takes {self.imbalance:.1%} more than the mean"]
        )


def runs(names: Sequence[str]) -> str:
    """Return names, those that differ by a number alone together."""
    found: list[tuple[str, int, int]] = []
    for name in names:
        head, _, last = name.rpartition(".")
        number = int(last) if last.isdecimal() else -1
        if found and number > 0 and found[-1][0] == head and found[-1][2] == number - 1:
            found[-1] = head, found[-1][1], number
        else:
            found.append((head, number, number) if number >= 0 else (name, -1, -1))

    def shown(head: str, first: int, last: int) -> str:
        numbers = "" if first < 0 else f"{first}" if first == last else f"{first}-{last}"
        return f"{head}.{numbers}".strip(".")

    return ", ".join(shown(*each) for each in found)


def cut_model(anatomy: Anatomy, ranks: Sequence[int], is_timed: bool) -> Cut:
    """Cut a model into as many stages as ``ranks`` names: of each stage, its rank.

    Raises ConfigError if it has fewer modules in its chain.
    """
    weights, items = anatomy.weights, anatomy.items()
    total = [anatomy.weight(item) for item in items]
    total[0] = together([total[0], *(weights[name] for name in anatomy.before)])
    after = together([weights[LOSS], *(weights[name] for name in anatomy.after)])
    if anatomy.is_apart:
        total.append(after)
    else:
        total[-1] = together([total[-1], after])
    if len(total) < len(ranks):
        raise ConfigError(
            f"{len(items)} modules in a row are not cut into {len(ranks)} stages",
            advice="use fewer ranks, or a schedule with fewer stages a rank",
        )
    starts = cut(total, len(ranks))
    ends = [*starts[1:], len(total)]
    found = [
        cut_stage(anatomy, index, rank, start, end, together(total[start:end]))
        for index, (rank, start, end) in enumerate(zip(ranks, starts, ends, strict=True))
    ]
    return Cut(max(ranks) + 1, tuple(found), is_timed)


def cut_stage(
    anatomy: Anatomy, index: int, rank: int, start: int, end: int, weight: Weight
) -> CutStage:
    items = anatomy.items()
    n = len(items)
    has_after = end == n + anatomy.is_apart
    own = Own(start, min(end, n), has_after)
    names = [*(anatomy.before if start == 0 else ()), *anatomy.names_of(items[start : own.end])]
    names += anatomy.after if has_after else ()
    return CutStage(index, rank, own, tuple(names), weight)


def together(weights: Sequence[Weight]) -> Weight:
    return Weight(sum(w.seconds for w in weights), sum(w.n_bytes for w in weights))


# -- names ---------------------------------------------------------------------------------------


def stages_in(model: nn.Module) -> Iterator[tuple[str, ModelStage]]:
    """Yield the stages in a model, or the model that is one, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, ModelStage):
            yield name, module
