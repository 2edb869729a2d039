"""Whether computing a unit again gives what its forward gave (floor 2).

Only the bits can say so: code may read what no snapshot holds. A unit's saved tensors are digested
as its forward saves them, and again when backward computes it once more; the unit is pure where all
digests are equal. The verdict holds for one path through the unit's code. Where a switch of its
modules, a hook or the kind of an argument is another, the proof is made anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hetero.crc import crc32

MOST_PATHS = 8  # of a unit that are tried; one that takes a new path at each step is not pure
PATIENCE = 4  # computations for which there was no room
MOST_KNOWN = 64  # paths whose verdict is remembered
PIECE = 2**18  # elements of a device's tensor that are digested at once
ODD = 0x1E3779B97F4A7C15  # a multiplier without a short period


class Located(Protocol):
    """A saved view of a parameter; its bytes are the parameter's."""

    @property
    def param(self) -> int:
        """The parameter's number."""

    @property
    def offset(self) -> int:
        """Of its first element, in the parameter."""

    @property
    def size(self) -> tuple[int, ...]:
        """Of the view."""

    @property
    def stride(self) -> tuple[int, ...]:
        """Of the view, in elements."""


class Digests:
    """What a forward saved, in the order in which it did.

    Args:
        keeps: whether autograd gets the tensors; if not, nothing can be differentiated.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self._seen: list[tuple[Any, ...]] = []
        self._is_nested = False
        self._later: list[torch.Tensor] = []  # digests that a device computes

    def saw(self, tensor: torch.Tensor) -> None:
        """Digest a tensor that autograd saves."""
        if tensor.is_nested:  # it has no shape, which torch's checkpoint asks for
            self._is_nested = True
            return
        self._seen.append((tensor.shape, tensor.dtype, self._digest(tensor.detach())))

    def saw_view(self, saved: Located) -> None:
        """Note a view of a parameter that autograd saves."""
        self._seen.append((saved.param, saved.offset, saved.size, saved.stride))

    def difference(self, other: Digests) -> str:
        """Return what the second computation did otherwise; "" where it did the same."""
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
        if tensor.layout is not torch.strided:
            return 0
        if tensor.dtype == torch.uint8:  # a library's workspace, parts of which nothing wrote
            return 0
        flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
        if not flat.numel():
            return 0
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if flat.device.type in ("cpu", "meta"):
            data = flat.view(torch.uint8)  # a rehearsal, which has no bytes, takes the same steps
            return 0 if data.is_meta else crc32(memoryview(data.numpy()))
        self._later.append(_sums(flat))
        return 0


def _sums(flat: torch.Tensor) -> torch.Tensor:
    """Return a digest of a 1-D tensor's bits on its device, which is not waited for."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(sizes[flat.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for at in range(0, bits.numel(), PIECE):
        piece = bits[at : at + PIECE].to(torch.int64)
        weights = torch.arange(at + 1, at + 1 + piece.numel(), device=flat.device) * ODD
        total = total * ODD + (piece * (weights | 1)).sum()
    return total


class Proof:
    """What is known of one unit."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}  # by path: "" where it is pure, else why it is not
        self._path = 0
        self._failures = 0  # of memory

    def take(self, path: Sequence[Any]) -> int:
        """The unit's forward takes this path; returns its number."""
        self._path = hash(tuple(path))
        return self._path

    @property
    def holds(self) -> bool:
        """Whether the unit is pure on the path that it took last."""
        return self._found.get(self._path) == ""

    @property
    def is_open(self) -> bool:
        """Whether it is not known yet, and worth asking."""
        return self._path not in self._found and len(self._found) < MOST_PATHS

    def conclude(self, path: int, reason: str | None) -> None:
        """One computation of this path was repeated: it was the same (""), or why it was not.

        A path that failed once is not pure, whatever its other calls gave. None: there was no room
        to repeat it.
        """
        if reason is None:
            self._failures += 1
            if self._failures < PATIENCE:
                return
            reason = "did not find room"
        if len(self._found) > MOST_KNOWN:
            self._found.clear()
        self._found[path] = self._found.get(path) or reason
