"""Guards gradients that early updates may have read, see [Note: early updates]."""

from __future__ import annotations

from hetero.errors import StateError, too_early
from hetero.memory.layout import Bucket, Segment


class EarlyReads:
    """Refuses changes of gradients between their arrival and the step, if updates may be early."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._fired: set[int] = set()  # parameters with a gradient since the last step
        self._begun: set[int] = set()  # buckets whose early update has begun

    def arrive(self, bucket: int, segment: Segment) -> None:
        """Note a gradient; StateError if its bucket's update has begun."""
        if self._enabled:
            self.check_addend(bucket, segment)
            self._fired.add(segment.index)

    def has_come(self, segment: Segment) -> bool:
        """Whether a gradient of a parameter came since the last step."""
        return segment.index in self._fired

    def begin(self, bucket: Bucket) -> None:
        """Note that an early update reads a bucket's gradients."""
        self._begun.add(bucket.id)

    def seal(self) -> None:
        """End the step of early updates: gradients are the user's again."""
        self._begun.clear()
        self._fired.clear()

    def check_addend(self, bucket: int, segment: Segment) -> None:
        """Raise StateError for another gradient of a bucket whose update has begun."""
        if bucket in self._begun:
            raise too_early(f"another gradient of {segment.spec.name!r} comes")

    def check_write(self, segment: Segment) -> None:
        """Raise StateError for a write to a gradient that an update may have read."""
        if self._enabled and segment.index in self._fired:
            raise StateError(
                f"updates='backward': the gradient of {segment.spec.name!r} is written between"
                " backward and optimizer.step(), and its update may have begun",
                advice="leave updates= at 'step' to clip, scale or average gradients",
            )
