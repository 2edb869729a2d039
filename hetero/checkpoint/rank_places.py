"""Which saved rank one of now goes on from: that with its place in the model (no torch)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class RankPlace(NamedTuple):
    """Where a rank is among those of a model."""

    stage: int
    copy: int
    """Among ranks with the same stages and the same parts of tensors: along all other axes."""
    tensor: int


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide a model. They are numbered stage by stage, and those of a tensor follow each
    other (`hetero.parallel.mesh.AXES`)."""

    n_ranks: int
    n_stages: int
    n_tensor: int

    def __post_init__(self) -> None:
        """ValueError for ranks that cannot be divided like that."""
        parts = self.n_stages * self.n_tensor
        if parts < 1 or self.n_ranks < 1 or self.n_ranks % parts:
            raise ValueError(f"{self.n_ranks} ranks of {parts} parts")

    def place(self, rank: int) -> RankPlace:
        stage, within = divmod(rank, self.n_ranks // self.n_stages)
        return RankPlace(stage, *divmod(within, self.n_tensor))

    def seen_from(self, other: Division, rank: int) -> RankPlace:
        """Return the place here of a rank of another division. Parts of tensors that are cut
        otherwise have no places in common: it is that of the first part."""
        place = other.place(rank)
        return place if other.n_tensor == self.n_tensor else place._replace(tensor=0)

    def nearest(self, ranks: Iterable[int], to: RankPlace) -> int:
        """Return the rank with this place; else the first with its part of tensors, of its copy if
        there is one, and of its stage."""

        def apart(rank: int) -> tuple[bool, bool, bool, int]:
            stage, copy, tensor = self.place(rank)
            return tensor != to.tensor, copy != to.copy, stage != to.stage, rank

        return min(ranks, key=apart)

    def exactly(self, other: Division, rank: int) -> int | None:
        """Return the rank here with the place of one of another division; None if there is none, or
        if stages or tensors are divided otherwise."""
        if (other.n_stages, other.n_tensor) != (self.n_stages, self.n_tensor):
            return None
        place = other.place(rank)
        found = self.nearest(range(self.n_ranks), place)
        return found if self.place(found) == place else None
