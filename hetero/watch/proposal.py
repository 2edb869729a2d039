"""The settings with which `hetero.prepare` would run a program, rehearsed (floor 4)."""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.config import Config
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
    ram_bytes: int
    """That it could have: what is free, with its own tensors on a CPU."""
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
    subject, ways = found, ways_to_run(had, config, was_short=short is not None)
    made: list[Proposal] = []
    state = torch.get_rng_state()
    thread = threading.Thread(
        target=lambda: made.append(rehearsed(subject, ways, had, config)), name="hetero-watch"
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


def ways_to_run(had: ProgramMemory, config: Config, *, was_short: bool) -> list[dict[str, Any]]:
    """Return the settings to begin with, in the order in which they are tried: in RAM alone, unless
    that was too small for the program already, and with a drive."""
    in_ram, on_drive = (settings_for(had, config, drive=drive) for drive in (False, True))
    return [on_drive] if was_short or in_ram == on_drive else [in_ram, on_drive]


def settings_for(had: ProgramMemory, config: Config, *, drive: bool = False) -> dict[str, Any]:
    """Return the settings to begin with: those given, and budgets of what the program had.

    A rehearsal raises a budget that is too small. On a CPU with a ``drive`` it begins with half of
    what the program held, and the drive for the rest.
    """
    given = given_in(config)
    if had.place.type == "cuda":
        given.setdefault("device", "cuda")
        room = had.fragments.free_bytes + had.fragments.reserved_bytes if had.fragments else None
        if room:
            given.setdefault("hbm", room)
        given.setdefault("host", had.ram_bytes)
    elif not given.keys() & PLACED:
        on_drive = drive or "nvme" in given
        given.update(device="cpu", host=max(had.most_bytes // 2, 1) if on_drive else had.ram_bytes)
        if on_drive:
            given.setdefault("nvme", (DRIVE,))
    given.setdefault("profile", profile_of(had.place))
    return given


def given_in(config: Config) -> dict[str, Any]:
    """Return the settings that are no defaults."""
    plain = Config()
    values = ((name, getattr(config, name)) for name in SETTINGS)
    return {name: value for name, value in values if value != getattr(plain, name)}


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


def rehearsed(
    subject: Subject, ways: list[dict[str, Any]], had: ProgramMemory, config: Config
) -> Proposal:
    """Return the proposal that a rehearsal makes: of the first way that fits, or the last one."""
    try:
        for settings in ways:
            found = plan(
                subject.model,
                given_to(subject.model, *subject.entry.batch),
                optimizer=subject.optimizer,
                estimates=False,
                **settings,
            )
            if has_room(found, had):
                break
    except HeteroError as error:
        return Proposal("", (f"it could not be rehearsed: {error.args[0]}", error.advice))
    except Exception as error:
        return Proposal("", (f"it could not be rehearsed: {type(error).__name__}: {error}",))
    return Proposal(without_free(found, had, config).paste, tuple(sentences(found)))


def has_room(found: Plan, had: ProgramMemory) -> bool:
    """Whether a plan for a CPU runs in the RAM that the program could have."""
    in_ram = sum(row.peak_bytes for row in found.tiers if row.tier != "NVME")
    return found.fits and in_ram <= had.ram_bytes


def without_free(found: Plan, had: ProgramMemory, config: Config) -> Plan:
    """Return a plan that leaves out the RAM that is free, as `prepare` finds it by itself: a little
    less may be free by then, and it would refuse the figure."""
    if config.host is not None or found.settings.get("host") != shown(had.ram_bytes):
        return found
    return replace(found, settings={k: v for k, v in found.settings.items() if k != "host"})


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
    if found.settings.get("nvme") == (DRIVE,):
        said.append(f"first make the directory {DRIVE}, or name another one on a local drive")
    return said
