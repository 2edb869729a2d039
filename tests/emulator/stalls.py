"""Where a planned steady step may wait for the device, and why: docs/cuda.md names each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from tests.emulator.fake import Stall


class Place(NamedTuple):
    """A function of hetero: the end of its module's path, and its name."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module.removesuffix('.py').replace('/', '.')}.{self.function}"

    def is_in(self, stall: Stall) -> bool:
        rows = (row.split(":", 1) for row in stall.where.split(" <- ") if ":" in row)
        return any(
            path.endswith("/" + self.module) and rest.split(" ", 1)[1] == self.function
            for path, rest in rows
        )


RING_FULL = Place("gradients/ring.py", "poll")
STAGE_FULL = Place("gradients/ring.py", "_free_stage")
LAST_GRADIENTS = Place("gradients/ring.py", "finish")
CLIPPED_GRADIENT = Place("gradients/slot.py", "land")
NORM = Place("update/states.py", "numbers_of")
FINITE = Place("gradients/clip.py", "read_together")
UNUSED = Place("access/pages.py", "flush")
OFFLOADED = Place("memory/parcel.py", "flush")
ALONE = Place("activations/offload.py", "border")
TURNED = Place("activations/offload.py", "awake")
ALWAYS = {RING_FULL, LAST_GRADIENTS, UNUSED}
"""Backward waits for a gradient where HBM has no room for more on their way down, and `step` for
the last ones: the emulator's copies land as late as they can."""
OFFLOADING = {OFFLOADED, TURNED, ALONE}
ADDENDS = Place("gradients/crossing.py", "cross")
SUM = Place("gradients/ring.py", "brought_up")
NORM_OF_RANKS = Place("gradients/slot.py", "norm_of")
TOLD = Place("gradients/shared.py", "share_norms")
SUMMED = Place("gradients/device_sums.py", "add")
SHARE_ON_HBM = Place("memory/share.py", "value")
"""Of a gradient on HBM that is put together for its norm."""
FROM_DISK = Place("memory/below.py", "fetch")
STAGED = Place("device/staging.py", "_land")
"""On the threads that copy between stages and memory that is not page-locked."""
RANKS = {ADDENDS, SUMMED}
"""Of ranks that share a model, on the thread that sends gradients."""
CARRIED = Place("update/passage.py", "_landing")
"""On the threads that carry updates through HBM."""
SHOWN = Place("memory/manager.py", "let_write")
"""Of a program that holds a state dict."""
CLIPPING = {NORM, CLIPPED_GRADIENT}
CLIPPING_SUMS = CLIPPING | {SUM, STAGE_FULL}
CLIPPING_RANKS = CLIPPING | {SUM, NORM_OF_RANKS, TOLD, SHARE_ON_HBM}
PLACES = {
    *ALWAYS,
    *OFFLOADING,
    *CLIPPING_RANKS,
    *RANKS,
    FINITE,
    FROM_DISK,
    STAGED,
    STAGE_FULL,
    CARRIED,
    SHOWN,
}


def unexpected(found: Counter[Stall], allowed: Iterable[Place]) -> list[Stall]:
    """Return the waits that are at none of these places."""
    places = [*allowed]
    return [stall for stall in found if not any(place.is_in(stall) for place in places)]
