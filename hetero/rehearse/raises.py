"""How budgets grow until a rehearsal fits (floor 4)."""

from __future__ import annotations

from collections import Counter

from hetero.errors import BudgetError

EXACT_RAISES = 2  # of one budget to an error's figure, which sees a peak only as far as it came
FIRST_RAISE = 1 / 64  # of a budget, at least, from then on; each raise twice as much as the last
MOST_INSTEAD = 6  # raises of RAM in place of HBM


class Raises:
    """The raises of a plan's budgets so far, by tier."""

    def __init__(self) -> None:
        self._n: Counter[str] = Counter()
        self._instead = 0

    def asked(
        self, error: BudgetError, hbm_bytes: int | None, host_bytes: int | None
    ) -> tuple[str, int]:
        """Return the tier to raise for an error, and to how many bytes.

        Where RAM was short, homes fill the HBM that activations lack. More RAM takes them off it,
        and RAM can be added to a machine; so it grows first, by what HBM lacks.
        """
        tier, needed_bytes = error.tier, error.needed_bytes
        if tier != "HBM" or not self._n["HOST"] or self._instead == MOST_INSTEAD:
            return tier, needed_bytes
        self._instead += 1
        return "HOST", (host_bytes or 0) + max(0, needed_bytes - (hbm_bytes or 0))

    def raised(self, tier: str, now_bytes: int, needed_bytes: int) -> int:
        """Return the budget to try next: the needed one, and after some raises more than that."""
        before = self._n[tier]
        self._n[tier] += 1
        if before < EXACT_RAISES:
            return needed_bytes
        larger = int(now_bytes * (1 + FIRST_RAISE * 2 ** (before - EXACT_RAISES)))
        return max(needed_bytes, larger)
