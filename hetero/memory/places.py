"""The tier of every home (floor 1, mechanism)."""

from __future__ import annotations

from collections.abc import Collection

from hetero.types import Kind, Tier


class HomePlaces:
    """The tiers of homes; which buckets' homes are on HBM may change between steps.

    Args:
        stays: whether parameters stay where they compute: then all homes are there.
        on_disk: kinds and buckets of the homes on disk.
    """

    __slots__ = ("on_disk", "on_hbm", "stays")

    def __init__(
        self, *, stays: bool = False, on_disk: Collection[tuple[Kind, int]] = frozenset()
    ) -> None:
        self.stays = stays
        self.on_disk = on_disk
        self.on_hbm: set[int] = set()
        """Buckets of a paged model whose homes are on HBM, those of all kinds."""

    def tier(self, kind: Kind, bucket: int) -> Tier:
        """Return the tier of a home, made now or there already."""
        if self.stays or bucket in self.on_hbm:
            return Tier.HBM
        return Tier.NVME if (kind, bucket) in self.on_disk else Tier.HOST
