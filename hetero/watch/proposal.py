"""The settings with which `hetero.prepare` would run a program, rehearsed (floor 4)."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.config import Config, host_limit
from hetero.device import Fragments, accelerator_name
from hetero.errors import HeteroError
from hetero.plan.hardware import find, names
from hetero.rehearse.plan import Plan, plan, shown
from hetero.report.words import format_seconds
from hetero.types import format_bytes
from hetero.watch.observer import Shortage
from hetero.watch.program import Program, Subject

NO_MODEL = "the program called no module with parameters"
NO_TRAINING = "the program called its model without gradients alone; hetero.plan plans training"
KEEPS_GRAPHS = (
    "the program called {name} {n} times with gradients on and never went backward: each result"
    " that it keeps holds its activations. Call it under torch.inference_mode()"
)
NO_BATCH = "the arguments of its model have no copy without bytes"
SETTINGS = tuple(f.name for f in fields(Config) if f.name not in ("weights", "mesh"))
PLACED = {"device", "hbm", "host", "profile"}  # any of these says where the rehearsal begins
DRIVE = "hetero-states"  # directory that a proposal names for what RAM does not hold


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a rehearsal found, or why there is none."""

    line: str
    """For the program; empty without a rehearsal."""
    said: tuple[str, ...]


class ProgramMemory(NamedTuple):
    """The memory that a program had."""

    place: torch.device
    most_bytes: int
    """That it was seen to hold."""
    fragments: Fragments | None


def propose(
    program: Program, had: ProgramMemory, config: Config, short: Shortage | None, seconds: float
) -> Proposal:
    """Rehearse the main model of a program, for at most so long.

    It runs in a thread of its own: modes, hooks and autocast of the program's thread, which may be
    anywhere, are not those of another one. Generators are left as they were. A thread that takes
    longer is waited for by the interpreter: ended inside of torch, it would abort the process.
    """
    if short is not None and short.tier:
        return of_budget(short)
    found = program.main()
    if found is None or found.entry.batch is None or not found.entry.trains:
        missing = NO_MODEL if found is None else NO_BATCH if found.entry.trains else NO_TRAINING
        return Proposal("", (missing,))
    if program.only_keeps_graphs and found.entry.n_calls > 1:
        name = type(found.model).__name__
        return Proposal("", (KEEPS_GRAPHS.format(name=name, n=found.entry.n_calls),))
    others = sum(row.entry.trains for row in program.plain()) - 1
    subject, settings = found, settings_for(had, config)
    made: list[Proposal] = []
    state = torch.get_rng_state()
    thread = threading.Thread(
        target=lambda: made.append(rehearsed(subject, settings)), name="hetero-watch"
    )
    thread.start()
    thread.join(seconds)
    if not made:
        return Proposal("", (f"the rehearsal was not over after {seconds:.0f} s",))
    torch.set_rng_state(state)
    return of_several(made[0], subject, others) if others else made[0]


def of_several(made: Proposal, subject: Subject, others: int) -> Proposal:
    """Return a proposal that says which model it is of."""
    plural = "s" if others > 1 else ""
    alone = (
        f"of {type(subject.model).__name__} alone: prepare the {others} other model{plural}, too"
    )
    return Proposal(made.line, (f"{made.said[0]}; {alone}", *made.said[1:]))


def of_budget(short: Shortage) -> Proposal:
    """Return what hetero's own error proposes: its model is prepared already."""
    field = {"HBM": "hbm", "HOST": "host", "NVME": "nvme_bytes"}.get(short.tier, "hbm")
    line = f"{field}={short.needed_bytes}" if short.needed_bytes else ""
    return Proposal(line, (f"the model is hetero's already. {short.advice}",))


def settings_for(had: ProgramMemory, config: Config) -> dict[str, Any]:
    """Return the settings to begin with: those given, and budgets of what the program had.

    A rehearsal raises a budget that is too small. On a CPU it begins with half of what the program
    held, and a drive for the rest.
    """
    plain = Config()
    values = ((name, getattr(config, name)) for name in SETTINGS)
    given = {name: value for name, value in values if value != getattr(plain, name)}
    if had.place.type == "cuda":
        given.setdefault("device", "cuda")
        room = had.fragments.free_bytes + had.fragments.reserved_bytes if had.fragments else None
        if room:
            given.setdefault("hbm", room)
        given.setdefault("host", host_limit().n_bytes)
    elif not given.keys() & PLACED:
        given.update(device="cpu", host=max(had.most_bytes // 2, 1))
        given.setdefault("nvme", (DRIVE,))
    given.setdefault("profile", profile_of(had.place))
    return given


def profile_of(place: torch.device) -> str:
    """Return the name of hetero's own profile that is most like this machine."""
    name = accelerator_name() if place.type == "cuda" else None
    profiles = {each: find(each) for each in names()}
    has_gpu, cores = name is not None, torch.get_num_threads()
    words = set((name or "").lower().replace("-", " ").split())
    alike = {
        each: (
            len(words & set(p.gpu.name.lower().replace("-", " ").split())) if p.gpu else 0,
            -abs(p.host.cores - cores),
        )
        for each, p in profiles.items()
        if (p.gpu is not None) == has_gpu
    }
    return max(alike, key=lambda each: alike[each])


def rehearsed(subject: Subject, settings: dict[str, Any]) -> Proposal:
    """Return the proposal that a rehearsal makes."""
    try:
        found = plan(
            subject.model,
            given_to(subject.model, *subject.entry.batch),
            optimizer=subject.optimizer,
            estimates=False,
            **settings,
        )
    except HeteroError as error:
        return Proposal("", (f"it could not be rehearsed: {error.args[0]}", error.advice))
    except Exception as error:
        return Proposal("", (f"it could not be rehearsed: {type(error).__name__}: {error}",))
    return Proposal(found.paste, tuple(sentences(found)))


def given_to(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a call as `hetero.plan` takes them: positional, or by name."""
    if not kwargs:
        return args
    return inspect.signature(model.forward).bind(*args, **kwargs).arguments if args else kwargs


def sentences(found: Plan) -> list[str]:
    """Return what a plan says, for people."""
    tiers = ", ".join(
        f"{row.tier} {format_bytes(row.peak_bytes)}"
        + (f" of {format_bytes(row.budget_bytes)}" if row.budget_bytes else "")
        for row in found.tiers
    )
    step = format_seconds(found.step_seconds)
    said = [f"rehearsed on profile {found.profile}: {tiers}; {step} a step"]
    for short in found.shortfalls:
        said.append(
            f"{short.tier} was {format_bytes(short.short_bytes)} short at first: the line asks for"
            f" {shown(short.needed_bytes)}"
        )
    return said
