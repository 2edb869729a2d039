"""Names of a checkpoint, where ranks have stages of a model: those of the whole one (floor 4)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, TypeVar

from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.reader import CheckpointReader
from hetero.errors import CheckpointMismatch, ConfigError, DivergenceError
from hetero.members import Members
from hetero.parallel.stages import stages_in
from hetero.train.engine.engine import Engine
from hetero.train.engine.snapshot import Part

T = TypeVar("T")
BY_SPLIT = (
    "cut the model with hetero.split, whose stages know their names in it; or save"
    " {index: stage.state_dict()} of each rank's stages, and optimizer.state_dict(), with"
    " torch.distributed.checkpoint"
)


class Same:
    """The names of a model that is whole on each rank."""

    is_whole = True

    def whole(self, name: str) -> str:
        return name

    def own(self, name: str) -> Sequence[str]:
        return (name,)


@dataclass(frozen=True)
class OfStages:
    """The names of stages, of which each has one in the whole model."""

    names: Mapping[str, str]
    """Names in the whole model, by those here."""
    order: Mapping[str, int]
    """Of parameters, by their names in the whole model: their places there."""
    here: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_whole = False

    def whole(self, name: str) -> str:
        return self.names[name]

    def own(self, name: str) -> Sequence[str]:
        """Return the names here of what the whole model has; stages of a rank may share it."""
        return self.here.get(name, ())


Names = Same | OfStages


def names_of(engine: Engine) -> Names:
    """Return the names of a prepared model; ConfigError for stages that do not know theirs."""
    if engine.setup.company is None:
        return Same()
    model = engine.setup.model
    tensors = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]
    names: dict[str, str] = {}
    order: dict[str, int] = {}
    for at, stage in stages_in(model):
        head = f"{at}." if at else ""
        names |= {n: stage.in_whole(n[len(head) :]) for n in tensors if n.startswith(head)}
        order |= stage.order
    odd = next((name for name in tensors if name not in names), None)
    if odd is not None:
        raise ConfigError(
            f"{odd!r} is of one rank's stages, and nothing says its name in the whole model",
            advice=BY_SPLIT,
        )
    here: dict[str, list[str]] = {}
    for name, whole in names.items():
        here.setdefault(whole, []).append(name)
    return OfStages(names, order, here)


# -- of a save -----------------------------------------------------------------------------------


def in_whole(parts: Iterable[Part], names: Names) -> list[Part]:
    """Return parts with their names in the whole model, each once."""
    renamed = (replace(p, name=p.name._replace(name=names.whole(p.name.name))) for p in parts)
    return list({part.name: part for part in reversed(list(renamed))}.values())[::-1]


def told(
    entries: Sequence[SavedTensor],
    members: Sequence[Sequence[str]],
    settings: Mapping[str, str],
    names: Names,
) -> bytes:
    """Return what a rank with stages tells the others of its part of the model, and of the
    ``settings`` of its optimizer's groups, which a checkpoint has once."""
    order = {} if isinstance(names, Same) else names.order
    groups = [[[order[name], name] for name in group] for group in members]
    return json.dumps([[astuple(entry) for entry in entries], groups, dict(settings)]).encode()


@dataclass(frozen=True)
class Union:
    """What all ranks have together."""

    entries: list[SavedTensor]
    members: list[list[str]]
    """Of each group, in the order of the whole model."""
    first: Mapping[SavedTensor, int]
    """Of each entry: the first rank that has it."""


def union(rows: Sequence[bytes], ranks: Members) -> Union:
    """Return what ranks told; DivergenceError if they differ in what several have."""
    first: dict[SavedTensor, int] = {}
    named: dict[tuple[str, str, str], SavedTensor] = {}
    groups: list[dict[str, int]] = []
    of_first: dict[str, str] = {}
    for rank, row in enumerate(rows):
        entries, members, settings = json.loads(row)
        for each in entries:
            kind, name, key, dtype, shape, order, cuts = each
            sides = tuple(map(tuple, cuts))
            entry = SavedTensor(kind, name, key, dtype, tuple(shape), tuple(order), sides)
            if named.setdefault((kind, name, key), entry) != entry:
                raise diverged(ranks.name(rank), f"another {entry.label!r}")
            first.setdefault(entry, rank)
        if rank and len(members) != len(groups):
            what = f"an optimizer of {len(members)} groups, not {len(groups)}"
            raise diverged(ranks.name(rank), what)
        of_first = of_first or settings
        for key, value in settings.items():
            if value != of_first.get(key):
                raise diverged(ranks.name(rank), f"{value} as {key}, not {of_first.get(key)}")
        groups = groups or [{} for _ in members]
        for group, given in zip(groups, members, strict=True):
            group.update({name: place for place, name in given})
    entries = sorted(first, key=lambda entry: (entry.kind, entry.name, entry.key))
    return Union(entries, [sorted(group, key=group.__getitem__) for group in groups], first)


def diverged(name: str, what: str) -> DivergenceError:
    return DivergenceError(
        f"{name} saves {what}",
        advice="build the optimizer with the same groups on every rank, change their settings on"
        " all ranks alike, and call save_checkpoint with the same kinds= at the same step",
    )


# -- of a load -----------------------------------------------------------------------------------


class OwnEntries:
    """A checkpoint's entries that this rank's model has, by their names here."""

    def __init__(self, reader: CheckpointReader, names: Names) -> None:
        self.path = reader.path
        self._reader = reader
        self.numbers: list[int] = []
        self.entries: list[SavedTensor] = []
        for number, entry in enumerate(reader.entries):
            for name in () if entry.kind == "extra" else names.own(entry.name):
                self.numbers.append(number)
                self.entries.append(replace(entry, name=name))
        self._found = {(e.kind, e.name, e.key): n for n, e in enumerate(self.entries)}

    def find(self, kind: str, name: str, key: str = "") -> int | None:
        return self._found.get((kind, name, key))

    def read(self, entry: int, start: int, into: memoryview) -> None:
        self._reader.read(self.numbers[entry], start, into)


def own_groups(members: Sequence[Sequence[str]], names: Names) -> list[list[str]]:
    """Return each group's members that are here, by their names here."""
    return [[own for name in group for own in names.own(name)] for group in members]


def own_values(values: Mapping[str, T], names: Names) -> dict[str, T]:
    """Return the values of what is here, by the names here."""
    return {own: value for name, value in values.items() for own in names.own(name)}


def all_values(reader: CheckpointReader, key: str) -> Iterator[tuple[str, Any]]:
    """Yield values by name that ranks told of a checkpoint's model, each their own."""
    yield from reader.meta[key].items()
    for told_of_one in reader.of_ranks:
        yield from told_of_one.get(key, {}).items()


def check_taken(reader: CheckpointReader, taken: Iterable[Sequence[int]]) -> None:
    """Raise CheckpointMismatch for an entry that no rank's model has."""
    seen = {number for each in taken for number in each}
    for number, entry in enumerate(reader.entries):
        if entry.kind != "extra" and number not in seen:
            raise CheckpointMismatch(
                f"the checkpoint is of another model: {entry.label!r} is in no rank's stages",
                advice="split the model as it was when it was saved, into any number of stages",
            )
