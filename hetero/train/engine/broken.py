"""A model that must not be used: a load of it, or a step, failed half-way (floor 2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hetero.errors import StateError
from hetero.train.access.hooks import Hooks


class Broken:
    """Why a model must not be used; "" if it may be."""

    def __init__(self, model: nn.Module) -> None:
        self.why = ""
        self._model = model
        self._barrier = Hooks()  # refuses forwards meanwhile

    def refuse(self) -> None:
        """Raise StateError if the model must not be used."""
        if self.why:
            raise StateError(
                f"the model's values do not belong together: {self.why}",
                advice="load a whole checkpoint with hetero.load_checkpoint before going on",
            )

    def begin_load(self, source: str) -> None:
        """Refuse every use of the model until `end_load`."""
        self.tear(f"{source} was loaded in part")

    def tear(self, why: str) -> None:
        """Refuse every use of the model until a load is complete."""
        self.end_load()
        self.why = why
        self._barrier.refuse_forwards(self._model, self.refuse)

    @contextmanager
    def loads_itself(self) -> Iterator[None]:
        """Let the model's own methods of loading use its state dict before a load is complete."""
        said, self.why = self.why, ""
        try:
            yield
        finally:
            self.why = said

    def end_load(self) -> None:
        """A load is complete: the model may be used."""
        self.why = ""
        self._barrier.remove()
