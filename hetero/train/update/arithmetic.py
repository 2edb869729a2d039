"""The ways to update a bucket: formulas, or torch's rule on flat runs or whole tensors (floor 2).

Parameters that keep their dtype are updated by the user's optimizer class itself (rules.py), on
flat runs where that gives the same bits. Working weights with an fp32 master are updated by the
written formulas (formulas.py) in one pass of the kernel, or of torch where there is none; rules
without a formula run on a whole tensor's master.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hetero.cores import Cores
from hetero.jobs import Portable, Slice
from hetero.memory.extent import PinSpan, PinUse, Request, overlap
from hetero.memory.home import Home, cut
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket
from hetero.train.gradients.homes import GradHomes
from hetero.train.update import kernel
from hetero.train.update.formulas import Coefficients, Formula
from hetero.train.update.masters import Masters
from hetero.train.update.passage import Operand, Passage
from hetero.train.update.rules import Group, Rule, State, copied, is_elementwise
from hetero.train.update.states import Elementwise, Ready, StateHomes, UpdatePiece, cut_run, pieces
from hetero.types import Kind

# Elements of a slice. Each slice holds the interpreter, for which the thread that launches the next
# forward waits too: for 50 us and more, in pieces. Threads share one slice of the kernel's.
RULE_NUMEL = 2**18  # temporaries stay in the cache: 1.9 ns an element, 2.2 ns at 2**20 (measured)
RULE_THREADS = 4  # so many leave the interpreter to others; for more, a slice is longer
MOST_RULE_NUMEL = 2**20
KERNEL_NUMEL = 2**20  # of the kernel's where threads share none: on disk, with first states
PARAM = Kind.PARAM.value
SharedWork = Callable[[slice], tuple[Coefficients, kernel.Operands]]


def rule_numel(n_threads: int) -> int:
    """Return the elements of a call of torch's rule."""
    return min(RULE_NUMEL * max(1, n_threads // RULE_THREADS), MOST_RULE_NUMEL)


@dataclass(slots=True)
class Update:
    """One bucket's update: slices that may run in parallel, and the steps that follow."""

    bucket: Bucket
    slices: list[Slice] = field(default_factory=list)
    portable: list[Portable] = field(default_factory=list)
    """More slices, which may pass through HBM."""
    may_pass: bool = True
    """Whether there may be any."""
    finishes: list[Slice] = field(default_factory=list)
    together: list[Any] = field(default_factory=list)
    """Parameters that all ranks step at the same time (`together`), before anything else."""
    on_device: bool = False
    """Whether its homes are on the device: then `step` carries it out, in order of compute."""
    touched_bytes: int = 0
    """That it reads and writes there."""
    fresh: bool = False
    """Whether states appear: then `step` itself carries it out."""
    scaled: list[int] = field(default_factory=list)
    """Indices of the parameters whose stored gradients are multiplied by their pending factors."""
    touched: list[int] = field(default_factory=list)
    """Indices of the parameters."""
    requests: list[Request] = field(default_factory=list)
    """The slices' requests to disk, in their order."""
    counts: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    """Step counts as this update leaves them, until the step is drafted."""
    begun: list[Ready] = field(default_factory=list)
    """Parameters that were given their first state, until the step is drafted."""

    def undo(self) -> None:
        """Take first states back: the step cannot be made."""
        for row in self.begun:
            row.state.clear()

    def settle(self) -> None:
        """Leave step counts as the update leaves them."""
        for count, value in self.counts:
            count.fill_(value)
        self.counts, self.begun = [], []  # our references look like a user's


@dataclass(frozen=True, slots=True)
class Bench:
    """The homes that slices of updates read and write, and where they compute."""

    rule: Rule
    states: StateHomes
    store: HomeStore
    grads: GradHomes
    masters: Masters
    cores: Cores
    native: kernel.Native | None
    passage: Passage
    """The way of slices through HBM."""
    stream_to: torch.device | None
    """The device to which pieces of homes are brought; None: they are updated at home."""

    @property
    def may_write(self) -> bool:
        """Whether the rule may write to gradients, which then show it."""
        return self.rule.known is None

    @property
    def in_place(self) -> bool:
        """Whether factors are applied to gradients at home; on disk they pend."""
        return not self.store.pool.spills or self.may_write

    def param(self, bucket: Bucket) -> Home:
        """Return the home of a bucket's parameters."""
        return self.store.homes[PARAM, bucket.id]

    def lows(self, bucket: Bucket) -> list[Home]:
        """Return the home of a bucket's masters, if there is one."""
        return [self.masters.low(bucket)] if bucket.has_master else []

    def add(
        self,
        update: Update,
        piece: UpdatePiece,
        states: Mapping[str, Home],
        work: Callable[[slice], None],
        numel: int | None,
        whole: slice | None = None,
    ) -> None:
        """Add a piece to an update, in slices of about ``numel`` elements; None: as a whole.

        They are cut where chunks end or, if anything lies on disk, extents. ``whole``: only this
        run of it.
        """
        bucket, pool = update.bucket, self.store.pool
        size = None
        if numel is not None:
            size = bucket.chunk_numel * max(1, self.at_once(bucket, numel) // bucket.chunk_numel)
            size = pool.extent_numel if pool.spills else size
        param = self.param(bucket)
        cuts = piece.slices(size) if whole is None else cut_run(whole, size or sys.maxsize)
        runs = list(kept_runs(cuts, param.kept))
        if self.is_on_device(bucket):
            update.on_device = True
            kept = [param, *states.values(), *self.lows(bucket)]
            sizes = [2 * home.item_dtype.itemsize for home in kept]
            sizes.append(self.grads.of(bucket).item_dtype.itemsize)
            update.touched_bytes += sum(sizes) * sum(run.stop - run.start for run in runs)
        for run in runs:
            if not pool.spills:
                update.slices.append(partial(work, run))
                continue
            request = self._request(bucket, piece, states, run)
            if request.needs:
                update.requests.append(request)
            update.slices.append(partial(self._hold, request, work, run))

    def add_shared(
        self, update: Update, work: SharedWork, library: kernel.Library, run: slice
    ) -> None:
        """Add a run, which all threads update together."""
        kept = next(kept_runs([run], self.param(update.bucket).kept))
        shared = kernel.SharedUpdate(library, partial(work, kept))
        parts = -(-(kept.stop - kept.start) // kernel.SHARED_NUMEL)
        update.slices += [shared] * max(1, min(parts, 1 + self.cores.n_threads))

    def at_once(self, bucket: Bucket, numel: int) -> int:
        """Return how many elements a call takes: without bytes only the calls cost time."""
        is_meta = self.param(bucket).device.type == "meta"
        return sys.maxsize if is_meta or self.is_on_device(bucket) else numel

    def is_on_device(self, bucket: Bucket) -> bool:
        """Whether a device updates a bucket that is no processor, in the order of compute."""
        return self.param(bucket).on_device or self.store.is_on_device(bucket.id)

    def _request(
        self, bucket: Bucket, piece: UpdatePiece, states: Mapping[str, Home], run: slice
    ) -> Request:
        """Return a slice's request to disk: weights, gradients, masters and states."""
        uses = [(self.param(bucket), PinUse.WRITE)]
        uses.append((self.grads.of(bucket), PinUse.WRITE if self.may_write else PinUse.READ))
        uses += [(home, PinUse.WRITE) for home in self.lows(bucket)]
        missing = piece.missing or ()
        uses += [
            (home, PinUse.FRESH if key in missing else PinUse.WRITE) for key, home in states.items()
        ]
        return Request([PinSpan(home, run.start, run.stop, use) for home, use in uses])

    def _hold(self, request: Request, work: Callable[[slice], None], run: slice) -> None:
        """Do a slice's work with its homes in memory: a disk fails before it begins."""
        with self.store.held(request):
            work(run)

    def sharing(self, bucket: Bucket) -> kernel.Library | None:
        """Return what threads share an update of masters with, where all its homes are in RAM."""
        if self.native is None or self.stream_to is not None or self.store.pool.spills:
            return None
        return self.native.sharing(self.param(bucket).device)

    def in_one_pass(self, bucket: Bucket) -> bool:
        """Whether updates of masters need none of torch's threads."""
        place = self.param(bucket).device
        compiled = self.native is not None and self.native.takes(place)
        return self.stream_to is None and (compiled or place.type == "meta")

    def turn(self) -> AbstractContextManager[None]:
        """Return the turn of a slice that any cut leaves the same; a device has one queue."""
        return self.cores.one() if self.stream_to is None else self.cores.all()

    @contextmanager
    def streamed(
        self, homes: list[torch.Tensor], grad: torch.Tensor
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Bring pieces of homes to the device that updates them, and back; none moves at home."""
        if self.stream_to is None:
            yield homes, grad
            return
        there = [home.to(self.stream_to, copy=True) for home in homes]
        yield there, grad.to(self.stream_to, copy=True)
        for home, moved in zip(homes, there, strict=True):
            home.copy_(moved)

    def multiplied(self, grad: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
        """Return a gradient at home times its factors; on disk it stays as it is, and they pend."""
        return scaled(grad if self.in_place or not factors else grad.clone(), factors)


def kept_runs(runs: Iterable[slice], kept: slice) -> Iterator[slice]:
    """Yield what a rank keeps of runs; an empty run if that is nothing, since a step counts."""
    first: slice | None = None
    has_any = False
    for run in runs:
        mine = overlap(run, kept)
        first = mine if first is None else first
        if mine.start < mine.stop or run.start == run.stop:
            has_any = True
            yield mine
    if first is not None and not has_any:
        yield slice(first.start, first.start)


# -- the formulas, on masters --------------------------------------------------------------------


def draft_formula(
    bench: Bench, formula: Formula, update: Update, group: Group, rows: Sequence[Ready]
) -> None:
    """Add one pass over weight, master, gradient and states, in slices that run on any thread."""
    fills, first = formula.arrays(group), formula.scalars(group)
    homes = {key: bench.states.home(key, update.bucket, torch.float32) for key in fills}
    # 1. a parameter without state gets torch's; its first slice writes the values
    missing = [_begin(bench, update, row, first, homes) for row in rows]
    # 2. neighbours with equal scalars are one piece, whose coefficients are computed once
    for piece in pieces(rows, missing):
        scalars = {key: float(piece.first.state[key]) for key in first}
        numbers, after = formula.coefficients(group, scalars, piece.missing is not None)
        update.counts += [(row.state[k], x) for row in piece.rows for k, x in after.items()]
        fresh = {key: fills[key] for key in piece.missing or ()}
        factors = piece.first.factors
        grad = bench.grads.of(update.bucket)
        work = FormulaPass(bench, formula, numbers, update.bucket, grad, homes, fresh, factors)
        begins = add_portable(update, piece, work)
        run = piece.run if begins is None else slice(piece.run.start, begins)
        library = None if fresh else bench.sharing(update.bucket)
        if library is not None and run.start < run.stop:
            bench.add_shared(update, work.shared, library, run)
        elif begins is None or run.start < run.stop:
            bench.add(update, piece, homes, work, formula_numel(grad.device), run)


def add_portable(update: Update, piece: UpdatePiece, work: FormulaPass) -> int | None:
    """Add the end of a piece that may pass through HBM; return where it begins, None if none may.

    Updates that began in backward do not: both links are busy then. Nor do first ones, which write
    states that are not there yet.
    """
    passage, run = work.bench.passage, piece.run
    first: int = max(run.start, passage.tail(update.bucket.numel))
    if first >= run.stop or work.fresh or not update.may_pass or work.bench.store.pool.spills:
        return None
    if update.bucket.n_shares > 1 or not passage.takes(work.operands(slice(first, run.stop))):
        return None
    for part in cut(first, run.stop, passage.numel):
        here, carried = partial(work, part), partial(work.carried, part)
        if passage.is_only_way:
            update.slices.append(carried)
        else:
            update.portable.append(Portable(here, carried, part.stop - part.start))
    return first


def formula_numel(place: torch.device) -> int | None:
    """Return the elements of a slice; None: a device takes a run of any length in one launch."""
    return KERNEL_NUMEL if place.type in ("cpu", "meta") else None


def _begin(
    bench: Bench, update: Update, row: Ready, scalars: Mapping[str, float], homes: dict[str, Home]
) -> tuple[str, ...] | None:
    """Give a parameter torch's first state; return the keys that its update fills, None if none."""
    missing = tuple(key for key in homes if key not in row.state)
    if row.state and not missing:
        return None
    if not row.state:
        update.begun.append(row)
    for key, value in scalars.items():
        row.state.setdefault(key, torch.tensor(value, dtype=torch.float32, device="cpu"))
    for key in missing:
        bench.states.show(row.state, key, homes[key], row.segment)
    return missing


@dataclass(frozen=True, slots=True)
class FormulaPass:
    """The work of slices that a formula updates."""

    bench: Bench
    formula: Formula
    numbers: Coefficients
    bucket: Bucket
    grad: Home
    homes: dict[str, Home]
    fresh: dict[str, float]
    """The states that appear, with their first values."""
    factors: tuple[float, ...]

    def __call__(self, run: slice) -> None:
        bench, bucket = self.bench, self.bucket
        with nullcontext() if bench.in_one_pass(bucket) else bench.turn():
            for key, value in self.fresh.items():
                self.homes[key].part(run).fill_(value)
            *homes, grad = [each.part for each in self.operands(run)]
            with bench.streamed(homes, grad) as (there, its_grad):
                self._update([*there, its_grad])

    def shared(self, run: slice) -> tuple[Coefficients, kernel.Operands]:
        """Return the numbers and tensors of a run that threads update together."""
        param, low, *states, grad = [each.part for each in self.operands(run)]
        return self.numbers, kernel.Operands(param, low, grad, states, self.factors)

    def carried(self, run: slice) -> None:
        """Update a slice on the device, as `Passage.carry`."""
        passage, operands = self.bench.passage, self.operands(run)
        passage.carry(operands, self._update, self.bucket.id, partial(self, run))

    def operands(self, run: slice) -> list[Operand]:
        """Return weights, low halves, states and gradients."""
        bench, bucket = self.bench, self.bucket
        states = [Operand(home, Kind.STATE, run) for home in self.homes.values()]
        return [
            Operand(bench.param(bucket), Kind.PARAM, run),
            Operand(bench.masters.low(bucket), Kind.MASTER, run),
            *states,
            Operand(self.grad, Kind.GRAD, run, is_written=False),
        ]

    def _update(self, tensors: Sequence[torch.Tensor]) -> None:
        """Update tensors in the order of `operands`, on any device."""
        param, low, *states, grad = tensors
        kernel.update(
            self.formula,
            self.numbers,
            param=param,
            low=low,
            grad=grad,
            states=states,
            factors=self.factors,
            native=self.bench.native,
        )


# -- torch's rule, on flat runs ------------------------------------------------------------------


def draft_flat(bench: Bench, update: Update, group: Group, rows: Sequence[Ready]) -> None:
    """Add steps of neighbours that share scalars, cut anywhere."""
    _draft_runs(bench, update, group, pieces(rows, [None] * len(rows)))


def draft_shared(bench: Bench, update: Update, group: Group, rows: Sequence[Ready]) -> None:
    """Add steps of parts of parameters, each cut at multiples of `SHARE_ALIGN` from its start.

    There, kernels that work on vectors of elements (fused ones, and those of two-byte numbers) give
    the bits that they give to the whole.
    """
    _draft_runs(bench, update, group, [UpdatePiece((row,)) for row in rows])


def _draft_runs(bench: Bench, update: Update, group: Group, found: Iterable[UpdatePiece]) -> None:
    for piece in found:
        if piece.first.factors and bench.in_place:
            update.scaled.extend(row.segment.index for row in piece.rows)
        homes = bench.states.needed(group, piece.first)
        work = FlatRun(bench, group, update.bucket, piece.first, homes)
        bench.add(update, piece, homes, work, rule_numel(bench.cores.n_threads))
        update.finishes.append(partial(bench.states.share, update.bucket, piece, work.after))


@dataclass(frozen=True, slots=True)
class FlatRun:
    """The work of slices of a run of neighbours."""

    bench: Bench
    group: Group
    bucket: Bucket
    first: Ready
    homes: dict[str, Home]
    after: State = field(default_factory=dict)
    """The state as the step leaves it, with its scalars."""

    def __call__(self, whole: slice) -> None:
        # an extent may be long: temporaries of a short run stay in the cache
        numel = rule_numel(self.bench.cores.n_threads)
        for run in cut_run(whole, self.bench.at_once(self.bucket, numel)):
            self._step(run)

    def _step(self, run: slice) -> None:
        bench, state = self.bench, self.first.state
        flat = bench.param(self.bucket).part(run)
        grad = bench.multiplied(bench.grads.of(self.bucket).part(run), self.first.factors)
        there = [key for key in self.homes if key in state]
        here = [flat, *(self.homes[key].part(run) for key in there)]
        with bench.turn(), bench.streamed(here, grad) as ((param, *moved), param_grad):
            param.grad = param_grad
            before = {k: copied(v) for k, v in state.items() if k not in there}
            before.update(zip(there, moved, strict=True))
            (done,) = bench.rule.run(self.group, [param], [before])
        for key, value in done.items():
            if not is_elementwise(key, value, flat.shape):
                self.after[key] = value
                continue
            self.after[key] = Elementwise()
            if value is not before.get(key):
                home = self.homes.get(key) or bench.states.home(key, self.bucket, value.dtype)
                home.part(run).copy_(value)


# -- torch's rule, on whole tensors --------------------------------------------------------------


def draft_whole(bench: Bench, update: Update, group: Group, rows: Sequence[Ready]) -> None:
    """Add steps of parameters, or of their fp32 masters one at a time."""
    has_master = update.bucket.has_master
    if not has_master:
        written = (row for row in rows if bench.may_write or (row.factors and bench.in_place))
        update.scaled.extend(row.segment.index for row in written)
    alone = has_master or bench.store.pool.spills  # as little in memory as possible
    for some in [(row,) for row in rows] if alone else [tuple(rows)]:
        work = WholeTensors(bench, group, update.bucket, some)
        bench.add(update, UpdatePiece(some), bench.states.needed(group, some[0]), work, None)


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """The work of a slice of whole parameters."""

    bench: Bench
    group: Group
    bucket: Bucket
    rows: tuple[Ready, ...]

    def __call__(self, whole: slice) -> None:
        bench = self.bench
        params = [self._param(row) for row in self.rows]
        with bench.cores.all():
            before = [bench.states.views(row) for row in self.rows]
            after = bench.rule.run(self.group, params, before)
        for param, row, state in zip(params, self.rows, after, strict=True):
            param.grad = None
            bench.states.keep(row, state)
            if self.bucket.has_master:  # it is rounded to its working weight
                bench.masters.assign(row.segment, param)

    def _param(self, row: Ready) -> torch.Tensor:
        """Return a parameter, or its master, with its gradient."""
        bench = self.bench
        grad = bench.grads.of(self.bucket).view(row.segment)
        if self.bucket.has_master:
            param = bench.masters.value(row.segment)
            param.grad = scaled(torch.empty_like(param).copy_(grad), row.factors)
        else:
            param = bench.param(self.bucket).view(row.segment)
            param.grad = bench.multiplied(grad, row.factors)
        return param


def scaled(grad: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    for factor in factors:
        grad.mul_(factor)
    return grad
