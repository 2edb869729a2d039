"""Every storage of a plain model's training while it lives, counted by its use (floor 4).

[Note: touched bytes]  A storage counts whole, with the bytes that were requested for it, from the
first operation that reads or makes it until it is freed. Nothing is sampled or estimated: the
levels of all categories sum to the bytes of the storages known to be alive. Memory that no
operation of PyTorch's dispatcher touches is not known (workspaces of libraries, memory inside
compiled code, Python's own). While operations are watched, a few backward formulas of PyTorch may
copy where they would otherwise write in place; these copies count.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hetero.events import EventLog, What
from hetero.internals import is_traceable_wrapper_subclass
from hetero.report.lines import ProgramLines
from hetero.train.activations.meter import tensors_in
from hetero.train.model.looking import LookingMode, bitwise
from hetero.types import Kind, Tier

OTHER = "other"
Category = Kind | str
CATEGORIES: tuple[Category, ...] = (
    *(Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.ACTIVATION, Kind.BUFFER),
    OTHER,
)
OWNED = (Kind.PARAM, Kind.GRAD, Kind.STATE, Kind.BUFFER)


class Change(NamedTuple):
    """Bytes that a category gains, or loses if negative; 0 logs its level unchanged."""

    category: Category
    n_bytes: int
    where: str = ""
    """The lines of the program that made them; empty inside a module's access."""


class LiveStorage:
    __slots__ = ("category", "counts", "n_bytes", "ref", "where")

    def __init__(self, category: Category, n_bytes: int, *, counts: bool, where: str) -> None:
        self.category = category
        self.where = where
        self.counts = counts  # False on another device
        self.n_bytes = n_bytes if counts else 0
        self.ref: weakref.ref[torch.UntypedStorage]


class Storages(LookingMode):
    """Logs a LEVEL whenever bytes of a category come, go, or move to another (two events at once).

    Args:
        place: storages on other devices do not count.
    """

    def __init__(self, log: EventLog, tier: Tier, place: torch.device) -> None:
        super().__init__()
        self.levels: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self._log = log
        self._tier = tier
        self._place = place
        self._making: Category = OTHER
        self._rows: dict[int, LiveStorage] = {}
        self._owned: set[int] = set()
        self._coming: deque[tuple[Change, ...]] = deque()
        self._lock = threading.Lock()
        self._lines = ProgramLines()
        self._held: Counter[tuple[Category, str]] = Counter()
        self._peak = self._total = 0
        self._rises = False
        self._at_peak: dict[tuple[Category, str], int] = {}

    def made_at_peak(self) -> dict[str, dict[str, int]]:
        """Return the bytes at the peak that no module made, by category and lines of the program.

        Parameters and what belongs to them have modules, and are left out.
        """
        found: dict[str, dict[str, int]] = {}
        rows = self._held if self._rises else self._at_peak
        for (category, where), n_bytes in rows.items():
            if where and n_bytes and category not in OWNED:
                name = category.value if isinstance(category, Kind) else category
                found.setdefault(name, {})[where] = n_bytes
        return found

    @contextmanager
    def making(self, category: Category) -> Iterator[None]:
        """Count the results of operations inside a block in a category."""
        outer, self._making = self._making, category
        try:
            yield
        finally:
            self._making = outer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper is unwrapped first: its parts are the live storages
        grows_graph = self._making is OTHER and torch.is_grad_enabled()
        derived = self._touch((*args, *kwargs.values()) if kwargs else args)
        make = bitwise(func)
        found = make(*args, **kwargs) if kwargs else make(*args)
        made = Kind.ACTIVATION if grows_graph and derived else self._making
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            row = self._rows.get(storage._cdata)
            if row is None:
                self._post(self._note(storage, made))
            elif row.counts and row.n_bytes != storage.nbytes():
                self._resize(row, storage.nbytes())
        return found

    def _touch(self, given: Iterable[Any]) -> bool:
        """Count storages made unwatched; returns whether an activation is among ``given``."""
        derived = False
        for value in given:
            if isinstance(value, (tuple, list)):
                derived |= self._touch(value)
            elif isinstance(value, torch.Tensor) and value.layout is torch.strided:
                storage = value.untyped_storage()
                row = self._rows.get(storage._cdata)
                if row is None:
                    self._post(self._note(storage, OTHER))
                elif row.category is Kind.ACTIVATION:
                    derived = True
        return derived

    def begin(self, owners: Iterable[tuple[Category, torch.Tensor]]) -> None:
        """Log all levels at the start of a log; owners as for `settle`."""
        gained = self._settle(owners)
        self._post(*(Change(category, gained[category]) for category in CATEGORIES))

    def settle(self, owners: Iterable[tuple[Category, torch.Tensor]]) -> None:
        """Give storages the category of their first owner; those without one become ``other``."""
        self._post(*(Change(*item) for item in self._settle(owners).items()))

    def _settle(self, owners: Iterable[tuple[Category, torch.Tensor]]) -> Counter[Category]:
        gained: Counter[Category] = Counter()
        found: dict[int, tuple[torch.UntypedStorage, Category]] = {}
        for category, tensor in owners:
            if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor):
                storage = tensor.untyped_storage()
                found.setdefault(storage._cdata, (storage, category))
        for key in self._owned - found.keys():
            row = self._rows.get(key)
            if row is not None and row.category in OWNED:
                self._add(gained, self._move(row, OTHER))
        for storage, category in found.values():
            self._add(gained, self._own(storage, category))
        self._owned = set(found)
        return gained

    def _add(self, gained: Counter[Category], changes: Iterable[Change]) -> None:
        """Sum changes up by category; whose lines they are of is noted at once."""
        for category, n_bytes, where in changes:
            gained[category] += n_bytes
            self._held[category, where] += n_bytes
            self._held[category, ""] -= n_bytes  # the sum is of no lines

    def own(self, storage: torch.UntypedStorage, category: Category) -> None:
        """Put a storage in a category that has owners."""
        self._owned.add(storage._cdata)
        self._post(*self._own(storage, category))

    def _own(self, storage: torch.UntypedStorage, category: Category) -> tuple[Change, ...]:
        row = self._rows.get(storage._cdata)
        if row is None:
            return (self._note(storage, category),)
        return () if row.category is category else self._move(row, category)

    def forget(self) -> None:
        """Stop watching all storages."""
        while self._rows:
            del self._rows.popitem()[1].ref  # and with it its callback

    def _note(self, storage: torch.UntypedStorage, category: Category) -> Change:
        key = storage._cdata
        inside = category in OWNED or self._log.access >= 0
        where = "" if inside else self._lines.here(sys._getframe(1))
        counts = storage.device == self._place
        row = LiveStorage(category, storage.nbytes(), counts=counts, where=where)

        def gone(_: object) -> None:
            del self._rows[key]
            self._post(Change(row.category, -row.n_bytes, row.where))

        row.ref = weakref.ref(storage, gone)
        self._rows[key] = row
        return Change(category, row.n_bytes, where)

    def _move(self, row: LiveStorage, category: Category) -> tuple[Change, Change]:
        old, row.category = row.category, category
        return Change(old, -row.n_bytes, row.where), Change(category, row.n_bytes, row.where)

    def _resize(self, row: LiveStorage, n_bytes: int) -> None:
        grown, row.n_bytes = n_bytes - row.n_bytes, n_bytes
        self._post(Change(row.category, grown, row.where))

    def _post(self, *changes: Change) -> None:
        """Apply changes one by one; the lock's holder also applies those that come meanwhile."""
        self._coming.append(changes)
        while self._coming and self._lock.acquire(blocking=False):
            try:
                while self._coming:
                    self._apply(self._coming.popleft())
            finally:
                self._lock.release()

    def _apply(self, changes: tuple[Change, ...]) -> None:
        log, levels, t = self._log, self.levels, self._log.clock()
        if self._rises and sum(change.n_bytes for change in changes) < 0:
            self._at_peak, self._rises = dict(self._held), False
        for category, n_bytes, where in changes:
            levels[category] += n_bytes
            self._held[category, where] += n_bytes
            self._total += n_bytes
            now_bytes = levels[category]
            log.add(What.LEVEL, t, t, tier=self._tier, category=category, n_bytes=now_bytes)
        if self._total > self._peak:
            self._peak, self._rises = self._total, True
