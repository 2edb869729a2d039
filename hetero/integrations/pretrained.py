"""Pretrained models of transformers, loaded inside a byte budget (floor 4).

From transformers 5 on, weights go from their files straight home (streaming.py). Earlier versions
load them, mapped in the dtype of the files, and hetero copies them home one by one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig

from hetero.api import prepare as prepare_model
from hetero.config import Config, Settings
from hetero.errors import ConfigError, HeteroError
from hetero.tensorfile import INDEX, SINGLE
from hetero.weights import Weights

STREAMS = importlib.util.find_spec("transformers.core_model_loading") is not None
DTYPE = "dtype" if STREAMS else "torch_dtype"  # the name that every version knows
HUB = ("revision", "local_files_only", "trust_remote_code", "token", "cache_dir", "subfolder")
REFUSED = {
    "device_map": "hbm= and host= say where parameters are",
    "tp_plan": "one process holds the model",
    "quantization_config": "hetero pages plain tensors",
    "state_dict": "build the model, load the state dict into it, and call hetero.prepare",
    "output_loading_info": "read the load report that transformers logs",
}
KNOWN = frozenset(field.name for field in dataclasses.fields(Config)) - {"weights"}

MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def from_pretrained(
    name: str | Path,
    *,
    optimizer: MakeOptimizer | None = None,
    prepare: bool = True,
    model_class: Any = None,
    config: Settings = None,
    **settings: Any,
) -> Any:
    """Load a model of transformers inside a byte budget; its values, keys and ties are the stock's.

    Args:
        name: a directory with ``config.json`` and safetensors, or a name on the Hub.
        optimizer: makes an optimizer of the model's parameters, as
            ``lambda params: torch.optim.AdamW(params, lr=1e-5)``. Without it the model is for
            inference.
        prepare: False returns the model with empty parameters. It cannot compute before
            ``hetero.prepare(model, optimizer, **settings)``, which then takes the settings (for
            param groups, adapters, a Trainer).
        model_class: a model class or auto class of transformers, or its name; None: the class that
            ``config.json`` names, else ``AutoModelForCausalLM``.
        config, settings: as for `hetero.prepare`. Any other keyword goes to transformers'
            ``from_pretrained`` (``dtype``, by default that of the files; ``revision``,
            ``local_files_only``, ``trust_remote_code``, ``attn_implementation``, values for the
            model's own config).

    Returns:
        the model, in eval mode; ``(model, optimizer)`` with an optimizer.

    Raises:
        ConfigError: no such model, no safetensors in it, tensors of other shapes, or a setting
            that cannot be honoured.
        CheckpointCorrupt: a file is missing, cut short or damaged.
        BudgetError: as `hetero.prepare`.

    Example:
        >>> import hetero, transformers
        >>> config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64)
        >>> transformers.GPT2LMHeadModel(config).save_pretrained("small")
        >>> model = hetero.from_pretrained("small", device="cpu:sim", hbm="1MiB")
        >>> hetero.status(model).device
        'cpu:sim'
    """
    given = {key: settings.pop(key) for key in set(settings) - KNOWN}
    for key, why in REFUSED.items():
        if given.get(key) is not None:
            raise ConfigError(f"from_pretrained with {key}=", advice=f"leave it out: {why}")
    if not prepare and (optimizer or config or settings):
        raise ConfigError(
            "from_pretrained(prepare=False) with an optimizer or settings",
            advice="give them to hetero.prepare(model, optimizer, ...)",
        )
    if optimizer is not None and not callable(optimizer):
        raise ConfigError(
            f"optimizer= of from_pretrained is a {type(optimizer).__name__}, not a function:"
            " the parameters are not there yet",
            advice="pass what makes one, as optimizer=lambda params: torch.optim.AdamW(params)",
        )
    ready = Config.load(config, **settings)  # find mistakes before loading anything
    model = load(str(name), model_class, given)
    if not prepare:
        return model
    made = None if optimizer is None else optimizer(model.parameters())
    return prepare_model(model, made, config=ready)


def load(name: str, model_class: Any, given: dict[str, Any]) -> nn.Module:
    """Return the model that transformers loads; parameters whose values wait are empty."""
    check_directory(name, given)
    given = {"use_safetensors": True, DTYPE: given.pop("dtype", "auto"), **given}
    with staying_in_files() as stream:
        try:
            cls = class_of(name, model_class, {k: given[k] for k in HUB if k in given})
            model: nn.Module = cls.from_pretrained(name, **given)
        except HeteroError:  # from hetero's own reading
            raise
        except OSError as error:
            raise ConfigError(
                f"transformers cannot load {name!r}: {' '.join(str(error).split())}",
                advice="name a directory with config.json and safetensors, or a model on the Hub"
                " that this machine can reach or has in its cache",
            ) from error
        except TypeError as error:
            refuse_misspelt(error, given)
            raise
        except RuntimeError as error:
            said = mismatches(error, stream)
            if not said:
                raise
            raise ConfigError(
                f"{name!r} does not fit the model: {said}",
                advice="name the checkpoint of this very model, or pass"
                " ignore_mismatched_sizes=True to begin these tensors anew",
            ) from error
    return model


def refuse_misspelt(error: TypeError, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a model refuses a keyword that is nearly a setting of hetero's."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    name = found[1] if found is not None else ""
    near = difflib.get_close_matches(name, KNOWN, n=1)
    if name in given and near:
        raise ConfigError(
            f"unknown setting {name!r}, did you mean {near[0]}?",
            advice="the model takes no such argument either",
        ) from error


def staying_in_files() -> AbstractContextManager[Any]:
    """Return a context in which weights stay in their files; no effect before version 5."""
    if not STREAMS:
        return nullcontext()
    from hetero.integrations.streaming import streaming

    return streaming()


def mismatches(error: RuntimeError, stream: Any) -> str:
    """Return the tensors whose shapes differ between files and model; "" if none do."""
    if stream is None:  # transformers names them in its error
        return " ".join(str(error).split()) if "size mismatch" in str(error) else ""
    shown = "; ".join(stream.mismatched[:10])
    return f"{len(stream.mismatched)} differences: {shown}" if stream.mismatched else ""


def check_directory(name: str, given: Mapping[str, Any]) -> None:
    """Refuse a directory with incomplete safetensors; read none of them."""
    where = Path(name) / (given.get("subfolder") or "")
    plain = (where / SINGLE, where / INDEX)
    if given.get("variant") is None and any(path.exists() for path in plain):
        Weights(where).close()


def class_of(name: str, model_class: Any, hub: dict[str, Any]) -> Any:
    """Return the class to load: the given one, or the one that config.json names."""
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
