"""Which parameters an optimizer may have (floor 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero.errors import ConfigError
from hetero.train.engine.check import check_once, pageable
from hetero.train.engine.setup import Setup
from hetero.train.update.masters import WORKING
from hetero.train.update.rules import Group


class Admission:
    """Refuses changes of an optimizer's groups that cannot be honoured."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        groups = [] if setup.inner is None else setup.inner.param_groups
        self._listed = {id(p): p for group in groups for p in group["params"]}  # by `prepare`
        self._admitted: list[int] = []  # ids of the parameters in the groups at the last step

    def admit_all(self, groups: Sequence[Group]) -> None:
        """Raise ConfigError for a parameter in the groups that cannot be stepped."""
        params = [param for group in groups for param in group["params"]]
        ids = [id(param) for param in params]
        if ids == self._admitted:  # the model holds them all, so no id is reused
            return
        for param in params:
            if id(param) not in self._listed and pageable(param):
                self.admit(param)
        check_once(self._setup.model, groups)
        self._admitted = ids

    def admit(self, param: torch.Tensor) -> None:
        """Raise ConfigError for a parameter of another model, or one that lacks its master."""
        setup = self._setup
        if id(param) not in setup.index:
            raise ConfigError(
                f"a parameter of shape {list(param.shape)} is not of the prepared model",
                advice="prepare the model again with the larger module",
            )
        working, bucket = WORKING.get(setup.config.precision), setup.bucket(param)
        if working is None or not bucket.codec.exact:
            return  # a coded weight's gradient is refused when it arrives
        if bucket.dtype is working and not bucket.has_master:
            raise ConfigError(
                f"parameter {setup.segment(param).spec.name!r} was frozen, and in no group, when"
                " the model was prepared: it has no fp32 master, and small updates of it would be"
                " lost",
                advice="give the optimizer all parameters that may thaw before hetero.prepare, or"
                " release the model and prepare it again",
            )
