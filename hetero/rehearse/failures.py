"""Why a model could not be rehearsed, in words (floor 4)."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hetero.errors import ConfigError, HeteroError
from hetero.rehearse.clock import OpClock
from hetero.train.update.rules import Rule

OURS = Path(__file__).parent.parent
LIBRARIES = (
    str(Path(torch.__file__).parent),
    *(str(OURS / room) for room in ("train", "rehearse", "functional", "jobs.py", "cores.py")),
)

ASKS = "computes by its numbers, and a plan has none:"


@contextmanager
def explaining(model: str) -> Iterator[None]:
    """Raise a ConfigError that names operation and line if a block of the user's code fails."""
    try:
        yield
    except HeteroError:
        raise
    except Exception as error:
        raise explained(model, error) from error


def explained(model: str, error: Exception) -> ConfigError:
    """Return the error to raise for an error in a model without bytes."""
    where = "".join(f" {part}" for part in (operation_of(error), line_of(error)) if part)
    asks = isinstance(error, NotImplementedError) or "meta" in str(error).lower()
    said = str(error).partition("\n")[0]
    rule = rule_of(error)
    if rule is not None:
        failing = f"fails in its step: {type(error).__name__}: {said}"
        return ConfigError(
            f"optimizer {rule.kind.__name__} {ASKS if asks else failing}{where or f' {error}'}",
            advice="plan with an optimizer that keeps as many states, as torch.optim.AdamW with its"
            " two, or run it: hetero.prepare takes what steps each parameter by itself",
        )
    if asks:
        return ConfigError(
            f"{model} {ASKS}{where or f' {error}'}",
            advice="plan the part that does not, or run it: hetero.prepare takes such a model, and"
            " hetero.profile shows what it does",
        )
    return ConfigError(
        f"{model} fails on this batch{where and ':'}{where}: {type(error).__name__}: {said}",
        advice="check batch= and loss=: the model is called as a training loop calls it, on tensors"
        " without bytes, of which any number is 1",
    )


def rule_of(error: Exception) -> Rule | None:
    """Return the rule in whose step an error was raised; None if the model raised it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Rule.run.__code__ or frame.f_code is Rule.step_in_place.__code__:
            found: Rule = frame.f_locals["self"]
            return found
    return None


def operation_of(error: Exception) -> str:
    """Return the operation that failed; empty if it was none of torch's."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is OpClock.__torch_dispatch__.__code__:
            return f"{frame.f_locals['func']}"
    return ""


def line_of(error: Exception) -> str:
    """Return the innermost line of the user's own code; empty if there is none."""
    calls = traceback.extract_tb(error.__traceback__)
    own = [call for call in calls if not call.filename.startswith(LIBRARIES)]
    if not own:
        return ""
    return f"in line {own[-1].lineno} of {Path(own[-1].filename).name}: {own[-1].line}"
