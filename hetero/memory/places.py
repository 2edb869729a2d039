"""The tier of every home (floor 1, mechanism)."""

from __future__ import annotations

from collections.abc import Set

from hetero.types import Kind, Tier


class HomePlaces:
    """The tiers of homes; which are on HBM, and which of those on disk lie in RAM, may change
    between steps.

    Args:
        stays: whether parameters stay where they compute: then all homes are there.
        on_disk: kinds and buckets of the homes on disk, where their places are kept for them.
    """

    __slots__ = ("lifted", "on_disk", "on_hbm", "stays")

    def __init__(
        self, *, stays: bool = False, on_disk: Set[tuple[Kind, int]] = frozenset()
    ) -> None:
        self.stays = stays
        self.on_disk = on_disk
        self.on_hbm: set[int] = set()
        """Buckets of a paged model whose homes are on HBM, those of all kinds."""
        self.lifted: set[tuple[Kind, int]] = set()
        """Those of ``on_disk`` that lie in RAM, which others have left."""

    def tier(self, kind: Kind, bucket: int) -> Tier:
        """Return the tier of a home, made now or there already."""
        if self.stays or bucket in self.on_hbm:
            return Tier.HBM
        part = kind, bucket
        return Tier.NVME if part in self.on_disk and part not in self.lifted else Tier.HOST
