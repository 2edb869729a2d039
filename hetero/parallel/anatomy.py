"""A model as a chain of modules, with what comes before and after it (floor 3).

A decoder is an embedding, blocks in a list, a norm and a head. It is cut between blocks, where one
tensor is all that goes on. That this is so is looked at, not assumed: a twin without bytes runs
once, and everything that passes a cut in another way is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from hetero.errors import ConfigError
from hetero.internals import DispatchMode
from hetero.parallel.grouped import of_any_dtype
from hetero.parallel.waists import (
    BLANKS,
    Narrowing,
    Waist,
    storage_of,
    tensors_of,
    unwrap,
    wrap,
)
from hetero.plan.cut import Weight
from hetero.train.activations.structure import flatten
from hetero.train.model.units import has_params

META = torch.device("meta")
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
BY_HAND = "write the stages as modules of their own, and prepare those of a rank in one ModuleList"
LABELS = "labels"
LOSS = "loss"
_aten = torch.ops.aten
NUMBER = _aten._local_scalar_dense.default
POSITIONS = ("max_position_embeddings", "n_positions", "context")
"""Names, in configurations, of the longest sequence."""
SAMPLE_POSITIONS = 1024


class Turn(Enum):
    """Where a module outside of the chain runs."""

    BEFORE = "before"
    AFTER = "after"


@dataclass(frozen=True)
class Call:
    """Arguments of a model's forward: what a schedule's step passes for one micro-batch."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Anatomy:
    """What a model consists of; names are those of its modules, in the order of their calls."""

    chain: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    is_apart: bool
    """Whether a cut fits between the last of the chain and what comes after."""
    takes_ids: bool
    """Whether the model's input is of whole numbers, of which others may stand for any."""
    weights: Mapping[str, Weight]
    """Of each name, of modules after a waist, and of `LOSS`."""
    waists: Mapping[str, Waist] = field(default_factory=dict)
    """Of blocks that may be cut in two."""
    own_loss_takes_more: bool = False
    """Whether the loss that the model makes of labels may take what blocks make apart from what
    they return."""

    def items(self) -> list[tuple[str, int]]:
        """Return what is never cut: a block (0), or its first (1) or second part (2)."""
        parts = {name: (1, 2) if name in self.waists else (0,) for name in self.chain}
        return [(name, part) for name in self.chain for part in parts[name]]

    def names(self, item: tuple[str, int]) -> list[str]:
        """Return the names of the modules of an item."""
        name, part = item
        if not part:
            return [name]
        waist = self.waists[name]
        return [f"{name}.{each}" for each in (waist.first if part == 1 else waist.second)]

    def names_of(self, items: Sequence[tuple[str, int]]) -> list[str]:
        """Return the names of modules, those of a block with both parts as one."""
        found: list[str] = []
        for name, part in items:
            if part == 2 and (name, 1) in items:
                n = len(self.waists[name].first)
                found[-n:] = [name]
            else:
                found += self.names((name, part))
        return found

    def weight(self, item: tuple[str, int]) -> Weight:
        name, part = item
        whole = self.weights[name]
        if not part:
            return whole
        after = [self.weights[each] for each in self.names((name, 2))]
        seconds = min(whole.seconds, sum(each.seconds for each in after))
        n_bytes = sum(each.n_bytes for each in after)
        if part == 2:
            return Weight(seconds, n_bytes)
        return Weight(whole.seconds - seconds, whole.n_bytes - n_bytes)


class Clock(Protocol):
    """Weighs what runs inside of a block."""

    def running(self) -> AbstractContextManager[Any]:
        """Return a block in which operations are weighed."""

    def now(self) -> float:
        """Return the weight of all so far."""


class Products(DispatchMode):
    """Weighs operations by the multiplications and additions of their matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self._flops = 0.0

    def running(self) -> AbstractContextManager[Any]:
        return self

    def now(self) -> float:
        return self._flops

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is NUMBER:
            return number_of(args[0])
        found = func(*args, **kwargs or {})
        if func.overloadpacket in flop_registry:
            counted = flop_registry[func.overloadpacket]
            self._flops += float(counted(*args, **kwargs or {}, out_val=found))
        return found


@of_any_dtype()
def examine(model: nn.Module, call: Call, clock: Clock, loss: Any = None) -> Anatomy:
    """Return the anatomy of a model that is called so.

    Args:
        call: of one micro-batch; only its shapes matter.
        clock: weighs each module's forward and backward.
        loss: makes a scalar of the model's output, which weighs on what comes last.

    Raises ConfigError for a model that is no chain, or in which more than one tensor goes on from
    one module of the chain to the next.
    """
    twin, call = without_bytes(model), blank(call)
    path = chain_of(twin)
    listed = twin.get_submodule(path).named_children()
    chain = [f"{path}.{name}" if path else name for name, _ in listed]
    apart = list(outside(twin, path))
    look = Look(twin, chain, apart)
    look.run(call)
    weights = weighed(twin, [*chain, *apart], call, clock, loss)
    after_waists = [f"{name}.{each}" for name, w in look.waists.items() for each in w.second]
    weights = {**weighed(twin, after_waists, call, clock, None), **weights}
    in_turn = [*look.places, *(name for name in apart if name not in look.places)]
    after = [name for name in in_turn if look.places.get(name) is not Turn.BEFORE]
    first = next((each for each in call.args if isinstance(each, torch.Tensor)), None)
    return Anatomy(
        chain=tuple(chain),
        before=tuple(name for name in in_turn if name not in after),
        after=tuple(after),
        is_apart=look.is_apart,
        takes_ids=first is not None and not first.is_floating_point(),
        weights=weights,
        waists=look.waists,
        own_loss_takes_more=look.gives_more and takes_more(model, call, chain, apart),
    )


def takes_more(model: nn.Module, call: Call, chain: Sequence[str], apart: Sequence[str]) -> bool:
    """Whether a model's own loss may take what blocks make apart from what they return."""
    words = call.args[0] if call.args else None
    is_told = LABELS in inspect.signature(model.forward).parameters
    if not is_told or not isinstance(words, torch.Tensor):
        return True
    given = {LABELS: torch.empty_like(words), **call.kwargs}  # a tensor of its own
    look = Look(without_bytes(model), chain, apart)
    try:
        look.run(Call(call.args, given))
    except ConfigError:
        return True
    return look.takes_inner


def refuse(model: nn.Module, what: str) -> ConfigError:
    name = type(model).__name__
    return ConfigError(f"this {name} is not cut into stages: {what}", advice=BY_HAND)


def number_of(tensor: torch.Tensor) -> bool | int:
    """Return the number that code gets that asks for one of a tensor without bytes."""
    return True if tensor.dtype is torch.bool else 1


# -- what there is -------------------------------------------------------------------------------


def chain_of(model: nn.Module) -> str:
    """Return the name of the list whose children have the most parameters, the outermost of these;
    the model itself, if that is a list."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            found[name] = sum(p.numel() for p in module.parameters())
    if not found or not max(found.values()):
        raise refuse(model, "it has no list of blocks")
    return max(found, key=lambda name: found[name])


def outside(model: nn.Module, path: str) -> Iterator[str]:
    """Yield the outermost modules apart from a list that have parameters, or drop out."""
    above = [path.rsplit(".", n)[0] if n else path for n in range(path.count(".") + 1)]
    around = {"", *above} - {path} if path else set()
    for name in sorted(around, key=len):
        module = model.get_submodule(name)
        own = [key for key, param in module._parameters.items() if param is not None]
        if own:
            raise refuse(model, f"{name or 'it'} has a parameter {own[0]!r} of its own")
        for key, child in module.named_children():
            full = f"{name}.{key}" if name else key
            if full not in (*around, path) and (has_params(child) or isinstance(child, DROPOUTS)):
                yield full


def without_bytes(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, whose parameters all learn."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in memo:
            copied: torch.Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META
            )
            if isinstance(tensor, nn.Parameter):
                copied = nn.Parameter(copied, tensor.dtype.is_floating_point)
            memo[id(tensor)] = copied
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise refuse(model, f"it cannot be copied ({error})") from error


def blank(call: Call) -> Call:
    """Return a call whose tensors have no bytes."""

    def one(value: Any) -> Any:
        return torch.empty_like(value, device=META) if isinstance(value, torch.Tensor) else value

    return Call(tuple(map(one, call.args)), {key: one(v) for key, v in call.kwargs.items()})


def sample(model: nn.Module) -> Call:
    """Return a call of a model of words: one sample of as many positions as are usual."""
    config = getattr(model, "config", None)
    longest = [getattr(config, name, None) for name in POSITIONS]
    known = [n for n in longest if isinstance(n, int)]
    if not known or not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise ConfigError(
            f"nothing says what a {type(model).__name__} is called with",
            advice="pass batch=, the arguments of one micro-batch",
        )
    size = 1, min(SAMPLE_POSITIONS, *known)
    return Call((torch.empty(size, dtype=torch.long, device=META),))


# -- what goes on --------------------------------------------------------------------------------


class Followed(DispatchMode):
    """Follows which tensors come from some others, by their storages.

    Args:
        answers: whether code that asks for a number gets one here.
    """

    def __init__(self, *, answers: bool) -> None:
        super().__init__()
        self._answers = answers
        self.is_asked = False
        """Whether code has asked for a number of one of them."""
        self._found: dict[int, torch.Tensor] = {}

    def add(self, value: Any) -> None:
        for tensor in tensors_of(value):
            self._found[storage_of(tensor)] = tensor  # alive, so that no other takes its place

    def has(self, value: Any) -> bool:
        return any(storage_of(tensor) in self._found for tensor in tensors_of(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is NUMBER and self._answers:
            self.is_asked |= self.has(args)
            return number_of(args[0])
        found = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if self.has((args, kwargs)) and not any(each in name for each in BLANKS):
            self.add(found)
        return found


class Look:
    """A pass that shows in which order modules run, and what comes to each."""

    def __init__(self, model: nn.Module, chain: Sequence[str], apart: Sequence[str]) -> None:
        self.places: dict[str, Turn] = {}
        self.is_apart = False
        self.takes_inner = False
        """Whether the result takes what blocks make apart from what they return."""
        self.gives_more = False
        """Whether the model's output has any of that."""
        self.waists: dict[str, Waist] = {}
        self._model = model
        self._chain = chain
        self._apart = apart
        self._n = 0  # modules of the chain that have run
        self._last: torch.Tensor | None = None
        self._reach = Followed(answers=True)
        # what blocks make of what they are given, but for what they return
        self._inner = Followed(answers=False)

    @torch.no_grad()
    def run(self, call: Call) -> None:
        for number, name in enumerate(self._chain):
            wrap(self._model, name, partial(self._link, number))
        for name in self._apart:
            wrap(self._model, name, partial(self._other, name))
        self._reach.add((call.args, ()))
        with self._reach, self._inner:
            output = called(self._model, call)
        if self._n != len(self._chain):
            raise refuse(self._model, f"{self._chain[self._n]!r} is not called")
        if self._reach.is_asked:
            raise refuse(self._model, "its code asks for numbers of what it is given")
        if self._reach.has(result_of(output)):
            raise refuse(self._model, "what it returns takes more than what its last block returns")
        self.takes_inner = self._inner.has(result_of(output))
        parts = flatten(output)[0], getattr(output, "__dict__", {})
        self.gives_more = self._inner.has(parts)
        unwrap(self._model, [*self._chain, *self._apart])

    def _link(self, number: int, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self._chain[number]
        if number != self._n:
            raise refuse(self._model, f"{name!r} is called out of order, or more than once")
        if not args or not isinstance(args[0], torch.Tensor):
            raise refuse(self._model, f"{name!r} is given no tensor first")
        if number and args[0] is not self._last:
            before = self._chain[number - 1]
            raise refuse(self._model, f"{name!r} is not given what {before!r} returns")
        if self._reach.has((args[1:], kwargs)):
            raise refuse(self._model, f"{name!r} is given more than one tensor that is computed")
        self._inner.add(args[0])
        block = self._model.get_submodule(name)
        found, waist = Narrowing(block, args[0]).run(act, args, kwargs)
        if waist is not None and number:  # nothing stands before the first block
            self.waists[name] = waist
        if not isinstance(found, torch.Tensor):
            raise refuse(self._model, f"{name!r} returns {type(found).__name__}, and no tensor")
        self._n += 1
        self._last = torch.empty_like(found)  # which comes from nothing
        return self._last

    def _other(self, name: str, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if 0 < self._n < len(self._chain):
            raise refuse(self._model, f"{name!r} is called between blocks")
        place = Turn.AFTER if self._n else Turn.BEFORE
        if place is Turn.AFTER and Turn.AFTER not in self.places.values():
            self.is_apart = bool(args) and args[0] is self._last
        if self.places.setdefault(name, place) is not place:
            raise refuse(self._model, f"{name!r} is called before the blocks and after them")
        found = act(*args, **kwargs)
        if place is Turn.BEFORE:
            self._reach.add(found)
        return found


def called(model: nn.Module, call: Call) -> Any:
    try:
        return model(*call.args, **call.kwargs)
    except ConfigError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise refuse(model, f"its forward fails without bytes ({error})") from error


def result_of(output: Any) -> Any:
    """Return what a schedule's loss is given, of a model that names its results: its own loss if it
    got labels, its logits otherwise."""
    loss = getattr(output, "loss", None)
    return getattr(output, "logits", output) if loss is None else loss


# -- what it weighs ------------------------------------------------------------------------------


def weighed(
    model: nn.Module, names: Sequence[str], call: Call, clock: Clock, loss: Any
) -> dict[str, Weight]:
    """Return the weight of each module, in one pass in which each also goes backward at once."""
    spent = dict.fromkeys(names, 0.0)

    def around(name: str, act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        began = clock.now()
        found = there_and_back(act, args, kwargs)
        spent[name] += clock.now() - began
        return found

    for name in names:
        wrap(model, name, partial(around, name))
    with clock.running(), torch.no_grad():
        output = called(model, call)
        if loss is not None:
            began = clock.now()
            there_and_back(loss, (output,), {})
            spent[LOSS] = clock.now() - began
    unwrap(model, names)
    found = {name: Weight(spent[name], bytes_of(model.get_submodule(name))) for name in names}
    return {**found, LOSS: Weight(spent.get(LOSS, 0.0), 0)}


def there_and_back(act: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Make a call and its backward pass; return its result without one."""

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.detach().requires_grad_()
        return value

    with torch.enable_grad():
        found = act(*map(leaf, args), **{key: leaf(value) for key, value in kwargs.items()})
        outputs = [each for each in tensors_of(found) if each.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(each) for each in outputs])
    return found.detach() if isinstance(found, torch.Tensor) else found


def bytes_of(module: nn.Module) -> int:
    return sum(param.nbytes for param in module.parameters())
