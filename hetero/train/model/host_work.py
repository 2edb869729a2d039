"""Work on HOST in the middle of a model's operations (floor 2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode


def host_work() -> AbstractContextManager[Any]:
    """Let operations on HOST inside a block count for nothing: modes that watch look away."""
    if _get_current_dispatch_mode() is None:
        return nullcontext()
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager
