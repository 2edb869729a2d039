"""Checks of a model and an optimizer before anything is touched (floor 2).

They raise before the first allocation, so a refused model is the plain model it was.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.device import ALONE
from hetero.errors import ConfigError, StateError
from hetero.internals import is_traceable_wrapper_subclass, storage_uses, tree_iter
from hetero.memory.codec import is_finite, refusal
from hetero.memory.layout import Layout
from hetero.train.model.empty import promised
from hetero.train.model.parts import Parts, PlainTensors
from hetero.train.model.units import PART, has_params
from hetero.train.update.optimizer import Optimizer
from hetero.train.update.trial import check_optimizer

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
_BITSANDBYTES = ("Params4bit", "Int8Params")
OF_MODULES = {"_parameters", "_buffers", "_modules"}
_FLOAT8 = tuple(getattr(torch, n) for n in dir(torch) if n.startswith("float8_"))


def check_model(model: object, *, weights: bool = False, parts: Parts | None = None) -> nn.Module:
    """Return the model, or raise naming the module or the parameter that cannot be prepared.

    A parameter may be empty (on the meta device) if ``weights`` are to come, or if it knows where
    its values are.
    """
    parts = parts or PlainTensors()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}", advice="pass an nn.Module")
    for name, module in model.named_modules():
        where = name or "the model"
        if is_prepared(module):
            raise StateError(
                f"{where} is prepared already, or part of a model that is",
                advice="call hetero.release(model, optimizer) first",
            )
        check_unwrapped(where, module, "prepare")
    if not pages(model):
        raise ConfigError(
            "the model has no parameters of floating point", advice="there is nothing to page"
        )
    named = list(model.named_parameters())
    for name, param in named:
        if not (param.is_meta and (weights or promised(param))):
            check_param(name, param, parts)
    check_one_device((name, param) for name, param in named if not promised(param))
    check_overlaps((name, parts.local(param)) for name, param in named)
    for name, param in tables(model):
        if param.is_meta and pageable(param):
            raise ConfigError(
                f"parameter {name!r} is on the meta device, and its module makes it anew each time",
                advice="load this model's weights before hetero.prepare",
            )
    check_aliases(model, named, parts)
    return model


def check_watchable(model: object) -> tuple[nn.Module, torch.device]:
    """Return a plain model and its device, or raise naming the part that cannot be watched."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {type(model).__name__}", advice="pass an nn.Module")
    for name, module in model.named_modules():
        where = name or "the model"
        if is_prepared(module):
            raise StateError(
                f"{where} is part of a prepared model", advice="profile the model that was prepared"
            )
        check_unwrapped(where, module, "profile")
        if is_compiled(module):
            raise ConfigError(
                f"{where} is compiled: hetero cannot count the bytes inside compiled code",
                advice="profile the model before torch.compile",
            )
    named = list(model.named_parameters())
    if not named:
        raise ConfigError("the model has no parameters", advice="there is nothing to profile")
    for name, param in named:
        check_plain(name, param)
    check_one_device(named)
    return model, named[0][1].device


def is_prepared(module: nn.Module) -> bool:
    """Whether a module is prepared, or a part with parameters; others may belong to several."""
    return PART in module.__dict__ and has_params(module)


def check_unwrapped(where: str, module: nn.Module, verb: str) -> None:
    """Refuse wrappers that split or copy a module, and scripts; ``verb`` is for advice."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS:
            raise ConfigError(
                f"{where} is wrapped by {kind.__name__}", advice=f"{verb} the inner module"
            )
    places = getattr(module, "hf_device_map", None) or {}
    if len(set(places.values())) > 1 or hasattr(module, "_hf_hook"):
        raise ConfigError(
            f"{where} was loaded with device_map: accelerate's hooks move its parameters",
            advice=f"load it without device_map, then {verb} it",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{where} is a ScriptModule, which bypasses parameter access",
            advice=f"{verb} the Python module",
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile` was asked for a module, in place or around it."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def check_plain(name: str, param: nn.Parameter) -> None:
    """Refuse a parameter that has no bytes of its own yet, or has them in other tensors."""
    if isinstance(param, nn.parameter.UninitializedParameter):
        raise ConfigError(
            f"parameter {name!r} is uninitialized (a lazy module)", advice="run one batch first"
        )
    if param.is_meta or param.layout is not torch.strided or is_traceable_wrapper_subclass(param):
        raise ConfigError(
            f"parameter {name!r} is no plain dense tensor ({type(param.data).__name__},"
            f" {param.layout}, {param.device})",
            advice="profile a model whose parameters are plain tensors, before it is sharded",
        )


def pageable(param: nn.Parameter) -> bool:
    """Return whether hetero pages a parameter; integer tables stay on the device like buffers.

    They are small, and C++ reads sizes and indices in them past ``__torch_function__``.
    """
    return param.is_floating_point() or param.is_complex()


def pages(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that hetero pages, by name, in the model's order.

    [Note: made anew]  PEFT's LoRA on `nn.MultiheadAttention` registers other objects whenever its
    modules are listed, and again in each forward, which computes their values. Such parameters
    cannot be paged and stay on the device like buffers. Listing twice finds them.
    """
    first = dict(model.named_parameters())  # held, so that no address is reused
    twice = ((name, param) for name, param in model.named_parameters() if first.get(name) is param)
    return [(name, param) for name, param in twice if pageable(param)]


def tables(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that are not paged, by name, as they are registered now."""
    paged = {id(param) for _, param in pages(model)}
    return [(name, p) for name, p in model.named_parameters() if id(p) not in paged]


def check_param(name: str, param: nn.Parameter, parts: Parts) -> None:
    """Refuse parameters whose bytes are not a plain dense tensor, by name and kind."""
    is_wrapper = parts.inside(param) is not None
    if hasattr(type(param), "hetero_runtime"):  # tied into this model from another one
        raise StateError(
            f"parameter {name!r} belongs to a prepared model",
            advice="call hetero.release on that model first",
        )
    if type(param).__name__ in _BITSANDBYTES or hasattr(param, "quant_state"):
        raise ConfigError(
            f"parameter {name!r} is a {type(param).__name__} that bitsandbytes has quantised",
            advice="load the model in bf16, without quantization_config=; hetero.prepare(...,"
            " frozen='nf4') codes frozen weights, 0.53 bytes a parameter",
        )
    kind = ""
    if isinstance(param, nn.parameter.UninitializedParameter):
        kind = "uninitialized (a lazy module)"
    elif param.is_meta:
        kind = "on the meta device (name its values with weights=)"
    elif param.is_sparse or param.layout is not torch.strided:
        kind = f"sparse ({param.layout})"
    elif param.is_quantized or param.is_nested:
        kind = "quantized" if param.is_quantized else "nested"
    elif is_wrapper and type(parts.local(param)) is not torch.Tensor:
        kind = f"a {type(param).__name__} of a {type(parts.local(param)).__name__}"
    elif is_wrapper:
        parts.check(name, param)
    elif type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
        kind = f"a tensor subclass ({type(param).__name__})"
    elif type(param) is not nn.Parameter:
        kind = f"a Parameter subclass ({type(param).__name__})"
    elif param.is_inference():
        kind = "an inference tensor, which torch does not train (made in torch.inference_mode)"
    elif param.dtype in _FLOAT8 and param.requires_grad:
        kind = f"a trainable {param.dtype}"
    if kind:
        raise ConfigError(
            f"parameter {name!r} is {kind}",
            advice="prepare a model of plain dense parameters; build or load the weights first",
        )


def check_codes(model: nn.Module, layout: Layout, parts: Parts) -> None:
    """Refuse, by name, weights that their codec cannot hold, before any has changed."""
    paged = (param for _, param in pages(model))
    for param, (bucket, segment) in zip(paged, layout.home, strict=True):
        codec = layout.buckets[bucket].codec
        if not (codec.exact or is_finite(parts.local(param))):
            raise refusal(segment.spec.name, codec)


def check_one_device(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    places: dict[torch.device, str] = {}
    for name, param in named:
        places.setdefault(param.device, name)
    if len(places) > 1:
        listed = ", ".join(f"{name!r} on {place}" for place, name in places.items())
        raise ConfigError(f"parameters are on several devices: {listed}", advice="use one device")


class Span(NamedTuple):
    """Bytes [first, end) of a storage."""

    first: int
    end: int
    name: str


def span_of(name: str, tensor: torch.Tensor) -> tuple[int, Span] | None:
    """Return a tensor's storage and its part of it; None where it has no bytes of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return None
    if is_traceable_wrapper_subclass(tensor):
        return None
    last: int = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    end = first + (last + 1) * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), Span(first, end, name)


def spans_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[int, list[Span]]:
    """Return the parts of every storage that tensors have, in order."""
    found: dict[int, list[Span]] = {}
    for name, tensor in named:
        span = span_of(name, tensor)
        if span is not None:
            found.setdefault(span[0], []).append(span[1])
    for spans in found.values():
        spans.sort()
    return found


def check_aliases(
    model: nn.Module, named: Sequence[tuple[str, nn.Parameter]], parts: Parts
) -> None:
    """Refuse module tensors that share a parameter's memory; warn of other holders of it.

    In torch they follow every step; from `prepare` on the parameter's bytes are elsewhere.
    """
    spans = spans_of((name, parts.local(param)) for name, param in pages(model))
    known = {id(param) for _, param in named}
    for name, tensor, is_computed in held_by(model):
        span = None if id(tensor) in known else span_of(name, parts.local(tensor))
        if is_computed and span is not None and span[0] in spans:
            spans[span[0]].append(Span(0, 0, name))  # only counted as a holder
            continue
        for first, end, other in spans.get(span[0], ()) if span is not None else ():
            if span is not None and first < span[1].end and span[1].first < end:
                raise ConfigError(
                    f"{name!r} shares memory with parameter {other!r}, which lies elsewhere once it"
                    " is prepared: the two would part at the first step",
                    advice="compute it from the parameter in forward, or make it a clone",
                )
    warn_of_aliases(spans)


def held_by(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Yield name and tensor of modules' other attributes, and whether each forward computes it."""
    for prefix, module in model.named_modules():
        computed = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        held = {**module._buffers, **module.__dict__}
        for key, value in held.items():
            if key not in OF_MODULES:
                for tensor in tree_iter(value):
                    if isinstance(tensor, torch.Tensor):
                        name = f"{prefix}.{key}" if prefix else key
                        yield name, tensor, key in computed


def warn_of_aliases(spans: Mapping[int, Sequence[Span]]) -> None:
    """Warn of parameters whose memory is also held outside the model."""
    if any(use_count_of(storage) > len(parts) for storage, parts in spans.items()):
        gc.collect()  # a dead graph still holds its saved tensors
    held = [p for s, parts in spans.items() if use_count_of(s) > len(parts) for p in parts if p.end]
    if held:
        warnings.warn(
            f"the memory of {len(held)} parameters, as {held[0].name!r}, is held outside the model"
            " (a state dict, a view, p.data, a graph): what holds it keeps the values that it has"
            " now, and no longer follows the training; take it again after hetero.prepare",
            stacklevel=2,
        )


def use_count_of(storage: int) -> int:
    """Return how many tensors have a storage, by its address."""
    return storage_uses(storage) - (ALONE - 1)


def check_overlaps(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse parameters that share part of a storage; tied ones are one parameter."""
    for rows in spans_of(named).values():
        for (_, end, name), (first, _, other) in itertools.pairwise(rows):
            if first < end:
                raise ConfigError(
                    f"parameters {name!r} and {other!r} share part of their memory",
                    advice="tie them (one Parameter under two names) or clone one of them",
                )


def check_pair(model: nn.Module, optimizer: object) -> torch.optim.Optimizer | None:
    """Return the optimizer, or raise naming why it cannot step this model."""
    if isinstance(optimizer, Optimizer):
        raise StateError(
            "the optimizer is prepared already", advice="pass the plain torch optimizer"
        )
    plain = check_whose(model, optimizer)
    if plain is None:
        return None
    check_optimizer(plain)
    return plain


def check_whose(model: nn.Module, optimizer: object) -> torch.optim.Optimizer | None:
    """Return the optimizer, or raise naming a parameter that is not of the model."""
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}", advice="pass a torch.optim optimizer"
        )
    known = {id(param) for param in model.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for position, param in enumerate(group["params"]):
            if id(param) not in known and not was_made_anew(model, param):
                raise ConfigError(
                    f"parameter {position} of group {number} (shape {list(param.shape)}) is not of"
                    " the model",
                    advice="build the optimizer from model.parameters() of this very model",
                )
    check_once(model, optimizer.param_groups)
    return optimizer


def was_made_anew(model: nn.Module, param: torch.Tensor) -> bool:
    """Whether a model had a frozen parameter until it was listed again; see [Note: made anew]."""
    anew = [each for _, each in tables(model) if pageable(each)]
    return not param.requires_grad and any(each.shape == param.shape for each in anew)


def check_once(model: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a parameter that an optimizer lists twice, which torch steps twice."""
    counts = Counter(id(param) for group in groups for param in group["params"])
    names = (name for name, param in model.named_parameters() if counts[id(param)] > 1)
    if max(counts.values(), default=0) > 1:
        raise ConfigError(
            f"parameter {next(names, '')!r} is in the optimizer's groups twice",
            advice="list it once; torch would step it twice with one gradient",
        )
