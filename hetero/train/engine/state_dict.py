"""Everything of a prepared model that outlives a process, as named parts (floor 2)."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.memory.layout import Bucket, Segment
from hetero.memory.manager import PARAM
from hetero.memory.shown import refresh
from hetero.optim import AdamW8bit
from hetero.train.engine.check import tables
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Name, Part, of_home, of_tensor
from hetero.train.engine.steps import placed
from hetero.train.gradients.homes import GRAD, WIDE
from hetero.train.model.lazy import handle
from hetero.train.update.formulas import Formula
from hetero.train.update.masters import LOW
from hetero.train.update.rules import SCALARS, Group, Rule, is_elementwise
from hetero.types import Kind

Scalars = dict[str, dict[str, Any]]
TensorMake = tuple[torch.dtype, tuple[int, ...]]
Make = tuple[Name, torch.dtype, tuple[int, ...]]
NO_STATES = (PARAM, GRAD, WIDE, LOW)  # homes that hold no optimizer state
_F32 = torch.float32


def parts_of(engine: Engine, *, as_now: bool = False) -> list[Part]:
    """Return parameters, the ``low`` of masters, states and buffers, bucket by bucket.

    Buckets come in the order of the next forward, which is that of their updates. ``as_now`` copies
    buffers and unpaged parameters: the next forward may change them.
    """
    found: list[Part] = []
    for bucket in ordered(engine):
        for segment in bucket.segments:
            found.extend(_of_parameter(engine, bucket, segment))
    parts = engine.setup.parts
    for name, tensor in at_hand(engine.setup.model):
        own, place = parts.local(tensor).detach(), parts.place(name.name, tensor)
        found.append(of_tensor(name, own.cpu().clone() if as_now else own, place=place))
    return found


def ordered(engine: Engine) -> list[Bucket]:
    """Return the buckets in the order of the next forward, as far as that is known."""
    return engine.residence.in_order(engine.setup.buckets)


def _of_parameter(engine: Engine, bucket: Bucket, segment: Segment) -> Iterator[Part]:
    setup, param, name = engine.setup, engine.setup.params[segment.index], segment.spec.name
    homes, place = setup.store.homes, setup.parts.place(name, param)
    at_home = partial(
        of_home, segment=segment, bucket=bucket.id, place=place, is_first=setup.parts.is_first
    )
    if engine.residence.trained is not None:
        yield at_home(Name("param", name), homes[PARAM, bucket.id])
    else:
        yield of_tensor(Name("param", name), setup.parts.local(param), bucket.id, place)
    if bucket.has_master:
        yield at_home(Name("master", name), setup.masters.low(bucket))
    for key, value in known_state(engine, param).items():
        if not is_tensor(key, value, segment):
            continue
        here = homes.get((key, bucket.id)) if engine.steps.stepper is not None else None
        if here is not None and is_elementwise(key, value, segment.spec.shape):
            yield at_home(Name("state", name, key), here)
        else:
            shown = engine.shown_state(param, value)
            own, there = setup.parts.local(shown), setup.parts.place(f"{key} of {name}", shown)
            current = partial(_current, engine, param, key)
            yield of_tensor(Name("state", name, key), own, bucket.id, there, current=current)


def is_tensor(key: str, value: Any, segment: Segment) -> bool:
    """Whether a state is saved as a tensor of its own, and not among the scalars."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.dim() > 0 or is_elementwise(key, value, segment.spec.shape)


def _current(engine: Engine, param: torch.Tensor, key: str) -> torch.Tensor:
    value: torch.Tensor = known_state(engine, param)[key]
    return engine.setup.parts.local(value).detach()


def known_state(engine: Engine, param: torch.Tensor) -> dict[str, Any]:
    """Return the optimizer's state of a parameter as it stands, without waiting for updates."""
    if engine.optimizer is None:
        return {}
    return engine.optimizer.known_state.get(param, {})


def at_hand(model: nn.Module) -> Iterator[tuple[Name, torch.Tensor]]:
    """Yield the persistent buffers, and the parameters that are never paged."""
    for name, param in tables(model):
        yield Name("param", name), param
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield Name("buffer", f"{prefix}.{key}" if prefix else key), buffer


def scalars_of(engine: Engine, bucket: Bucket) -> Scalars:
    """Return the states of a bucket's parameters that are not saved as tensors: step counts."""
    found: Scalars = {}
    for segment in bucket.segments:
        state = known_state(engine, engine.setup.params[segment.index])
        small = {
            k: v.detach().clone() if isinstance(v, torch.Tensor) else v
            for k, v in state.items()
            if not is_tensor(k, v, segment)
        }
        if state:
            found[segment.spec.name] = small
    return found


def counted_at_close(engine: Engine, bucket: Bucket) -> bool:
    """Whether step counts move when a step is closed, not when the bucket's update is done."""
    stepper = engine.steps.stepper
    if stepper is None:
        return True
    return bucket.has_master and stepper.drafts.formula is not None


def check_states(
    engine: Engine,
    groups: Sequence[Group],
    states: Iterable[Make],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    """Raise ValueError, or the rule's own error, unless a step goes on from these states.

    Args:
        groups: settings that go on top of those of the optimizer's groups.
        states: every tensor's name, dtype and shape; the model has such parameters.
        scalars: states that are not saved as tensors, by the parameter's name.
    """
    if engine.optimizer is None:
        return
    tensors = makes_of(engine, states)
    numbers = {id(param): number for number, param in enumerate(engine.setup.params)}
    tried: set[str] = set()
    stepped: set[str] = set()
    for group, saved in zip(engine.optimizer.param_groups, groups, strict=True):
        settings = {**{k: v for k, v in group.items() if k != "params"}, **saved}
        for number in (numbers[id(p)] for p in group["params"] if id(p) in numbers):
            bucket, segment = engine.setup.blueprint.layout.home[number]
            name, shape = segment.spec.name, segment.spec.shape
            stepped.add(name)
            trial = Trial(bucket, shape, tensors.get(name, {}), scalars.get(name, {}))
            if (known := f"{settings} {trial}") not in tried:
                tried.add(known)
                trial.run(engine, settings)
    odd = (tensors.keys() | scalars.keys()) - stepped
    if odd:
        raise ValueError(f"there are states of {min(odd)!r}, which no group has")


def makes_of(engine: Engine, states: Iterable[Make]) -> dict[str, dict[str, TensorMake]]:
    """Return dtypes and shapes by parameter and key; ValueError if homes cannot hold them."""
    found: defaultdict[str, dict[str, TensorMake]] = defaultdict(dict)
    dtypes = {place: home.dtype for place, home in engine.setup.store.homes.items()}
    places = places_of(engine)
    for name, dtype, shape in states:
        bucket, segment = places[name.name]
        if name.key in NO_STATES:
            raise ValueError(f"{name.name!r} has a state {name.key!r}, which is a home's own name")
        here = dtypes.setdefault((name.key, bucket), dtype)
        if here is not dtype and is_paged(engine, name.key, shape, segment):
            raise ValueError(f"{name.key} of {name.name!r} is {dtype}, its bucket has {here}")
        found[name.name][name.key] = dtype, shape
    return found


def own_makes(engine: Engine, states: Iterable[Make]) -> list[Make]:
    """Return states with the shapes that this rank's parts of them have."""
    places, params = places_of(engine), engine.setup.params

    def own(make: Make) -> Make:
        name, dtype, shape = make
        _, segment = places[name.name]
        is_part = shape == tuple(params[segment.index].shape)
        return (name, dtype, segment.spec.shape) if is_part else make

    return [own(make) for make in states]


class Trial(NamedTuple):
    """A step of a tiny parameter, from states like those that a parameter is to have."""

    bucket: int
    shape: tuple[int, ...]
    tensors: Mapping[str, TensorMake]
    scalars: Mapping[str, Any]

    def run(self, engine: Engine, settings: Group) -> None:
        """Make the step; raises the rule's own error, or ValueError."""
        bucket, stepper = engine.setup.buckets[self.bucket], engine.steps.stepper
        rule = engine.steps.rule
        has_master = bucket.has_master
        if has_master and stepper is not None and stepper.drafts.formula is not None:
            self._follow(stepper.drafts.formula, settings)
        elif rule is not None and not rule.refuses(len(self.shape)):
            self._step(rule, torch.float32 if has_master else bucket.dtype, settings)

    def _follow(self, formula: Formula, settings: Group) -> None:
        """Compute the numbers of the next update, which runs on fp32 states."""
        keys = formula.arrays(settings)
        odd = [k for k in keys if self.tensors.get(k, (_F32, self.shape)) != (_F32, self.shape)]
        if odd or keys.keys() & self.scalars.keys():
            raise ValueError(f"{[*odd, *keys]} are fp32 and of the parameter's shape")
        fresh = any(key not in self.tensors for key in keys)
        first = formula.scalars(settings)
        known = {k: torch.tensor(v, device="cpu") for k, v in first.items()} if fresh else {}
        counts = {k: {**known, **self.scalars}[k] for k in first}
        if not all(isinstance(count, torch.Tensor) for count in counts.values()):
            raise ValueError(f"{[*first]} are tensors")
        formula.coefficients(settings, {k: float(v) for k, v in counts.items()}, fresh)

    def _step(self, rule: Rule, dtype: torch.dtype, settings: Group) -> None:
        """Step with the user's own rule."""
        probe = torch.zeros(probe_shape(self.shape), dtype=dtype, device="cpu")
        probe.grad = torch.zeros_like(probe)
        there = {key: self._on_probe(key, make[1], settings) for key, make in self.tensors.items()}
        if None in there.values():  # of fewer dimensions: the rule shows which ones, if it makes it
            other = probe.clone()
            other.grad = torch.zeros_like(other)
            with torch.no_grad():
                (fresh,) = rule.run(settings, [other], [{}])
            for key in [key for key, shape in there.items() if shape is None and key in fresh]:
                there[key] = self._as_made(key, fresh[key], probe.shape)
        state = {
            key: torch.zeros(shape, dtype=self.tensors[key][0], device="cpu")
            for key, shape in there.items()
            if shape is not None
        }
        for key, value in self.scalars.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
        with torch.no_grad():
            (after,) = rule.run(settings, [probe], [state])
        lost = [key for key, shape in there.items() if shape is None and key in after]
        if lost:  # of a shape that the rule does not give them
            raise ValueError(f"{lost[0]} is of shape {list(self.tensors[lost[0]][1])}")

    def _as_made(self, key: str, made: Any, probe: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape that the rule gives a state of the tiny parameter, if it gives the whole
        parameter's the one there is; else None. Both have some dimensions of their parameter."""
        shape = self.tensors[key][1]
        tiny = tuple(made.shape) if isinstance(made, torch.Tensor) else None
        for kept in itertools.combinations(range(len(probe)), len(shape)):
            there = tuple(probe[at] for at in kept), tuple(self.shape[at] for at in kept)
            if there == (tiny, shape):
                return tiny
        return None

    def _on_probe(
        self, key: str, shape: tuple[int, ...], settings: Group
    ) -> tuple[int, ...] | None:
        """Return a state's shape for the tiny parameter; None: of no known kind."""
        probe = probe_shape(self.shape)
        if key in AdamW8bit.PER_BLOCK:
            block = settings["block_size"]
            right = shape == (-(-math.prod(self.shape) // block),)
            return (-(-math.prod(probe) // block),) if right else None
        if len(shape) != len(probe):
            return shape if shape == () else None
        sizes = list(zip(shape, self.shape, probe, strict=True))
        if any(size not in (1, full) for size, full, _ in sizes):
            return None
        return tuple(tiny if size == full else 1 for size, full, tiny in sizes)


def probe_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a tiny shape that keeps sizes of 1; its last two differ."""
    most = [2] * max(0, len(shape) - 2) + [3, 4][-len(shape) :]
    return tuple(min(pair) for pair in zip(shape, most, strict=False))


def places_of(engine: Engine) -> dict[str, tuple[int, Segment]]:
    """Return every parameter's bucket and segment, by its name."""
    return {
        segment.spec.name: (bucket, segment)
        for bucket, segment in engine.setup.blueprint.layout.home
    }


def is_paged(engine: Engine, key: str, shape: tuple[int, ...], segment: Segment) -> bool:
    """Whether a state lies in a home."""
    return engine.steps.stepper is not None and key not in SCALARS and shape == segment.spec.shape


def empty_states(engine: Engine, states: Iterable[Make]) -> dict[Name, torch.Tensor]:
    """Return a tensor for every state to be loaded; BudgetError if there is no room."""
    if engine.optimizer is None:
        return {}
    made: dict[Name, torch.Tensor] = {}
    places = places_of(engine)
    for name, dtype, shape in states:
        bucket, segment = places[name.name]
        if is_paged(engine, name.key, shape, segment):
            layout = engine.setup.blueprint.layout
            home = engine.setup.store.get(Kind.STATE, name.key, layout.buckets[bucket], dtype)
            made[name] = handle(engine.setup.store, home, segment)
        else:
            empty = torch.empty(shape, dtype=dtype, device=place_of(engine, bucket))
            made[name] = engine.shown_state(engine.setup.params[segment.index], empty)
    return made


def place_of(engine: Engine, bucket: int) -> torch.device:
    """Return where the updates of a bucket run: where its parameters' home is."""
    home = engine.setup.store.homes.get((Kind.PARAM.value, bucket))
    return engine.setup.device.torch_device if home is None else home.device


def begin_again(engine: Engine, states: Mapping[Name, torch.Tensor]) -> None:
    """Give parameters these states in place of what they have."""
    if engine.optimizer is None:
        return
    engine.optimizer.state.clear()
    places = places_of(engine)
    for name, value in states.items():
        param = engine.setup.params[places[name.name][1].index]
        engine.optimizer.known_state[param][name.key] = value


def take_scalars(engine: Engine, scalars: Mapping[str, Mapping[str, Any]]) -> None:
    """Give parameters the saved states that are not tensors: step counts."""
    if engine.optimizer is None:
        return
    by_name = {segment.spec.name: segment for _, segment in engine.setup.blueprint.layout.home}
    groups = engine.groups()
    for name, values in scalars.items():
        if name not in by_name:
            continue
        param = engine.setup.params[by_name[name].index]
        if engine.steps.stepper is None:  # torch steps them where its kernels read them
            group = groups.get(id(param), {})
            values = {key: placed(value, param.device, group) for key, value in values.items()}
        engine.optimizer.known_state[param].update(values)


def settle(engine: Engine) -> None:
    """Bring everything home and finish every update, so that homes may be read and written."""
    engine.setup.saver.finish()
    engine.residence.quiesce()
    engine.finish()
    engine.setup.masters.follow_for_now()
    engine.setup.store.take_all()


def loaded(engine: Engine) -> None:
    """The homes were written: show the new values everywhere."""
    for param in engine.setup.params:
        torch.autograd.graph.increment_version(param)
    engine.setup.masters.forget()
    for home in engine.setup.store.homes.values():
        refresh(home)
    engine.residence.loaded()
