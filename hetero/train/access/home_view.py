"""Reads and writes of homes by state dicts (floor 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero.memory.layout import Segment
from hetero.memory.shown import alias
from hetero.modes import in_own_mode
from hetero.train.access.pages import ParameterPages
from hetero.train.model.lazy import HomeSlot, shown
from hetero.train.model.parts import Parts

_HOMEWARD = (torch.Tensor.detach, torch.Tensor.copy_)


class StateDictView:
    """While open, carries out a state dict's operations on unbound parameters at their homes.

    Args:
        before_write: called before a home may be written, now or through a tensor that shows it.
    """

    def __init__(
        self, pages: ParameterPages, parts: Parts, *, before_write: Callable[[], None]
    ) -> None:
        self._pages = pages
        self._parts = parts
        self._before_write = before_write
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside a block, let ``detach`` and ``copy_`` of unbound parameters reach the homes."""
        before, self._is_open = self._is_open, True
        try:
            yield
        finally:
            self._is_open = before

    def takes(self, func: Callable[..., Any]) -> bool:
        """Whether a function is carried out on homes now."""
        return self._is_open and func in _HOMEWARD

    @in_own_mode
    def carry_out(self, func: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
        """Carry out a state dict's ``detach`` or ``copy_``."""
        param = args[0]
        if func == torch.Tensor.detach:
            value = self._detached(param)
            return (
                value if self._parts.inside(param) is None else self._parts.wrapping(param)(value)
            )
        return self._copied(param, self._parts.value(param, args[1]))

    def _detached(self, param: nn.Parameter) -> torch.Tensor:
        bucket, segment = self._pages.home(param)
        manager = self._pages.manager
        home = manager.home(bucket)
        if not home.shows:
            return self._lazily(param, bucket, segment)
        manager.flush_and_wait(bucket)
        self._before_write()  # writes to the result go unnoticed
        manager.copies[bucket].expose()
        return home.view(segment).detach()

    def _copied(self, param: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
        bucket, segment = self._pages.home(param)
        self._pages.manager.flush_and_wait(bucket)
        self._before_write()
        self._pages.masters.assign(segment, value)
        torch.autograd.graph.increment_version(param)
        self._pages.stepped([bucket])
        self._pages.manager.refresh(bucket)
        return param

    def _lazily(self, param: nn.Parameter, bucket: int, segment: Segment) -> torch.Tensor:
        """Return a lazy tensor for a parameter whose home is on disk or encoded."""
        manager = self._pages.manager

        def read() -> torch.Tensor:
            manager.flush_and_wait(bucket)
            return manager.home(bucket).read(segment)

        def keep() -> torch.Tensor:
            self._before_write()  # writes to the result go unnoticed
            manager.adopt_home_writes(held=False)
            manager.flush_and_wait(bucket)
            return alias(manager.home(bucket), segment)

        def write(value: torch.Tensor) -> None:
            self._copied(param, value)

        home = manager.home(bucket)
        return shown(HomeSlot(home, segment, read=read, keep=keep, write=write))
