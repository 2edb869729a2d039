"""The run behind `hetero train`: a byte-level GPT learns real text inside a byte budget."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from hetero.api import Status, backward, prepare, status
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import ConfigError
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.text import as_tokens, batches, read_files, topics_text, unigram_entropy
from hetero.train.optimizer import Optimizer

WARM_UP = 0.1  # of the steps
FLOOR = 0.1  # of the peak learning rate, where the cosine ends
SMOOTHED = 10  # steps in the mean that is reported as the last loss
MAX_GRAD_NORM = 1.0
STATES_PER_BUDGET = 4  # the default hbm is this part of param, gradient and the two moments

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, on what, for how long and under which budget."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """Shape of the model; its context is the length of every sequence."""
    text: tuple[str | Path, ...] = ()
    """Files and directories to learn; none: Python's reference manual."""
    batch: int = 2
    """Sequences per step."""
    steps: int = 80
    """Steps of the learning-rate schedule, and of the run."""
    minutes: float | None = None
    """Stop after this much training, wherever the schedule is; None: never."""
    lr: float = 5e-4
    """Peak learning rate."""
    seed: int = 0
    """Seed of the weights and, in a generator of its own, of the batches."""
    config: str | Path | None = None
    """TOML file of hetero settings."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `hetero.prepare` that go on top of the file; hbm="all" means no budget."""


class StepReport(NamedTuple):
    """What one step did, for whoever watches."""

    step: int
    """Steps done, from 1."""
    loss: float
    seconds: float
    """Since training began."""
    tokens: int
    """Since training began."""
    status: Status


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to; sizes in bytes, losses in nats per byte of text."""

    parameters: int
    state_bytes: int
    """Parameters, gradients and moments."""
    text_bytes: int
    unigram_entropy: float
    """Loss of the best guess without context."""
    steps: int
    planned_steps: int
    """More than ``steps`` when the minutes were up first."""
    seconds: float
    tokens_per_second: float
    losses: tuple[float, ...]
    first_loss: float
    last_loss: float
    """Mean over the last ten steps."""
    weights_sha256: str
    """Digest of the weights: as many steps give the same at any budget."""
    status: Status

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return dataclasses.asdict(self)


def train(options: TrainOptions, watch: Callable[[StepReport], None] | None = None) -> TrainResult:
    """Run the whole recipe; ``watch`` hears of every step.

    Raises ConfigError and BudgetError of `hetero.prepare`, and ConfigError for options that cannot
    be honoured. The global generator is seeded.
    """
    # 1. text, model and optimizer, as in plain PyTorch
    tokens = load_tokens(options)
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), fused=True)
    # 2. the one line that puts it under a budget
    config = settings_for(model, options)
    model, optimizer = prepare(model, optimizer, config=config)
    # 3. the same loop as ever
    reports: list[StepReport] = []
    for report in run(model, optimizer, options, draw(tokens, options, config)):
        reports.append(report)
        if watch is not None:
            watch(report)
    # 4. what came of it
    return conclude(model, reports, tokens, options.steps)


def shape(**fields: Any) -> GPTConfig:
    """Return a model's shape; ConfigError where the numbers do not go together."""
    try:
        return GPTConfig(**fields)
    except ValueError as error:
        raise ConfigError(str(error), advice="choose another width or number of heads") from error


def load_tokens(options: TrainOptions) -> torch.Tensor:
    """Return the text as uint8 tokens; ConfigError where it is missing or too short."""
    try:
        tokens = as_tokens(read_files(options.text) if options.text else topics_text())
    except OSError as error:
        raise ConfigError(f"text: {error}", advice="--text takes files and directories") from error
    context = options.model.context
    if len(tokens) <= context:
        raise ConfigError(
            f"the text has {len(tokens)} bytes; one sequence takes {context + 1}",
            advice="give more text, or a shorter context",
        )
    return tokens


def build_model(options: TrainOptions) -> GPT:
    """Return the model, drawn from the global generator seeded afresh."""
    torch.manual_seed(options.seed)
    return GPT(options.model)


def settings_for(model: torch.nn.Module, options: TrainOptions) -> Config:
    """Return the settings: CUDA or the simulated device, and by default a quarter of the states."""
    given = dict(options.settings)
    unlimited = given.get("hbm") == "all"
    if unlimited:
        given["hbm"] = None
    config = Config.load(options.config, **given)
    if config.device is None:
        found = open_device(None)
        config = dataclasses.replace(config, device="cpu:sim" if found.name == "cpu" else found)
    if config.hbm is None and not unlimited:
        config = dataclasses.replace(config, hbm=states_of(model) // STATES_PER_BUDGET)
    return config


def states_of(model: torch.nn.Module) -> int:
    """Return the bytes of parameters, gradients and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters())


def draw(tokens: torch.Tensor, options: TrainOptions, config: Config) -> Iterator[Batch]:
    """Yield the batches of a run on the device."""
    place = open_device(config.device).torch_device
    context = options.model.context
    for x, y in batches(tokens, batch=options.batch, context=context, seed=options.seed):
        yield x.to(place), y.to(place)


def run(
    model: torch.nn.Module, optimizer: Optimizer, options: TrainOptions, data: Iterable[Batch]
) -> Iterator[StepReport]:
    """Train step by step, as any PyTorch loop does, and report each step."""
    scheduler = LambdaLR(optimizer, warm_up_and_cosine(options.steps))
    began, tokens = time.perf_counter(), 0
    for step, (x, y) in zip(range(1, options.steps + 1), data, strict=False):
        loss = model(x, y)
        backward(loss)  # loss.backward(), but for the loss scaling of fp16
        optimizer.clip_grad_norm_(MAX_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        tokens += x.numel()
        seconds = time.perf_counter() - began
        yield StepReport(step, loss.item(), seconds, tokens, status(model))
        if options.minutes is not None and seconds >= 60 * options.minutes:
            return


def warm_up_and_cosine(steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at a step: up in a line, down along a cosine."""
    warm_up = max(1, int(WARM_UP * steps))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor


def conclude(
    model: torch.nn.Module, reports: list[StepReport], tokens: torch.Tensor, planned_steps: int
) -> TrainResult:
    """Return the result of a run that has ended."""
    losses = tuple(report.loss for report in reports)
    last, tail = reports[-1], losses[-SMOOTHED:]
    n_parameters = sum(p.numel() for p in model.parameters())
    return TrainResult(
        parameters=n_parameters,
        state_bytes=states_of(model),
        text_bytes=len(tokens),
        unigram_entropy=unigram_entropy(tokens),
        steps=last.step,
        planned_steps=planned_steps,
        seconds=last.seconds,
        tokens_per_second=last.tokens / last.seconds,
        losses=losses,
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        weights_sha256=digest(model),
        status=last.status,
    )


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all weights in the order of the state dict."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
