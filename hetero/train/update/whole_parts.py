"""Torch's rule on parameters that are parts of larger tensors (floor 2).

A rule that needs whole tensors steps a wrapper, as torch does, with collectives of the wrapper's
own for norms and products. So ranks make these steps inside ``step``, one after the other, in the
order of the optimizer's groups: that of a model that torch steps, as which another rank may have
it. A parameter (or its master), its gradient and its states are copies in RAM meanwhile.

[Note: states lie as parameters do]  A home has this rank's part of a state, cut as its parameter.
Rules of hetero bring gradients to that first. Those of torch make states like the gradient; where
it lies otherwise (that of an embedding cut by words is whole on all ranks) their numbers would be
rounded otherwise than torch's, and the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.train.model.parts import Parts
from hetero.train.update.arithmetic import Bench, Update
from hetero.train.update.rules import Group, Rule, State, is_elementwise
from hetero.train.update.states import Ready
from hetero.train.update.together import WholeShares


class Gradients(Protocol):
    """What is known of a model's gradients."""

    params: Sequence[nn.Parameter]
    parts: Parts

    def was_cut(self, param: nn.Parameter) -> bool:
        """Whether every rank had the whole of a gradient, of which its part is left."""


def check_placed(
    rule: Rule,
    params: Iterable[torch.Tensor],
    name: Callable[[torch.Tensor], str],
    is_placed: Callable[[nn.Parameter], bool],
) -> None:
    """Refuse a gradient as in [Note: states lie as parameters do], on all ranks of a tensor."""
    if rule.places_grads:
        return
    odd = next((param for param in params if not is_placed(cast("nn.Parameter", param))), None)
    if odd is None:
        return
    what, kind = name(odd), rule.kind.__name__
    raise ConfigError(
        f"the gradient of {what!r} lies on ranks otherwise than the parameter, and {kind} makes its"
        " states like the gradient",
        advice=f"leave {what!r} out of the groups of {kind} (an embedding has no use for it), or"
        " divide it so that its gradient is divided alike",
    )


def draft_parts(
    bench: Bench, update: Update, group: Group, rows: Sequence[Ready], grads: Gradients
) -> list[Ready]:
    """Add steps of parameters that are parts, of an elementwise rule those of which ranks have
    addends of the gradient; return the rows of the others."""
    others = []
    for row in rows:
        param = grads.params[row.segment.index]
        is_addend = grads.parts.is_pending(param)
        if grads.parts.inside(param) is None or (bench.rule.elementwise and not is_addend):
            others.append(row)
            continue
        bench.states.needed(group, row)
        given = bench, group, update.bucket, row, grads.parts, param, is_addend
        update.together.append(WholeParts(*given))
    return others


@dataclass(frozen=True, slots=True)
class WholeParts(WholeShares):
    """The step of a parameter of which ranks have parts, and of its part perhaps shares."""

    parts: Parts
    param: nn.Parameter
    """The user's."""
    is_addend: bool
    """Whether the gradient at home is this rank's addend."""

    @property
    def has_owner(self) -> bool:
        return False  # all ranks of a tensor make its collectives

    def _step(self, param: torch.Tensor, state: State) -> tuple[State, torch.Tensor]:
        grad, shape = param.grad, self.row.segment.spec.shape
        assert grad is not None
        wrap, parts = self.parts.wrapping(self.param), self.parts
        whole = wrap(param)
        whole.grad = parts.addend(self.param, grad) if self.is_addend else wrap(grad)
        before = {k: wrap(v) if is_elementwise(k, v, shape) else v for k, v in state.items()}
        with self.bench.cores.all():
            (after,) = self.bench.rule.run(self.group, [whole], [before])
        param.grad = None
        inside = {k: v for k, v in after.items() if parts.inside(v) is not None}
        return {**after, **{k: parts.value(self.param, v) for k, v in inside.items()}}, grad
