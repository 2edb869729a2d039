"""Whose words the columns of logits are: all of a vocabulary, or one rank's (floor 1).

Where ranks divide a head by words (DTensors of ``Shard(0)``), a rank has the logits of its words
alone. What a loss needs of the others is three numbers a token: the largest logit, the sum of
exponentials, and the label's own logit. Collectives give all ranks the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from hetero.errors import ConfigError
from hetero.internals import all_reduced


class Read(NamedTuple):
    """What a loss needs of a chunk's logits, each [t]."""

    lse: torch.Tensor
    chosen: torch.Tensor
    """The logits of the labels."""
    mean: torch.Tensor | None
    """Of all words' logits, if labels are smoothed."""


class Words(Protocol):
    """The words of a vocabulary that this rank has."""

    n: int
    """Words of the whole vocabulary."""
    n_parts: int
    """Ranks that divide it."""

    def read(self, logits: torch.Tensor, labels: torch.Tensor, *, smooth: bool) -> Read: ...

    def add(self, d: torch.Tensor, labels: torch.Tensor, amount: float) -> None:
        """Add to each token's entry of its label."""

    def summed(self, addend: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of the gradients that come through their words."""


class AllWords:
    """All words of a vocabulary."""

    def __init__(self, n: int) -> None:
        self.n, self.n_parts = n, 1

    def read(self, logits: torch.Tensor, labels: torch.Tensor, *, smooth: bool) -> Read:
        try:
            chosen = logits.gather(-1, labels[:, None])[:, 0]
        except RuntimeError as error:  # on a CPU; a look at the labels would wait for a device
            if "out of bounds" not in str(error):
                raise
            raise ConfigError(
                f"a label is no word of the head's {logits.shape[-1]}: {error}",
                advice="labels lie in [0, V), or are ignore_index",
            ) from error
        return Read(torch.logsumexp(logits, -1), chosen, logits.mean(-1) if smooth else None)

    def add(self, d: torch.Tensor, labels: torch.Tensor, amount: float) -> None:
        d.scatter_add_(-1, labels[:, None], d.new_full((len(labels), 1), amount))

    def summed(self, addend: torch.Tensor) -> torch.Tensor:
        return addend


class SomeWords:
    """The words that one of several ranks has of a vocabulary: [first, last)."""

    def __init__(self, first: int, last: int, n: int, n_parts: int, group: str) -> None:
        self.first, self.last = first, last
        self.n, self.n_parts = n, n_parts
        self._group = group

    def read(self, logits: torch.Tensor, labels: torch.Tensor, *, smooth: bool) -> Read:
        top = all_reduced(logits.amax(-1), self._group, "max")
        top = top.masked_fill(top.isinf(), 0)  # as in logsumexp: no infinity less infinity
        here, is_here = self._here(labels)
        chosen = logits.gather(-1, here[:, None])[:, 0].masked_fill(~is_here, 0)
        sums = [(logits - top[:, None]).exp_().sum(-1), chosen]
        sums += [logits.sum(-1)] if smooth else []
        exps, chosen, *rest = all_reduced(torch.stack(sums), self._group)
        unknown = (labels < 0) | (labels >= self.n)  # of which no rank has the logit
        chosen = chosen.masked_fill(unknown, float("nan"))
        return Read(exps.log() + top, chosen, rest[0] / self.n if rest else None)

    def add(self, d: torch.Tensor, labels: torch.Tensor, amount: float) -> None:
        here, is_here = self._here(labels)
        d.scatter_add_(-1, here[:, None], (is_here * amount).to(d.dtype)[:, None])

    def summed(self, addend: torch.Tensor) -> torch.Tensor:
        return all_reduced(addend.contiguous(), self._group)

    def _here(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return labels as columns of this rank, 0 for others', and which are this rank's."""
        is_here = (labels >= self.first) & (labels < self.last)
        return (labels - self.first).where(is_here, 0), is_here


def words_of(weight: torch.Tensor) -> Words:
    """Return whose words a head's weight, [V, H], has.

    Raises ConfigError for one that ranks divide otherwise than by words.
    """
    n = weight.shape[0]
    if not is_divided(weight):
        return AllWords(n)
    parted: Any = weight
    mesh, placements = parted.device_mesh, parted.placements
    n_ranks = mesh.size()
    at_once = -(-n // n_ranks)  # torch's rule: of the last rank there may be fewer
    if mesh.ndim != 1 or not placements[0].is_shard(0) or at_once * (n_ranks - 1) >= n:
        raise ConfigError(
            f"the head is placed as {placements} on {n_ranks} ranks, for {n} words",
            advice="let each of the ranks of one axis have words: ColwiseParallel",
        )
    first = mesh.get_local_rank() * at_once
    group = mesh.get_group().group_name
    return SomeWords(first, min(first + at_once, n), n, n_ranks, group)


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that ranks divide (a DTensor)."""
    return getattr(tensor, "placements", None) is not None


def here(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, to which gradients come."""
    parted: Any = tensor
    found: torch.Tensor = parted.to_local() if is_divided(tensor) else tensor
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor, of which ranks may have parts, or each a copy."""
    parted: Any = tensor
    found: torch.Tensor = parted.full_tensor() if is_divided(tensor) else tensor
    return found
