"""Layer-major micro-batching: a unit takes a large batch slice by slice (floor 2).

A unit's forward runs under no_grad on a few samples at a time and keeps nothing but its inputs; its
backward computes one slice again, differentiates it, and goes on to the next. Weights are pinned
once for all slices, so that a step fetches each of them twice, however many slices there are.

[Note: order of sums]  The gradient of a parameter is ``((g0 + g1) + g2) + ...`` over the slices of
a unit in the order of the batch, summed in fp32 for 2-byte parameters and rounded once; the first
addend is a copy. For parameters of 4 bytes and more these are the bits of plain gradient
accumulation over the same slices.

[Note: one batch]  To the user there is one batch: one loss over all samples. A unit in which
samples meet (batch norm in training, an auxiliary loss) has no such slices and is refused. It is
found by tainting: with NaN in all other samples, the outputs of a slice must not become NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetero.device import accelerator_rng, set_accelerator_rng
from hetero.errors import StateError
from hetero.train.caches import is_cache, put_together, rows_of
from hetero.train.recompute import buffers_apart, leaves_of, told_apart, versions

Call = Callable[..., Any]


class _Fields(NamedTuple):
    """Stands for a dataclass among leaves."""

    kind: type
    names: tuple[str, ...]


class Structure(NamedTuple):
    """How leaves stand in arguments or outputs, dataclasses that torch does not know included."""

    spec: TreeSpec
    inner: tuple[tuple[_Fields, Structure] | None, ...]

    def build(self, leaves: Iterator[Any]) -> Any:
        """Return the structure with ``leaves`` in it."""
        found = []
        for inner in self.inner:
            if inner is None:
                found.append(next(leaves))
                continue
            fields, structure = inner
            values = structure.build(leaves)
            made: Any = object.__new__(fields.kind)
            for name, value in zip(fields.names, values, strict=True):
                object.__setattr__(made, name, value)
            found.append(made)
        return tree_unflatten(found, self.spec)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of nested containers and dataclasses, and how they stood."""
    outer, spec = tree_flatten(value, is_leaf=is_cache)
    leaves: list[Any] = []
    inner: list[tuple[_Fields, Structure] | None] = []
    for leaf in outer:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            leaves.append(leaf)
            inner.append(None)
            continue
        names = tuple(field.name for field in dataclasses.fields(leaf))
        below, structure = flatten([getattr(leaf, name) for name in names])
        leaves.extend(below)
        inner.append((_Fields(type(leaf), names), structure))
    return leaves, Structure(spec, tuple(inner))


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the first dimension of the first tensor among arguments; 0 where there is none."""
    leaves, _ = flatten((tuple(args), kwargs))
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    return int(next(sizes, 0))


class Moment(NamedTuple):
    """The states of the generators and of autocast, to be had again."""

    cpu: torch.Tensor
    device: torch.Tensor | None
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool

    @classmethod
    def now(cls, place: torch.device) -> Moment:
        kinds = dict.fromkeys(("cpu", place.type))
        return cls(
            torch.get_rng_state(),
            accelerator_rng(place),
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
            ),
            torch.is_autocast_cache_enabled(),
        )

    def set_generators(self, place: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            set_accelerator_rng(place, self.device)

    @contextmanager
    def again(self, place: torch.device) -> Iterator[None]:
        """Run a block as at this moment; generators go on afterwards as if it had not run."""
        before = Moment.now(place)
        self.set_generators(place)
        try:
            with ExitStack() as stack:
                for kind, enabled, dtype in self.casts:
                    stack.enter_context(
                        torch.autocast(kind, dtype, enabled=enabled, cache_enabled=self.cache)
                    )
                yield
        finally:
            before.set_generators(place)


class Sliced:
    """One call of a unit on a batch, as calls on its slices.

    Args:
        name: the unit's, for messages.
        around: a context in which the unit's parameters are bound.
        size: samples of a slice; batch: samples of all.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        call: Call,
        *,
        around: Callable[[], Any],
        place: torch.device,
        batch: int,
        size: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.name = name
        self.module = module
        self.around = around
        self.place = place
        self.batch = batch
        self.rows = [slice(at, min(at + size, batch)) for at in range(0, batch, size)]
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._call = call
        leaves, self._structure = flatten((tuple(args), kwargs))
        self._leaves, self._places = told_apart(leaves)
        self.differentiable: tuple[bool, ...] = ()
        """Which outputs a gradient comes back through, as `check_unit` found."""
        self._outputs: Structure
        self._constants: list[Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, each once."""
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def refuse_caches(self) -> None:
        """Refuse a cache among the arguments, to which every slice would add."""
        if self.caches:
            raise StateError(
                f"micro_batch: unit {self.name!r} adds to a cache of keys and values",
                advice="set model.config.use_cache = False while it trains",
            )

    def is_sliced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's first dimension is the batch."""
        return tensor.dim() > 0 and tensor.shape[0] == self.batch

    def part(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a tensor's rows, or all of one that is not of the batch."""
        return tensor[rows] if self.is_sliced(tensor) else tensor

    def __call__(self) -> Any:
        """Return the unit's output for the whole batch."""
        tensors = self.tensors
        # arguments stay with the graph as saved tensors, where hooks see them, not in this object
        self._leaves = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in self._leaves]
        found = _Slices.apply(self, len(self.params), *self.params, *tensors)  # type: ignore[no-untyped-call]
        outputs = iter(found)
        return self._outputs.build(next(outputs) if c is None else c.value for c in self._constants)

    @property
    def caches(self) -> list[Any]:
        """The caches among the arguments."""
        return [leaf for leaf in self._leaves if is_cache(leaf)]

    def evaluated(self) -> Any:
        """Return the unit's output for the whole batch, nothing of which is differentiated.

        Caches among the arguments are extended row by row.
        """
        tensors, leaves = self.tensors, list(self._leaves)
        self._leaves = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in leaves]
        caches = {i: leaf for i, leaf in enumerate(leaves) if is_cache(leaf)}
        parts: list[dict[int, Any]] = []
        whole: list[torch.Tensor] = []
        with self.around():
            for rows in self.rows:
                parts.append({i: rows_of(cache, rows) for i, cache in caches.items()})
                for i, part in parts[-1].items():
                    self._leaves[i] = _Plain(part)
                outputs = self.run([self.part(t, rows) for t in tensors])
                self.check_rows(outputs, rows)
                whole = whole or [laid_out_like(o, self.batch) for o in outputs]
                for to, output in zip(whole, outputs, strict=True):
                    to[rows] = output
                del outputs
        for i, cache in caches.items():
            put_together(cache, [part[i] for part in parts])
        own = {id(part): caches[i] for i, part in parts[-1].items()}
        given = iter(whole)
        return self._outputs.build(
            next(given) if c is None else own.get(id(c.value), c.value) for c in self._constants
        )

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the unit with these tensors among its arguments; returns the output's tensors."""
        given = iter(tensors)
        distinct = [next(given) if leaf is None else leaf.value for leaf in self._leaves]
        args, kwargs = self._structure.build(distinct[place] for place in self._places)
        found, self._outputs = flatten(self._call(*args, **kwargs))
        self._constants = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in found]
        return [x for x in found if isinstance(x, torch.Tensor)]

    def check_rows(self, outputs: Sequence[torch.Tensor], rows: slice) -> None:
        """Refuse an output that is not of the batch."""
        for output in outputs:
            if output.dim() == 0 or output.shape[0] != rows.stop - rows.start:
                raise self.refusal(
                    f"returned a tensor of shape {list(output.shape)} for {rows.stop - rows.start}"
                    " samples, which is not one row for each"
                )

    def refusal(self, what: str) -> StateError:
        return StateError(
            f"micro_batch: unit {self.name!r} {what}",
            advice="train this model without micro_batch=, with smaller batches and gradient"
            " accumulation; or keep what mixes samples outside of units with units=",
        )


class _Plain(NamedTuple):
    """An argument or output that is no tensor."""

    value: Any


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Sliced, n_params: int, *inputs: torch.Tensor) -> Any:
        tensors = inputs[n_params:]
        ctx.job, ctx.n_params = job, n_params
        ctx.moments = []
        whole: list[torch.Tensor] = []
        with job.around():
            for rows in job.rows:
                ctx.moments.append(Moment.now(job.place))
                outputs = job.run([job.part(t, rows) for t in tensors])
                job.check_rows(outputs, rows)
                if not whole:
                    whole = [laid_out_like(o, job.batch) for o in outputs]
                for to, output in zip(whole, outputs, strict=True):
                    to[rows] = output
                del outputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        constant = zip(whole, job.differentiable, strict=True)
        ctx.mark_non_differentiable(*(o for o, through in constant if not through))
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        job: Sliced = ctx.job
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        sums = [_Sum(p) for p in job.params]
        parts = [
            _Gathered(t, job) if need else None
            for t, need in zip(tensors, wanted[ctx.n_params :], strict=True)
        ]
        with torch.enable_grad(), job.around(), buffers_apart(job.module):
            for rows, moment in zip(job.rows, ctx.moments, strict=True):
                given = [
                    job.part(t, rows).detach().requires_grad_(part is not None)
                    for t, part in zip(tensors, parts, strict=True)
                ]
                with moment.again(job.place):
                    outputs = job.run(given)
                pairs = [
                    (output, grad[rows])
                    for output, grad in zip(outputs, grads, strict=True)
                    if grad is not None and output.requires_grad
                ]
                leaves = [t for t, part in zip(given, parts, strict=True) if part is not None]
                if not pairs or not (job.params or leaves):
                    continue
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    [*job.params, *leaves],
                    [grad for _, grad in pairs],
                    allow_unused=True,
                )
                del outputs, pairs
                for total, grad in zip(sums, found, strict=False):
                    total.add(grad)
                rest = iter(found[len(sums) :])
                for part in parts:
                    if part is not None:
                        part.put(rows, next(rest))
        totals = [s.total for s in sums]
        return None, None, *totals, *(None if part is None else part.whole for part in parts)


def laid_out_like(output: torch.Tensor, batch: int) -> torch.Tensor:
    """Return memory for a batch of which ``output`` is a slice, with its dimensions in its order.

    What comes next may choose its arithmetic by strides, and is to choose as it would for a slice.
    """
    strides: tuple[int, ...] = output.stride()
    order = sorted(range(output.dim()), key=lambda d: (-strides[d], d))
    shape = (batch, *output.shape[1:])
    memory = output.new_empty([shape[d] for d in order])
    return memory.permute([order.index(d) for d in range(output.dim())])


class _Sum:
    """A parameter's gradient over slices; see [Note: order of sums]."""

    def __init__(self, param: torch.Tensor) -> None:
        self.total: torch.Tensor | None = None
        self._wide = param.dtype.itemsize < 4 and param.dtype.is_floating_point

    def add(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        dtype = torch.float32 if self._wide else grad.dtype
        if self.total is None:
            self.total = grad.to(dtype, copy=True)
        else:
            self.total += grad


class _Gathered:
    """An argument's gradient, put together from slices, or summed where it was not sliced."""

    def __init__(self, tensor: torch.Tensor, job: Sliced) -> None:
        self._sliced = job.is_sliced(tensor)
        self.whole = torch.zeros_like(tensor) if self._sliced else None
        self._sum = _Sum(tensor)

    def put(self, rows: slice, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if self.whole is not None and self._sliced:
            self.whole[rows] = grad
            return
        self._sum.add(grad)
        self.whole = self._sum.total


def check_unit(job: Sliced) -> tuple[bool, ...]:
    """Refuse a unit that cannot be cut into slices, or say which outputs gradients go through.

    It runs the unit five times, and changes nothing.
    """
    hooked = [p for p in job.params if getattr(p, "_backward_hooks", None)]
    if hooked:
        raise job.refusal("has parameters with hooks of their own, which would run for each slice")
    originals = job.tensors
    tensors = [t.detach().clone() for t in originals]
    untouched = versions(tensors)
    kept = list(job._leaves)
    job._leaves = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in job._leaves]
    moment = Moment.now(job.place)
    try:
        with buffers_apart(job.module):
            for rows in (job.rows[0], slice(job.rows[0].stop, job.batch)):
                with moment.again(job.place), torch.no_grad(), job.around():
                    clean = job.run(tensors)
                    job.check_rows(clean, slice(0, job.batch))
                with moment.again(job.place), torch.no_grad(), job.around():
                    tainted = job.run([tainted_outside(job, t, rows) for t in tensors])
                for before, after in zip(clean, tainted, strict=True):
                    new = after[rows].isnan() & ~before[rows].isnan()
                    if bool(new.any()):
                        raise job.refusal("mixes samples: one changes when another does")
            if versions(tensors) != untouched:
                raise job.refusal("writes to its inputs in place, of which it is given parts")
            first = job.rows[0]
            with moment.again(job.place), torch.enable_grad(), job.around():
                given = [
                    job.part(t, first).detach().requires_grad_(of.requires_grad)
                    for t, of in zip(tensors, originals, strict=True)
                ]
                outputs = job.run(given)
                check_leaves(job, outputs, given)
                found = tuple(output.requires_grad for output in outputs)
    finally:
        job._leaves = kept
    return found


def check_samples(job: Sliced) -> None:
    """Refuse a unit in which samples meet, by its first two alone; changes nothing."""
    two = slice(0, 2)
    tensors = [job.part(t, two).clone() for t in job.tensors]
    sliced = [job.is_sliced(t) for t in job.tensors]
    kept, moment = list(job._leaves), Moment.now(job.place)

    def run(other: int | None) -> list[torch.Tensor]:
        job._leaves = [
            None if isinstance(x, torch.Tensor) else _Plain(rows_of(x, two) if is_cache(x) else x)
            for x in kept
        ]
        given = [t.clone() for t in tensors]
        for tensor, of_batch in zip(given, sliced, strict=True):
            if of_batch and other is not None and tensor.is_floating_point():
                tensor[other] = float("nan")
        with moment.again(job.place), job.around():
            found = job.run(given)
        job.check_rows(found, two)
        return found

    try:
        with buffers_apart(job.module):
            clean = run(None)
            for row in (0, 1):
                for before, after in zip(clean, run(1 - row), strict=True):
                    if bool((after[row].isnan() & ~before[row].isnan()).any()):
                        raise job.refusal("mixes samples: one changes when another does")
    finally:
        job._leaves = kept


def tainted_outside(job: Sliced, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return a tensor with NaN in all samples but some."""
    if not job.is_sliced(tensor) or not tensor.is_floating_point():
        return tensor
    tainted = torch.full_like(tensor, float("nan"))
    tainted[rows] = tensor[rows]
    return tainted


def check_leaves(
    job: Sliced, outputs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> None:
    """Refuse a unit that uses parameters of another: their gradients would be lost."""
    own = {id(leaf) for leaf in (*job.params, *given)}
    if any(id(leaf) not in own for leaf in leaves_of(outputs)):
        raise job.refusal("uses a parameter that is not its own")
