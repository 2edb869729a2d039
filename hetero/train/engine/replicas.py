"""Ranks that each hold a whole model, begin with the same values and take the same steps.

This is torch's DistributedDataParallel for models that hetero has prepared (stage 0 of ZeRO,
floor 2). Gradients are averaged at the end of a backward pass, on HOST, where they lie: the group
is one of gloo, whatever the devices are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetero.internals import RUN_BACKWARD, in_backward, install
from hetero.train.access.hooks import Hooks, before_forward

BATCH_BYTES = 25 * 2**20  # of gradients in one collective, as in torch's
FIRST = 0  # the rank whose values count


def open_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks that averages in RAM; collective. None: the default one does."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


class Replicas:
    """One rank's copy of a model that every rank has.

    Made before `hetero.prepare`, on all ranks in the same order: it broadcasts the first rank's
    parameters and buffers. As in torch, a forward with gradients decides whether they are complete
    after the backward pass; others between it and that pass decide nothing.

    Args:
        model: the plain model.
        group: the ranks that average; None: the default group.
        buffers: whether to broadcast the first rank's buffers again before each forward that
            follows one whose gradients were to be averaged.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup | None, *, buffers: bool = True
    ) -> None:
        self._group = group
        self._buffers = list(model.buffers()) if buffers else []
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._index = {id(p): i for i, p in enumerate(self._params)}
        self._arrived: set[int] = set()
        self._share([*model.parameters(), *model.buffers()])
        self._hooks = Hooks()
        self._hooks.gradients(self._params, self._note)
        self._stop = before_forward(model, self._begin)
        self._shares_next = True
        self._waits = False  # for the backward pass of a forward that is to be averaged
        self._n_taken = 0
        self.is_due = True
        """Whether the next backward pass completes gradients."""
        self.is_told = False
        """Whether a backward pass is under way after which all ranks average together."""
        self.accumulates = False
        """Whether forwards are of batches before the last of a step."""
        averaging = functools.partial(averages, weakref.ref(self))
        self._undo = weakref.finalize(self, install((RUN_BACKWARD.replaced(averaging),)))

    def close(self) -> None:
        """Let go of the model."""
        self._undo()
        self._hooks.remove()
        self._stop()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Run a backward pass inside; average after it, if that is due, also where it made no
        gradient on this rank."""
        self.is_told = True
        try:
            yield
        finally:
            self.is_told = False
        if self.is_due:
            self.average()

    @contextmanager
    def own_pass(self) -> Iterator[None]:
        """Run a backward pass of the program's own inside; average after it if it made gradients,
        as torch does."""
        before = self._n_taken
        yield
        if self.is_due and not self.is_told and self._n_taken > before:
            self.average()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Let gradients of forwards inside wait for later ones."""
        before, self.accumulates = self.accumulates, True
        try:
            yield
        finally:
            self.accumulates = before

    def average(self) -> None:
        """Average, over all ranks, each gradient that any rank has made since the last call.

        Collective. A rank without a gradient that others have counts as one of zeros; a gradient
        that no rank has stays None. Each is multiplied by 1 / ranks and then summed, in the
        parameter's dtype, as torch does it.
        """
        here = torch.zeros(len(self._params), dtype=torch.uint8, device="cpu")
        here[[i for i in self._arrived if self._params[i].grad is not None]] = 1
        self._arrived.clear()
        dist.all_reduce(here, dist.ReduceOp.MAX, group=self._group)
        self._waits &= not here.any()
        params = [self._params[i] for i in here.nonzero().flatten().tolist()]
        with torch.no_grad():
            for batch in batches(params):
                self._average(batch)

    def _average(self, params: Sequence[nn.Parameter]) -> None:
        flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device="cpu")
        shaped = [
            piece.view(param.shape)
            for param, piece in zip(params, flat.split([p.numel() for p in params]), strict=True)
        ]
        for param, piece in zip(params, shaped, strict=True):
            if param.grad is not None:
                piece.copy_(param.grad)
        flat.mul_(1 / dist.get_world_size(self._group))
        dist.all_reduce(flat, group=self._group)
        for param, piece in zip(params, shaped, strict=True):
            if param.grad is None:
                param.grad = piece.to(param.device, copy=True)
            else:
                param.grad.copy_(piece)

    def _note(self, param: nn.Parameter) -> None:
        self._arrived.add(self._index[id(param)])
        self._n_taken += 1

    def _begin(self) -> None:
        if self._shares_next:
            self._share(self._buffers)
        if torch.is_grad_enabled():
            self._waits |= not self.accumulates
            self.is_due = self._waits
        self._shares_next = torch.is_grad_enabled() and not self.accumulates

    def _share(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != "meta":  # an empty model's weights come from the same files
                dist.broadcast(tensor.detach(), FIRST, group=self._group)


def averages(replicas: Callable[[], Replicas | None], engine: Callable[..., Any]) -> Any:
    """Return torch's run of a backward pass, after which gradients are averaged."""

    @functools.wraps(engine)
    def run(*args: Any, **kwargs: Any) -> Any:
        there = replicas()
        if there is None or in_backward():  # a pass inside another one
            return engine(*args, **kwargs)
        with there.own_pass():
            return engine(*args, **kwargs)

    return run


@contextmanager
def one_pass(several: Collection[Replicas]) -> Iterator[None]:
    """Run a backward pass inside that several models may have a part in."""
    with ExitStack() as stack:
        for replicas in several:
            stack.enter_context(replicas.one_pass())
        yield


def batches(params: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype together, up to `BATCH_BYTES`, in their order."""
    batch: list[nn.Parameter] = []
    n_bytes = 0
    for param in params:
        more = param.numel() * param.dtype.itemsize
        if batch and (param.dtype is not batch[0].dtype or n_bytes + more > BATCH_BYTES):
            yield batch
            batch, n_bytes = [], 0
        batch.append(param)
        n_bytes += more
    if batch:
        yield batch
