"""What code reaches beside its module: a forward that is made again leaves no trace anywhere.

Each block notes its calls where no attribute of a module holds them. After training plain torch and
hetero have the same notes, though units were tried, or computed again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import sys
import weakref
from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hetero.errors import StateError
from tests.campaigns.harness import Block, Case, Net, Program, Side, adamw

settings_of_the_user = ModuleType("settings_of_the_user")
sys.modules["settings_of_the_user"] = settings_of_the_user
TOTAL = torch.zeros(())
STORE: dict[str, int] = {}
last: Tensor | None = None


class Registry:
    calls = 0


class Tally:
    def __init__(self) -> None:
        self.calls = 0

    def note(self) -> None:
        self.calls += 1


OUTSIDE = Tally()


def forget() -> None:
    """Let the program begin anew: a budget is found by trying."""
    global last
    last = None
    TOTAL.zero_()
    STORE.clear()
    Named.log.clear()
    Registry.calls = Named.calls = OUTSIDE.calls = settings_of_the_user.calls = 0


def notes(kind: type[Noting]) -> Program:
    """Return a plain loop over such blocks, which writes down what they noted."""

    def program(side: Side) -> None:
        forget()
        net = Net(3, block=kind)
        side.train(*side.prepare(net, adamw(net)), steps=4)
        for block in net.blocks:
            side.record("noted", *block.noted())

    program.__name__ = f"{kind.__name__}_notes"
    return program


class Noting(Block):
    """A block that notes its calls; `note` returns what scales its output."""

    @abstractmethod
    def note(self, x: Tensor) -> Any:
        """Note a call."""

    @abstractmethod
    def noted(self) -> list[Any]:
        """Return what was noted."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.note(x))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class InATuple(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair(torch.zeros(()), torch.ones(()))

    def note(self, x: Tensor) -> Any:
        return self.pair.first.add_(1).clone()

    def noted(self) -> list[Any]:
        return [*self.pair]


class GlobalTensor(Noting):
    def note(self, x: Tensor) -> Any:
        return TOTAL.add_(1).clone()

    def noted(self) -> list[Any]:
        return [TOTAL]


class GlobalMadeAnew(Noting):
    def note(self, x: Tensor) -> Any:
        global last
        last = torch.ones(()) if last is None else last + 1
        return last

    def noted(self) -> list[Any]:
        return [last]


class Named(Noting):
    """Attributes of its own class, and of another one."""

    calls = 0
    log: list[int] = []  # noqa: RUF012

    def note(self, x: Tensor) -> Any:
        type(self).calls += 1
        Registry.calls += 1
        self.log.append(1)
        return Named.calls + len(self.log)

    def noted(self) -> list[Any]:
        return [Named.calls, Registry.calls, len(self.log)]


class ModuleOfTheUser(Noting):
    def note(self, x: Tensor) -> Any:
        settings_of_the_user.calls += 1
        return settings_of_the_user.calls

    def noted(self) -> list[Any]:
        return [settings_of_the_user.calls]


@dataclasses.dataclass(slots=True)
class Slots:
    calls: int = 0


class MoreSlots(Slots):
    """Has a dictionary besides."""


class InSlots(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.own = [Slots(), MoreSlots()]

    def note(self, x: Tensor) -> Any:
        for one in self.own:
            one.calls += 1
        return self.own[0].calls

    def noted(self) -> list[Any]:
        return [one.calls for one in self.own]


class OfNumpy(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(3)

    def note(self, x: Tensor) -> Any:
        self.array += 1
        return float(self.array[0])

    def noted(self) -> list[Any]:
        return [self.array]


class Log(list[int]):
    """A list of the user's."""


class Containers(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.count = collections.Counter()
        self.log = Log()
        self.few = collections.deque(maxlen=3)
        self.order = collections.OrderedDict(a=1, b=2)

    def note(self, x: Tensor) -> Any:
        self.count["calls"] += 1
        self.log.append(1)
        self.few.append(len(self.log))
        self.order.move_to_end("a")
        self.order.move_to_end("b", last=len(self.log) % 2 > 0)
        return sum(self.few)

    def noted(self) -> list[Any]:
        return [*self.count.values(), len(self.log), *self.few, *self.order.values()]


class InAProperty(Noting):
    @property
    def calls(self) -> int:
        return STORE.get("calls", 0)

    @calls.setter
    def calls(self, calls: int) -> None:
        STORE["calls"] = calls

    def note(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls

    def noted(self) -> list[Any]:
        return [self.calls]


def counting() -> tuple[Callable[[], int], Callable[[], int]]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count, lambda: calls


class Callables(Noting):
    """Functions, bound methods and partials with state of their own; one that is decorated."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.counted = counting()
        self.bound, self.partial = Tally().note, functools.partial(Tally.note, Tally())
        self.weak = weakref.ref(OUTSIDE)

    @torch.no_grad()
    def note(self, x: Tensor) -> Any:
        self.bound()
        self.partial()
        self.weak().note()
        return self.count()

    def noted(self) -> list[Any]:
        return [
            *(self.counted(), self.bound.__self__.calls),
            *(self.partial.args[0].calls, OUTSIDE.calls),
        ]


class OtherModule(Noting):
    """A norm that is in a list, where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [nn.BatchNorm1d(7)]

    def note(self, x: Tensor) -> Any:
        return self.norms[0](x)

    def noted(self) -> list[Any]:
        return [*self.norms[0].buffers()]


class OddBuffers(Noting):
    """Of every kind, some of which have no bytes that can be compared as they lie."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {
            "complex": torch.zeros(2, dtype=torch.cfloat),
            "conj": torch.ones(2, dtype=torch.cfloat).conj(),
            "negative": torch.ones(2, dtype=torch.cfloat).conj().imag,
            "bools": torch.zeros(2, dtype=torch.bool),
            "empty": torch.zeros(0),
            "late": None,
            "expanded": torch.zeros(1).expand(4),
            "eighth": torch.zeros(3).to(torch.float8_e4m3fn),
            "grows": torch.zeros(1),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("sparse", torch.eye(3).to_sparse(), persistent=False)
        self.register_buffer("rows", torch.eye(3).to_sparse_csr(), persistent=False)

    def note(self, x: Tensor) -> Any:
        self.complex += 1j
        self.conj *= 1.1
        self.bools.logical_not_()
        self.sparse.mul_(1.1)
        self.late = torch.ones(2) if self.late is None else torch.cat([self.late, torch.ones(1)])
        self.grows.resize_(self.grows.numel() + 1).fill_(0.5)
        scales = self.complex.abs().sum() + self.bools.sum() + self.conj.real.sum()
        return 0.1 * (scales + self.late.sum() + self.grows.sum() + self.sparse.to_dense().sum())

    def noted(self) -> list[Any]:
        return [self.complex, self.conj, self.bools, self.late, self.grows, self.sparse.to_dense()]


def hooks_that_write_state(side: Side) -> None:
    net = Net(3)
    seen: list[float] = []
    for block in net.blocks:
        block.up.register_forward_hook(lambda m, a, out: (seen.append(1), out + len(seen) / 99)[1])
        block.up.register_forward_pre_hook(lambda m, a: seen.append(1))
        block.up.register_full_backward_hook(lambda m, a, out: seen.append(1))
        block.register_forward_hook(lambda m, a, out: seen.append(1))
    side.train(*side.prepare(net, adamw(net)), steps=4)
    side.record("seen", len(seen))


def hooks_of_all_modules(side: Side) -> None:
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, out: seen.append("."))
    try:
        net = Net(3)
        side.train(*side.prepare(net, adamw(net)), steps=4)
    finally:
        handle.remove()
    side.record("seen", len(seen))


class Hooked(Block):
    """Hooks its input, what it makes, and once a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.is_hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.is_hooked = True
            self.up.weight.register_hook(lambda grad: (self.log.append(1), grad * 0.5)[1])
        x.register_hook(lambda grad: (self.log.append(2), grad * 1.5)[1])
        y = super().forward(x)
        y.register_hook(lambda grad: self.log.append(3))
        return y


def gradient_hooks_made_in_forward(side: Side) -> None:
    net = Net(3, block=Hooked)
    side.train(*side.prepare(net, adamw(net)), steps=4)
    side.record("log", *(sum(block.log) for block in net.blocks))


class Ragged(Block):
    """Rows of unequal length, as a nested tensor, which has no shape."""

    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([x[0], x[1][:3]])
        return super().forward(x + torch.nested.to_padded_tensor(ragged * 2.0, 0.0, x.shape))


def rows_of(layout: torch.layout, number: int) -> Tensor:
    """Return rows of unequal length; every third time as one dense tensor of as many dimensions."""
    rows = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(number))
    if number % 3 == 0:
        return rows
    return torch.nested.as_nested_tensor([rows[0], rows[1][:3]], layout=layout)


def rows_of_unequal_length(side: Side, layout: torch.layout) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        return sum((row.square().mean() for row in model(rows_of(layout, number)).unbind()), zero)

    zero = torch.zeros(())
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))
    model, optimizer = side.prepare(Blocks(net), adamw(net))
    side.train(model, optimizer, loss_of, steps=8)


def jagged_rows(side: Side) -> None:
    rows_of_unequal_length(side, torch.jagged)


def ragged_rows(side: Side) -> None:
    rows_of_unequal_length(side, torch.strided)


class Blocks(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NESTED = StateError, "blocks.0', a Sequential, cannot be computed again: it saves a nested tensor"


def nested_tensors_inside(side: Side) -> None:
    net = Net(3, block=Ragged)
    side.train(*side.prepare(net, adamw(net)), steps=4)


class Carrier:
    """An object that a block is given, and that keeps its output."""

    def __init__(self) -> None:
        self.output: Tensor | None = None


class Carries(Block):
    def forward(self, x: Tensor, carrier: Carrier) -> Tensor:
        carrier.output = super().forward(x)
        return carrier.output


def outputs_that_an_object_keeps(side: Side) -> None:
    """The graph of each step goes with the objects of each step."""
    alive = weakref.WeakSet[Carrier]()

    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x, carrier = self.embed(tokens), Carrier()
            alive.add(carrier)
            for block in self.blocks:
                x = block(x, carrier)
            return self.head(self.norm(x))

    net = Model(3, block=Carries)
    side.train(*side.prepare(net, adamw(net)), steps=4)
    gc.collect()
    side.record("alive", len(alive))


class Decays(Block):
    """Writes to a weight past its version counter; what autograd saves does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        self.side.weight.data.mul_(0.999)
        return super().forward(x) + self.side(x)


WRITES = StateError, "a Decays, cannot be computed again: it writes to its parameters"


def weights_written_through_data(side: Side) -> None:
    net = Net(3, block=Decays)
    side.train(*side.prepare(net, adamw(net)))


KINDS = (
    *(InATuple, GlobalTensor, GlobalMadeAnew, Named, ModuleOfTheUser, InSlots, OfNumpy, Containers),
    *(InAProperty, Callables, OtherModule, OddBuffers),
)
PROGRAMS = [*(notes(kind) for kind in KINDS), hooks_that_write_state, hooks_of_all_modules]
PROGRAMS += [gradient_hooks_made_in_forward, outputs_that_an_object_keeps]
CASES = [
    Case(weights_written_through_data),
    Case(weights_written_through_data, {"device": "cpu:sim"}),
    Case(weights_written_through_data, {"activations": "recompute"}, WRITES),
    Case(nested_tensors_inside),
    Case(nested_tensors_inside, {"activations": "recompute"}, (StateError, "saves a nested")),
    *(
        Case(program, settings)
        for program in (jagged_rows, ragged_rows)
        for settings in ({}, {"activations": "keep"}, {"activations": "offload", "hbm": None})
    ),
    *(
        Case(program, settings, refusal)
        for program in (jagged_rows, ragged_rows)
        for settings, refusal in (
            ({"activations": "recompute"}, NESTED),
            ({"activations": "recompute", "hbm": None}, NESTED),
            ({"micro_batch": 1}, (StateError, "blocks.0' is given a nested tensor")),
        )
    ),
    *(Case(program) for program in PROGRAMS),
    *(Case(program, {"activations": "recompute", "hbm": None}) for program in PROGRAMS),
]
