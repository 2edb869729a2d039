"""Typed failures: what was needed, what there was, and what to do (floor 0)."""

from __future__ import annotations

from collections.abc import Iterable


class HeteroError(Exception):
    """Base of every failure that hetero reports.

    ``advice`` says what to do next; ``moves`` holds the last chunk moves, oldest first, when the
    failure came from inside the engine.
    """

    def __init__(self, message: str, *, advice: str = "", moves: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.advice = advice
        self.moves = tuple(moves)

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.advice:
            parts.append(f"Advice: {self.advice}")
        if self.moves:
            parts.append("Last moves:\n  " + "\n  ".join(self.moves[-12:]))
        return "\n".join(parts)


class ConfigError(HeteroError, ValueError):
    """A setting, a model or an optimizer that hetero cannot honour as given."""


class BudgetError(HeteroError, MemoryError):
    """A tier's byte budget does not hold what is needed at once.

    ``needed_bytes`` is the smallest budget of ``tier`` that would have worked, when known.
    """

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        moves: Iterable[str] = (),
        tier: str = "",
        needed_bytes: int = 0,
    ) -> None:
        super().__init__(message, advice=advice, moves=moves)
        self.tier = tier
        self.needed_bytes = needed_bytes


class StateError(HeteroError, RuntimeError):
    """The library or the model is not in a state that allows the operation."""


class TransferError(HeteroError, RuntimeError):
    """A copy between tiers failed, or arrived with other bytes than were sent."""


class StorageError(HeteroError, OSError):
    """A disk failed, filled up or returned other bytes than were written."""


class CheckpointError(HeteroError, RuntimeError):
    """A checkpoint is missing, damaged, unsafe or of another model."""


class DivergenceError(HeteroError, RuntimeError):
    """Ranks that must agree do not."""
