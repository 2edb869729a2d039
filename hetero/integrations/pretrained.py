"""Pretrained models of transformers, whose weights go from their files straight home (floor 4).

transformers loads as it always does: it finds the files, builds the model, renames keys, ties,
initialises what is missing, and reports. Between the two halves of that, `Streaming` keeps from it
the tensors that become parameters as they are; their parameters stay empty and know their file
(`hetero.train.empty.Place`). Whoever prepares the model reads them, piece by piece, into the homes.
Tensors that are computed with (experts that are merged), buffers, and weights that may or may not
be tied, are loaded by transformers.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    rename_source_key,
)

from hetero.api import prepare
from hetero.config import Config
from hetero.errors import ConfigError, HeteroError
from hetero.train.check import pageable
from hetero.train.empty import Place, promise
from hetero.weights import INDEX, SINGLE, SUFFIX, Weights

LOADING = threading.RLock()  # a method of transformers is replaced while a model is loaded
HUB = ("revision", "local_files_only", "trust_remote_code", "token", "cache_dir", "subfolder")
REFUSED = {
    "device_map": "hbm= and host= say where parameters are",
    "tp_plan": "one process holds the model",
    "quantization_config": "hetero pages plain tensors",
    "state_dict": "build the model, load the state dict into it, and call hetero.prepare",
    "output_loading_info": "read the load report that transformers logs",
}
SETTINGS = frozenset(field.name for field in dataclasses.fields(Config)) - {"weights"}

Load = Callable[..., Any]
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def from_pretrained(
    name: str | Path,
    *,
    optimizer: MakeOptimizer | None = None,
    prepare: bool = True,
    model_class: Any = None,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    **settings: Any,
) -> Any:
    """Load a model of transformers inside a byte budget; its values, keys and ties are the stock's.

    Args:
        name: a directory with ``config.json`` and safetensors, or a name on the Hub.
        optimizer: makes an optimizer of the model's parameters, as
            ``lambda params: torch.optim.AdamW(params, lr=1e-5)``. Without one the model is for
            inference.
        prepare: False leaves the model as it is, with empty parameters, for whoever calls
            ``hetero.prepare(model, optimizer, **settings)`` later (param groups, adapters, a
            Trainer); it cannot compute before. Settings are given there then.
        model_class: a model class or auto class of transformers, or its name; None: the class that
            ``config.json`` names, else ``AutoModelForCausalLM``.
        config, settings: as for `hetero.prepare`. Any other keyword goes to transformers'
            ``from_pretrained`` (``dtype``, which is that of the files when not given; ``revision``,
            ``local_files_only``, ``trust_remote_code``, ``attn_implementation``, values for the
            model's own config).

    Returns:
        the model, in eval mode; ``(model, optimizer)`` with an optimizer.

    Raises:
        ConfigError: no such model, no safetensors in it, tensors of other shapes, or a setting
            that cannot be honoured.
        CheckpointCorrupt: a file is missing, cut short or damaged.
        BudgetError: as `hetero.prepare`.
    """
    given = {key: settings.pop(key) for key in set(settings) - SETTINGS}
    for key, why in REFUSED.items():
        if given.get(key) is not None:
            raise ConfigError(f"from_pretrained with {key}=", advice=f"leave it out: {why}")
    if not prepare and (optimizer or config or settings):
        raise ConfigError(
            "from_pretrained(prepare=False) with an optimizer or settings",
            advice="give them to hetero.prepare(model, optimizer, ...)",
        )
    ready = Config.load(config, **settings)  # mistakes in it are told before anything is loaded
    model = load(str(name), model_class, given)
    return finish(model, optimizer, ready) if prepare else model


def finish(model: nn.Module, optimizer: MakeOptimizer | None, config: Config) -> Any:
    """Prepare a loaded model."""
    if optimizer is None:
        return prepare(model, config=config)
    return prepare(model, optimizer(model.parameters()), config=config)


def load(name: str, model_class: Any, given: dict[str, Any]) -> nn.Module:
    """Return the model that transformers loads, with empty parameters where their values wait."""
    check_directory(name, given)
    given.setdefault("use_safetensors", True)
    with streaming() as what:
        try:
            cls = class_of(name, model_class, {k: given[k] for k in HUB if k in given})
            model: nn.Module = cls.from_pretrained(name, **given)
        except HeteroError:  # of our own reading, and said already
            raise
        except OSError as error:
            raise ConfigError(
                f"transformers cannot load {name!r}: {' '.join(str(error).split())}",
                advice="name a directory with config.json and safetensors, or a model on the Hub"
                " that this machine can reach or has in its cache",
            ) from error
        except RuntimeError as error:
            if not what.mismatched:
                raise
            shown = "; ".join(what.mismatched[:10])
            raise ConfigError(
                f"{name!r} does not fit the model: {len(what.mismatched)} differences: {shown}",
                advice="name the checkpoint of this very model, or pass"
                " ignore_mismatched_sizes=True to begin these tensors anew",
            ) from error
    return model


def check_directory(name: str, given: Mapping[str, Any]) -> None:
    """Refuse a directory whose safetensors are not complete, in our words; nothing is read."""
    where = Path(name) / (given.get("subfolder") or "")
    plain = (where / SINGLE, where / INDEX)
    if given.get("variant") is None and any(path.exists() for path in plain):
        Weights(where).close()


def class_of(name: str, model_class: Any, hub: dict[str, Any]) -> Any:
    """Return the class to load: the one that was given, or the one that config.json names."""
    if isinstance(model_class, str):
        if not hasattr(transformers, model_class):
            raise ConfigError(
                f"transformers has no {model_class}", advice="name a model class or an auto class"
            )
        return getattr(transformers, model_class)
    if model_class is not None:
        return model_class
    found, _ = PretrainedConfig.get_config_dict(name, **hub)
    named = next(iter(found.get("architectures") or ()), "")
    remote = hub.get("trust_remote_code") and "auto_map" in found
    known = None if remote else getattr(transformers, named, None)
    return known or transformers.AutoModelForCausalLM


# -- between the two halves of a load --------------------------------------------------------------


class InFile(NamedTuple):
    """A tensor of a file."""

    place: Place
    shape: tuple[int, ...]


class Streaming:
    """What transformers loads, and what stays in its files.

    Args:
        stock: transformers' own way to load checkpoint files into a model.
    """

    def __init__(self, stock: Load) -> None:
        self.mismatched: list[str] = []
        """What is of another shape in the file than in the model."""
        self._stock = stock

    def load(
        self, model: Any, state_dict: Any, files: list[str] | None, config: Any, *rest: Any
    ) -> Any:
        """Stand in for `PreTrainedModel._load_pretrained_model`."""
        plain = state_dict is None and config.hf_quantizer is None
        if not plain or not files or not all(file.endswith(SUFFIX) for file in files):
            return self._stock(model, state_dict, files, config, *rest)
        # 1. which tensors become parameters as they are
        places, others = self._sorted(model, tensors_of(files), config.weight_mapping or [])
        # 2. all else is transformers': what it converts, buffers, and what the model does not have
        opened: dict[str, Any] = {path: safe_open(path, framework="pt") for path in files}
        slices = {key: opened[place.path].get_slice(key) for key, place in others.items()}
        info, index = self._stock(model, slices, None, config, *rest)
        opened.clear()
        # 3. the parameters that wait
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
    ) -> tuple[dict[str, Place], dict[str, Place]]:
        """Return the places of parameters by their names, and those of all else by their keys."""
        names = Names(model, mapping)
        found: dict[str, list[Place]] = {}
        others: dict[str, Place] = {}
        for key, (place, shape) in there.items():
            known = names.param(key)
            if known is None or tuple(known[1].shape) != shape:
                others[key] = place
            else:
                found.setdefault(known[0], []).append(place)
        pairs = [pair for pair in model.all_tied_weights_keys.items() if set(pair) <= found.keys()]
        compared = {name for pair in pairs for name in pair}  # they are tied where they are equal
        for name in [n for n, places in found.items() if n in compared or len(places) > 1]:
            others.update({place.name: place for place in found.pop(name)})
        return {name: places[0] for name, places in found.items()}, others


@contextmanager
def streaming() -> Iterator[Streaming]:
    """Let what this thread loads with transformers stay in its files."""
    with LOADING:
        before, thread = PreTrainedModel.__dict__["_load_pretrained_model"], threading.get_ident()
        stock = PreTrainedModel._load_pretrained_model
        what = Streaming(stock)

        def load(*args: Any, **kwargs: Any) -> Any:
            ours = threading.get_ident() == thread
            return (what.load if ours else stock)(*args, **kwargs)

        PreTrainedModel._load_pretrained_model = staticmethod(load)  # type: ignore[method-assign]
        try:
            yield what
        finally:
            PreTrainedModel._load_pretrained_model = before  # type: ignore[method-assign]


def tensors_of(files: Iterable[str]) -> dict[str, InFile]:
    """Return where every tensor of these files is."""
    found: dict[str, InFile] = {}
    for path in files:
        with Weights(path) as weights:
            for name in weights.names():
                found[name] = InFile(Place(path, name), weights.shape(name))
    return found


class Names:
    """What the keys of files become in a model; the model's own rules of renaming decide."""

    def __init__(self, model: Any, mapping: Sequence[Any]) -> None:
        self._model = model
        self._known = model.state_dict()
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]

    def param(self, key: str) -> tuple[str, nn.Parameter] | None:
        """Return the empty parameter that a key's tensor becomes as it is; None for all else."""
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


def wait(model: nn.Module, name: str, place: Place, dtype: torch.dtype) -> None:
    """Put an empty parameter that knows its place where a name says."""
    param = model.get_parameter(name)
    empty = nn.Parameter(param.detach().to(dtype), requires_grad=True)
    promise(empty, place)
    empty._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers looks for it
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, empty)
