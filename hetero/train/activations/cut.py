"""How a unit is cut into slices, found by trying two samples (floor 2).

[Note: one batch]  To the user there is one batch: one loss over all samples. A unit that mixes
samples (batch norm in training, an auxiliary loss) cannot be sliced and is refused. Tainting finds
it: with other values in all other samples, the outputs of a slice must not change.

[Note: what is cut]  A first dimension may equal the batch by chance: a causal mask of as many
positions. A tensor whose other rows change a slice's outputs does not hold samples, and is given
whole; with the rest cut, a sample must have the same output in company and alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from hetero.errors import HeteroError, StateError
from hetero.train.activations.moment import Moment
from hetero.train.activations.slices import Sliced
from hetero.train.model.graph import leaves_of, users_hooks, versions
from hetero.train.model.units import makes_anew

NEAR = {1: 0.2, 2: 0.05, 4: 1e-3, 8: 1e-8}  # tolerance by item size, times the largest output


class Checked(NamedTuple):
    """How a unit is cut into slices."""

    cut: tuple[bool, ...]
    """Which of its tensors hold samples."""
    differentiable: tuple[bool, ...] = ()
    """Which outputs pass a gradient back."""


def check_unit(job: Sliced) -> Checked:
    """Return how a unit is cut into slices, or refuse it; changes nothing."""
    if makes_anew(job.module):
        raise job.refusal("makes its parameters anew in each forward, which would be many")
    if any(users_hooks(param) for param in job.params):
        raise job.refusal("has parameters with hooks of their own, which would run for each slice")
    moment = job.moment()
    job.cut = find_cut(job, moment) if len(job.rows) > 1 else job.candidates
    originals = job.tensors
    with job.lent(), moment.again(), torch.enable_grad(), job.around_trial():
        given = [
            t.detach().requires_grad_(of.requires_grad)
            for t, of in zip(job.parts(originals, job.rows[0]), originals, strict=True)
        ]
        outputs = job.run(given)
        check_leaves(job, outputs, given)
        return Checked(job.cut, tuple(output.requires_grad for output in outputs))


def find_cut(job: Sliced, moment: Moment) -> tuple[bool, ...]:
    """Return which tensors of a unit hold samples; see [Note: what is cut].

    Raises StateError for a unit that mixes samples. Runs two samples a few times, changing nothing.
    """
    places = [at for at, candidate in enumerate(job.candidates) if candidate]
    refused: StateError | None = None
    for n in range(len(places)):
        for whole in combinations(places, n):
            job.cut = tuple(of and at not in whole for at, of in enumerate(job.candidates))
            try:
                if keeps_apart(job, moment):
                    return job.cut
            except Shapes:
                continue
            except StateError as error:
                refused = refused or error
    raise refused or job.refusal("mixes samples: one changes when another does")


class Shapes(Exception):
    """Shapes do not fit: a tensor was cut that does not hold samples."""


TWO, ONE = slice(0, 2), slice(0, 1)


def keeps_apart(job: Sliced, moment: Moment) -> bool:
    """Whether a sample has the same output with any other sample, and alone.

    A single row may choose other kernels: it is compared up to rounding, unless the unit draws.
    """
    tensors = [t.detach() for t in job.tensors]
    clean = _of_rows(job, tensors, TWO, moment)
    for at, tensor in enumerate(job.parts(tensors, TWO)):
        for row in (0, 1) if job.cut[at] else ():
            other = changed_outside(tensor, slice(row, row + 1))
            if other is None:
                continue
            given = [other if i == at else t for i, t in enumerate(job.parts(tensors, TWO))]
            after = job.tried([t.clone() for t in given], moment, TWO)
            if any(not _same(a[row], b[row]) for a, b in zip(clean, after, strict=True)):
                return False
    alone = _of_rows(job, tensors, ONE, moment)
    return job.draws or all(is_near(few, both[ONE]) for few, both in zip(alone, clean, strict=True))


def _of_rows(
    job: Sliced, tensors: Sequence[torch.Tensor], rows: slice, moment: Moment
) -> list[torch.Tensor]:
    """Return a unit's outputs for some samples; raises Shapes, or StateError for a refusal."""
    given = [t.clone() for t in job.parts(tensors, rows)]
    untouched = versions(given)
    try:
        found = job.tried(given, moment, rows)
    except HeteroError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, AssertionError) as error:
        raise Shapes from error
    if versions(given) != untouched:
        raise job.refusal("writes to its inputs in place, of which it is given parts")
    job.check_rows(found, rows)
    return found


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    nan = torch.equal(first.isnan(), second.isnan())
    return nan and torch.equal(first.nan_to_num(), second.nan_to_num())


def changed_outside(tensor: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """Return a tensor with other values outside ``rows``; None if none can be found."""
    if tensor.is_meta:
        return None
    found = tensor.clone()
    outside = torch.ones(len(tensor), dtype=torch.bool, device=tensor.device)
    outside[rows] = False
    if tensor.is_floating_point() or tensor.is_complex():
        found[outside] = float("nan")
    elif tensor.dtype == torch.bool:
        found[outside] = ~found[outside]
    elif tensor.numel():  # a value of the tensor: an index stays in its range
        for value in (tensor.flatten()[0], tensor.flatten()[-1], 0):
            found[outside] = value
            if not torch.equal(found, tensor):
                break
    return None if torch.equal(found, tensor) else found


def is_near(few: torch.Tensor, all_: torch.Tensor) -> bool:
    """Whether outputs are equal up to the rounding of other kernels."""
    if few.shape != all_.shape:
        return False
    if not few.is_floating_point() or few.is_meta:
        return True
    top = all_.nan_to_num().abs().max() if all_.numel() else all_.new_zeros(())
    error = (few - all_).nan_to_num().abs().max() if all_.numel() else all_.new_zeros(())
    return bool(error <= NEAR[few.dtype.itemsize] * top)


def check_leaves(
    job: Sliced, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> None:
    """Refuse a unit that uses another unit's parameters: their gradients would be lost."""
    own = {id(leaf) for leaf in (*job.params, *given)}
    if any(id(leaf) not in own for leaf in leaves_of(outputs)):
        raise job.refusal("uses a parameter that is not its own")
