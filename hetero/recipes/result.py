"""Reports of a run: per step, per evaluation, and at its end (floor 4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero.errors import CheckpointCorrupt
from hetero.status import Status


class EvalLoss(NamedTuple):
    """The loss on held-out data."""

    step: int
    loss: float
    """Mean in nats a token."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


class RunBudget(NamedTuple):
    """How many bytes of a tier a run may take, and why so many."""

    tier: str
    n_bytes: int | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known of a run before its first step."""

    model: str
    parameters: int
    state_bytes: int
    device: str
    mode: str
    budgets: tuple[RunBudget, ...]
    folder: str
    """Of checkpoints."""
    steps: int
    resumed: int
    """Steps made before this process."""
    ended_steps: int | None
    """Steps of the run that is resumed, where it had ended; None: it had not, or is new."""
    minutes: float | None
    disks: tuple[str, ...]
    """Directories of homes on disk."""
    step_write_bytes: int | None
    """To them, in a step; None: unknown."""
    save_every: int
    """Steps between checkpoints."""
    keep: int
    """Checkpoints that stay."""

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.resumed >= self.steps


class StepReport(NamedTuple):
    """The report on one step, passed to the caller's callback."""

    step: int
    """Steps done, from 1."""
    planned: int
    loss: float
    seconds: float
    """Since training began."""
    tokens: int
    """Since training began."""
    lr: float
    norm: float
    """Of the gradients before clipping."""
    evaluation: EvalLoss | None
    """Set if one was due after this step."""
    status: Status

    def figures(self) -> dict[str, float]:
        found = {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.norm,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
        }
        for name, row in self.status.tiers.items():
            found[f"{name.lower()}_bytes"] = row["used"] or 0
        if self.evaluation is not None:
            found["eval_loss"] = self.evaluation.loss
            found["eval_perplexity"] = self.evaluation.perplexity
        return found


@dataclass(slots=True)
class Progress:
    """The progress of a run; a checkpoint keeps it."""

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[EvalLoss] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    resumed: int = 0
    """Steps made before this process."""

    @property
    def steps(self) -> int:
        return len(self.losses)

    def saved(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in ("losses", "seconds", "tokens")}
        return {**found, "evaluations": [tuple(each) for each in self.evaluations]}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Progress:
        """Return the progress in a checkpoint; CheckpointCorrupt if it has none."""
        try:
            evaluations = [EvalLoss(*each) for each in found["evaluations"]]
            losses = [float(loss) for loss in found["losses"]]
            seconds, tokens = float(found["seconds"]), int(found["tokens"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"the checkpoint does not say how far its run has come: {error!r}",
                advice="use another checkpoint of hetero train",
            ) from error
        return cls(losses, evaluations, seconds, tokens, len(losses))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a run; sizes in bytes, losses in nats per token."""

    parameters: int
    state_bytes: int
    """Weights, gradients, masters and what the optimizer keeps."""
    data_tokens: int
    """Tokens with a loss, in all of the data."""
    unit: str
    """Name of one token: "byte", "token"."""
    unigram_entropy: float
    """Loss of the best guess without context."""
    steps: int
    planned_steps: int
    """More than ``steps`` if time ran out first."""
    seconds: float
    tokens_per_second: float
    losses: tuple[float, ...]
    first_loss: float
    last_loss: float
    """Mean over the last ten steps."""
    evaluations: tuple[EvalLoss, ...]
    weights_sha256: str
    """Digest of the weights that train; it does not depend on budgets."""
    checkpoint: str
    """Path of the last one written."""
    resumed_step: int
    """Step from which the run went on; 0 for a new run."""
    signal: int | None
    """Number of the signal that ended it early; None without one."""
    report: str | None
    """Path of the report on the first steps; their recording lies in the same directory."""
    recorded_steps: int
    """Steps in the recording."""
    out: str | None
    """Directory of the trained model, if it was written."""
    report_problem: str
    """Why there is no report, if recording failed."""
    status: Status

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
