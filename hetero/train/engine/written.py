"""Notices writes to working weights with masters that stay on the device (floor 2).

A model that fits has plain parameters, whose data are the homes themselves. Their class reports
aliases that leave through ``p.data``; version counters report in-place writes. A written weight is
its own master at the next step, as if it were paged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hetero.device import use_count
from hetero.errors import StateError
from hetero.internals import NO_TASK, at_end_of_backward, graph_task
from hetero.memory.layout import Bucket, Layout, row
from hetero.train.gradients.store import GradStore
from hetero.train.model import binding
from hetero.train.model.parts import Parts
from hetero.train.update.masters import Masters, Scaling


class WrittenWeights:
    """Notices writes to the resident parameters of one model, which compute at torch's own speed.

    Args:
        scaling: of the loss, under precision="fp16".
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        masters: Masters,
        grads: GradStore,
        scaling: Scaling | None,
        parts: Parts,
    ) -> None:
        self.scaling = scaling
        self._parts = parts
        self.index = {id(p): i for i, p in enumerate(params)}
        self._params = params
        self._layout = layout
        self._masters = masters
        self._grads = grads
        self._shown: dict[int, torch.Tensor] = {}  # weights as they were when an alias left
        self._graph_task = NO_TASK
        self._versions: list[int] = []

    def attach(self) -> None:
        """Give parameters the class that reports writes."""
        pinned = self._parts.pinned(self)
        for param in self._params:
            param.__class__ = pinned(param)
        self._versions = [self._parts.version(p) for p in self._params]

    def gradient_arrived(self, param: nn.Parameter) -> None:
        """A gradient is complete; it goes home when the backward pass is over."""
        self._grads.arrived(param)
        task = graph_task()
        if task != self._graph_task:
            self._graph_task = task
            at_end_of_backward(self._end_backward)

    def _end_backward(self) -> None:
        self._graph_task = NO_TASK
        self._grads.flush_pending()

    def quiesce(self) -> None:
        """Bring gradients home, and note which weights were written since the last step."""
        self._grads.flush_pending()
        for index, param in enumerate(self._params):
            segment, before = self._layout.home[index][1], self._shown.get(index)
            if self._parts.version(param) != self._versions[index]:
                self._masters.reset(segment)
                self._versions[index] = self._parts.version(param)
            elif before is not None:
                self._masters.was(segment, before)
            if before is not None:
                before.copy_(row(self._data(index)))

    def updated(self, bucket: Bucket) -> None:
        """A bucket's weights were updated: only later writes are the user's."""
        for segment in bucket.segments:
            index = segment.index
            self._versions[index] = self._parts.version(self._params[index])
            if index in self._shown:
                self._show(index)

    def _data(self, index: int) -> torch.Tensor:
        """Return what a parameter has inside, as an alias."""
        return self._parts.local(self._parts.data(self._params[index]))

    def _show(self, index: int) -> None:
        data = self._data(index)
        if use_count(data) <= _BOUND:
            del self._shown[index]
            return
        self._shown[index] = row(data).clone()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let a state dict's ``copy_`` into a parameter reach its master."""
        with _Loading(self):
            yield

    def load(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Make a loaded value a parameter's master."""
        index = self.index[id(param)]
        self._masters.assign(self._layout.home[index][1], self._parts.value(param, value))
        torch.autograd.graph.increment_version(param)
        self._versions[index] = self._parts.version(param)
        if index in self._shown:
            self._shown[index].copy_(row(self._data(index)))

    # -- for the class of parameters -------------------------------------------------------------

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], *, write: bool) -> Iterator[None]:
        """Resident parameters are always gathered."""
        yield

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        """Return ``param.data``; the next step compares it to find writes."""
        index = self.index[id(param)]
        if index not in self._shown:
            self._shown[index] = row(self._data(index)).clone()
        return self._parts.data(param)

    def assign(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Carry out ``param.data = value`` by copying; a change of geometry is refused."""
        if value.shape != param.shape or value.dtype != param.dtype:
            raise StateError(
                f"parameter {self.name(param)!r} is {param.dtype} {list(param.shape)}; data of"
                f" {value.dtype} {list(value.shape)} cannot replace it",
                advice="convert the model before hetero.prepare, or release it first",
            )
        with torch.no_grad():
            param.copy_(value)

    def assign_grad(self, param: nn.Parameter, *, adds: bool) -> None:
        """A gradient that code sets stays until the step, as on pages with masters."""

    def geometry(self, param: nn.Parameter) -> torch.Tensor:
        """Return a meta tensor with the parameter's own shape and strides."""
        return torch.empty_like(param, device="meta")

    def name(self, param: nn.Parameter) -> str:
        """Return the parameter's name in its model."""
        return self._layout.home[self.index[id(param)]][1].spec.name

    def fault(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Nothing is ever missing here."""
        with binding.without_faults():
            return func(*args, **kwargs)


_BOUND = 4  # uses of a home's storage: home, parameter, the data asked about, the handle


class _Loading(TorchFunctionMode):
    """Sees the ``copy_`` of `nn.Module.load_state_dict` before torch rounds its values."""

    def __init__(self, weights: WrittenWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.copy_ and id(args[0]) in self._weights.index:
            with torch.no_grad():
                self._weights.load(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))
