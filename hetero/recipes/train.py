"""The run behind `hetero train`: a byte-level GPT learns real text inside a byte budget."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from hetero.api import Status, backward, prepare, status
from hetero.checkpoint.load import load_checkpoint
from hetero.checkpoint.reader import Reader
from hetero.checkpoint.save import Save, save_checkpoint
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError, ConfigError
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.record import Recording, free_folder
from hetero.recipes.text import Batches, as_tokens, read_files, topics_text, unigram_entropy
from hetero.train.blueprint import draw
from hetero.train.optimizer import Optimizer
from hetero.train.spill import draw_spill

WARM_UP = 0.1  # of the steps
FLOOR = 0.1  # of the peak learning rate, where the cosine ends
SMOOTHED = 10  # steps in the mean that is reported as the last loss
MAX_GRAD_NORM = 1.0
STATES_PER_BUDGET = 4  # the default hbm is this part of param, gradient and the two moments
STATES_PER_HOST = 2  # and the default host is this part; the rest is on disk
RUNS = "runs"  # folder in the working directory, of checkpoints and of what is on disk
RECORDING = "run"  # folder beside a run's checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, on what, for how long and under which budget."""

    model: GPTConfig = field(default_factory=GPTConfig)
    """Shape of the model; its context is the length of every sequence."""
    text: tuple[str | Path, ...] = ()
    """Files and directories to learn; none: Python's reference manual."""
    batch: int = 2
    """Sequences per step."""
    steps: int = 64
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
    checkpoints: str | Path | None = None
    """Directory of checkpoints; None: the next, or with ``resume`` the last, of runs/1, runs/2 ...
    """
    save_every: int = 20
    """Steps from one checkpoint to the next; one is written at the end, too."""
    keep_last: int = 2
    """Checkpoints that stay."""
    resume: bool = False
    """Go on from the newest checkpoint."""
    record: str | Path | None = None
    """Directory for the recording of the first steps and its report, under a name with a number
    where it holds one already; None: run beside the checkpoints; "none": nothing is recorded."""


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
    checkpoint: str
    """The last one written."""
    resumed_step: int
    """Where the run went on; 0 for one from the beginning."""
    signal: int | None
    """The number of the signal that ended it early; None where none did."""
    report: str | None
    """The page that says what the first steps did; beside it is what was recorded."""
    recorded_steps: int
    """How many of its steps the recording has."""
    report_problem: str
    """Why there is no report though there should be one."""
    status: Status

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return dataclasses.asdict(self)


Stop = Callable[[], "int | None"]


def train(
    options: TrainOptions,
    watch: Callable[[StepReport], None] | None = None,
    stop: Stop = lambda: None,
) -> TrainResult:
    """Run the whole recipe; ``watch`` hears of every step.

    Once ``stop`` returns the number of a signal, the step under way is finished, saved, and the
    last. Raises ConfigError and BudgetError of `hetero.prepare`, ConfigError for options that
    cannot be honoured, and what saving and loading raise. The global generator is seeded.
    """
    # 1. text, model and optimizer, as in plain PyTorch
    tokens = load_tokens(options)
    folder = folder_of(options)
    if options.resume:
        check_run(folder, options, tokens)
    model = build_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    # 2. the one line that puts it under budgets
    config = settings_for(model, optimizer, options)
    model, optimizer = prepare(model, optimizer, config=config)
    # 3. the same loop as ever
    run = Run(model, optimizer, options, tokens, folder)
    if options.resume:
        run.resume()
    number = run.train(open_device(config.device).torch_device, watch, stop)
    # 4. what came of it
    page = run.recording.write_report()
    return conclude(run, tokens, number, page)


def folder_of(options: TrainOptions) -> Path:
    """Return where a run's checkpoints are; ConfigError where there are others, or none to go on.

    Without a name, runs are numbered in the folder `RUNS` of the working directory.
    """
    if options.checkpoints is None:
        numbers = [int(p.name) for p in Path(RUNS).glob("*") if p.name.isdigit()]
        saved = [n for n in numbers if found_in(Path(RUNS, str(n)))]
        number = max(saved, default=0) if options.resume else max(numbers, default=0) + 1
        folder = Path(RUNS, str(number))
    else:
        folder = Path(options.checkpoints)
    there = found_in(folder)
    if options.resume and not there:
        raise ConfigError(
            f"{folder} holds no checkpoint to go on from",
            advice="start without --resume, or name the run's folder with --checkpoints",
        )
    if there and not options.resume:
        raise ConfigError(
            f"{folder} holds the checkpoints of another run",
            advice="go on from them with --resume, or name another folder with --checkpoints",
        )
    return folder


def found_in(folder: Path) -> bool:
    """Whether a folder holds a checkpoint."""
    return any(p.name.removeprefix("step-").isdigit() for p in folder.glob("step-*"))


def record_folder(options: TrainOptions, folder: Path) -> Path | None:
    """Return where a run is recorded whose checkpoints are in ``folder``; None: nowhere."""
    if options.record == "none":
        return None
    return free_folder(Path(options.record) if options.record else folder / RECORDING)


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


def settings_for(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: TrainOptions
) -> Config:
    """Return the settings: CUDA or the simulated device; by default HBM for a quarter of the
    states, RAM for half of them, and a disk for the rest."""
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
    if config.host is None and not unlimited:
        config = dataclasses.replace(config, host=host_of(model, optimizer, config))
    if not config.nvme and not unlimited:
        Path(RUNS).mkdir(exist_ok=True)
        config = dataclasses.replace(config, nvme=(RUNS,))
    return config


def host_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> int:
    """Return the default RAM budget: half the states, so that the rest is on disk."""
    half = states_of(model) // STATES_PER_HOST
    try:
        draw_spill(draw(model, optimizer, config), half, None)
    except BudgetError as error:  # a model too small for its own largest update
        return error.needed_bytes
    return half


def states_of(model: torch.nn.Module) -> int:
    """Return the bytes of parameters, gradients and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in model.parameters())


class Run:
    """The loop: a plain PyTorch loop, with a checkpoint now and then."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        options: TrainOptions,
        tokens: torch.Tensor,
        folder: Path,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = options
        self.folder = folder
        self.text = tokens
        self.scheduler = LambdaLR(optimizer, warm_up_and_cosine(options.steps))
        context = options.model.context
        self.batches = Batches(tokens, batch=options.batch, context=context, seed=options.seed)
        self.losses: list[float] = []
        self.seconds = 0.0
        self.resumed_step = 0
        self.saved: Save | None = None
        self.recording = Recording(model, record_folder(options, folder))

    @property
    def tokens(self) -> int:
        """Tokens trained on since the beginning."""
        return len(self.losses) * self.options.batch * self.options.model.context

    def train(
        self,
        place: torch.device,
        watch: Callable[[StepReport], None] | None,
        stop: Stop,
    ) -> int | None:
        """Train to the end, or to the signal that is returned."""
        with self.recording:
            number = self.loop(place, watch, stop)
        last = self.saved
        if len(self.losses) > (self.resumed_step if last is None else last.step):
            last = self.save()
        if last is not None:
            last.wait()
        return number

    def loop(
        self,
        place: torch.device,
        watch: Callable[[StepReport], None] | None,
        stop: Stop,
    ) -> int | None:
        """Make the steps."""
        options, number = self.options, None
        began = time.perf_counter() - self.seconds
        while len(self.losses) < options.steps and number is None:
            self.step(place)
            self.recording.count_step()
            self.seconds = time.perf_counter() - began
            step = len(self.losses)
            if watch is not None:
                row = (step, self.losses[-1], self.seconds, self.tokens, status(self.model))
                watch(StepReport(*row))
            number = stop()
            if options.minutes is not None and self.seconds >= 60 * options.minutes:
                break
            if number is None and step % options.save_every == 0 and step < options.steps:
                self.save(asynchronous=True)  # training goes on while it is written
        return number

    def step(self, place: torch.device) -> None:
        """Make one step, as any PyTorch loop does."""
        x, y = next(self.batches)
        loss = self.model(x.to(place), y.to(place))
        backward(loss)  # loss.backward(), but for the loss scaling of fp16
        self.optimizer.clip_grad_norm_(MAX_GRAD_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def save(self, *, asynchronous: bool = False) -> Save:
        """Write a checkpoint."""
        run = fingerprint(self.options, self.text)
        progress = {"losses": self.losses, "seconds": self.seconds, "run": run}
        self.saved = save_checkpoint(
            self.folder,
            self.model,
            self.optimizer,
            progress,
            scheduler=self.scheduler,
            data=self.batches,
            keep_last=self.options.keep_last,
            asynchronous=asynchronous,
        )
        return self.saved

    def resume(self) -> None:
        """Go on from the newest checkpoint."""
        progress = load_checkpoint(
            self.folder, self.model, self.optimizer, scheduler=self.scheduler, data=self.batches
        )
        self.losses, self.seconds = list(progress["losses"]), progress["seconds"]
        self.resumed_step = len(self.losses)


def fingerprint(options: TrainOptions, text: torch.Tensor) -> dict[str, Any]:
    """Return what decides the numbers; budgets do not."""
    names = ("batch", "steps", "lr", "seed")
    given = {name: getattr(options, name) for name in names}
    precision = dict(options.settings).get("precision", "fp32")
    crc = zlib.crc32(text.numpy().data)
    return {**given, "precision": precision, "text": crc, **dataclasses.asdict(options.model)}


def check_run(folder: Path, options: TrainOptions, text: torch.Tensor) -> None:
    """Refuse to go on with a run of other options, before anything is built."""
    with Reader.open(folder) as reader:
        extra = reader.meta.get("extra")
    there, here = extra.get("run") if isinstance(extra, dict) else None, fingerprint(options, text)
    if not isinstance(there, dict):
        raise ConfigError(f"{folder} is no run of hetero train", advice="name the run's folder")
    other = [f"{k} was {there.get(k)} and is {v}" for k, v in here.items() if there.get(k) != v]
    if other:
        raise ConfigError(
            f"the run in {folder} had other options: {', '.join(other)}",
            advice="resume with the options the run was started with",
        )


def warm_up_and_cosine(steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at a step: up in a line, down along a cosine."""
    warm_up = max(1, int(WARM_UP * steps))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor


def conclude(run: Run, tokens: torch.Tensor, number: int | None, page: Path | None) -> TrainResult:
    """Return the result of a run that has ended."""
    losses = tuple(run.losses)
    tail = losses[-SMOOTHED:]
    return TrainResult(
        parameters=sum(p.numel() for p in run.model.parameters()),
        state_bytes=states_of(run.model),
        text_bytes=len(tokens),
        unigram_entropy=unigram_entropy(tokens),
        steps=len(losses),
        planned_steps=run.options.steps,
        seconds=run.seconds,
        tokens_per_second=run.tokens / run.seconds,
        losses=losses,
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        weights_sha256=digest(run.model),
        checkpoint=str(run.folder if run.saved is None else run.saved.path),
        resumed_step=run.resumed_step,
        signal=number,
        report=None if page is None else str(page),
        recorded_steps=run.recording.steps,
        report_problem=run.recording.problem,
        status=status(run.model),
    )


def digest(model: torch.nn.Module) -> str:
    """Return the SHA-256 of all weights in the order of the state dict."""
    sha = hashlib.sha256()
    for value in model.state_dict().values():
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
