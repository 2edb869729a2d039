"""The room that forwards find on the device next to a model that stays there (floor 2)."""

from __future__ import annotations

import sys

from hetero.train.activations.allocator import DeviceBytes
from hetero.train.engine.setup import Setup
from hetero.types import Tier


class ForwardRoom:
    """Bytes that a forward and its backward may take, on top of what was there before."""

    def __init__(self, setup: Setup, counted: DeviceBytes) -> None:
        self._setup = setup
        self._counted = counted
        self._foreign_bytes = 0  # on the device at `prepare`, of others
        self._limit_bytes = 0  # of all that is on the device, in this step
        self._base_bytes = 0  # on the device when this forward began
        self._first_bytes: int | None = None  # and when the step's first one began
        self._standing_bytes = 0  # by how much these differ at a step's last forward

    def attach(self) -> None:
        """Look at what is on the device when the model is prepared."""
        setup = self._setup
        self._foreign_bytes = max(0, self._counted.now_bytes() - setup.ledger.used(Tier.HBM))
        self._standing_bytes = sum(setup.blueprint.grad_sizes)  # until it is measured

    # -- a step ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a forward of this step has begun."""
        return self._first_bytes is not None

    def begin(self) -> None:
        """A forward begins, on top of what earlier ones of the step left."""
        self._base_bytes = self._counted.now_bytes()
        if self._first_bytes is None:
            self._first_bytes, self._limit_bytes = self._base_bytes, self._limit(self._base_bytes)
        self._counted.restart()

    def end(self) -> None:
        """The step is made."""
        if self._first_bytes is not None:
            self._standing_bytes = self._base_bytes - self._first_bytes
            self._first_bytes = None

    def forget(self) -> None:
        """The step came to nothing."""
        self._first_bytes = None

    # -- bytes -----------------------------------------------------------------------------------

    @property
    def taken_bytes(self) -> int:
        """All that came since the forward began."""
        return max(0, self._counted.now_bytes() - self._base_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most of it."""
        return self._counted.peak_bytes() - self._base_bytes

    @property
    def most_bytes(self) -> int:
        """What there may be on the device: all of it, or `hbm=`."""
        return min(self._counted.most_bytes(), self._setup.config.hbm or sys.maxsize)

    @property
    def n_bytes(self) -> int:
        """The room: what the step's later forwards will find standing is not theirs."""
        first = self._base_bytes if self._first_bytes is None else self._first_bytes
        to_come = max(0, first + self._standing_bytes - self._base_bytes)
        return max(0, self._limit_bytes - self._base_bytes - to_come)

    def _limit(self, now_bytes: int) -> int:
        """Return the most bytes that there may be on the device: what others take of it is theirs,
        unless `hbm=` is needed for it."""
        setup, most = self._setup, self._counted.most_bytes()
        if setup.config.hbm is None:
            return most
        ours = setup.ledger.used(Tier.HBM)
        if setup.steps:  # torch's states came with the first step
            grads = sum(setup.blueprint.grad_sizes)
            ours = setup.blueprint.home_bytes - grads + setup.budget.buffer_bytes
        later = max(0, now_bytes - self._foreign_bytes - ours)
        return min(
            most, setup.config.hbm + self._foreign_bytes + min(later, setup.budget.slack_bytes)
        )
