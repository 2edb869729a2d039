"""Divides HBM until the next border: buffers, activations, ring, frames (floor 1).

Pure arithmetic on bytes; no torch. Activations' need is measured and forecast elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero.plan.activations import Policy

WORTH = 8  # add frames only for more than 1/8 of HBM: they are filled and planned anew


@dataclass(frozen=True, slots=True)
class Hbm:
    """The bytes of a device, and its fixed parts."""

    total_bytes: int
    buffer_bytes: int
    least_bytes: int
    """Of the frames that the widest unit pins: the minimum."""
    granule_bytes: int
    """Of one frame."""

    @property
    def most_bytes(self) -> int:
        """For frames, activations and the ring."""
        return self.total_bytes - self.buffer_bytes

    @property
    def room_bytes(self) -> int:
        """For activations and the ring, with the fewest frames."""
        return self.most_bytes - self.least_bytes

    @property
    def fewest_frames(self) -> int:
        """The minimum number of frames."""
        return self.least_bytes // self.granule_bytes

    def frames(self, n_bytes: int) -> int:
        """Return how many frames fit with ``n_bytes`` of activations and ring."""
        return (self.most_bytes - n_bytes) // self.granule_bytes

    def left_bytes(self, frames: int) -> int:
        """Return the bytes that ``frames`` leave to activations and the ring."""
        return self.most_bytes - frames * self.granule_bytes

    def is_worth(self, n_bytes: int, frames: int) -> bool:
        """Whether many more than ``frames`` fit with ``n_bytes`` of activations and ring."""
        least = max(self.most_bytes // WORTH, self.least_bytes)
        return self.left_bytes(frames) - n_bytes > least


@dataclass(frozen=True, slots=True)
class Division:
    """A division of HBM; the rest is less than a frame, or not worth a new plan."""

    buffer_bytes: int
    activation_bytes: int
    ring_bytes: int
    """Of gradients on their way down."""
    frames: int
    policies: Mapping[int, Policy] = field(default_factory=dict)
    """Of activations, by unit."""

    @property
    def moving_bytes(self) -> int:
        """Of activations and the ring, charged together."""
        return self.activation_bytes + self.ring_bytes


def divide(
    hbm: Hbm,
    activation_bytes: int,
    *,
    ring_bytes: int = 0,
    frames: int = 0,
    keeps: bool = False,
    policies: Mapping[int, Policy] | None = None,
) -> Division:
    """Return the division: activations first, then the ring, then frames in what is left.

    Args:
        activation_bytes: expected need of the next step.
        ring_bytes: of the ring that lets copies overlap with compute; it may get less.
        frames: present number.
        keeps: whether to stay at that number if only a few more would fit.

    Raises ValueError if activations do not fit with the fewest frames.
    """
    if activation_bytes > hbm.room_bytes:
        raise ValueError(f"{activation_bytes} bytes of activations; there is {hbm.room_bytes}")
    ring = min(ring_bytes, hbm.room_bytes - activation_bytes)
    fitting = hbm.frames(activation_bytes + ring)
    stays = keeps and fitting > frames and not hbm.is_worth(activation_bytes + ring, frames)
    return Division(
        hbm.buffer_bytes,
        activation_bytes,
        ring,
        frames if stays else fitting,
        dict(policies or {}),
    )
