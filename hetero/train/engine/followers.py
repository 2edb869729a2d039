"""What follows what happens to the homes of parameters: saves, masters, gradients (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero.memory.layout import Bucket, Segment
from hetero.train.engine.snapshot import Saver
from hetero.train.gradients.store import GradStore
from hetero.train.update.masters import Masters


@dataclass(frozen=True, slots=True)
class Followers:
    """The `HomeEvents` of a model that trains."""

    saver: Saver
    masters: Masters
    grads: GradStore

    def writing(self, bucket_id: int) -> None:
        """A save has read the home before a user's write comes there."""
        self.saver.wait_for(bucket_id)

    def overwriting(self, bucket: Bucket, start: int, end: int) -> Callable[[], None]:
        """Weights that change become their own masters."""
        return self.masters.overwriting(bucket, start, end)

    def written(self, segment: Segment) -> None:
        """A weight that was written is its own master."""
        self.masters.reset(segment)

    def updated(self, bucket: Bucket) -> None:
        """The update has read the gradients: their home goes."""
        self.grads.release(bucket)
