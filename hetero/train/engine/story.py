"""What becomes of a prepared model, for `logging.getLogger("hetero")` (floor 2).

Nothing is printed by default: these are messages of level INFO, and a program says with
`logging.basicConfig(level=logging.INFO)` that it wants them. A step without news costs one look at
the logger's level.
"""

from __future__ import annotations

import logging
from collections import Counter

from hetero.train.engine.paged import Paged
from hetero.train.engine.resident import Resident
from hetero.train.engine.setup import Setup
from hetero.types import Tier, format_bytes

LOGGER = logging.getLogger("hetero")
LOGGER.addHandler(logging.NullHandler())
SLOW = (
    "its first two steps are slow: the first runs with the fewest frames and measures activations,"
    " the second makes the plan that later ones follow"
)


class Story:
    """Tells of one model what has changed since it was asked last."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._name = type(setup.model).__name__
        self._residence = ""
        self._policies: Counter[str] = Counter()

    def begins(self, residence: Paged | Resident) -> None:
        """The model is prepared."""
        if not self._is_told():
            return
        setup = self._setup
        budgets = ((tier, setup.ledger.budgets.get(tier)) for tier in (Tier.HBM, Tier.HOST))
        within = " and ".join(f"{format_bytes(n)} of {t.name}" for t, n in budgets if n is not None)
        numel = sum(param.numel() for param in setup.params)
        self._residence = residence.name
        LOGGER.info(
            "%s with %s parameters is prepared on %s: %s%s",
            *(self._name, f"{numel:,}", setup.device.name, residence.name),
            f" within {within}" if within else "",
        )
        if isinstance(residence, Paged) and setup.inner is not None:
            LOGGER.info("%s: %s", self._name, SLOW)
        spill = setup.budget.spill
        if spill is not None and spill.on_disk:
            LOGGER.info(
                "%s: RAM does not hold everything: %s of states have their homes on disk, in %s",
                *(self._name, format_bytes(spill.disk_bytes), ", ".join(setup.config.nvme)),
            )

    def stepped(self, residence: Paged | Resident) -> None:
        """A step is made."""
        if not self._is_told():
            return
        step = self._setup.steps
        if residence.name != self._residence:
            self._residence = residence.name
            LOGGER.info("%s is %s after step %d", self._name, residence.name, step)
        policies = Counter(str(policy) for policy in residence.activations.policies.values())
        if policies != self._policies:
            self._policies = policies
            said = ", ".join(f"{n} units {policy}" for policy, n in policies.most_common())
            LOGGER.info("%s: activations after step %d: %s", self._name, step, said or "all kept")

    def _is_told(self) -> bool:
        """Whether anyone listens; a rehearsal's model, which has no bytes, has no story."""
        return LOGGER.isEnabledFor(logging.INFO) and self._setup.device.has_bytes
