"""Models of transformers 5 whose weights stay in their files until they are prepared (floor 4).

transformers works as always: it finds the files, builds the model, renames keys, ties weights,
initialises missing tensors, and reports. Meanwhile `Streaming` withholds the tensors that become
parameters unchanged; these parameters stay empty and know their file
(`hetero.train.model.empty.FilePlace`). `prepare` reads them, piece by piece, into the homes.
transformers loads all others: tensors that it converts (merged experts), buffers, and weights that
may or may not be tied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from hetero.tensorfile import SUFFIX
from hetero.train.engine.check import pageable
from hetero.train.model.empty import FilePlace, promise
from hetero.weights import Weights

LOADING = threading.RLock()  # a load replaces a method of transformers

Load = Callable[..., Any]


class InFile(NamedTuple):
    place: FilePlace
    shape: tuple[int, ...]


class Streaming:
    """Splits a checkpoint: some tensors stay in their files, transformers loads the others.

    Args:
        stock: transformers' own function to load checkpoint files into a model.
    """

    def __init__(self, stock: Load) -> None:
        self.mismatched: list[str] = []
        """Tensors whose shapes differ between file and model."""
        self._stock = stock

    def load(
        self, model: Any, state_dict: Any, files: list[str] | None, config: Any, *rest: Any
    ) -> Any:
        """Stand in for `PreTrainedModel._load_pretrained_model`."""
        plain = state_dict is None and config.hf_quantizer is None
        if not plain or not files or not all(file.endswith(SUFFIX) for file in files):
            return self._stock(model, state_dict, files, config, *rest)
        # 1. find the tensors that become parameters unchanged
        places, others = self._sorted(model, tensors_of(files), config.weight_mapping or [])
        # 2. let transformers load the others: converted tensors, buffers, unknown keys
        opened: dict[str, Any] = {path: safe_open(path, framework="pt") for path in files}
        slices = {key: opened[place.path].get_slice(key) for key, place in others.items()}
        info, index = self._stock(model, slices, None, config, *rest)
        opened.clear()
        # 3. tell the parameters of the first their files
        for name, place in places.items():
            wait(model, name, place, dtype_of(model.get_parameter(name), name, config))
            info.missing_keys.discard(name)
        self.mismatched = [
            f"{name!r} is {list(here)} in the model and {list(there)} in the files"
            for name, there, here in sorted(info.mismatched_keys)
        ]
        return info, index

    def _sorted(
        self, model: Any, there: Mapping[str, InFile], mapping: Sequence[Any]
    ) -> tuple[dict[str, FilePlace], dict[str, FilePlace]]:
        """Return the places of unchanged parameters by name, and of all other tensors by key."""
        names = Names(model, mapping)
        found: dict[str, list[FilePlace]] = {}
        others: dict[str, FilePlace] = {}
        for key, (place, shape) in there.items():
            known = names.param(key)
            if known is None or tuple(known[1].shape) != shape:
                others[key] = place
            else:
                found.setdefault(known[0], []).append(place)
        pairs = [pair for pair in model.all_tied_weights_keys.items() if set(pair) <= found.keys()]
        compared = {name for pair in pairs for name in pair}  # tied if they are equal
        for name in [n for n, places in found.items() if n in compared or len(places) > 1]:
            others.update({place.name: place for place in found.pop(name)})
        return {name: places[0] for name, places in found.items()}, others


@contextmanager
def streaming() -> Iterator[Streaming]:
    """Let weights stay in their files if this thread loads them with transformers."""
    with LOADING:
        owner: Any = PreTrainedModel
        before, thread = owner.__dict__["_load_pretrained_model"], threading.get_ident()
        stock = owner._load_pretrained_model
        stream = Streaming(stock)

        def load(*args: Any, **kwargs: Any) -> Any:
            ours = threading.get_ident() == thread
            return (stream.load if ours else stock)(*args, **kwargs)

        owner._load_pretrained_model = staticmethod(load)
        try:
            yield stream
        finally:
            owner._load_pretrained_model = before


def tensors_of(files: Iterable[str]) -> dict[str, InFile]:
    """Return the place of every tensor in these files."""
    found: dict[str, InFile] = {}
    for path in files:
        with Weights(path) as weights:
            for name in weights.names():
                found[name] = InFile(FilePlace(path, name), weights.shape(name))
    return found


class Names:
    """Maps keys of files to names in a model, by the model's own rules."""

    def __init__(self, model: Any, mapping: Sequence[Any]) -> None:
        self._model = model
        self._known = model.state_dict()
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def param(self, key: str) -> tuple[str, nn.Parameter] | None:
        """Return the empty parameter that a key's tensor becomes unchanged, else None."""
        name, converted = self._renamed(key, self._renamings, self._converters)
        if name not in self._known and key in self._known:  # it should not have been renamed
            name, converted = self._renamed(key, [], [])
        if converted is not None or name not in self._known:
            return None
        try:
            param: nn.Parameter = self._model.get_parameter(name)
        except AttributeError:  # a buffer
            return None
        return (name, param) if param.is_meta and pageable(param) else None

    def _renamed(
        self, key: str, renamings: list[Any], converters: list[Any]
    ) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(
            key, renamings, converters, prefix, self._known
        )
        return found


def dtype_of(param: nn.Parameter, name: str, config: Any) -> torch.dtype:
    """Return the dtype that transformers loads a parameter in."""
    plan: dict[str, torch.dtype] = config.dtype_plan or {}
    if plan:
        pattern, by_group, _ = build_glob_alternation(list(plan))
        found = pattern.search(name)
        if found is not None:
            return plan[by_group[found.lastgroup or ""]]
    return param.dtype


def wait(model: nn.Module, name: str, place: FilePlace, dtype: torch.dtype) -> None:
    """Replace a parameter by an empty one that knows its place."""
    param = model.get_parameter(name)
    empty: Any = nn.Parameter(param.detach().to(dtype), requires_grad=True)
    promise(empty, place)
    empty._is_hf_initialized = True  # transformers looks for it
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, empty)
