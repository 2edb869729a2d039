"""One step whose every allocation is seen: by what, for what, in which module (floor 4).

[Note: a mode between the program's]  A sample begins inside of an outermost module's call and ends
inside of an optimizer's step, so that its mode is not opened and closed like a block. It is opened
only where the program has no mode of its own, and closed only while it is the innermost one; until
then it passes operations on. So a mode of the program, opened or closed in between, stays its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hetero.internals import current_mode
from hetero.train.activations.meter import tensors_in
from hetero.train.model.looking import LookingMode, bitwise
from hetero.watch.owners import Owned, storage_of
from hetero.watch.picture import OUTSIDE, HeldStorage, MemoryUse, Picture, picture
from hetero.watch.stacks import Stacks

BEFORE = ""  # the operation of what was there before the sample


class SampledStorage:
    """A storage while it lives."""

    __slots__ = ("module", "n_bytes", "operation", "ref", "stack", "use")

    def __init__(self, use: MemoryUse, module: str, operation: str, stack: int) -> None:
        self.use = use
        self.module = module
        self.operation = operation
        self.stack = stack
        self.n_bytes = 0
        self.ref: weakref.ref[torch.UntypedStorage]


class Sample(LookingMode):
    """Sees the storages on one device that the operations of a step make, read and free.

    Args:
        path: the modules whose calls are open.
        names: of modules, by id.
    """

    def __init__(
        self,
        step: int,
        place: torch.device,
        stacks: Stacks,
        path: list[nn.Module],
        names: dict[int, str],
    ) -> None:
        super().__init__()
        self.step = step
        self.place = place
        self.making = MemoryUse.ACTIVATIONS
        """What the program makes at present."""
        self.is_on = True
        self.broken = ""
        """Why it ended early: what it has seen is not all."""
        self._stacks = stacks
        self._path = path
        self._names = names
        self._blocks: dict[int, SampledStorage] = {}
        self._changes: list[tuple[SampledStorage, int]] = []

    def open(self, owners: Iterable[Owned]) -> None:
        """Begin; owners are those of what is there already."""
        self.settle(owners)
        self.__enter__()

    def close(self) -> bool:
        """End; returns whether the mode is off, too. If not, it only passes operations on."""
        self.is_on = False
        if current_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True

    def forget(self) -> None:
        """Follow no storage any more."""
        while self._blocks:
            del self._blocks.popitem()[1].ref  # and with it its callback

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper is unwrapped first: its parts are the live storages
        if self.is_on:
            self._quietly(self._read, (*args, *kwargs.values()) if kwargs else args)
        make = bitwise(func)
        found = make(*args, **kwargs) if kwargs else make(*args)
        if self.is_on:
            self._quietly(self._note, found, func)
        return found

    def _quietly(self, look: Callable[..., None], *given: Any) -> None:
        """Look at an operation; an error of ours ends the sample, not the program."""
        try:
            look(*given)
        except Exception as error:
            self.is_on = False
            self.broken = f"{type(error).__name__}: {error}"

    def _note(self, found: Any, func: Any) -> None:
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            block = self._blocks.get(storage._cdata)
            if block is None:
                self._made(storage, func)
            elif block.n_bytes != storage.nbytes() and storage.device == self.place:
                self._resize(block, storage.nbytes())

    def _read(self, given: Iterable[Any]) -> None:
        for tensor in tensors_in(given):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._blocks:
                self._follow(storage, SampledStorage(MemoryUse.OTHER, OUTSIDE, BEFORE, 0))

    def _made(self, storage: torch.UntypedStorage, func: Any) -> None:
        use = self.making
        if use is MemoryUse.ACTIVATIONS and not self._path and not torch.is_grad_enabled():
            use = MemoryUse.OTHER  # of the program, not of its loss
        module = self._names.get(id(self._path[-1])) if self._path else OUTSIDE
        name = module or type(self._path[-1]).__name__
        stack = self._stacks.here(sys._getframe(2))
        self._follow(storage, SampledStorage(use, name, str(func.overloadpacket), stack))

    def _follow(self, storage: torch.UntypedStorage, block: SampledStorage) -> None:
        key = storage._cdata
        block.n_bytes = storage.nbytes() if storage.device == self.place else 0

        def gone(_: object) -> None:
            del self._blocks[key]
            self._changes.append((block, -block.n_bytes))

        block.ref = weakref.ref(storage, gone)
        self._blocks[key] = block
        self._changes.append((block, block.n_bytes))

    def _resize(self, block: SampledStorage, n_bytes: int) -> None:
        self._changes.append((block, n_bytes - block.n_bytes))
        block.n_bytes = n_bytes

    def settle(self, owners: Iterable[Owned]) -> None:
        """Say what storages are that have an owner by now."""
        for use, module, tensor in owners:
            storage = storage_of(tensor)
            if storage is None:
                continue
            block = self._blocks.get(storage._cdata)
            if block is None:
                self._follow(storage, SampledStorage(use, module, BEFORE, 0))
            elif block.use is not use:
                block.use, block.module = use, module

    def now(self, when: str) -> Picture:
        """Return what lives now."""
        blocks = list(self._blocks.values())
        return self._picture(when, ((block, block.n_bytes) for block in blocks))

    def peak(self, when: str) -> Picture:
        """Return what lived when most bytes did."""
        changes = list(self._changes)
        level, most, at = 0, -1, 0
        for number, (_, n_bytes) in enumerate(changes):
            level += n_bytes
            if level > most:
                most, at = level, number + 1
        held: dict[SampledStorage, int] = {}
        for block, n_bytes in changes[:at]:
            held[block] = held.get(block, 0) + n_bytes
        return self._picture(when, held.items())

    def _picture(self, when: str, held: Iterable[tuple[SampledStorage, int]]) -> Picture:
        return picture(when, self.step, self._parts(held), has_stacks=True)

    def _parts(self, held: Iterable[tuple[SampledStorage, int]]) -> Iterator[HeldStorage]:
        for block, n_bytes in held:
            lines = self._stacks.lines(block.stack)
            yield HeldStorage(block.use, block.module, block.operation, lines, n_bytes)


def may_open() -> bool:
    """Whether the program has no mode of its own; see [Note: a mode between the program's]."""
    return current_mode() is None
