"""Kinds of state that a forward may change: how each is read, lent and put back (floor 2)."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, MutableMapping
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from hetero.device import accelerator_rng, set_accelerator_rng
from hetero.dry import unseen_writes
from hetero.train.activations.reach import Names

SMALL = 2**20  # bytes up to which a device buffer's copy is kept, written or not
TINY = 2**16  # the same of a CPU's
FP32 = "fp32_precision"  # torch's name for how fp32 products are made: "ieee", "tf32", "bf16"
absent: Any = object()
"""The value of a name that has none."""


class RandomSource(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]


class Switch(NamedTuple):
    """One of torch's process-wide settings that choose arithmetic."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Buffer:
    """A module's tensor as it was before a forward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._before: torch.Tensor | None = tensor.clone()
        self._version = _version(tensor)

    def close(self) -> None:
        """Forget a large copy if the forward did not write the tensor.

        On a CPU bits are compared, since versions miss writes through ``.data``. On a device that
        would synchronise. A small copy stays: others may write before the call is repeated.
        """
        tensor = self._tensor
        if _version(tensor) != self._version:
            return
        on_cpu = tensor.device.type in ("cpu", "meta")
        if _is_plain(tensor) and tensor.nbytes <= (TINY if on_cpu else SMALL):
            return
        if not on_cpu or _same_bits(self._before, tensor):
            self._before = None

    @property
    def is_lost(self) -> bool:
        """Whether others have written the tensor since `close`, and there is no copy."""
        return self._before is None and self.is_written()

    def is_written(self) -> bool:
        """Whether the tensor's version is another one than before."""
        return _version(self._tensor) != self._version

    def copy(self) -> torch.Tensor:
        """Return a writable copy of the value before the forward."""
        return (self._tensor if self._before is None else self._before).clone()


def _version(tensor: torch.Tensor) -> int:
    return (-1 if tensor.is_inference() else tensor._version) + unseen_writes(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _same_bits(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    if first is None or not _is_plain(first):
        return first is None
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    plain = (t.resolve_conj().resolve_neg() for t in (first, second))
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in plain)
    return second.is_meta or bool(np.array_equal(one.numpy(), other.numpy()))


def _put(space: MutableMapping[Any, Any], values: dict[Any, Any]) -> None:
    if _is_same(space, values):
        return
    for name, value in values.items():
        if space.get(name, absent) is not value:
            space[name] = value
    for name in [name for name in space if name not in values]:
        del space[name]


def _is_same(space: MutableMapping[Any, Any], values: dict[Any, Any]) -> bool:
    same = len(space) == len(values) and all(map(operator.is_, space.values(), values.values()))
    return same and space.keys() == values.keys()


def contents(table: Any) -> Any:
    """Return a container's contents in a plain one."""
    if not table:
        return ()
    return dict(table) if isinstance(table, dict) else list(table)


def _refill(table: Any, values: Any) -> None:
    """Set a container's contents, in place and in order."""
    if not (table or values):
        return
    if isinstance(table, dict):
        _put(table, dict(values))
        if list(table) != list(values):
            table.clear()
            table.update(values)
    elif isinstance(table, list):
        list.__setitem__(table, slice(None), values)
    else:
        table.clear()
        table.update(values) if isinstance(table, set) else table.extend(values)


def _fill(cell: CellType, value: Any) -> None:
    """Set a closure's variable, or clear it."""
    if value is not absent:
        cell.cell_contents = value
    elif content(cell) is not absent:
        del cell.cell_contents


def content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return absent


def _named(names: Names) -> dict[str, Any]:
    space, chosen = names
    return {name: space.get(name, absent) for name in chosen}


def _assign(names: Names, values: dict[str, Any]) -> None:
    """Set the values of some names, or delete them."""
    space, _ = names
    for name, value in values.items():
        if value is absent:
            space.pop(name, None)
        elif space.get(name, absent) is not value:
            space[name] = value


def _with_lent(table: Any, lent: dict[int, Any]) -> Any:
    """Return a container's contents with copies in place of tensors and tuples of them."""
    values = table.values() if isinstance(table, dict) else table
    if not lent or lent.keys().isdisjoint(map(id, values)):
        return table
    if isinstance(table, dict):
        return {k: lent.get(id(v), v) for k, v in table.items()}
    return [lent.get(id(v), v) for v in table]


def stand_in(value: Any, lent: dict[int, Any]) -> Any:
    """Return the copy of a tensor, or a tuple with copies of its tensors."""
    if not isinstance(value, tuple):
        return lent.get(id(value), value)
    return tuple.__new__(type(value), [stand_in(inner, lent) for inner in value])


def _as_it_was(then: Any, lent: dict[int, Any]) -> Any:
    return then


def _switch(switch: Switch, value: Any) -> None:
    if switch.get() != value:
        switch.set(value)


class StateKind(NamedTuple):
    """A kind of state, by its operations."""

    read: Callable[[Any], Any]
    """Returns a holder's present state."""
    write: Callable[[Any, Any], None]
    """Restores a holder's state, in place."""
    lend: Callable[[Any, dict[int, Any]], Any] = _as_it_was
    """Returns a state with the copies in ``lent`` in place of tensors and tuples of them."""


SPACE = StateKind(dict, _put, _with_lent)
TABLE = StateKind(contents, _refill, _with_lent)
NAMES = StateKind(_named, _assign, _with_lent)
CELL = StateKind(content, _fill, lambda value, lent: lent.get(id(value), value))
ARRAY = StateKind(np.copy, np.copyto)
SETTING = StateKind(lambda switch: switch.get(), _switch)


def common_sources() -> list[RandomSource]:
    return [
        RandomSource(random.getstate, random.setstate, operator.eq),
        RandomSource(np.random.get_state, np.random.set_state, _same_state),
        RandomSource(torch.get_rng_state, torch.set_rng_state, _same_bytes),
    ]


def device_source(place: torch.device) -> list[RandomSource]:
    """Return the generator of a device, if it has one."""
    if accelerator_rng(place) is None:
        return []
    get, put = functools.partial(accelerator_rng, place), set_accelerator_rng
    return [RandomSource(get, functools.partial(put, place), _same_bytes)]


def source_of(value: Any) -> RandomSource | None:
    """Return a generator object's source; None for any other object."""
    if isinstance(value, torch.Generator):
        return RandomSource(value.get_state, value.set_state, _same_bytes)
    if isinstance(value, np.random.RandomState):
        return RandomSource(value.get_state, value.set_state, _same_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        get, put = lambda: bits.state, lambda state: setattr(bits, "state", state)
        return RandomSource(get, put, lambda a, b: repr(a) == repr(b))
    if isinstance(value, random.Random):
        return RandomSource(value.getstate, value.setstate, operator.eq)
    return None


def _same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return bool(np.array_equal(first.numpy(), second.numpy()))


def _same_state(first: Any, second: Any) -> bool:
    return bool(np.array_equal(first[1], second[1]) and first[2:] == second[2:])


@functools.cache
def switches() -> tuple[Switch, ...]:
    """Return torch's settings that choose between ways to compute a result."""
    sdp, cudnn = torch.backends.cuda, torch.backends.cudnn
    found = [
        Switch(sdp.flash_sdp_enabled, sdp.enable_flash_sdp),
        Switch(sdp.mem_efficient_sdp_enabled, sdp.enable_mem_efficient_sdp),
        Switch(sdp.math_sdp_enabled, sdp.enable_math_sdp),
        Switch(sdp.cudnn_sdp_enabled, sdp.enable_cudnn_sdp),
        Switch(torch.get_default_dtype, torch.set_default_dtype),
        Switch(_deterministic, _set_deterministic),
        _attribute(cudnn, "enabled"),
        _attribute(cudnn, "benchmark"),
        _attribute(cudnn, "deterministic"),
        # ranks that have parts of a sequence replace it for the length of a block
        _attribute(F, "scaled_dot_product_attention"),
    ]
    ways = [
        Switch(functools.partial(getattr, way, FP32), functools.partial(_set_fp32, way))
        for way in ways_of_fp32()
    ]
    older = [
        _where_known(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        _where_known(*_attribute(cudnn, "allow_tf32")),
    ]
    # the older ones agree once the newer ones are set; where they do not, they set some of these
    return (*found, *ways, *older, *ways)


def ways_of_fp32() -> list[Any]:
    """Return what has torch's setting of fp32 products: that of all, of each library, and of each
    operation in one, which follow in this order where they are not set themselves."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    found: list[Any] = [torch.backends, cudnn, mkldnn, cuda.matmul]
    for library in (cudnn, mkldnn):
        found += [getattr(library, name, None) for name in ("matmul", "conv", "rnn")]
    return [way for way in found if hasattr(way, FP32)]


def _set_fp32(way: Any, value: str) -> None:
    setattr(way, FP32, "none")  # perhaps it followed another
    if getattr(way, FP32) != value:
        setattr(way, FP32, value)


def _attribute(owner: Any, name: str) -> Switch:
    return Switch(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))


def _where_known(get: Callable[[], Any], put: Callable[[Any], Any]) -> Switch:
    """Return a switch of a setting that torch refuses to tell, and that is None, once
    `ways_of_fp32` were set apart from it."""

    def known() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return Switch(known, lambda value: None if value is None else put(value))


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(state: tuple[bool, bool]) -> None:
    if state != _deterministic():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(state[0], warn_only=state[1])
