"""Work on HOST in the middle of a model's operations (floor 2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hetero.internals import current_mode, without_modes

_NOTHING = nullcontext()


def host_work() -> AbstractContextManager[Any]:
    """Hide a block's operations on HOST from modes that count."""
    if current_mode() is None:
        return _NOTHING
    manager: AbstractContextManager[Any] = without_modes()
    return manager
