"""Gradients whose homes are shared with other ranks (floor 2)."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero.device import Ticket
from hetero.device.comm import Comm
from hetero.errors import DivergenceError, StateError
from hetero.memory.layout import Bucket, Segment
from hetero.memory.link import Link
from hetero.train.gradients.crossing import exchange_bytes
from hetero.train.gradients.device_sums import SumSpace
from hetero.train.gradients.exchange import Exchange
from hetero.train.gradients.homes import shaped
from hetero.train.gradients.refusals import assert_dense
from hetero.train.gradients.slot import (
    NONE,
    GradNorm,
    GradSlot,
    GradState,
    LazyGrad,
    NormWay,
    Unsummed,
)
from hetero.train.gradients.store import GradStore
from hetero.train.model.host_work import host_work
from hetero.types import Kind

UNSUMMED = Unsummed(
    "a gradient is read before its backward pass is over: it is summed over ranks then",
    advice="read p.grad after loss.backward(), or hook the tensor before it arrives",
)
LOST = Unsummed(
    "a backward pass failed before its gradients were summed over ranks, and they are used",
    advice="call optimizer.zero_grad() on all ranks before you try again",
)

NOTHING = (None, None)


class SharedGradStore(GradStore):
    """Takes gradients to shares: what a rank's backward pass gives is an addend of them all.

    A gradient that the user's code holds is copied: one rank's reference must not keep others from
    their sums.
    """

    leases = False
    takes_graphs = False

    def __init__(self, *args: Any, comm: Comm, link: Link, space: SumSpace, **named: Any) -> None:
        super().__init__(*args, **named)
        self.homes.expects_sums = True
        self._comm = comm
        self._keeps = False
        self._kept: dict[int, None] = {}  # parameters whose ``p.grad`` is of this rank alone
        self._addends: dict[int, tuple[GradSlot, torch.Tensor]] = {}  # of no_sync, to ones at home
        self._summed: dict[int, GradSlot] = {}  # gradients whose sums are being made
        n_bytes = exchange_bytes(self._layout, comm.sum_group)
        self.homes.store.reserve(Kind.GRAD, n_bytes, "gradients on their way between ranks")
        self._exchange = Exchange(
            self._layout,
            comm,
            device=named["device"],
            link=link,
            ring=self.ring,
            cores=named["cores"],
            space=space,
            home=self.homes.of,
            expected=self._trained,
            is_summed=self._is_summed,
            opens=self._open,
            closed=self._close,
        )

    def _trained(self, bucket: Bucket) -> set[int]:
        params = self.params
        return {s.position for s in bucket.segments if params[s.index].requires_grad}

    # -- addends ---------------------------------------------------------------------------------

    def _send(self, index: int, grad: torch.Tensor, *, scaled: bool, made: Ticket | None) -> None:
        segment = self._layout.home[index][1]
        assert_dense(grad, segment.spec.name)
        self._show(index, self._new_slot(segment))
        self._exchange.add(segment, shaped(segment, grad, segment.spec.dtype))

    def accumulate(self, slot: GradSlot, grad: torch.Tensor) -> None:
        segment = slot.segment
        if slot.state is GradState.TAKEN:
            raise StateError(
                f"the gradient of {segment.spec.name!r} was taken by an alias (.numpy(), a view),"
                " and another one arrives, to be summed over ranks",
                advice="clone gradients that are kept: p.grad.clone()",
            )
        kept, before = self._addends.pop(segment.index, NOTHING)
        grad = before.add_(grad) if before is not None and kept is slot else grad.clone()
        if self._keeps:
            self._addends[segment.index] = slot, grad
        else:
            self._exchange.add(segment, shaped(segment, grad, segment.spec.dtype))

    def flush_pending(self) -> None:
        if self._keeps:
            return
        super().flush_pending()
        with host_work():
            self._exchange.unscale = self.scaling.unscale
            self._exchange.advance()

    def pass_ended(self) -> None:
        if self._keeps:
            return
        self._pending.update(self._kept)  # that this pass did not come to
        self._kept.clear()
        super().flush_pending()
        try:
            with host_work():
                for slot, grad in self._kept_addends():
                    self._exchange.add(slot.segment, grad)
                self._addends.clear()
                self._exchange.finish_pass()
        except BaseException:
            self.pass_failed()
            raise

    def pass_failed(self) -> None:
        lost = [self._layout.home[index][1] for index in self._pending]
        self._pending.clear()
        with host_work():
            lost += self._exchange.forget()
        self._summed.clear()
        for segment in lost:
            if self.parts.grad(self.params[segment.index]) is not None:
                self._lose(self._showing(segment))

    def _lose(self, slot: GradSlot) -> None:
        """Refuse all uses of a gradient that lacks addends, until it is taken away."""
        if slot.state is not GradState.TAKEN:
            if slot.state is not GradState.ARRIVING:
                slot.become(GradState.ARRIVING, "add")
            slot.landing = LOST

    def check_exchanged(self) -> None:
        kept = [i for i in self._kept if self.parts.grad(self.params[i]) is not None]
        kept += [slot.segment.index for slot, _ in self._kept_addends()]
        if kept:
            name = self._layout.home[kept[0]][1].spec.name
            raise StateError(
                f"a step, and this rank alone has all of the gradient of {name!r}: no backward pass"
                " outside of no_sync followed",
                advice="leave hetero.no_sync for the last backward pass before a step",
            )

    def finish(self) -> None:
        self._kept.clear()
        self._addends.clear()
        super().finish()
        self.homes.expects_sums = True  # of ranks

    def land(self, name: str, bucket: Bucket) -> bool:
        self._exchange.settle(bucket)
        return super().land(name, bucket)

    def _kept_addends(self) -> list[tuple[GradSlot, torch.Tensor]]:
        """Return addends of no_sync with the gradients to which they go, if they are there still.

        With gradients that were taken away, theirs go too.
        """
        return [each for each in self._addends.values() if self.shown(each[0].segment) is each[0]]

    def reset(self) -> None:
        self._exchange.clear()
        self._exchange.close()
        self._kept.clear()
        self._addends.clear()
        super().reset()

    # -- passes that exchange nothing ------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients of passes inside on this rank, where torch adds them up."""
        before, self._keeps = self._keeps, True
        try:
            yield
        finally:
            self._keeps = before

    def arriving(self, index: int) -> None:
        if not self._keeps and index not in self._kept:
            super().arriving(index)

    def arrived(self, param: nn.Parameter) -> None:
        super().arrived(param)
        index = self._index[id(param)]
        if self._keeps:
            del self._pending[index]
            if not isinstance(self.parts.grad(param), LazyGrad):
                self._kept[index] = None
        else:
            self._kept.pop(index, None)

    def assigned(self, param: nn.Parameter, *, adds: bool) -> None:
        """A gradient set by the user's code is the same on all ranks; torch's would be an addend of
        no pass."""
        if adds:
            name = self._layout.home[self._index[id(param)]][1].spec.name
            raise StateError(
                f"a schedule computes the gradient of {name!r} apart from its inputs' (zero"
                " bubble), and ranks that share the stage sum gradients at the end of a pass",
                advice="use Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B or"
                " ScheduleLoopedBFS, or leave dp_shard out of mesh=",
            )

    def take_plain(self) -> None:
        """Take home gradients set by the user's code; those of no_sync, scaled alike, stay."""
        for index, param in enumerate(self.params):
            grad = self.parts.grad(param)
            plain = grad is not None and not isinstance(grad, LazyGrad)
            if plain and index not in self._kept:
                with host_work():
                    self._showing(self._layout.home[index][1])

    # -- norms -----------------------------------------------------------------------------------

    def share_norms(self, way: NormWay) -> None:
        """Take the norms of the gradients of which this rank has the largest part, and tell them.

        Each is torch's, of a whole tensor. Of shares that ranks cannot read where they lie, or have
        no numbers, each rank takes all.
        """
        slots = [slot for s in self._segments() if (slot := self.shown(s)) is not None]
        due = [s for s in slots if s.value is None and s.norm is None and s.home.is_shared]
        if not due or self.place.type == "meta":
            return
        indices = [slot.segment.index for slot in due]
        mine = {
            slot.segment.index: slot.home_norm(slot.way(way)).cpu()
            for slot in due
            if self._largest(slot.segment) == self._comm.rank % self._comm.n_shares
        }
        told: dict[int, torch.Tensor] = {}
        rows = self._comm.agree(pickle.dumps((indices, mine)), f"norms of order {way.ord}")
        for row in rows:
            theirs, norms = pickle.loads(row)  # from ranks of this very program
            if theirs != indices:
                raise self._others_norms(set(theirs) ^ set(indices))
            told.update(norms)
        for slot in due:
            slot.norm = GradNorm(slot.way(way), told[slot.segment.index])

    def _others_norms(self, indices: set[int]) -> DivergenceError:
        name = self._layout.home[min(indices)][1].spec.name
        return DivergenceError(
            f"ranks that share a model differ in the gradient of {name!r}, of which some take the"
            " norm",
            advice="change gradients, or take them away, in the same way on every rank",
        )

    def _segments(self) -> Iterator[Segment]:
        return (segment for bucket in self._layout.buckets for segment in bucket.segments)

    def _largest(self, segment: Segment) -> int:
        """Return the share with the largest part of a tensor, the first of equals."""
        size = self._layout.bucket(segment).share_numel
        first, last = segment.offset // size, max(segment.offset, segment.end - 1) // size
        ends = (min(segment.end, (r + 1) * size) for r in range(first, last + 1))
        parts = [end - max(segment.offset, r * size) for r, end in enumerate(ends, first)]
        return first + parts.index(max(parts))

    # -- sums ------------------------------------------------------------------------------------

    def _is_summed(self, segment: Segment) -> bool:
        """Whether ``p.grad`` is what an earlier pass has left, or the user's code has set."""
        grad = self.parts.grad(self.params[segment.index])
        if isinstance(grad, LazyGrad):
            return grad.slot.summed
        return grad is not None and segment.index not in self._kept

    def _open(self, segment: Segment) -> bool:
        slot = self._summed[segment.index] = self._showing(segment)
        if slot.landing is LOST:
            LOST.wait()
        if not slot.summed:
            return False
        slot.land()
        if slot.factors != NONE:
            slot.writable()
        slot.become(GradState.ARRIVING, "add")
        slot.landing = UNSUMMED
        return True

    def _showing(self, segment: Segment) -> GradSlot:
        """Return the gradient that ``p.grad`` shows, made one at home if it is not."""
        grad = self.parts.grad(self.params[segment.index])
        if isinstance(grad, LazyGrad):
            return grad.slot
        slot = (
            self._new_slot(segment)  # other ranks have one
            if grad is None
            else self._take(segment.index, grad, scaled=False)
        )
        self._show(segment.index, slot)
        return slot

    def _close(self, segment: Segment) -> None:
        slot = self._summed.pop(segment.index)
        slot.landing, slot.norm, slot.summed = None, None, True
        slot.become(GradState.HOME, "land")
        self._has_added = True

    def _new_slot(self, segment: Segment) -> GradSlot:
        """Return a gradient that the next sum begins."""
        self._make_way(segment)
        bucket = self._layout.bucket(segment)
        slot = GradSlot(self, segment, self.homes.make(bucket, wide=bucket.has_master))
        slot.landing = UNSUMMED
        self._slots[segment.index] = weakref.ref(slot)
        return slot

    def _take(
        self, index: int, grad: torch.Tensor, *, scaled: bool, made: Ticket | None = None
    ) -> GradSlot:
        """Take a gradient that the user's code made, the same on all ranks."""
        segment = self._layout.home[index][1]
        assert_dense(grad, segment.spec.name)
        slot = self._new_slot(segment)
        slot.landing, slot.summed = None, True
        self.homes.write(slot.home, segment, shaped(segment, grad, slot.home.dtype))
        slot.become(GradState.HOME, "land")
        return slot
