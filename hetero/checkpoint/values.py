"""Values other than tensors, as JSON and back, without code in them (floor 4).

JSON has no tuples, no bytes, no keys but strings and no tensors: each becomes an object with one
reserved key. Tensors of one element or more are entries of the checkpoint, named in the object.
Values of other types are refused, by the path to them.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from hetero.checkpoint.manifest import ITEM_BYTES
from hetero.errors import CheckpointCorrupt, ConfigError
from hetero.parse import MAX_DEPTH
from hetero.train.engine.state_dict import Scalars

MARK = "__hetero__"
Keep = Callable[[str, torch.Tensor], None]
Find = Callable[[str], torch.Tensor]


def encode(value: Any, path: str, keep: Keep, within: tuple[Any, ...] = ()) -> Any:
    """Return a value as JSON; its tensors go to ``keep(path, tensor)``.

    ``within`` are the containers around it, outermost first. Raises ConfigError for any value but a
    number, a string, bytes, a container or a tensor, for a container that contains itself, and for
    nesting beyond `MAX_DEPTH`.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return _plain(value)
    if isinstance(value, torch.Tensor):
        keep(path, value.detach())
        return {MARK: "tensor", "entry": path}
    if isinstance(value, (bytes, bytearray)):
        return {MARK: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, numpy.generic):
        return encode(value.item(), path, keep, within)
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        keep(path, torch.from_numpy(value.copy()))
        return {MARK: "array", "entry": path}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        within = _entered(value, path, within)
        items = [encode(item, f"{path}[{i}]", keep, within) for i, item in enumerate(value)]
        kind = next(k for k in (list, tuple, set, frozenset, deque) if isinstance(value, k))
        return items if kind is list else {MARK: kind.__name__, "items": items}
    if isinstance(value, Mapping):
        return _mapping(value, path, keep, _entered(value, path, within))
    raise ConfigError(
        f"{path} is a {type(value).__name__}, which a checkpoint does not keep",
        advice="save numbers, strings, bytes, lists, tuples, dicts and tensors: nothing is pickled",
    )


def _plain(value: Any) -> Any:
    """Return a number or string without its subclass (a numpy float, an enum's string)."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _entered(value: Any, path: str, within: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the containers around the items of a container, or refuse it by its path."""
    if any(value is one for one in within):
        raise ConfigError(
            f"{path} is a {type(value).__name__} that contains itself",
            advice="save what it stands for, as a name or a number: a checkpoint is a tree",
        )
    if len(within) == MAX_DEPTH:
        raise ConfigError(
            f"{path} is nested deeper than {MAX_DEPTH}",
            advice="save it flat, as a list of pairs, or in a file of its own",
        )
    return (*within, value)


def _mapping(value: Mapping[Any, Any], path: str, keep: Keep, within: tuple[Any, ...]) -> Any:
    plain = all(isinstance(key, str) for key in value) and MARK not in value
    if plain:
        return {str(k): encode(v, f"{path}.{k}", keep, within) for k, v in value.items()}
    pairs = [
        [encode(k, f"{path} key {i}", keep, within), encode(v, f"{path}[{k!r}]", keep, within)]
        for i, (k, v) in enumerate(value.items())
    ]
    return {MARK: "dict", "items": pairs}


def decode(value: Any, find: Find) -> Any:
    """Invert `encode`, with tensors from ``find(path)``; CheckpointCorrupt for other data."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: decode(item, find) for key, item in value.items()}
    kind = value[MARK]
    try:
        return _MAKE[kind](value, find)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorrupt(
            f"a value is of kind {str(kind)[:80]!r} and is not: {str(error)[:200]}",
            advice="use another checkpoint; hetero verify lists them",
        ) from error


def encode_inside(value: Any) -> dict[str, Any]:
    """Return a value as JSON that holds its tensors too: small ones."""
    found: dict[str, Any] = {}

    def keep(path: str, tensor: torch.Tensor) -> None:
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[path] = {"dtype": dtype, "base64": base64.b64encode(raw).decode()}

    return {"value": encode(value, "value", keep), "tensors": found}


def decode_inside(saved: Mapping[str, Any]) -> Any:
    """Invert `encode_inside`; tensors have one dimension."""

    def find(path: str) -> torch.Tensor:
        row = saved["tensors"][path]
        raw = bytearray(base64.b64decode(row["base64"], validate=True))
        dtype = getattr(torch, row["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"there is no dtype {dtype}")
        return torch.frombuffer(raw, dtype=torch.uint8).view(dtype)

    return decode(saved["value"], find)


def _items(value: dict[str, Any], find: Find) -> list[Any]:
    return [decode(item, find) for item in value["items"]]


_MAKE: dict[str, Callable[[dict[str, Any], Find], Any]] = {
    "tensor": lambda value, find: find(value["entry"]),
    "array": lambda value, find: find(value["entry"]).numpy(),
    "bytes": lambda value, find: base64.b64decode(value["base64"], validate=True),
    "tuple": lambda value, find: tuple(_items(value, find)),
    "set": lambda value, find: set(_items(value, find)),
    "frozenset": lambda value, find: frozenset(_items(value, find)),
    "deque": lambda value, find: deque(_items(value, find)),
    "dict": lambda value, find: {decode(k, find): decode(v, find) for k, v in value["items"]},
}


# -- states that are no tensors of their own ------------------------------------------------------


def encode_scalars(scalars: Scalars) -> Any:
    """Return step counts and the like as JSON; a scalar tensor as its dtype and number."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            return {"dtype": dtype, "value": value.item()}
        return {"value": encode(value, "state", refuse)}

    return {name: {k: plain(v) for k, v in state.items()} for name, state in scalars.items()}


def decode_scalars(saved: Mapping[str, Mapping[str, Any]]) -> Scalars:
    """Invert `encode_scalars`."""

    def made(value: Mapping[str, Any]) -> Any:
        if "dtype" in value:
            return torch.tensor(value["value"], dtype=dtype_named(value["dtype"]), device="cpu")
        return decode(value["value"], refuse)

    return {name: {k: made(v) for k, v in state.items()} for name, state in saved.items()}


def dtype_named(name: str) -> torch.dtype:
    """Return a dtype of the format; KeyError for any other name."""
    if name not in ITEM_BYTES:
        raise KeyError(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def refuse(path: str, *_: Any) -> Any:
    """Refuse a tensor among scalars."""
    raise CheckpointCorrupt(
        f"{path} names a tensor where none is saved",
        advice="use another checkpoint; hetero verify lists them",
    )
