"""What a step of a prepared model allocates until its backward, by module and line (floor 4).

The ledger charges a room for activations as a whole, and of a model that stays none at all. One
step of a recording is therefore seen operation by operation: the third one, when placement and
policies are found. `Meta.allocations` is what lived when most did.

[Note: no mode in a backward]  Under a mode torch takes other formulas in some backwards, of which
one at least rounds differently ([Note: formulas under a mode]). So the mode is closed before any
backward pass begins, also one inside of a forward: what backward itself allocates is not seen, and
no bit changes. In a forward no formula depends on modes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.internals import RUN_BACKWARD, current_mode
from hetero.report.lines import ProgramLines
from hetero.report.run import Allocation, Allocations
from hetero.report.timing import WARMUP
from hetero.train.access.entries import ProgramEntries
from hetero.train.activations.meter import tensors_in
from hetero.train.engine.engine import Engine
from hetero.train.model.binding import without_faults
from hetero.train.model.looking import LookingMode, bitwise

LONGEST = 16  # outermost calls of a sample, where neither a backward nor a step ends it
Call = Callable[..., Any]


class Maker(NamedTuple):
    """What made a storage."""

    module: str
    """Empty outside of the model."""
    where: str


class MadeStorage:
    """A storage while it lives."""

    __slots__ = ("maker", "n_bytes", "ref")

    def __init__(self, maker: Maker, n_bytes: int) -> None:
        self.maker = maker
        self.n_bytes = n_bytes
        self.ref: weakref.ref[torch.UntypedStorage]


class AllocationMode(LookingMode):
    """Follows the storages on one device that operations make, until they die.

    Args:
        module: returns the name of the module that computes.
    """

    def __init__(self, place: torch.device, module: Callable[[], str]) -> None:
        super().__init__()
        self.is_on = True
        self._place = place
        self._module = module
        self._lines = ProgramLines()
        self._made: dict[int, MadeStorage] = {}
        self._changes: list[tuple[Maker, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper is unwrapped first: its parts are the live storages
        make = bitwise(func)
        found = make(*args, **kwargs) if kwargs else make(*args)
        if self.is_on and not getattr(func, "is_view", False):
            try:
                with without_faults():  # else this would fetch an unbound parameter
                    self._look(found, (*args, *kwargs.values()) if kwargs else args)
            except Exception:  # an error of ours ends the sample, not the program
                self.is_on = False
                self._changes.clear()
        return found

    def _look(self, found: Any, given: Any) -> None:
        shared: set[int] | None = None
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            row = self._made.get(storage._cdata)
            if row is not None:
                self._resize(row, storage.nbytes())
                continue
            if shared is None:  # a view, or a write in place, makes nothing
                shared = {each.untyped_storage()._cdata for each in tensors_in(given)}
            if storage._cdata not in shared and storage.device == self._place:
                self._follow(storage)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        row = MadeStorage(Maker(self._module(), self._lines.here(sys._getframe(3))), 0)

        def gone(_: object) -> None:
            self._made.pop(key, None)
            self._changes.append((row.maker, -row.n_bytes))

        row.ref = weakref.ref(storage, gone)
        self._made[key] = row
        self._resize(row, storage.nbytes())

    def _resize(self, row: MadeStorage, n_bytes: int) -> None:
        if n_bytes != row.n_bytes:
            self._changes.append((row.maker, n_bytes - row.n_bytes))
            row.n_bytes = n_bytes

    def close(self) -> bool:
        """Look no more; returns whether the mode is off, too. If not, it only passes on."""
        self.is_on = False
        while self._made:
            del self._made.popitem()[1].ref  # and with it its callback
        if current_mode() is not self:
            return False
        self.__exit__(None, None, None)
        return True

    def peak(self) -> list[Allocation]:
        """Return what lived when most bytes did, the largest first."""
        level, most, at = 0, 0, 0
        for number, (_, n_bytes) in enumerate(self._changes):
            level += n_bytes
            if level > most:
                most, at = level, number + 1
        held = Counter[Maker]()
        for maker, n_bytes in self._changes[:at]:
            held[maker] += n_bytes
        rows = [Allocation(*maker, n_bytes) for maker, n_bytes in held.items() if n_bytes]
        return sorted(rows, key=lambda row: (-row.n_bytes, row.module, row.where))


class StepAllocations:
    """Samples one step of a prepared model while it is recorded.

    It refers to nothing of the program once it is closed. A step that fails is not taken: the next
    one is sampled in its place.
    """

    def __init__(self, engine: Engine) -> None:
        self.found = Allocations()
        self._engine = engine
        self._entries = ProgramEntries(self)
        self._passes = RUN_BACKWARD.replaced(self._around_pass)
        self._names: dict[int, str] = {}
        self._mode: AllocationMode | None = None
        self._ending: AllocationMode | None = None  # over, and not the innermost mode
        self._calls = self._forwards = 0
        self._listens = self._is_done = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Sample a step that runs inside the block."""
        self._listen()
        try:
            yield
        finally:
            self._end(whole=False)
            self._leave()

    def _listen(self) -> None:
        self._entries.install()
        self._passes.install()
        self._listens = True

    def _leave(self) -> None:
        """Put torch's functions back."""
        if self._listens:
            self._listens = False
            self._passes.uninstall()  # the last one first: each puts back what it found
            self._entries.remove()

    # -- a step ----------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._close()
        if self._mode is None and self._is_due(module):
            self._begin()
        self._calls += 1
        if self._calls > LONGEST:
            self._end(whole=True)

    def after_forward(self, module: nn.Module) -> None:
        if self._engine.optimizer is None:
            self._end(whole=True)  # there is no backward

    def before_backward(self) -> None:
        """Nothing: `_around_pass` hears of all passes."""

    def after_backward(self) -> None:
        self._close()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._end(whole=True)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._close()

    def failed(self, error: BaseException) -> None:
        self._end(whole=False)

    def _around_pass(self, plain: Call) -> Call:
        @functools.wraps(plain)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._mode is not None:  # see [Note: no mode in a backward]
                self._end(whole=True)
            return plain(*args, **kwargs)

        return run

    # -- the sample ------------------------------------------------------------------------------

    def _is_due(self, module: nn.Module) -> bool:
        """Whether a call is sampled: of our model, when it is settled, and under no other mode."""
        setup, trains = self._engine.setup, self._engine.optimizer is not None
        if self._is_done or self._ending is not None or (trains and not torch.is_grad_enabled()):
            return False
        if not any(each is setup.model for each in module.modules()):
            return False
        self._forwards += 1
        steps = setup.steps if trains else self._forwards - 1  # without training each is a step
        return steps >= WARMUP and current_mode() is None

    def _begin(self) -> None:
        model = self._engine.setup.model
        named = model.named_modules()
        self._names = {id(module): name or type(model).__name__ for name, module in named}
        self._entries.path = []
        self._calls = 0
        self._mode = AllocationMode(self._engine.setup.device.torch_device, self._module)
        self._mode.__enter__()

    def _module(self) -> str:
        """Return the innermost module of the model whose call is open."""
        for module in reversed(self._entries.path or ()):
            name = self._names.get(id(module))
            if name is not None:
                return name
        return ""

    def _end(self, *, whole: bool) -> None:
        """End the sample that is open, and take it if it is of a ``whole`` step."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        if whole:
            self._is_done = True
            self.found = Allocations(self._engine.setup.log.step, mode.peak())
        self._entries.path = None
        self._names = {}
        self._ending = mode
        self._close()

    def _close(self) -> None:
        """Close the mode of a sample that is over, if it is the innermost one by now."""
        if self._ending is not None and self._ending.close():
            self._ending = None
        if self._is_done and self._ending is None:
            self._leave()
