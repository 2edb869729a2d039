"""Steps that each process makes alone, as under accelerate's `LocalSGD` (floor 4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn

from hetero.config import Config
from hetero.errors import ConfigError


class LocalSteps:
    """Gives models ``no_sync`` of torch's DistributedDataParallel, which `LocalSGD` calls.

    Args:
        config: the models' settings.
        no_sync: a block in which a model's gradients stay on their process.
        shares: whether ranks share the models.
    """

    def __init__(
        self,
        config: Config,
        no_sync: Callable[[nn.Module], AbstractContextManager[None]],
        *,
        shares: bool,
    ) -> None:
        self._config, self._no_sync, self._shares = config, no_sync, shares
        self._models: list[nn.Module] = []

    def offer(self, model: nn.Module) -> None:
        """Give a model the method, unless it has one of its own."""

        def no_sync() -> AbstractContextManager[None]:  # a closure, which copies of the model keep
            self._check()
            return self._no_sync(model)

        if not hasattr(model, "no_sync"):
            model.__dict__["no_sync"] = no_sync
            self._models.append(model)

    def close(self) -> None:
        """Take the method away from all models."""
        while self._models:
            self._models.pop().__dict__.pop("no_sync", None)

    def _check(self) -> None:
        """Refuse steps of one process where ranks share weights, or where averages of weights
        would replace masters."""
        said = "model.no_sync() lets processes step alone (accelerate's LocalSGD calls it), and "
        if self._shares:
            raise ConfigError(
                said + "ranks share this model (mesh=)",
                advice="leave LocalSGD out, or mesh=; to accumulate, use"
                " accelerator.accumulate(model) or accelerator.no_sync(model)",
            )
        if self._config.precision != "fp32":
            raise ConfigError(
                f"{said}averages of 2-byte weights would replace their masters"
                f" (precision={self._config.precision!r})",
                advice="leave precision= out, and use Accelerator(mixed_precision='bf16')",
            )
