"""What a launcher, as torchrun, says of this process in its environment (no torch)."""

from __future__ import annotations

import os


def launched() -> int:
    """Return the ranks that torchrun, or a launcher like it, has started; 1 without one."""
    given = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(given) if given.isdecimal() else 1


def launch_rank() -> int:
    """Return this process's number among those that were started together; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() > 1 else 0
