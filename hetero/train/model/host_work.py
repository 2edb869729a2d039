"""Work on HOST in the middle of a model's operations (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hetero.device import unseen

host_work: Callable[[], AbstractContextManager[Any]] = unseen
"""Hide a block's operations on HOST from modes that count."""
