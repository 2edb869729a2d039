"""Everything of a prepared model that outlives a process, as named parts (floor 2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero.memory.layout import Bucket, Segment
from hetero.memory.manager import PARAM
from hetero.train.check import pageable
from hetero.train.engine import Engine
from hetero.train.lazy import handle
from hetero.train.rules import SCALARS, is_elementwise
from hetero.train.snapshot import Name, Part, of_home, of_tensor
from hetero.types import Kind

Scalars = dict[str, dict[str, Any]]


def parts_of(engine: Engine, *, as_now: bool = False) -> list[Part]:
    """Return parameters, what is left of masters, states and buffers, bucket by bucket.

    Buckets come in the order of the next forward, which is that of their updates. With ``as_now``
    what no update changes, buffers, is copied: the next forward may change it.
    """
    found: list[Part] = []
    for bucket in ordered(engine):
        for segment in bucket.segments:
            found.extend(_of_parameter(engine, bucket, segment))
    for name, tensor in tables(engine.model):
        found.append(of_tensor(name, tensor.detach().cpu().clone() if as_now else tensor))
    return found


def ordered(engine: Engine) -> list[Bucket]:
    """Return the buckets in the order of the next forward, as far as that is known."""
    buckets = engine.blueprint.layout.buckets
    if engine.mode != "paged":
        return list(buckets)
    order = engine.runtime.train.order()
    return sorted(buckets, key=lambda bucket: order.get(bucket.id, len(order)))


def _of_parameter(engine: Engine, bucket: Bucket, segment: Segment) -> Iterator[Part]:
    store, param, name = engine.store, engine.params[segment.index], segment.spec.name
    homes = store.homes
    if engine.mode == "paged" or engine.has_masters:
        home = homes[PARAM, bucket.id]
        yield of_home(Name("param", name), store, home, segment, bucket.id)
    else:
        yield of_tensor(Name("param", name), param, bucket.id)
    if engine.masters.has(bucket):
        low = engine.masters.low(bucket)
        yield of_home(Name("master", name), store, low, segment, bucket.id)
    for key, value in known_state(engine, param).items():
        if not is_tensor(key, value, segment):
            continue
        here = homes.get((key, bucket.id)) if engine.stepper is not None else None
        if here is not None and is_elementwise(key, value, segment.spec.shape):
            yield of_home(Name("state", name, key), store, here, segment, bucket.id)
        else:
            current = partial(_current, engine, param, key)
            yield of_tensor(Name("state", name, key), value, bucket.id, current=current)


def is_tensor(key: str, value: Any, segment: Segment) -> bool:
    """Whether a state is saved as a tensor of its own, and not as a number beside it."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() > 0 or is_elementwise(key, value, segment.spec.shape)


def _current(engine: Engine, param: torch.Tensor, key: str) -> torch.Tensor:
    value: torch.Tensor = known_state(engine, param)[key]
    return value.detach()


def known_state(engine: Engine, param: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter as it stands, without waiting for updates."""
    if engine.optimizer is None:
        return {}
    return engine.optimizer.known_state.get(param, {})


def tables(model: nn.Module) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield the persistent buffers, and the parameters that are never paged."""
    for name, param in model.named_parameters():
        if not pageable(param):
            yield Name("param", name), param
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield Name("buffer", f"{prefix}.{key}" if prefix else key), buffer


def scalars_of(engine: Engine, bucket: Bucket) -> Scalars:
    """Return the states of a bucket's parameters that are no tensors of their own: step counts."""
    found: Scalars = {}
    for segment in bucket.segments:
        state = known_state(engine, engine.params[segment.index])
        small = {
            k: v.detach().clone() if isinstance(v, torch.Tensor) else v
            for k, v in state.items()
            if not is_tensor(k, v, segment)
        }
        if state:
            found[segment.spec.name] = small
    return found


def counted_at_close(engine: Engine, bucket: Bucket) -> bool:
    """Whether step counts move when a step is closed, and not when the bucket's update is done."""
    stepper = engine.stepper
    if stepper is None:
        return True
    return engine.masters.has(bucket) and stepper.updater.formula is not None


def begin_again(
    engine: Engine, states: Iterable[tuple[Name, torch.dtype, tuple[int, ...]]]
) -> None:
    """Give every parameter empty states of the given names, in place of what it has."""
    if engine.optimizer is None:
        return
    engine.optimizer.state.clear()
    places = {
        segment.spec.name: (bucket, segment) for bucket, segment in engine.blueprint.layout.home
    }
    for name, dtype, shape in states:
        bucket_id, segment = places[name.name]
        param = engine.params[segment.index]
        flat = name.key not in SCALARS and shape == segment.spec.shape
        if engine.stepper is not None and flat:
            bucket = engine.blueprint.layout.buckets[bucket_id]
            home = engine.store.get(Kind.STATE, name.key, bucket, dtype)
            value = handle(engine.store, home, segment)
        else:
            value = torch.empty(shape, dtype=dtype, device=engine.device.torch_device)
        engine.optimizer.known_state[param][name.key] = value


def take_scalars(engine: Engine, scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Give parameters the step counts, and what else is no tensor of its own, that were saved."""
    if engine.optimizer is None:
        return
    by_name = {segment.spec.name: segment for _, segment in engine.blueprint.layout.home}
    for name, values in scalars.items():
        if name not in by_name:
            continue
        engine.optimizer.known_state[engine.params[by_name[name].index]].update(values)


def settle(engine: Engine) -> None:
    """Bring everything home and finish every update, so that homes may be read and written."""
    engine.saver.finish()
    if engine.mode == "paged":
        engine.runtime.quiesce()
    elif engine.has_masters:
        engine.resident.quiesce()
    engine.finish()
    engine.store.take_all()


def loaded(engine: Engine) -> None:
    """The homes were written: whoever shows their values shows the new ones."""
    for param in engine.params:
        torch.autograd.graph.increment_version(param)
    engine.masters.forget()
    for home in engine.store.homes.values():
        engine.store.refresh(home)
    for bucket in engine.blueprint.layout.buckets:
        if engine.mode == "paged":
            engine.manager.renew(bucket.id)
        elif engine.has_masters:
            engine.resident.updated(bucket)
    if engine.mode == "paged":
        engine.runtime.stepped(bucket.id for bucket in engine.blueprint.layout.buckets)
