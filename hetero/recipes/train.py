"""The run behind `hetero train`: a model learns from text or answers inside byte budgets."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hetero import optim
from hetero.api import Status, backward, prepare, status
from hetero.checkpoint.load import load_checkpoint
from hetero.checkpoint.reader import Reader
from hetero.checkpoint.save import Save, save_checkpoint
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import BudgetError, CheckpointCorrupt, ConfigError
from hetero.io import make_folder
from hetero.recipes.options import TrainOptions
from hetero.recipes.record import Recording, free_folder
from hetero.recipes.task import Task, count, demo, loss_of
from hetero.recipes.text import unigram_entropy
from hetero.rehearse.plan import Plan, plan
from hetero.train.engine.blueprint import draw
from hetero.train.engine.spill import draw_spill
from hetero.train.update.optimizer import Optimizer

if TYPE_CHECKING:
    from hetero.integrations.tracking import Trackers

WARM_UP = 0.1  # of the steps
FLOOR = 0.1  # of the peak learning rate, where the cosine ends
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
SMOOTHED = 10  # steps in the mean that is reported as the last loss
STATES_PER_BUDGET = 4  # the demo's hbm is this part of param, gradient and the two moments
STATES_PER_HOST = 2  # and its host is this part; the rest is on disk
RUNS = "runs"  # folder in the working directory, of checkpoints and of what is on disk
RECORDING = "run"  # folder beside a run's checkpoints
DECIDING = (  # options that decide the numbers; budgets do not
    *("task", "seq", "checkpoint_blocks", "lora_rank", "lora_alpha", "lora_targets"),
    *("lora_dropout", "optimizer", "lr", "schedule", "warmup", "weight_decay", "max_grad_norm"),
    *("batch", "accumulate", "seed"),
)
SHAPES = ("width", "layers", "heads")
COMPUTING = (  # settings that do, too
    *("precision", "keep_fp32", "frozen", "keep_exact", "micro_batch", "tile", "fused_loss"),
)


class Evaluation(NamedTuple):
    """What a model said of data that it does not learn from."""

    step: int
    loss: float
    """Mean in nats a token."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


class StepReport(NamedTuple):
    """What one step did, for a caller's callback."""

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
    """Of the gradients, before they were clipped."""
    evaluation: Evaluation | None
    """Where one was due after this step."""
    status: Status

    def figures(self) -> dict[str, float]:
        """Return what is tracked of a step."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to; sizes in bytes, losses in nats per token."""

    parameters: int
    state_bytes: int
    """Parameters, gradients and moments."""
    data_tokens: int
    """That a loss is of, in all of the data."""
    unit: str
    """What one token is: "byte", "token"."""
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
    evaluations: tuple[Evaluation, ...]
    weights_sha256: str
    """Digest of the weights that train: as many steps give the same at any budget."""
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
    out: str | None
    """Where the trained model was written."""
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
    # 1. data, model and optimizer, as in plain PyTorch
    folder, config = folder_of(options), settings_of(options)
    task = task_of(options, config)
    deciding = fingerprint(options, config, task)
    if options.resume:
        check_run(folder, deciding)
    optimizer = optimizer_of(task.model, options)
    # 2. the one line that puts it under budgets
    config = settings_for(task.model, optimizer, config, options)
    _, optimizer = prepare(task.model, optimizer, config=config)
    # 3. the same loop as ever
    with tracking(options, folder) as trackers:
        place = open_device(config.device).torch_device
        run = Run(task, optimizer, options, folder, deciding, place, trackers)
        if options.resume:
            run.resume()
        number = run.train(watch, stop)
    # 4. what came of it
    page = run.recording.write_report()
    done = options.out is not None and number is None
    if done:
        task.write(Path(options.out or ""))
    return conclude(run, number, page, options.out if done else None)


def task_of(options: TrainOptions, config: Config) -> Task:
    """Return what options ask for; ConfigError where it cannot be had."""
    if options.is_demo:
        return demo(options)
    try:
        from hetero.recipes.language import language_task
    except ImportError as error:
        raise ConfigError(
            f"--model {options.model} needs transformers: {error}",
            advice="pip install 'hetero[integrations]', or leave --model out",
        ) from error
    return language_task(options, config)


def dry_run(options: TrainOptions) -> Plan:
    """Return the plan of a run, as `hetero.plan` has it; nothing is trained."""
    config = settings_of(options)
    task = task_of(options, config)
    optimizer = optimizer_of(task.model, options)
    budgets = settings_for(task.model, optimizer, config, options)
    config = dataclasses.replace(budgets, device=config.device)  # else the profile's machine
    batch = {**next(task.batches), **task.call}
    return plan(task.model, batch, optimizer=optimizer, config=config, loss=loss_of)


@contextmanager
def tracking(options: TrainOptions, folder: Path) -> Iterator[Trackers | None]:
    """Keep trackers open for a run; ConfigError for one that is not installed."""
    if not options.track:
        yield None
        return
    try:
        from hetero.integrations.tracking import Trackers
    except ImportError as error:
        raise ConfigError(
            f"--track needs accelerate: {error}", advice="pip install 'hetero[integrations]'"
        ) from error
    told = {k: v for k, v in dataclasses.asdict(options).items() if k != "settings"}
    plain = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in told.items()}
    trackers = Trackers(options.track, folder, plain)
    try:
        yield trackers
    finally:
        trackers.finish()


def folder_of(options: TrainOptions) -> Path:
    """Return where a run's checkpoints are; ConfigError where there are others, or none to go on.

    Without a name, runs are numbered in the folder `RUNS` of the working directory.
    """
    if options.save_dir is None:
        numbers = [int(p.name) for p in Path(RUNS).glob("*") if p.name.isdigit()]
        saved = [n for n in numbers if found_in(Path(RUNS, str(n)))]
        number = max(saved, default=0) if options.resume else max(numbers, default=0) + 1
        folder = Path(RUNS, str(number))
    else:
        folder = Path(options.save_dir)
    there = found_in(folder)
    if options.resume and not there:
        raise ConfigError(
            f"{folder} holds no checkpoint to go on from",
            advice="start without --resume, or name the run's folder with --save-dir",
        )
    if there and not options.resume:
        raise ConfigError(
            f"{folder} holds the checkpoints of another run",
            advice="go on from them with --resume, or name another folder with --save-dir",
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


def optimizer_of(model: nn.Module, options: TrainOptions) -> torch.optim.Optimizer:
    """Return the optimizer of what trains in a model."""
    params = [param for param in model.parameters() if param.requires_grad]
    common: Any = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.optimizer == "adamw":
        return torch.optim.AdamW(params, betas=BETAS, **common)
    if options.optimizer == "adam":
        return torch.optim.Adam(params, betas=BETAS, **common)
    if options.optimizer == "sgd":
        return torch.optim.SGD(params, momentum=MOMENTUM, **common)
    if options.optimizer == "adafactor":
        return torch.optim.Adafactor(params, **common)
    kinds: Any = {"lion": optim.Lion, "adamw8bit": optim.AdamW8bit}
    made: torch.optim.Optimizer = kinds[options.optimizer](params, **common)
    return made


def settings_of(options: TrainOptions) -> Config:
    """Return the settings as they were given; hbm="all" is no budget."""
    given = dict(options.settings)
    if is_unlimited(options):
        given["hbm"] = None
    return Config.load(None, **given)


def is_unlimited(options: TrainOptions) -> bool:
    return options.settings.get("hbm") == "all"


def settings_for(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, options: TrainOptions
) -> Config:
    """Return the settings of a run; the demo's, where nobody gave any, show every tier: HBM for a
    quarter of the states, RAM for half of them, and a disk for the rest, simulated without CUDA."""
    if not options.is_demo:
        return config
    unlimited = is_unlimited(options)
    if config.device is None:
        found = open_device(None)
        config = dataclasses.replace(config, device="cpu:sim" if found.name == "cpu" else found)
    if config.hbm is None and not unlimited:
        config = dataclasses.replace(config, hbm=states_of(model) // STATES_PER_BUDGET)
    if config.host is None and not unlimited:
        config = dataclasses.replace(config, host=host_of(model, optimizer, config))
    if not config.nvme and not unlimited:
        make_folder(RUNS, mode=0o777).close()
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
    """Return the bytes of parameters, and of gradients and AdamW's two moments of what trains."""
    sizes = ((p.numel() * p.element_size(), p.requires_grad) for p in model.parameters())
    return sum(4 * n_bytes if trains else n_bytes for n_bytes, trains in sizes)


class Run:
    """The loop: a plain PyTorch loop, with a checkpoint now and then."""

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        options: TrainOptions,
        folder: Path,
        deciding: Mapping[str, Any],
        place: torch.device,
        trackers: Trackers | None,
    ) -> None:
        self.task = task
        self.optimizer = optimizer
        self.options = options
        self.folder = folder
        self.deciding = deciding
        self.place = place
        self.trackers = trackers
        self.steps: int = deciding["steps"]
        self.scheduler = LambdaLR(optimizer, factor_of(options, self.steps))
        self.progress = Progress()
        self.saved: Save | None = None
        self.recording = Recording(task.model, record_folder(options, folder))

    def train(self, watch: Callable[[StepReport], None] | None, stop: Stop) -> int | None:
        """Train to the end, or to the signal that is returned."""
        with self.recording:
            number = self.loop(watch, stop)
        last = self.saved
        if self.progress.steps > (self.progress.resumed if last is None else last.step):
            last = self.save()
        if last is not None:
            last.wait()
        return number

    def loop(self, watch: Callable[[StepReport], None] | None, stop: Stop) -> int | None:
        """Make the steps."""
        options, number, done = self.options, None, self.progress
        began = time.perf_counter() - done.seconds
        while done.steps < self.steps and number is None:
            norm, lr = self.step(), float(self.scheduler.get_last_lr()[0])
            self.recording.count_step()
            done.seconds = time.perf_counter() - began
            evaluated = self.evaluate() if self.is_due() else None
            self.tell(
                StepReport(*done.row(self.steps), lr, norm, evaluated, status(self.task.model)),
                watch,
            )
            number = stop()
            if options.minutes is not None and done.seconds >= 60 * options.minutes:
                break
            if number is None and done.steps % options.save_every == 0 and done.steps < self.steps:
                self.save(asynchronous=True)  # training goes on while it is written
        return number

    def step(self) -> float:
        """Make one step, as any PyTorch loop does; returns the norm of its gradients.

        Every token counts as much as any other, in whichever pass it is.
        """
        passes = [next(self.task.batches) for _ in range(self.options.accumulate)]
        counts = [count(batch) for batch in passes]
        losses = []
        for batch, tokens in zip(passes, counts, strict=True):
            loss = self.task.loss(batch, self.place)
            if len(passes) > 1:
                loss = loss * (tokens / sum(counts))
            backward(loss)  # loss.backward(), but for the loss scaling of fp16
            losses.append(loss.detach())
        norm = self.optimizer.clip_grad_norm_(self.options.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.progress.losses.append(sum(loss.item() for loss in losses))
        self.progress.tokens += sum(counts)
        return float(norm.item())

    def is_due(self) -> bool:
        """Whether an evaluation is due after the step that was made."""
        done, every = self.progress.steps, self.options.eval_every
        due = done == self.steps or (every is not None and done % every == 0)
        return due and bool(self.task.evaluation)

    def evaluate(self) -> Evaluation:
        """Return the mean loss of a token of the data to evaluate on."""
        self.task.model.eval()
        with torch.no_grad():
            rows = [(count(b), self.task.loss(b, self.place).item()) for b in self.task.evaluation]
        self.task.model.train()
        mean = sum(n * loss for n, loss in rows) / sum(n for n, _ in rows)
        found = Evaluation(self.progress.steps, mean)
        self.progress.evaluations.append(found)
        return found

    def tell(self, report: StepReport, watch: Callable[[StepReport], None] | None) -> None:
        """Say what a step did to the caller's callback."""
        if self.trackers is not None:
            self.trackers.log(report.figures(), report.step)
        if watch is not None:
            watch(report)

    def save(self, *, asynchronous: bool = False) -> Save:
        """Write a checkpoint."""
        self.saved = save_checkpoint(
            self.folder,
            self.task.model,
            self.optimizer,
            {**self.progress.saved(), "run": dict(self.deciding)},
            scheduler=self.scheduler,
            data=self.task.batches,
            keep_last=self.options.keep,
            asynchronous=asynchronous,
        )
        return self.saved

    def resume(self) -> None:
        """Go on from the newest checkpoint."""
        found = load_checkpoint(
            self.folder,
            self.task.model,
            self.optimizer,
            scheduler=self.scheduler,
            data=self.task.batches,
        )
        self.progress = Progress.of(found)


@dataclass(slots=True)
class Progress:
    """How far a run has come."""

    losses: list[float] = dataclasses.field(default_factory=list)
    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    resumed: int = 0
    """Steps made before this process."""

    @property
    def steps(self) -> int:
        return len(self.losses)

    def row(self, planned: int) -> tuple[int, int, float, float, int]:
        """Return the first fields of a step's report."""
        return self.steps, planned, self.losses[-1], self.seconds, self.tokens

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        found = {name: getattr(self, name) for name in ("losses", "seconds", "tokens")}
        return {**found, "evaluations": [tuple(each) for each in self.evaluations]}

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Progress:
        """Return what a checkpoint kept; CheckpointCorrupt for what no run keeps."""
        try:
            evaluations = [Evaluation(*each) for each in found["evaluations"]]
            losses = [float(loss) for loss in found["losses"]]
            seconds, tokens = float(found["seconds"]), int(found["tokens"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"the checkpoint does not say how far its run has come: {error!r}",
                advice="use another checkpoint of hetero train",
            ) from error
        return cls(losses, evaluations, seconds, tokens, len(losses))


def fingerprint(options: TrainOptions, config: Config, task: Task) -> dict[str, Any]:
    """Return what decides the numbers; budgets do not."""
    found = {name: getattr(options, name) for name in (*DECIDING, *SHAPES)}
    found.update({name: getattr(config, name) for name in COMPUTING})
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    return {**plain, "steps": steps_of(options, task), "data": task.digest()}


def steps_of(options: TrainOptions, task: Task) -> int:
    """Return the steps of a run."""
    if options.epochs is None:
        return options.steps
    return max(1, math.ceil(options.epochs * task.passes / options.accumulate))


def check_run(folder: Path, here: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of other options, before anything is moved."""
    with Reader.open(folder) as reader:
        extra = reader.meta.get("extra")
    there = extra.get("run") if isinstance(extra, dict) else None
    if not isinstance(there, dict):
        raise ConfigError(f"{folder} is no run of hetero train", advice="name the run's folder")
    other = [f"{k} was {there.get(k)} and is {v}" for k, v in here.items() if there.get(k) != v]
    if other:
        raise ConfigError(
            f"the run in {folder} had other options: {', '.join(other)}",
            advice="resume with the options the run was started with",
        )


def factor_of(options: TrainOptions, steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at a step: up in a line, then as the schedule says."""
    warm_up = max(1, int(WARM_UP * steps)) if options.warmup is None else options.warmup

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        if options.schedule == "constant":
            return 1.0
        if options.schedule == "linear":
            return 1 - done
        return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * done)) / 2

    return factor


def conclude(run: Run, number: int | None, page: Path | None, out: str | None) -> TrainResult:
    """Return the result of a run that has ended."""
    done, task = run.progress, run.task
    losses = tuple(done.losses)
    tail = losses[-SMOOTHED:]
    learned = task.learned()
    return TrainResult(
        parameters=sum(p.numel() for p in task.model.parameters()),
        state_bytes=states_of(task.model),
        data_tokens=len(learned),
        unit=task.unit,
        unigram_entropy=unigram_entropy(learned),
        steps=done.steps,
        planned_steps=run.steps,
        seconds=done.seconds,
        tokens_per_second=done.tokens / done.seconds,
        losses=losses,
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        evaluations=tuple(done.evaluations),
        weights_sha256=digest(task.model),
        checkpoint=str(run.folder if run.saved is None else run.saved.path),
        resumed_step=done.resumed,
        signal=number,
        report=None if page is None else str(page),
        recorded_steps=run.recording.steps,
        out=out,
        report_problem=run.recording.problem,
        status=status(task.model),
    )


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the weights that train, in the order of the state dict."""
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    sha = hashlib.sha256()
    for name, value in model.state_dict().items():
        if name not in frozen:
            flat = value.detach().cpu().contiguous().view(-1)
            sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
