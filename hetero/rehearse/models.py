"""Models by name, by configuration, or by factory: on the meta device, with a batch (floor 4)."""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.plan.presets import PRESETS
from hetero.plan.shape import shape_of
from hetero.recipes.options import installed
from hetero.rehearse.bert import Bert
from hetero.rehearse.decoders import decoder
from hetero.rehearse.layers import HAS_EXPERTS
from hetero.rehearse.named import ModelConfig, config_of, is_factory

POSITIONS = 1024  # of the one sample that is planned with if no batch is given
MAX_LAYERS = 2**14  # that are built: a configuration of a kilobyte may ask for billions
UNFIT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
META = torch.device("meta")
NOT_THEIRS = re.compile(r"importlib|site-packages|" + re.escape(str(Path(__file__).parents[1])))
BERT = set(PRESETS["bert-base-uncased"])  # keys that a plain BERT is built of


@dataclass(frozen=True, slots=True)
class Described:
    """A model and the arguments of its call."""

    model: nn.Module
    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 1
    positions: int = 1


def describe(what: nn.Module | ModelConfig, batch: Any, *, plain: bool = True) -> Described:
    """Return the model that ``what`` names, and the batch; see `hetero.plan`.

    ``plain``: whether a configuration may be built without transformers, where hetero knows it.
    """
    if isinstance(what, nn.Module):
        return called(what, type(what).__name__, batch)
    if is_factory(what):
        model, own = from_factory(what)
        return called(model, what.rpartition(":")[2], batch if own is None else own)
    mapping, name = config_of(what)
    if batch is not None and not is_size(batch):
        return called(from_config(mapping, plain=plain), name, batch)
    samples, positions = batch or (1, POSITIONS)
    tokens = torch.empty(samples, positions, dtype=torch.long, device=META)
    kwargs = {"input_ids": tokens, "labels": tokens}
    return Described(from_config(mapping, plain=plain), name, (), kwargs, samples, positions)


def is_size(batch: Any) -> bool:
    """Whether a batch is (samples, positions)."""
    return isinstance(batch, tuple) and len(batch) == 2 and all(type(size) is int for size in batch)


def called(model: nn.Module, name: str, batch: Any) -> Described:
    """Return a model with its batch as arguments."""
    if batch is None or is_size(batch):
        raise ConfigError(
            f"{name} needs arguments",
            advice="let a function named as mymodels:small return model, batch; or give hetero.plan"
            "(batch=...) keyword arguments as a mapping, others as a sequence, or a tensor",
        )
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = batch
    elif isinstance(batch, (tuple, list)):
        args = batch
    else:
        args = (batch,)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dim()]
    shape = tensors[0].shape if tensors else (1,)
    positions = shape[1] if len(shape) > 1 else 1
    return Described(model, name, args, kwargs, shape[0], positions)


def told(error: Exception) -> str:
    """Return what an error of a user's code says, and the line that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [row for row in frames if not NOT_THEIRS.search(row.filename)]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
    return f"{kind}{error}{where}"


def from_factory(what: str) -> tuple[nn.Module, Any]:
    """Call a function by its name; return its model, which takes no memory, and its batch.

    If it returns a model alone, the batch is None.
    """
    module, _, name = what.rpartition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is a user's, and may raise anything
        raise ConfigError(
            f"{what}: {told(error)}", advice="name a function of a module here, as mymodels:small"
        ) from error
    try:
        with META:
            made = make()
    except Exception as error:
        raise ConfigError(
            f"{what} failed: {told(error)}",
            advice="a function without arguments, which asks for no number of a tensor: it runs"
            " without memory, on the meta device",
        ) from error
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{what} returned a {type(made).__name__}",
            advice="return an nn.Module, or one and its batch: return model, batch",
        )
    return model, batch


def from_config(mapping: Mapping[str, Any], *, plain: bool = True) -> nn.Module:
    """Return a model for causal language modelling, without memory for it.

    A configuration that says no more than a shape is built in plain torch, with the operations and
    the names of transformers; others need it.
    """
    for key, value in mapping.items():
        if "layer" in key and isinstance(value, int) and value > MAX_LAYERS:
            raise ConfigError(f"{key} is {value}", advice=f"a model has {MAX_LAYERS} at most")
    built = from_shape(mapping) if plain else None
    return built or from_transformers(mapping)


def from_shape(mapping: Mapping[str, Any]) -> nn.Module | None:
    """Return a model in plain torch; None of a configuration that says more than a shape."""
    try:
        shape = shape_of(mapping)
        if shape is not None:
            return decoder(shape) if HAS_EXPERTS or not shape.experts else None
        if set(mapping) == BERT:
            with META:
                return Bert(mapping).train()
    except UNFIT:
        return None  # transformers says what is wrong
    return None


def from_transformers(mapping: Mapping[str, Any]) -> nn.Module:
    """Return a Hugging Face model for causal language modelling, without memory for it."""
    with installed("transformers builds models from a configuration", other=", or pass a module"):
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
    options = dict(mapping)
    kind = options.pop("model_type", None)
    if kind is None:
        raise ConfigError(
            "the configuration does not say its model_type",
            advice="name the config.json of a model, as Transformers wrote it",
        )
    try:
        config = AutoConfig.for_model(kind, **options)
        config.use_cache = False
        with META:
            build: Any = AutoModelForCausalLM.from_config
            model: nn.Module = build(config, dtype=torch.float32)
    except (*UNFIT, StrictDataclassError) as error:
        first = str(error).partition(" Should contain one of")[0]  # hundreds of names
        raise ConfigError(
            f"transformers makes no causal language model of model_type={kind!r}: {first}",
            advice="pass a module, or the name of a function that makes one",
        ) from error
    return model.train()
