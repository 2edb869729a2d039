"""The values of parameters that are not in the model yet (floor 2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hetero.boxes import Arrangement
from hetero.errors import ConfigError
from hetero.memory.layout import Segment, contiguous_stride
from hetero.train.engine.check import pages
from hetero.train.engine.snapshot import read_box
from hetero.train.model.binding import point
from hetero.train.model.empty import FilePlace, promise, promised
from hetero.train.model.parts import PartPlace, Parts
from hetero.train.update.masters import Masters
from hetero.weights import Weights

PIECE_NUMEL = 2**16, 4 * 2**20  # elements read at once: a chunk's, between these


class Promises:
    """The values of empty parameters, in the files that these name.

    Raises ConfigError if shapes in a file have changed since.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._files: dict[str, Weights] = {}
        self._places: dict[int, FilePlace] = {}
        self._dtypes = [param.dtype for param in params]
        for index, param in enumerate(params):
            place = promised(param)
            if place is not None:
                if place.path not in self._files:
                    self._files[place.path] = Weights(place.path)
                there = self._files[place.path].shape(place.name)
                if there != tuple(param.shape):
                    raise ConfigError(
                        f"{place.name!r} of {place.path} is {list(there)} by now, not"
                        f" {list(param.shape)}",
                        advice="load the model again",
                    )
                self._places[index] = place

    def keeps(self, index: int) -> bool:
        """Whether a parameter's value comes from here."""
        return index in self._places

    def into(self, masters: Masters, segment: Segment) -> None:
        """Read a parameter straight into its home, by way of its own dtype."""
        place, dtype = self._places[segment.index], self._dtypes[segment.index]
        fill(masters, segment, self._files[place.path], place.name, dtype)

    def renew(self, params: Sequence[nn.Parameter]) -> None:
        """Mark parameters that are empty again with the places of their values."""
        for index, place in self._places.items():
            if params[index].is_meta:
                promise(params[index], place)

    def close(self) -> None:
        """Close the files."""
        for weights in self._files.values():
            weights.close()


def fill(
    masters: Masters,
    segment: Segment,
    weights: Weights,
    name: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Read a tensor straight into a parameter's home and master, rounded to ``dtype`` if given."""
    spec = segment.spec
    if spec.stride != contiguous_stride(spec.shape):
        value = whole(weights, name)
        masters.assign(segment, value if dtype is None else value.to(dtype))
        return
    room = masters.room(segment, weights.dtype(name))
    if room is not None and dtype in (None, weights.dtype(name)):
        weights.read(name, memoryview(room.numpy()))
        return
    least, most = PIECE_NUMEL
    numel = max(least, min(most, masters.chunk_numel))
    for start, values in weights.pieces(name, numel, masters.own(segment)):
        masters.assign_run(segment, start, values if dtype is None else values.to(dtype))


def part_of(weights: Weights, name: str, place: PartPlace) -> torch.Tensor:
    """Return a new tensor with this rank's part of one in a file."""
    dtype = weights.dtype(name)

    def read(start: int, into: memoryview) -> None:
        flat = torch.frombuffer(into, dtype=dtype)
        first = start // dtype.itemsize
        run = slice(first, first + flat.numel())
        for at, values in weights.pieces(name, PIECE_NUMEL[1], run):
            flat[at - first : at - first + values.numel()].copy_(values)

    return read_box(place.box, dtype, read, Arrangement(place.shape))


def whole(weights: Weights, name: str) -> torch.Tensor:
    """Return a new tensor with the values of one in a file."""
    value = torch.empty(weights.shape(name), dtype=weights.dtype(name), device="cpu")
    flat = value.view(-1)
    for start, values in weights.pieces(name, PIECE_NUMEL[0]):
        flat[start : start + values.numel()].copy_(values)
    return value


class Source:
    """Safetensors with the values of a model's parameters and buffers.

    A tied parameter is found under any of its names. Raises ConfigError that lists parameters and
    persistent buffers that are missing, or whose shapes differ, before anything is changed.
    """

    def __init__(self, model: nn.Module, path: str, parts: Parts) -> None:
        self._model = model
        self._parts = parts
        self._weights = Weights(path)
        self._there = set(self._weights.names())
        self._prefix = self._find_prefix()
        self._name: dict[int, str] = {}
        names: dict[int, list[str]] = {}
        params = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
            params[id(param)] = param
        problems = []
        for param in params.values():
            problems += self._note(id(param), names[id(param)], param)
        for name, buffer in self._buffers():
            problems += self._note(id(buffer), [name], buffer)
        if problems:
            shown = "; ".join(problems[:10])
            raise ConfigError(
                f"weights={path!r} do not fit the model: {len(problems)} differences: {shown}",
                advice="name the directory of this very model's weights",
            )
        named = pages(model)
        paged = [id(param) for _, param in named]
        self._of_index = [self._name[key] for key in paged]
        self._places = [parts.place(name, param) for name, param in named]
        self._tables = [param for key, param in params.items() if key not in paged]

    def into(self, masters: Masters, segment: Segment) -> None:
        """Read a parameter straight into its home, and into its master if it has one."""
        name, place = self._of_index[segment.index], self._places[segment.index]
        if place is not None and place.cuts:
            masters.assign(segment, part_of(self._weights, name, place))
        else:
            fill(masters, segment, self._weights, name)

    def keeps(self, index: int) -> bool:
        """Whether a parameter's value comes from here: all do."""
        return True

    def read_buffers(self) -> None:
        """Read, in place, the buffers in the files and the parameters that are never paged."""
        with torch.no_grad():
            for table in self._tables:
                value = whole(self._weights, self._name[id(table)])
                if table.is_meta:
                    point(table, value.to(table.dtype))
                else:
                    table.copy_(value)
            for name, buffer in self._buffers():
                if name in self._there or self._prefix + name in self._there:
                    there, place = self._name[id(buffer)], self._parts.place(name, buffer)
                    value = whole(self._weights, there)
                    if place is not None:
                        value = value[tuple(slice(*side) for side in place.box)]
                    self._parts.local(buffer).copy_(value)

    def renew(self, params: Sequence[nn.Parameter]) -> None:
        """Parameters are empty again; the next `prepare` names the directory itself."""

    def close(self) -> None:
        """Close the files."""
        self._weights.close()

    def _note(self, key: int, names: Iterable[str], tensor: torch.Tensor) -> list[str]:
        """Remember a tensor's name in the files; return what differs."""
        listed = list(names)
        found = next(
            (n for name in listed for n in (name, self._prefix + name) if n in self._there), None
        )
        if found is None:
            return [f"{listed[0]!r} is missing"]
        if self._weights.shape(found) != tuple(tensor.shape):
            theirs = list(self._weights.shape(found))
            return [f"{listed[0]!r} is {list(tensor.shape)} here and {theirs} there"]
        self._name[key] = found
        return []

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the persistent buffers with their names."""
        found = []
        for prefix, module in self._model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    found.append((f"{prefix}.{name}" if prefix else name, buffer))
        return found

    def _find_prefix(self) -> str:
        """Return the prefix of a Hugging Face base model's names in a head model's files."""
        prefix = getattr(self._model, "base_model_prefix", "")
        dotted = f"{prefix}." if isinstance(prefix, str) and prefix else ""
        return dotted if any(name.startswith(dotted) for name in self._there) else ""
