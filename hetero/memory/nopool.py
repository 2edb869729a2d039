"""What stands for the pool of a model that lies in memory as a whole (floor 1, mechanism)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hetero.device import Slab
from hetero.errors import StateError
from hetero.memory.extent import Extents, Request
from hetero.types import Kind, Lane


class NoPool:
    """Stands for a pool if no home lies on disk: nothing has to be pinned."""

    spills = False
    extent_numel = sys.maxsize
    n_threads = 1
    written_bytes = 0
    seconds_per_byte = 0.0
    told = False

    def adopt(
        self, kind: Kind, slab: Slab, n_bytes: int, itemsize: int, what: str, *kept: slice
    ) -> Extents:
        raise StateError(f"{what} is to lie on disk, and no directory on a drive was named")

    @contextmanager
    def pin(self, request: Request) -> Iterator[None]:
        yield

    def ready(self, request: Request) -> bool:
        return True

    def ahead(self, requests: Iterable[Request]) -> None: ...

    def later(self, requests: Iterable[Request]) -> None: ...

    def discard(self, extents: Extents) -> None: ...

    def take_counts(self) -> Counter[Lane]:
        return Counter()

    def close(self) -> None: ...
