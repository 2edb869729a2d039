"""The ledger: every byte of every tier, charged before it moves (floor 1, mechanism)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from hetero.errors import OutOfMemory, StateError
from hetero.events import EventLog, What
from hetero.types import Kind, Tier, format_bytes


class Ledger:
    """Charges and credits per (tier, kind); a tier without a budget is only counted."""

    def __init__(self, budgets: Mapping[Tier, int | None], log: EventLog | None = None) -> None:
        self.budgets = dict(budgets)
        self.to_come: Callable[[Tier], int] = nothing
        """Returns the bytes of a tier that will yet be charged, as far as it is known."""
        self._log = log
        self._used: Counter[tuple[Tier, Kind]] = Counter()
        self._of_tier: Counter[Tier] = Counter()
        self._peak: Counter[tuple[Tier, Kind | None]] = Counter()

    def charge(self, tier: Tier, kind: Kind, n_bytes: int, what: str) -> None:
        """Debit ``n_bytes`` or raise OutOfMemory naming ``what`` and the shortfall."""
        used, budget = self.used(tier), self.budgets.get(tier)
        if budget is not None and used + n_bytes > budget:
            short = used + n_bytes - budget
            needed = used + max(n_bytes, self.to_come(tier))
            raise OutOfMemory(
                f"{what} needs {format_bytes(n_bytes)} of {tier.name};"
                f" {format_bytes(budget - used)} of {format_bytes(budget)} are free,"
                f" {short} bytes short",
                advice=f"raise {tier.name.lower()}= to at least {needed} bytes",
                tier=tier.name,
                needed_bytes=needed,
            )
        self._of_tier[tier] = used + n_bytes
        of_kind = self._used[tier, kind] = self._used[tier, kind] + n_bytes
        if used + n_bytes > self._peak[tier, None]:
            self._peak[tier, None] = used + n_bytes
        if of_kind > self._peak[tier, kind]:
            self._peak[tier, kind] = of_kind
        self._note(tier, kind)

    def credit(self, tier: Tier, kind: Kind, n_bytes: int) -> None:
        """Give back charged bytes; more than were charged is a StateError."""
        if self._used[tier, kind] < n_bytes:
            raise StateError(f"{tier.name} {kind.value}: gave back {n_bytes} bytes, more than held")
        self._used[tier, kind] -= n_bytes
        self._of_tier[tier] -= n_bytes
        self._note(tier, kind)

    def _note(self, tier: Tier, kind: Kind) -> None:
        if self._log is not None:
            self._log.now(What.LEVEL, tier=tier, category=kind, n_bytes=self._used[tier, kind])

    def restate(self) -> None:
        """Log the present charges, for a log that begins here."""
        for tier, kind in list(self._used):
            self._note(tier, kind)

    def used(self, tier: Tier, kind: Kind | None = None) -> int:
        """Return the bytes charged now, of one kind or of all."""
        return self._of_tier[tier] if kind is None else self._used[tier, kind]

    def peak(self, tier: Tier, kind: Kind | None = None) -> int:
        """Return the most bytes ever charged to a tier at once, of one kind or of all."""
        return self._peak[tier, kind]

    def free(self, tier: Tier) -> int | None:
        """Return the bytes left under the budget, None without a budget."""
        budget = self.budgets.get(tier)
        return None if budget is None else budget - self.used(tier)


def nothing(tier: Tier) -> int:
    return 0
