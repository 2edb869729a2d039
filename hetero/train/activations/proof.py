"""Whether recomputing a unit gives the bits of its forward (floor 2).

Only the bits can tell: code may read state that no snapshot holds. A unit's saved tensors are
digested in its forward and again when backward recomputes it; it is pure if all digests are equal.
The verdict holds for one path through the unit's code: a changed switch of its modules, hook or
kind of argument needs a new proof.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hetero.crc import crc32

MOST_PATHS = 8  # tried of a unit; one with a new path at each step is not pure
PATIENCE = 4  # trials that found no room
MOST_KNOWN = 64  # most paths with a remembered verdict
PIECE = 2**20  # words digested at once on a device
DIGEST_BYTES = 2 * 8 * PIECE  # most that a digest takes there meanwhile
WORDS = (torch.int32, torch.int16, torch.uint8)  # a sum of wider ones would lose their first bit
ODD = 0x1E3779B97F4A7C15  # a multiplier without a short period


class Located(Protocol):
    """A saved view of a parameter; its bytes are the parameter's."""

    @property
    def param(self) -> int:
        """The parameter's number."""

    @property
    def offset(self) -> int:
        """Of its first element in the parameter."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of the view."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the view, in elements."""


class Digests:
    """Digests of the tensors that a forward saved, in order.

    Args:
        keeps: whether autograd gets the tensors; if not, nothing can be differentiated.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._seen: list[tuple[Any, ...]] = []
        self._is_nested = False
        self._later: list[torch.Tensor] = []  # digests computed on a device

    def saw(self, tensor: torch.Tensor) -> None:
        if tensor.is_nested:  # it has no shape, which torch's checkpoint asks for
            self._is_nested = True
            return
        self._seen.append((tensor.shape, tensor.dtype, self._digest(tensor.detach())))

    def saw_view(self, saved: Located) -> None:
        """Note a view of a parameter that autograd saves."""
        self._seen.append((saved.param, saved.offset, saved.size, saved.stride))

    def difference(self, other: Digests) -> str:
        """Return how the second computation differs; "" if it does not."""
        if self._is_nested:
            return "saved a nested tensor"
        if len(self._seen) != len(other._seen):
            return f"saved {len(other._seen)} tensors and not {len(self._seen)}"
        for at, (first, second) in enumerate(zip(self._seen, other._seen, strict=True)):
            if first != second:
                return f"made other bits in tensor {at} of {len(self._seen)}"
        pairs = zip(self._later, other._later, strict=True)
        if any(not torch.equal(first, second) for first, second in pairs):
            return "made other bits"
        return ""

    def _digest(self, tensor: torch.Tensor) -> int:
        if tensor.layout is not torch.strided or tensor._is_zerotensor():  # it has no bytes
            return 0
        if tensor.dtype == torch.uint8:  # a library's workspace, partly unwritten
            return 0
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        if not flat.numel():
            return 0
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if flat.device.type in ("cpu", "meta"):
            data = flat.view(torch.uint8)  # a rehearsal has no bytes, and takes the same steps
            return 0 if data.is_meta else crc32(memoryview(data.numpy()))
        self._later.append(_sums(flat))
        return 0


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Return a digest of a 1-D tensor's bits on its device, without waiting: for each piece, the
    sum of its words, each times an odd number of its own, modulo 2**64.

    The host launches each operation: a step that proves a model would wait for it if pieces were
    small, or words narrow.
    """
    raw = flat.view(torch.uint8)
    word = next(each for each in WORDS if raw.numel() % each.itemsize == 0)
    is_aligned = raw.storage_offset() % word.itemsize == 0  # else the same bits, in a copy
    n_words = min(PIECE, raw.numel() // word.itemsize)
    odd = torch.arange(1, 1 + n_words, device=flat.device).mul_(ODD).bitwise_or_(1)
    products = torch.empty_like(odd)
    sums = []
    for piece in raw.split(n_words * word.itemsize):
        words = (piece if is_aligned else piece.clone()).view(word)
        n = words.numel()
        sums.append(torch.mul(words, odd[:n], out=products[:n]).sum())
    return torch.stack(sums)


class Proof:
    """The verdicts on one unit.

    Args:
        is_tried: whether the unit may be repeated to find out.
    """

    def __init__(self, *, is_tried: bool = True) -> None:
        self._is_tried = is_tried
        self._found: dict[int, str] = {}  # by path: "" if pure, else the reason
        self._path = 0
        self._failures = 0  # of memory

    def take(self, path: Sequence[Any]) -> int:
        """Note the path of the unit's forward; return its number."""
        self._path = hash(tuple(path))
        return self._path

    @property
    def holds(self) -> bool:
        """Whether the unit is pure on its latest path."""
        return self._found.get(self._path) == ""

    @property
    def is_open(self) -> bool:
        """Whether the latest path has no verdict, and may be tried."""
        return self._is_tried and self._path not in self._found and len(self._found) < MOST_PATHS

    def conclude(self, path: int, reason: str | None) -> None:
        """Record a trial of this path: "" if the bits were the same, else the difference.

        A path that failed once is not pure. None: there was no room for the trial.
        """
        if reason is None:
            self._failures += 1
            if self._failures < PATIENCE:
                return
            reason = "did not find room"
        if len(self._found) > MOST_KNOWN:
            self._found.clear()
        self._found[path] = self._found.get(path) or reason

    def distrust(self, reason: str) -> None:
        """Take back what was found: the program itself changes what a forward read."""
        self._is_tried = False
        self._found = dict.fromkeys(self._found, reason)


class Proofs:
    """The verdicts on a model's units.

    Args:
        types: of the units' modules.
        is_tried: whether units may be repeated to find out.
    """

    def __init__(self, types: Mapping[int, type], *, is_tried: bool) -> None:
        self.learned = False
        """Whether a trial was concluded since this was set to False."""
        self._types = types
        self._of = {unit: Proof(is_tried=is_tried) for unit in types}
        self._impure: set[type] = set()  # of units that were seen not to be repeatable
        self._needed: set[int] = set()  # units to be recomputed without a verdict

    def adopt(self, other: Proofs) -> None:
        """Take over the verdicts of another residence of the same units."""
        self._of.update(other._of)

    def is_open(self, unit: int) -> bool:
        """Whether a unit still needs a proof."""
        return self._of[unit].is_open

    def holds(self, unit: int) -> bool:
        """Whether a unit is proven to give the same bits when recomputed."""
        return self._of[unit].holds

    def take(self, unit: int, path: Sequence[Any]) -> int:
        """Note the path of a unit's forward; return its number."""
        return self._of[unit].take(path)

    def need(self, unit: int) -> bool:
        """Return whether a unit may be recomputed before its proof, which backward then makes.

        Not one of a type that wrote to what it was given, or failed before: it cannot be repeated.
        """
        if not self.is_open(unit) or self._types[unit] in self._impure:
            return False
        self._needed.add(unit)
        return True

    def is_needed(self, unit: int) -> bool:
        """Whether a unit is recomputed all the same while its proof is open."""
        return unit in self._needed and self.is_open(unit)

    def wrote(self, unit: int) -> None:
        """A unit wrote to its inputs or parameters."""
        self._impure.add(self._types[unit])

    def leave(self, unit: int, reason: str) -> None:
        """Do not compute a unit again, though that might give the same bits."""
        self._of[unit].distrust(reason)
        self._needed.discard(unit)

    def distrust(self, reason: str) -> None:
        """A unit could not be computed again because the program had written to what it read: keep
        what units save from now on."""
        for proof in self._of.values():
            proof.distrust(reason)
        self._needed.clear()
        self.learned = True

    def conclude(self, unit: int, path: int, reason: str | None) -> None:
        """Record a trial, see `Proof.conclude`; the likes of one that failed are not needed."""
        self._of[unit].conclude(path, reason)
        self._needed.discard(unit)
        if reason:  # others of its type would fail, too: one in each step
            self._impure.add(self._types[unit])
            self._needed = {u for u in self._needed if self._types[u] is not self._types[unit]}
        self.learned = True
