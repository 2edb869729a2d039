"""The task of `hetero train`: a model, its batches and its loss (floor 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from hetero.crc import crc32
from hetero.errors import ConfigError
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.gpt_files import write_gpt
from hetero.recipes.options import TrainOptions
from hetero.recipes.sequences import IGNORED
from hetero.recipes.text import Batch, Batches, as_tokens, read_files, topics_text


class BatchStream(Protocol):
    """Batches without end, with a position that a checkpoint keeps."""

    def __next__(self) -> Batch:
        """Return the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with the data it learns from."""

    model: nn.Module
    batches: BatchStream
    evaluation: Sequence[Batch]
    targets: torch.Tensor
    """All tokens to learn, in order; `IGNORED` at positions without a loss."""
    passes: float
    """Batches of one epoch."""
    unit: str
    """Name of one token: "byte", "token"."""
    write: Callable[[Path], object]
    """Writes the trained model into a directory, for others to load."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every pass."""

    def loss(self, batch: Batch, place: torch.device) -> torch.Tensor:
        """Return the mean loss of a batch, in nats a token."""
        moved = {name: tensor.to(place) for name, tensor in batch.items()}
        return loss_of(self.model(**moved, **self.call))

    def learned(self) -> torch.Tensor:
        """Return the targets that have a loss."""
        return self.targets[self.targets != IGNORED]

    def digest(self) -> int:
        return crc32(self.targets.contiguous().numpy().data)


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss


def count(batch: Batch) -> int:
    """Return how many tokens of a batch have a loss."""
    if "targets" in batch:
        return batch["targets"].numel()
    return int((batch["labels"][:, 1:] != IGNORED).sum())


# -- the demo, which needs nothing but torch -----------------------------------------------------


def demo(options: TrainOptions) -> Task:
    """Return a byte-level GPT with its bytes, drawn from the global generator, seeded afresh."""
    if options.task != "pretrain" or options.lora_rank is not None or options.tokenizer:
        raise ConfigError(
            "gpt learns bytes as they are: it takes no sft, adapters or tokenizer",
            advice="name another --model, as tiny-llama",
        )
    tokens, length = load_tokens(options.data, options.seq), options.seq
    torch.manual_seed(options.seed)
    model = GPT(shape(options))
    judged = load_tokens(options.eval_data, length) if options.eval_data else None
    return Task(
        model=model,
        batches=Batches(tokens, batch=options.batch, context=length, seed=options.seed),
        evaluation=[] if judged is None else list(windows(judged, length, options.batch)),
        targets=tokens,
        passes=len(tokens) / (length * options.batch),
        unit="byte",
        write=lambda folder: write_gpt(model, folder),
    )


def shape(options: TrainOptions) -> GPTConfig:
    """Return the model's shape; ConfigError if its numbers contradict each other."""
    names = ("width", "layers", "heads")
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    try:
        return GPTConfig(context=options.seq, checkpoint_blocks=options.checkpoint_blocks, **given)
    except ValueError as error:
        raise ConfigError(str(error), advice="choose another width or number of heads") from error


def load_tokens(paths: Sequence[str], length: int) -> torch.Tensor:
    """Return text as uint8 tokens; ConfigError if it is missing or too short."""
    tokens = as_tokens(read_files(paths) if paths else topics_text())
    if len(tokens) <= length:
        raise ConfigError(
            f"the text has {len(tokens)} bytes; one sequence takes {length + 1}",
            advice="give more text, or a shorter --seq",
        )
    return tokens


def windows(tokens: torch.Tensor, length: int, batch: int) -> Iterator[Batch]:
    """Yield text in order, in batches of whole sequences."""
    fits = (len(tokens) - 1) // length * length
    inputs, targets = (tokens[i : i + fits].long().view(-1, length) for i in (0, 1))
    for some, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
        yield {"tokens": some, "targets": wanted}
