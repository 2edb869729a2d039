"""Typed errors, each with the need, the supply and an advice (floor 0)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any


class HeteroError(Exception):
    """Base of every failure that hetero reports.

    ``advice`` says how to go on; ``moves`` holds the last chunk moves, oldest first, if the failure
    came from inside the engine.
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


def afresh(error: BaseException) -> BaseException:
    """Return a copy of a kept error to raise: a raised one holds stack frames and their memory."""
    copy = type(error).__new__(type(error), *error.args)
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    if isinstance(error, OSError) and isinstance(copy, OSError):
        copy.errno = error.errno
    return copy


class ConfigError(HeteroError, ValueError):
    """A setting, a model or an optimizer that hetero cannot honour as given."""


class BudgetError(HeteroError, MemoryError):
    """A tier's byte budget is smaller than the need at one moment.

    ``needed_bytes`` is a budget of ``tier`` that is enough for the need so far: from `prepare`, for
    the states; from ``optimizer.step()``, for batches like the one that it refuses. Nothing was
    updated then, and training may go on. If the need could not be measured (``.advice`` says "at
    least"), more may be needed.
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


class OutOfMemory(BudgetError, RuntimeError):
    """A tier ran out while the model computed; a smaller batch may fit.

    Finders of batch sizes (accelerate's, Trainer's) recognise it by its one argument and its words:
    " out of memory.", and in accelerate 1.3 "CUDA out of memory.", though it is a budget.
    """

    def __init__(self, message: str, *, tier: str, **known: Any) -> None:
        said = f"{tier} out of memory. {message} (a budget, not a CUDA out of memory.)"
        super().__init__(said, tier=tier, **known)
        self.what = message
        """Without the words that others look for."""

    def __reduce__(self) -> Any:
        known: dict[str, Any] = {"advice": self.advice, "moves": self.moves}
        known["needed_bytes"] = self.needed_bytes
        return partial(type(self), tier=self.tier, **known), (self.what,)


class StateError(HeteroError, RuntimeError):
    """The library or the model is not in a state that allows the operation."""


class ForkedProcessError(StateError):
    """A forked child uses files, threads, memory or ranks' calls that belong to its parent."""


class TransferError(HeteroError, RuntimeError):
    """A copy between tiers failed, or arrived with wrong bytes."""


class StorageError(HeteroError, OSError):
    """A disk failed, filled up or returned other bytes than were written.

    ``op`` was tried at byte ``offset`` of ``path``; ``wanted`` and ``got`` are bytes.
    """

    def __init__(
        self,
        message: str,
        *,
        advice: str = "",
        moves: Iterable[str] = (),
        path: str = "",
        op: str = "",
        offset: int = 0,
        wanted: int = 0,
        got: int = 0,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, advice=advice, moves=moves)
        self.path = path
        self.op = op
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.errno = errno


class DiskFull(StorageError):
    """No space, no quota, or a file larger than the system allows."""


class DiskReadError(StorageError):
    """A read failed twice."""


class DiskWriteError(StorageError):
    """A write, a sync or a change of a directory failed."""


class TruncatedChunk(StorageError):
    """A file ended before the requested bytes."""


class ChunkCorrupt(StorageError):
    """A disk returned other bytes than those written last."""


class CheckpointError(HeteroError, RuntimeError):
    """A checkpoint is missing, damaged, unsafe or of another model."""


class NoCheckpoint(CheckpointError):
    """A directory holds no complete checkpoint."""


class CheckpointCorrupt(CheckpointError):
    """A checkpoint's bytes are not those that were saved."""


class CheckpointTooNew(CheckpointError):
    """A checkpoint was written by a later format than this version reads."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is of another model or another optimizer."""


class UnsafeCheckpoint(CheckpointError):
    """A checkpoint names or declares something that hetero never saves; nothing was opened."""


class DivergenceError(HeteroError, RuntimeError):
    """Ranks that must agree do not."""


class RankLost(DivergenceError):
    """A rank died, hangs, or left; the others cannot go on without it."""

    left: Any = None
    """What ranks that wait for this one are told: which rank, how and why."""


class UnknownTorch(HeteroError, ImportError):
    """hetero does not know this release of torch."""


KNOWN_TORCH = "2.9 to 2.13"


def too_early(what: str) -> StateError:
    """Return the error for an access to state that an early update has changed."""
    return StateError(
        f"updates='backward': {what} before optimizer.step(), and updates of this step have begun",
        advice="call optimizer.step() once after each backward pass, and before anything else reads"
        " or writes parameters, gradients or states; or leave updates= at 'step'",
    )


def unknown_torch(name: str, version: str) -> UnknownTorch:
    """Return the error for a release of torch without a name that hetero needs."""
    return UnknownTorch(
        f"torch {version} has no {name}, which hetero needs",
        advice=f"hetero knows torch {KNOWN_TORCH}; install one of these",
    )
