"""A pipeline: ranks with stages of one model, which torch's schedules run (floor 3).

The stages of a rank are one model to us, with one budget and one trace, and ranks share nothing
but activations and their gradients, which torch sends. What it waits for never comes from a rank
that is lost, so while a schedule of prepared stages runs its waits are ours: polls with a deadline,
which hear why a rank left.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hetero.device.comm import Company
from hetero.errors import ConfigError, HeteroError, StateError
from hetero.internals import Replacement, install, passes_of, pipeline_places, stages_of
from hetero.parallel.gloo import Talks
from hetero.parallel.mesh import STAGES, sizes_of, world_size
from hetero.parallel.norms import StageNorms
from hetero.parallel.splitting import refused
from hetero.parallel.splitting import split as split
from hetero.parallel.ties import check_told, told
from hetero.train.access.expected import Visit
from hetero.train.access.hooks import after_next_forward
from hetero.train.gradients.clip import OWN_NORMS, Norms
from hetero.train.model.parts import Parts
from hetero.train.model.units import MARK, PART
from hetero.types import Phase

STAGE = "what another stage sends"
TOGETHER = (
    "prepare the stages of a rank at once: hetero.prepare(nn.ModuleList(stages), optimizer,"
    f" mesh={{'{STAGES}': n}}), with one optimizer over the parameters of all"
)


class OneStage:
    """The only rank, or one of those that all have the same stages."""

    company: Company | None = None

    def meet(self, what: str) -> None: ...

    def norms(self, parts: Parts, place: torch.device) -> Norms:
        return OWN_NORMS

    def close(self) -> None: ...


class Pipeline:
    """The ranks of a pipeline, of whose stages this one has prepared its own.

    Args:
        model: has this rank's stages.
        n_ranks: with stages of their own.
        timeout_seconds: after which a rank that sends nothing is lost.
    """

    def __init__(self, model: nn.Module, n_ranks: int, timeout_seconds: float) -> None:
        self._model = weakref.ref(model)
        self._n_ranks = n_ranks
        self._talks = Talks([range(dist.get_world_size())], timeout_seconds)
        self._news, self._waits = self._talks.news, self._talks.waits
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._expected: weakref.WeakSet[Any] = weakref.WeakSet()
        self._aside: Aside | None = None
        self.polls = True
        """Whether the schedule that runs has works of gloo; those of NCCL order streams."""
        self._close = weakref.finalize(self, install(guards()))
        _pipelines.add(self)

    def compare(self, model: nn.Module) -> None:
        """Refuse, on all ranks, a weight that stages of several have."""
        rows = self._talks.agree(told(model), "weights of stages")
        check_told(rows, len(rows) // self._n_ranks, self._talks.members)

    def meet(self, what: str) -> None:
        """Wait for all ranks; raises RankLost for one that does not come, with its error."""
        self._talks.agree(b"", what)

    @property
    def company(self) -> Company | None:
        """All ranks of the pipeline, who save and load together."""
        return self._talks

    def norms(self, parts: Parts, place: torch.device) -> Norms:
        """Return the norms of the gradients of all stages, taken on a device."""
        model = self._model()
        assert model is not None
        return StageNorms(model, self._talks, self._n_ranks, parts, place)

    def close(self) -> None:
        """Let go of the other ranks, which hear of the error that is being handled."""
        _pipelines.discard(self)
        self._close()
        if self._aside is not None:
            self._aside.close()
        self._talks.close()

    # -- a schedule ------------------------------------------------------------------------------

    def count(self, stages: Iterable[Any]) -> int:
        """Return how many of a schedule's stages are of this model."""
        model = self._model()
        ours = {id(module) for module in model.modules()} if model is not None else set()
        return sum(any(id(m) in ours for m in stage.submod.modules()) for stage in stages)

    @contextmanager
    def running(self, schedule: Any, stages: Sequence[Any]) -> Iterator[None]:
        """Run a schedule's step inside, so that it ends even if another rank never answers."""
        self._waits.check()
        began = time.monotonic()
        with ExitStack() as stack:
            if torch.is_grad_enabled() and schedule not in self._seen:
                self._seen.add(schedule)
                for stage in stages:
                    if not stage.is_last:
                        look = functools.partial(check_output, stage.stage_index)
                        stack.callback(after_next_forward(stage.submod, look))
            self.polls = all(dist.get_backend(stage.group) == "gloo" for stage in stages)
            _running.append(self)
            try:
                yield
            except Exception as error:
                raise_typed(error)
                self._ask_why(error, began)
                raise
            finally:
                _running.pop()

    @contextmanager
    def trying(self, schedule: Any) -> Iterator[None]:
        """Let a schedule try its stages inside; after that, its first step is expected."""
        model = self._model()
        assert model is not None
        residence = vars(model)[MARK].residence
        with residence.aside():
            yield
        if torch.is_grad_enabled() and schedule not in self._expected:
            self._expected.add(schedule)
            residence.expect(visits_of(schedule))

    def _ask_why(self, error: Exception, began: float) -> None:
        """Raise RankLost if torch's error is that another rank has left, or does not answer."""
        if not isinstance(error, RuntimeError) or error.__cause__ is not None:
            return  # of code that a stage called: torch names the stage, and the error as its cause
        lost = self._waits.explained(error, STAGE, began)
        if lost is not None:
            raise lost from error

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Block until what torch sends and receives is over."""
        self._aside = self._aside or Aside()
        for work in works:
            began, waited = time.monotonic(), self._aside.begin(work)
            self._waits.poll(waited.ended.is_set, STAGE)
            if waited.error is not None:
                raise self._waits.failed(waited.error, STAGE, began) from None


class Waited:
    """A work that a thread blocks in: gloo's of two ranks say only there that they are over, and
    only once."""

    def __init__(self, work: dist.Work) -> None:
        self.ended = threading.Event()
        self.error: RuntimeError | None = None
        self._work = work

    def block(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self.error = error
        finally:
            del self._work  # and the tensors that it holds: this may wait long for the next one
            self.ended.set()


class Aside:
    """A thread that blocks in works."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Waited | None] = queue.SimpleQueue()
        # one that waits for a lost rank never ends, and must not hold up the end of the process
        threading.Thread(target=block_in_all, args=(self._todo,), daemon=True).start()
        self.close: Callable[[], object] = weakref.finalize(self, self._todo.put, None)

    def begin(self, work: dist.Work) -> Waited:
        waited = Waited(work)
        self._todo.put(waited)
        return waited


def block_in_all(todo: queue.SimpleQueue[Waited | None]) -> None:
    while (waited := todo.get()) is not None:
        waited.block()


_pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
_running: list[Pipeline] = []
"""Whose schedules are in their steps, the innermost last."""


def open_pipeline(model: nn.Module, mesh: Any, timeout_seconds: float) -> Pipeline | OneStage:
    """Join the ranks of a mesh that has an axis of stages; collective."""
    world = world_size()
    n_ranks = sizes_of(mesh, world)[STAGES] if mesh is not None and world else 1
    if n_ranks == 1:
        return OneStage()
    pipeline = Pipeline(model, n_ranks, timeout_seconds)
    with ExitStack() as undo:
        undo.callback(pipeline.close)
        pipeline.compare(model)
        undo.pop_all()
    return pipeline


def pipeline_of(stages: Sequence[Any]) -> Pipeline | None:
    """Return the pipeline of a schedule's stages; None if they are not of a prepared one.

    Raises StateError if they were prepared apart.
    """
    counts = {pipeline: n for pipeline in list(_pipelines) if (n := pipeline.count(stages))}
    if not counts:
        return None
    (pipeline, n), *others = counts.items()
    if others or n < len(stages):
        lone = [stage.stage_index for stage in stages if not is_prepared(stage)]
        what = f"stage {lone[0]} is not prepared" if lone else "each has a budget of its own"
        raise StateError(
            f"the {len(stages)} stages that this rank runs in one schedule were prepared apart:"
            f" {what}",
            advice=TOGETHER,
        )
    return pipeline


def is_prepared(stage: Any) -> bool:
    """Whether a stage's module is a part of a prepared model, or wraps one."""
    return any(PART in vars(module) for module in stage.submod.modules())


def visits_of(schedule: Any) -> Iterator[Visit]:
    """Yield the passes of a schedule's step through its stages, as torch's makes them."""
    stages = {stage.stage_index: stage for stage in stages_of(schedule)}
    rank = next(iter(stages.values())).group_rank
    for kind, index, _ in passes_of(schedule, rank):
        module, is_first = stages[index].submod, stages[index].is_first
        if kind == "F":
            yield Visit(module, Phase.FORWARD)
        elif kind == "B" or (kind == "W" and is_first):  # which has no half for inputs
            yield Visit(module, Phase.BACKWARD, from_the_end=True, is_first=is_first)
        elif not is_first:
            yield Visit(module, Phase.BACKWARD, from_the_end=kind == "I")


def check_output(index: int, output: Any) -> None:
    """Refuse what torch does not send from stage to stage."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    for value in values:
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"stage {index} returns {type(output).__name__}"
                + (f" with {type(value).__name__} in it" if output is not value else "")
                + ", and another stage waits for tensors",
                advice="let each stage but the last return a tensor, or a tuple of tensors",
            )


def raise_typed(error: BaseException) -> None:
    """Raise the error of ours that torch has put into one of its own, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HeteroError):
        cause = cause.__cause__
    if cause is not None and cause is not error:
        raise cause from cause.__cause__


def _watching(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a schedule's step that ends even if another rank never answers."""

    @functools.wraps(step)
    def watched(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        stages = stages_of(schedule)
        pipeline = pipeline_of(stages)
        if pipeline is None:
            return step(schedule, *args, **kwargs)
        with pipeline.running(schedule, stages):
            return step(schedule, *args, **kwargs)

    return watched


def _aside(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """Return what initialises a schedule's stages, whose trial is no part of a step."""

    @functools.wraps(initialise)
    def tried(schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if not _running:
            return initialise(schedule, *args, **kwargs)
        with _running[-1].trying(schedule):
            return initialise(schedule, *args, **kwargs)

    return tried


def _refusing(make: Callable[..., None]) -> Callable[..., None]:
    """Return a schedule's ``__init__`` that says what to do if it refuses prepared stages."""

    @functools.wraps(make)
    def made(schedule: Any, stages: Any, n_microbatches: int, *args: Any, **kwargs: Any) -> None:
        try:
            make(schedule, stages, n_microbatches, *args, **kwargs)
        except ValueError as error:
            there = stages if isinstance(stages, list) else [stages]
            if isinstance(error, HeteroError) or pipeline_of(there) is None:
                raise
            raise refused(error, n_microbatches, there[0].num_stages) from error

    return made


def _polling(wait: Callable[[list[dist.Work]], None]) -> Callable[[list[dist.Work]], None]:
    """Return a schedule's wait that polls, where works of a device do not order streams."""

    @functools.wraps(wait)
    def polled(works: list[dist.Work]) -> None:
        if _running and _running[-1].polls:
            _running[-1].wait(works)
        else:
            wait(works)

    return polled


@functools.cache
def guards() -> tuple[Replacement, ...]:
    """Return the functions of torch that are replaced while a pipeline is prepared."""
    places = pipeline_places()
    steps = (place.replaced(_watching) for place in places.steps)
    trials = (place.replaced(_aside) for place in places.trials)
    makers = (place.replaced(_refusing) for place in places.makers)
    return (*steps, *trials, *makers, places.wait.replaced(_polling))
