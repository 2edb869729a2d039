"""Layer-major micro-batching: a unit takes a large batch slice by slice (floor 2).

A unit's forward runs under no_grad on a few samples at a time and keeps only its inputs; its
backward recomputes and differentiates one slice after the other. Weights are pinned once for all
slices, so a step fetches each of them twice, however many slices there are.

[Note: order of sums]  The gradient of a parameter is ``((g0 + g1) + g2) + ...`` over the slices of
a unit in the order of the batch, summed in fp32 for 2-byte parameters and rounded once; the first
addend is a copy. For parameters of 4 bytes and more these are the bits of plain gradient
accumulation over the same slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from hetero.errors import StateError
from hetero.internals import keeps_graph
from hetero.interrupts import theirs
from hetero.train.activations.caches import is_cache, put_together, rows_of, twin
from hetero.train.activations.later_writes import LaterWrites
from hetero.train.activations.moment import Moment
from hetero.train.activations.reach import Reach
from hetero.train.activations.saved import SavedTensors
from hetero.train.activations.structure import Structure, flatten, told_apart

Call = Callable[..., Any]
Each = Callable[["Sliced"], AbstractContextManager[Iterable[int]]]
"""Gives the numbers of the slices that have to run, in a block in which each of them does."""


def batch_of(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the first dimension of the first tensor among arguments; 0 without one."""
    leaves, _ = flatten((tuple(args), kwargs))
    sizes = (leaf.size(0) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    return int(next(sizes, 0))


def one_by_one(job: Sliced) -> AbstractContextManager[Iterable[int]]:
    """Let all of a unit's slices run."""
    return nullcontext(range(len(job.rows)))


class Sliced:
    """One call of a unit on a batch, as calls on its slices.

    Args:
        name: the unit's, for messages.
        around: a context in which the unit's parameters are bound.
        around_trial: another one, of a forward that no backward follows.
        reach: the names in the code of modules, looked up once.
        saved: the owner of the saved-tensor hooks.
        each: which slices of a forward, or of a backward, have to run.
        batch, size: samples of the batch, and of a slice.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        call: Call,
        *,
        around: Callable[[], Any],
        around_trial: Callable[[], Any],
        place: torch.device,
        reach: Reach,
        saved: SavedTensors,
        each: Each,
        batch: int,
        size: int,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self.name = name
        self.module = module
        self.around = around
        self.around_trial = around_trial
        self.saved = saved
        self.each = each
        self.batch = batch
        self.rows = [slice(at, min(at + size, batch)) for at in range(0, batch, size)]
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._place = place
        self._reach = reach
        self._call = call
        leaves, self._structure = flatten((tuple(args), kwargs))
        self._leaves, self._places = told_apart(leaves)
        if any(tensor.is_nested for tensor in self.tensors):
            raise self.refusal("is given a nested tensor, of which torch takes no slices")
        self.candidates = tuple(t.dim() > 0 and t.shape[0] == batch for t in self.tensors)
        """Which tensors have a first dimension as long as the batch."""
        self.cut = self.candidates
        """Which tensors are given slice by slice."""
        self.differentiable: tuple[bool, ...] = ()
        """Which outputs pass a gradient back, as `check_unit` found."""
        self.moments: dict[int, Moment] = {}
        """Of the slices whose forward ran."""
        self._later: LaterWrites | None = None
        self.draws = False
        """Whether the unit drew random numbers in its last trial."""
        self._outputs: Structure
        self._constants: list[Any] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, each once."""
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    @property
    def others(self) -> list[Any]:
        """What the last slice gave that is no tensor."""
        return [each.value for each in self._constants if each is not None]

    def moment_of(self, at: int, tensors: Sequence[torch.Tensor]) -> Moment:
        """Return what a slice's forward finds; ``tensors``: the inputs, of the whole batch."""
        moment = self.moments[at] = self.moment()
        if self._later is None:
            self._later = LaterWrites(moment, self.saved.parts, tensors)
        return moment

    def ended(self) -> None:
        """The forward is over."""
        if self._later is not None:
            self._later.begin()

    def check_unwritten(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise StateError, in an access, if others have written to what the forward read;
        ``tensors``: its inputs, as they are now."""
        changes = ""
        if self._later is not None:
            self._later.look_at_data()
            changes = self._later.found(tensors)
        if not changes and any(moment.is_lost() for moment in self.moments.values()):
            changes = "may have read tensors that were written after its forward"
        if changes:
            raise self.refusal(f"{changes}, which computes it again")

    def moment(self) -> Moment:
        """Return the state that the unit's forward would find now."""
        plain = [leaf.value if isinstance(leaf, _Plain) else leaf for leaf in self._leaves]
        given = [leaf for leaf in plain if not (isinstance(leaf, torch.Tensor) or is_cache(leaf))]
        return Moment(self.module, self._place, self._reach, given)

    def found_by(self, at: int) -> Moment:
        """Return what a slice's forward found. One that did not have to run would have found what
        the last one before it did."""
        return self.moments[max(number for number in self.moments if number <= at)]

    def refuse_caches(self) -> None:
        """Refuse a cache among the arguments, to which every slice would add."""
        if self.caches:
            raise StateError(
                f"micro_batch: unit {self.name!r} adds to a cache of keys and values",
                advice="set model.config.use_cache = False while it trains",
            )

    def parts(self, tensors: Sequence[torch.Tensor], rows: slice) -> list[torch.Tensor]:
        """Return rows of the cut tensors, and the others whole."""
        pairs = zip(tensors, self.cut, strict=True)
        return [tensor[rows] if cut else tensor for tensor, cut in pairs]

    def __call__(self) -> Any:
        """Return the unit's output for the whole batch."""
        tensors = self.tensors
        # the graph keeps arguments as saved tensors, which hooks see; this object does not
        self._leaves = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in self._leaves]
        apply: Callable[..., Iterable[Any]] = _Slices.apply
        outputs = iter(apply(self, len(self.params), *self.params, *tensors))
        return self._outputs.build(next(outputs) if c is None else c.value for c in self._constants)

    @property
    def caches(self) -> list[Any]:
        return [leaf for leaf in self._leaves if is_cache(leaf)]

    def evaluated(self) -> Any:
        """Return the unit's output for the whole batch, without gradients.

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
                outputs = self.run(self.parts(tensors, rows))
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

    def tried(
        self, tensors: Sequence[torch.Tensor], moment: Moment, rows: slice | None = None
    ) -> list[torch.Tensor]:
        """Return the unit's outputs in the state of a moment, without side effects.

        Caches among the arguments are given as copies, or as their ``rows``.
        """
        with moment.again(), torch.no_grad(), self.lent(rows), self.around_trial():
            found = self.run(tensors)
            self.draws = moment.has_drawn()
            return found

    @contextmanager
    def lent(self, rows: slice | None = None) -> Iterator[None]:
        """Let `run` take other tensors, and copies of caches or of their ``rows``, in a block."""
        kept = self._leaves
        self._leaves = [
            None
            if isinstance(x, torch.Tensor)
            else _Plain((rows_of(x, rows) if rows else twin(x)) if is_cache(x) else x)
            for x in kept
        ]
        try:
            yield
        finally:
            self._leaves = kept

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the unit with these tensors among its arguments; return its output's tensors."""
        given = iter(tensors)
        distinct = [next(given) if leaf is None else leaf.value for leaf in self._leaves]
        args, kwargs = self._structure.build(distinct[place] for place in self._places)
        found, self._outputs = flatten(theirs(self._call, *args, **kwargs))
        left, _ = flatten((args, kwargs))
        if [id(leaf) for leaf in left] != [id(distinct[place]) for place in self._places]:
            raise self.refusal("writes to a list or dictionary that it is given")
        self._constants = [None if isinstance(x, torch.Tensor) else _Plain(x) for x in found]
        return [x for x in found if isinstance(x, torch.Tensor)]

    def check_rows(self, outputs: Sequence[torch.Tensor], rows: slice) -> None:
        """Refuse an output without one row for each sample."""
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
    """An argument or output that is not a tensor."""

    value: Any


class _Slices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Sliced, n_params: int, *inputs: torch.Tensor) -> Any:
        tensors = inputs[n_params:]
        ctx.job, ctx.n_params = job, n_params
        whole: list[torch.Tensor] = []
        with job.around(), job.each(job) as numbers:
            for at in numbers:
                moment = job.moment_of(at, tensors)
                outputs = job.run(job.parts(tensors, job.rows[at]))
                moment.close()
                job.check_rows(outputs, job.rows[at])
                if not whole:
                    whole = [laid_out_like(o, job.batch) for o in outputs]
                for to, output in zip(whole, outputs, strict=True):
                    to[job.rows[at]] = output
                del outputs
            job.ended()
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        constant = zip(whole, job.differentiable, strict=True)
        ctx.mark_non_differentiable(*(o for o, through in constant if not through))
        return tuple(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors  # first: raises torch's own error for a freed graph
        job: Sliced = ctx.job
        wanted = ctx.needs_input_grad[2:]
        sums = [_Sum(p) for p in job.params]
        parts = [
            _Gathered(t, sliced=cut) if need else None
            for t, cut, need in zip(tensors, job.cut, wanted[ctx.n_params :], strict=True)
        ]
        with torch.enable_grad(), job.around(), job.each(job) as numbers:
            job.check_unwritten(tensors)
            for at in numbers:
                rows, moment = job.rows[at], job.found_by(at)
                given = [
                    t.detach().requires_grad_(part is not None)
                    for t, part in zip(job.parts(tensors, rows), parts, strict=True)
                ]
                with moment.again():
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
        if not keeps_graph():  # [Note: out of gc's sight]
            del ctx.job
        return None, None, *totals, *(None if part is None else part.whole for part in parts)


def laid_out_like(output: torch.Tensor, batch: int) -> torch.Tensor:
    """Return memory for a batch with the dimension order of its slice ``output``.

    Later operations may choose their arithmetic by strides, and must choose as for a slice.
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
    """An argument's gradient, put together from slices, or summed if it was not sliced."""

    def __init__(self, tensor: torch.Tensor, *, sliced: bool) -> None:
        self._sliced = sliced
        self.whole = torch.zeros_like(tensor) if sliced else None
        self._sum = _Sum(tensor)

    def put(self, rows: slice, grad: torch.Tensor | None) -> None:
        if grad is None:
            return
        if self.whole is not None and self._sliced:
            self.whole[rows] = grad
            return
        self._sum.add(grad)
        self.whole = self._sum.total
