"""What others write after a call, of what the call read (floor 2).

A call that is repeated in backward would read it: plain torch goes on with what it has saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hetero.train.activations.moment import Moment
from hetero.train.activations.proof import Digests
from hetero.train.model.faults import is_unbound, listen_to_aliases
from hetero.train.model.parts import Parts


class LaterWrites:
    """Follows what a call was given and what its modules hold, from before the call on.

    Args:
        moment: the state that the call begins with; it tells of buffers.
        inputs: the call's distinct arguments. Those in RAM are digested: no version tells of what
            numpy writes.
    """

    def __init__(self, moment: Moment, parts: Parts, inputs: Sequence[Any]) -> None:
        self._moment = moment
        self._parts = parts
        self._in_ram = [at for at, value in enumerate(inputs) if _is_in_ram(value)]
        self._given = self._digested(inputs)
        self._versions: list[int] = []  # of parameters, after the call
        self._own: frozenset[int] = frozenset()  # their ids
        self._aliased: dict[int, tuple[Any, Digests]] = {}  # those whose ``data`` others have since
        self._wrote_data = False

    def begin(self) -> None:
        """The call is over: what is written from now on is others'."""
        self._versions = self._versions_now()
        self._own = frozenset(map(id, self._moment.params))
        listen_to_aliases(self)

    def hears_of(self, param: Any) -> bool:
        """Whether it matters that code gets a parameter's ``data``, for the first time."""
        return id(param) in self._own and id(param) not in self._aliased

    def about_to_alias(self, param: Any) -> None:
        """Code is about to get a parameter's ``data``: no version tells of writes to that."""
        before = Digests()
        digest([param], before, self._parts)
        self._aliased[id(param)] = param, before

    def look_at_data(self) -> None:
        """Compare parameters whose ``data`` others have; in an access, where they are bound."""
        for param, before in self._aliased.values():
            now = Digests()
            digest([param], now, self._parts)
            self._wrote_data |= bool(before.difference(now))

    def found(self, inputs: Sequence[Any]) -> str:
        """Return what was written; "" if nothing. ``inputs``: as the call is repeated with them."""
        if self._versions_now() != self._versions:
            return "has parameters that were written after its forward, before its backward"
        if self._wrote_data:
            return "has parameters whose data was written after its forward, before its backward"
        if self._given.difference(self._digested(inputs)):
            return "was given tensors that were written after its forward, or that hooks changed"
        if self._moment.is_lost():
            return "may have read tensors that were written after its forward, before its backward"
        return ""

    def _versions_now(self) -> list[int]:
        return [self._parts.version(param) for param in self._moment.params]

    def _digested(self, inputs: Sequence[Any]) -> Digests:
        found = Digests()
        for at in self._in_ram:
            found.saw(inputs[at])
        return found


def digest(values: Sequence[Any], digests: Digests, parts: Parts) -> None:
    """Add the tensors among values to digests, but for parameters that are not bound."""
    for value in values:
        if isinstance(value, torch.Tensor) and not is_unbound(value):
            digests.saw(parts.local(value))


def _is_in_ram(value: Any) -> bool:
    """Whether an input is a tensor in RAM whose bits can be looked at in place."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.is_nested:
        return False
    return value.layout is torch.strided and value.is_contiguous()
