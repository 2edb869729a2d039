"""Norms of gradients at home, and clipping them to a global one (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from hetero.train.gradients.slot import Factors, GradSlot, LazyGrad, NormWay
from hetero.train.model.binding import get_grad, get_grads
from hetero.train.model.parts import Parts


class Norms(Protocol):
    """The norms of a model's gradients, some of which other ranks may have."""

    def everywhere(
        self, params: Sequence[nn.Parameter], norms: Sequence[torch.Tensor], how: str
    ) -> Sequence[torch.Tensor]:
        """Return the norms of all gradients, given those of this rank's, and ``how`` it clips.
        Collective."""


class OwnNorms:
    """This rank has all of the model's gradients."""

    def everywhere(
        self, params: Sequence[nn.Parameter], norms: Sequence[torch.Tensor], how: str
    ) -> Sequence[torch.Tensor]:
        return norms


OWN_NORMS = OwnNorms()


def clip_grad_norm_(
    params: Iterable[nn.Parameter], max_norm: float, norm_type: float, *, error_if_nonfinite: bool
) -> torch.Tensor:
    """Do as `torch.nn.utils.clip_grad_norm_` does, with the same bits.

    Where all gradients are at home, their norms are known, and factors may pend, no operation on a
    gradient is dispatched: torch's function takes 20 us a parameter through theirs.
    """
    params = list(params)
    slots = [] if error_if_nonfinite else deferrable(params)
    if not slots:
        return nn.utils.clip_grad_norm_(
            params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
    with torch.no_grad():
        norms = [slot.norm_of(NormWay(float(norm_type))) for slot in slots]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        factor = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
    pending = {u: Factors(u, factor) for u in {slot.factors.unscale for slot in slots}}
    for slot in slots:
        slot.defer(pending[slot.factors.unscale])
    return total


def clip_parts_(
    params: Iterable[nn.Parameter],
    parts: Parts,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
    whole: Callable[[nn.Parameter], bool],
    norms: Norms,
) -> torch.Tensor:
    """Do as torch does with each mesh's gradients, which it refuses to mix, under one norm of those
    of all stages.

    Args:
        whole: of gradients that were cut to parts: their norm is that of the whole. Collective.
        norms: of other stages.
    """
    found, ord = [param for param in params if parts.grad(param) is not None], float(norm_type)
    with torch.no_grad():
        own, how = parts.norms(found, ord, whole), f"to {float(max_norm)} by norms of order {ord}"
        total = parts.total(norms.everywhere(found, own, how), ord)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so they"
            " cannot be clipped"
        )
    nn.utils.clip_grads_with_norm_(found, max_norm, total, foreach=False)  # a list may not mix
    return total


def deferrable(params: Iterable[nn.Parameter]) -> list[GradSlot]:
    """Return all gradients if each may wait for its factor; torch groups others by their dtypes,
    and multiplies one that several parameters have for each of them."""
    grads = [grad for grad in get_grads(params) if grad is not None]
    slots = [grad.slot for grad in grads if type(grad) is LazyGrad]
    dtypes = {slot.segment.spec.dtype for slot in slots}
    right = len(set(slots)) == len(grads) and len(dtypes) == 1 and all(s.deferrable for s in slots)
    return slots if right else []


def norms_of(params: Iterable[nn.Parameter]) -> list[float]:
    """Return the 2-norm of every gradient; waits for the device once."""
    grads = [g for g in map(get_grad, params) if g is not None]
    return read_together(
        [
            g.slot.norm_of(NormWay(2.0))
            if isinstance(g, LazyGrad)
            else torch.linalg.vector_norm(g.float(), 2.0)
            for g in grads
        ]
    )


def read_together(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return scalars on any devices as numbers; waits for each device once."""
    found = [0.0] * len(numbers)
    for place in dict.fromkeys(number.device for number in numbers):
        mine = [i for i, number in enumerate(numbers) if number.device == place]
        values = torch.stack([numbers[i] for i in mine]).tolist()
        for i, value in zip(mine, values, strict=True):
            found[i] = value
    return found
