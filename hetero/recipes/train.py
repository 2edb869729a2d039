"""The run of `hetero train`: a model learns from text or answers inside byte budgets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR

from hetero.api import engine_of, prepare
from hetero.checkpoint.load import load_checkpoint
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.save import Save, save_checkpoint
from hetero.config import Config
from hetero.device import open_device
from hetero.errors import ConfigError
from hetero.parallel.launch import Launch, launch
from hetero.parallel.mesh import STAGES, refuse_context, sizes_named
from hetero.recipes.folders import folder_of, record_folder
from hetero.recipes.learners import Learner, Loop
from hetero.recipes.optimizers import factor_of, optimizer_of
from hetero.recipes.options import TrainOptions, check_paths_of, installed, settings_of
from hetero.recipes.passes import Passes
from hetero.recipes.record import Recording
from hetero.recipes.result import (
    EvalLoss,
    Progress,
    RunBudget,
    RunStart,
    StepReport,
    TrainResult,
)
from hetero.recipes.setup import Settled, divided, settings_for
from hetero.recipes.stages import Scheduled, check_no_pipeline, check_options, staged
from hetero.recipes.task import Task, count, demo, loss_of
from hetero.recipes.text import unigram_entropy
from hetero.recipes.tracking import Log, tracking
from hetero.rehearse.plan import Plan, plan
from hetero.status import status
from hetero.train.update.optimizer import Optimizer
from hetero.types import noop

SMOOTHED = 10  # steps in the mean reported as the last loss
DECIDING = (  # options that change the numbers
    *("task", "seq", "checkpoint_blocks", "lora_rank", "lora_alpha", "lora_targets"),
    *("lora_dropout", "optimizer", "lr", "schedule", "warmup", "weight_decay", "max_grad_norm"),
    *("batch", "accumulate", "exchange", "seed", "width", "layers", "heads"),
)
COMPUTING = (  # settings that do
    *("precision", "keep_fp32", "frozen", "keep_exact", "micro_batch", "tile", "fused_loss"),
    "sum_group",
)

Stop = Callable[[], "int | None"]
Watch = Callable[[StepReport], None]
Announce = Callable[[RunStart], None]


def train(
    options: TrainOptions,
    watch: Watch = noop,
    stop: Stop = lambda: None,
    announce: Announce = noop,
) -> TrainResult:
    """Run the whole recipe; call ``announce`` before the first step, ``watch`` after each one.

    If ``stop`` returns the number of a signal after a step, the run saves that step and ends.
    Raises ConfigError and BudgetError as `hetero.prepare` does, ConfigError for options that cannot
    be honoured, and the errors of saving and loading. Seeds the global generator.
    """
    config = settings_of(options)
    with launch(config.timeout_seconds) as ranks:
        return train_on(ranks, options, config, watch, stop, announce)


def train_on(
    ranks: Launch,
    options: TrainOptions,
    config: Config,
    watch: Watch,
    stop: Stop,
    announce: Announce,
) -> TrainResult:
    """Run the recipe as one of ``ranks``; the first one watches, records and writes."""
    if ranks.size > 1 and config.mesh is None:
        config = dataclasses.replace(config, mesh="world")
    has_stages = sizes_named(config.mesh).get(STAGES, 1) > 1
    if has_stages:
        check_options(options, config, ranks)
    else:
        check_no_pipeline(options)
    refuse_context(config.mesh, "hetero train", "write a loop: docs/context-parallel.md")
    if ranks.rank:
        options = dataclasses.replace(options, record="none", track=())
        watch = announce = noop
    # 1. data, model and optimizer, as in plain PyTorch
    folder = Path(ranks.first(lambda: str(folder_of(options)), "the run's folder"))
    task = task_of(options, config)
    cut = staged(task, options, config) if has_stages else None
    task = task if cut is None else cut.task
    # a rank that refuses leaves when all have the groups of the mesh
    n_tensor = ranks.ready(lambda: divided(task.model, config, ranks.size), "divided tensors")
    deciding = fingerprint(options, config, task, n_tensor)
    ended = check_run(folder, deciding) if options.resume else None
    optimizer = optimizer_of(task.model, options)
    # 2. the one line that puts it under budgets
    settled = settings_for(task.model, optimizer, config, options)
    _, optimizer = prepare(task.model, optimizer, config=settled.config)
    # 3. the same loop as ever
    place = open_device(settled.config.device).torch_device
    setup = engine_of(task.model).setup
    passes = Passes(setup.comm, setup.everyone, options.accumulate, options.seed)
    learner: Learner = Loop(task, place, passes, options.exchange)
    if cut is not None:
        learner = Scheduled(cut, ranks, place, passes, n_tensor, options)
    run = TrainRun(task, optimizer, options, folder, deciding, learner, passes)
    if options.resume:
        run.resume()
    run.record()
    announce(start_of(run, settled, ended))
    with tracking(options, folder) as log:
        signal = run.train(watch, log, stop)
    # 4. the report, the trained model, the figures
    page = run.recording.write_report()
    out = options.out if signal is None else None
    if out is not None:
        task.write(Path(out))
    result = conclude(run, signal, page, out)
    passes.any(None)  # until here others read this rank's shares
    return result


def task_of(options: TrainOptions, config: Config) -> Task:
    """Return the task that options name; ConfigError if it cannot be built."""
    check_paths_of(options)
    if options.is_demo:
        return demo(options)
    with installed(f"--model {options.model} needs transformers", other=", or leave --model out"):
        from hetero.recipes.language import language_task
    return language_task(options, config)


def dry_run(options: TrainOptions) -> Plan:
    """Return the plan of a run, as `hetero.plan` makes it; train nothing."""
    config = settings_of(options)
    task = task_of(options, config)
    optimizer = optimizer_of(task.model, options)
    budgets = settings_for(task.model, optimizer, config, options).config
    config = dataclasses.replace(budgets, device=config.device)  # else the profile's machine
    batch = {**next(task.batches), **task.call}
    return plan(task.model, batch, optimizer=optimizer, config=config, loss=loss_of)


class Stopped(NamedTuple):
    """Why a run ends before its last step."""

    signal: int | None
    """None: its minutes are over."""


@dataclass
class TrainRun:
    """The loop: a plain PyTorch loop with checkpoints."""

    task: Task
    optimizer: Optimizer
    options: TrainOptions
    folder: Path
    deciding: Mapping[str, Any]
    learner: Learner
    passes: Passes
    progress: Progress = field(default_factory=Progress)
    saved: Save | None = None

    def __post_init__(self) -> None:
        self.steps: int = self.deciding["steps"]
        self.scheduler = LambdaLR(self.optimizer, factor_of(self.options, self.steps))
        self.recording = Recording(self.task.model, None)

    def record(self) -> None:
        """Record the steps from here on, if there are any."""
        if self.progress.steps < self.steps:
            folder = record_folder(self.options, self.folder)
            self.recording = Recording(self.task.model, folder)

    def train(self, watch: Watch, log: Log, stop: Stop) -> int | None:
        """Train to the end, or to a signal; returns its number."""
        with self.recording:
            signal = self.loop(watch, log, stop)
        last = self.saved
        if self.progress.steps > (self.progress.resumed if last is None else last.step):
            last = self.save()
        if last is not None:
            last.wait()
        return signal

    def loop(self, watch: Watch, log: Log, stop: Stop) -> int | None:
        options, done = self.options, self.progress
        began = time.perf_counter() - done.seconds
        while done.steps < self.steps:
            before = done.tokens
            lr, norm = self.step()
            self.recording.count_step(loss=done.losses[-1], tokens=done.tokens - before)
            done.seconds = time.perf_counter() - began
            report = self.report(lr, norm)
            log(report.figures(), report.step)
            watch(report)
            late = options.minutes is not None and done.seconds >= 60 * options.minutes
            signal = stop()
            mine = Stopped(signal) if late or signal is not None else None
            ended = self.passes.any(mine)
            if ended is not None:
                return ended.signal
            if done.steps % options.save_every == 0 and done.steps < self.steps:
                self.save(asynchronous=True)  # training goes on while it is written
        return None

    def step(self) -> tuple[float, float]:
        """Make one step, all tokens weighing alike; returns the next learning rate and the norm."""
        batches = [next(self.task.batches) for _ in range(self.options.accumulate)]
        found = self.learner.learn(batches, self.progress.steps)
        norm = self.optimizer.clip_grad_norm_(self.options.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.progress.losses.append(sum(self.learner.told(found)))
        self.progress.tokens += sum(map(count, batches))
        return float(self.scheduler.get_last_lr()[0]), float(norm.item())

    def report(self, lr: float, norm: float) -> StepReport:
        """Report on the last step; evaluate the model if that is due."""
        done = self.progress
        return StepReport(
            step=done.steps,
            planned=self.steps,
            loss=done.losses[-1],
            seconds=done.seconds,
            tokens=done.tokens,
            lr=lr,
            norm=norm,
            evaluation=self.evaluate() if self.is_due() else None,
            status=status(self.task.model),
        )

    def is_due(self) -> bool:
        """Whether an evaluation is due after the last step."""
        done, every = self.progress.steps, self.options.eval_every
        due = done == self.steps or (every is not None and done % every == 0)
        return due and bool(self.task.evaluation)

    def evaluate(self) -> EvalLoss:
        """Return the mean loss per token of the evaluation data."""
        self.task.model.eval()
        batches = self.task.evaluation
        counts = [count(batch) for batch in batches]
        with torch.no_grad():
            losses = self.learner.evaluate(batches)
        self.task.model.train()
        mean = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
        found = EvalLoss(self.progress.steps, mean)
        self.progress.evaluations.append(found)
        return found

    def save(self, *, asynchronous: bool = False) -> Save:
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
        """Load the newest checkpoint."""
        found = load_checkpoint(
            self.folder,
            self.task.model,
            self.optimizer,
            scheduler=self.scheduler,
            data=self.task.batches,
        )
        self.progress = Progress.of(found)
        rates = zip(self.optimizer.param_groups, self.scheduler.base_lrs, strict=True)
        factor = factor_of(self.options, self.steps)(self.progress.steps)
        for group, peak in rates:  # a run that is longer now has another one
            group["lr"] = peak * factor


# -- options that change the numbers -------------------------------------------------------------


def fingerprint(options: TrainOptions, config: Config, task: Task, n_tensor: int) -> dict[str, Any]:
    """Return every option and setting that changes the numbers; budgets do not."""
    found = {name: getattr(options, name) for name in DECIDING}
    found.update({name: getattr(config, name) for name in COMPUTING})
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}
    return {**plain, "steps": steps_of(options, task), "data": task.digest(), "tp": n_tensor}


def steps_of(options: TrainOptions, task: Task) -> int:
    if options.epochs is None:
        return options.steps
    return max(1, math.ceil(options.epochs * task.passes / options.accumulate))


def check_run(folder: Path, here: Mapping[str, Any]) -> int | None:
    """Refuse to resume a run with other options but more steps, before anything is moved.

    Returns the steps of the run, if it has made all of them.
    """
    with CheckpointReader.open(folder) as reader:
        extra = reader.meta.get("extra")
    there = extra.get("run") if isinstance(extra, dict) else None
    if not isinstance(extra, dict) or not isinstance(there, dict):
        raise ConfigError(f"{folder} is no run of hetero train", advice="name the run's folder")
    there = {"sum_group": 1, "tp": 1, "exchange": "pass", **there}  # older runs have no such keys
    other = [
        f"{k} was {there.get(k)} and is {v}"
        for k, v in here.items()
        if there.get(k) != v and not (k == "steps" and is_longer(there.get(k), v))
    ]
    if other:
        raise ConfigError(
            f"the run in {folder} had other options: {', '.join(other)}",
            advice="resume with the options the run was started with; steps may be more",
        )
    made, planned = Progress.of(extra).steps, there.get("steps")
    return made if made == planned else None


def is_longer(before: Any, now: int) -> bool:
    return isinstance(before, int) and before < now


# -- the beginning -------------------------------------------------------------------------------


UNSAID = {
    "hbm": "all of the device",
    "host": "what the machine leaves free",
    "nvme": "what is free there",
}
"""Budgets that neither the options nor the demo set."""


def start_of(run: TrainRun, settled: Settled, ended: int | None) -> RunStart:
    """Return what is known of a run before its first step."""
    options, found, size = run.options, status(run.task.model), run.learner.size()
    return RunStart(
        model=options.model,
        parameters=size.parameters,
        state_bytes=size.state_bytes,
        device=found.device,
        mode=found.mode,
        budgets=tuple(
            RunBudget(tier, row["budget"], reason(tier.lower(), settled))
            for tier, row in found.tiers.items()
        ),
        folder=str(run.folder),
        steps=run.steps,
        resumed=run.progress.resumed,
        ended_steps=ended,
        minutes=options.minutes,
        disks=settled.config.nvme,
        step_write_bytes=settled.step_write_bytes,
        save_every=options.save_every,
        keep=options.keep,
    )


def reason(name: str, settled: Settled) -> str:
    """Return why a budget is as large as it is."""
    config = settled.config
    given = {"hbm": config.hbm, "host": config.host, "nvme": config.nvme_bytes}.get(name)
    return settled.why.get(name) or (UNSAID.get(name, "") if given is None else "as given")


# -- the result ----------------------------------------------------------------------------------


def conclude(run: TrainRun, signal: int | None, page: Path | None, out: str | None) -> TrainResult:
    done, task = run.progress, run.task
    tail = done.losses[-SMOOTHED:]
    learned, size = task.learned(), run.learner.size()
    return TrainResult(
        parameters=size.parameters,
        state_bytes=size.state_bytes,
        data_tokens=len(learned),
        unit=task.unit,
        unigram_entropy=unigram_entropy(learned),
        steps=done.steps,
        planned_steps=run.steps,
        seconds=done.seconds,
        tokens_per_second=done.tokens / done.seconds,
        losses=tuple(done.losses),
        first_loss=done.losses[0],
        last_loss=sum(tail) / len(tail),
        evaluations=tuple(done.evaluations),
        weights_sha256=run.learner.digest(),
        checkpoint=str(run.folder if run.saved is None else run.saved.path),
        resumed_step=done.resumed,
        signal=signal,
        report=None if page is None else str(page),
        recorded_steps=run.recording.steps,
        out=out,
        report_problem=run.recording.problem,
        status=status(task.model),
    )
