"""Torch's rule on whole tensors of which ranks have shares (floor 2).

All ranks step the same parameters. Where they see each other's homes, each parameter has an owner,
which reads all of it, makes the step, and writes the result to the ranks that keep it. Else every
rank puts the whole together, makes the step, and keeps its share. Copies of one parameter (or its
master), its gradient and its states are in RAM meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hetero.errors import DivergenceError, RankLost
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket
from hetero.train.update.arithmetic import Bench, Update, scaled
from hetero.train.update.masters import write_everywhere
from hetero.train.update.rules import Group, State, is_elementwise
from hetero.train.update.states import Elementwise, Ready, UpdatePiece

ROW_BYTES = 2**24
"""Of states that are told at once."""


class Stepped(NamedTuple):
    """What an owner tells of a parameter's state: values, and the keys of those at home."""

    plain: dict[str, Any]
    at_home: tuple[str, ...]


def draft_together(bench: Bench, update: Update, group: Group, rows: Sequence[Ready]) -> None:
    """Add steps of parameters that all ranks make."""
    for row in rows:
        bench.states.needed(group, row)
        work = WholeShares(bench, group, update.bucket, row)
        update.together.append(work)
        if work.writes_grad:
            update.scaled.append(row.segment.index)


@dataclass(frozen=True, slots=True)
class WholeShares:
    """The step of a parameter of which each rank has a share."""

    bench: Bench
    group: Group
    bucket: Bucket
    row: Ready

    @property
    def has_owner(self) -> bool:
        """Whether every rank sees all of it."""
        homes = self.bench.store.of_bucket(self.bucket.id)
        return all(home.is_shared for _, home in homes)

    @property
    def writes_grad(self) -> bool:
        """Whether the rule may write to the gradient, which then shows it."""
        return self.bench.may_write and not self.bucket.has_master

    @property
    def numel(self) -> int:
        return self.row.segment.spec.numel

    def by_all(self) -> None:
        """Make the step on every rank; each keeps its share."""
        bench, segment = self.bench, self.row.segment
        param, state = self._read()
        # from here on ranks write what others have read
        with bench.store.writing_shares(f"an update of {segment.spec.name!r}"):
            after, grad = self._step(param, state)
            bench.states.keep(self.row, after)
            if self.writes_grad:
                bench.grads.of(self.bucket).write(segment, grad)
            if self.bucket.has_master:
                bench.masters.assign(segment, param)
            else:
                bench.param(self.bucket).write(segment, param)

    def by_owner(self) -> Stepped:
        """Make the step here alone, and write the result everywhere."""
        bench, segment = self.bench, self.row.segment
        param, state = self._read()
        after, grad = self._step(param, state)
        bench.masters.assign_everywhere(segment, param)
        if self.writes_grad:
            write_everywhere(bench.grads.of(self.bucket), segment, grad)
        plain, at_home = {}, []
        for key, value in after.items():
            if is_elementwise(key, value, segment.spec.shape):
                at_home.append(key)
                write_everywhere(bench.states.home(key, self.bucket, value.dtype), segment, value)
            else:
                plain[key] = value
        told = Stepped(plain, tuple(at_home))
        self.take(told)
        return told

    def take(self, told: Stepped) -> None:
        """Let the parameter's state be as its owner left it."""
        after: State = {**told.plain, **dict.fromkeys(told.at_home, Elementwise())}
        self.bench.states.share(self.bucket, UpdatePiece((self.row,)), after)

    def _read(self) -> tuple[torch.Tensor, State]:
        """Return the parameter or its master, with its gradient, and its states: copies."""
        bench, row, bucket = self.bench, self.row, self.bucket
        segment, homes = row.segment, bench.store.homes
        home = bench.param(bucket)
        param = bench.masters.value(segment) if bucket.has_master else home.read(segment)
        grad = bench.grads.of(bucket).read(segment)
        param.grad = scaled(torch.empty_like(param).copy_(grad), row.factors)
        paged = {key: homes[key, bucket.id].read(segment) for key in row.paged()}
        return param, {**row.state, **paged}

    def _step(self, param: torch.Tensor, state: State) -> tuple[State, torch.Tensor]:
        """Return the state after the step, and the gradient."""
        grad = param.grad
        assert grad is not None
        with self.bench.cores.all():
            (after,) = self.bench.rule.run(self.group, [param], [state])
        param.grad = None
        return after, grad


def step_together(store: HomeStore, works: Sequence[WholeShares]) -> None:
    """Make the steps of parameters, which are the same on all ranks."""
    owned = [work for work in works if work.has_owner]
    for work in works:
        if not work.has_owner:
            work.by_all()
    if not owned:
        return
    comm = store.comm
    first = comm.rank - comm.rank % comm.n_shares  # of the ranks that keep this copy
    owners = [first + n for n in owners_of([work.numel for work in owned], comm.n_shares)]
    mine: dict[int, Stepped] | str = ""
    with store.writing_shares("updates of whole tensors"):  # no save reads any more
        try:
            mine = {n: owned[n].by_owner() for n, owner in enumerate(owners) if owner == comm.rank}
        except BaseException as error:
            with suppress(RankLost):  # this rank's own error matters more
                told_by_all(store, pickle.dumps(f"{type(error).__name__}: {error}"))
            raise
    for other, raw in enumerate(told_by_all(store, pickle.dumps(mine))):
        told = pickle.loads(raw)  # of this very program
        if isinstance(told, str):
            raise DivergenceError(
                f"{comm.members.name(other)} failed in the updates of a step: {told}",
                advice="load the last checkpoint: parameters are of two steps",
            )
        if other != comm.rank and other in owners:
            for number, stepped in told.items():
                owned[number].take(stepped)


def owners_of(sizes: Sequence[int], n_ranks: int) -> list[int]:
    """Return a rank for each of some tensors, so that all ranks have about as much: the largest
    first, each to the rank that has least."""
    load, owners = [0] * n_ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        owners[number] = rank = load.index(min(load))
        load[rank] += sizes[number]
    return owners


def told_by_all(store: HomeStore, mine: bytes) -> list[bytes]:
    """Return the rows of all ranks, of any length."""
    agree, what = store.comm.agree, "states of whole tensors"
    most = max(int(row) for row in agree(str(len(mine)).encode(), what))
    found = [b""] * store.comm.size
    for at in range(0, most, ROW_BYTES):
        for rank, row in enumerate(agree(mine[at : at + ROW_BYTES], what)):
            found[rank] += row
    return found
