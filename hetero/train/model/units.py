"""Finding the units of a model: modules that are fetched as a whole (floor 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

MARK = "_hetero_engine"  # on a prepared model
STANDS_FOR = "hetero_stands_for"  # on what is in a block's place that is elsewhere: its class
PART = "_hetero_part"  # on every module of prepared models: how many have it
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose parameters are fetched together; ``module`` is None for a container's own
    parameters, which are fetched when touched."""

    name: str
    module: nn.Module | None


def find_units(model: nn.Module, patterns: Sequence[str] | None = None) -> list[Unit]:
    """Return the units of ``model`` in definition order.

    The repeated blocks of ModuleLists and Sequentials are units, then each remaining subtree.
    ``patterns`` (module names or globs) overrides that; parameters outside every named module are
    fetched when touched.
    """
    if patterns is not None:
        return named_units(model, patterns)
    names = {id(module): name for name, module in model.named_modules()}
    entries = entries_of(model)
    return list(unique(unit for e in entries for unit in units_of(e, names[id(e)])))


def entries_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a program calls as the model: those with parameters in a model
    without a forward of its own (a list of pipeline stages, a pair that trains together)."""
    if calls_itself(model) or not has_params(model):
        return [model]
    below = (e for child in model.children() if has_params(child) for e in entries_of(child))
    return list(dict.fromkeys(below)) or [model]


def calls_itself(module: nn.Module) -> bool:
    """Whether a module has a forward, of its class or put on it."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def units_of(model: nn.Module, name: str) -> Iterator[Unit]:
    """Yield the units of an entry, which has a name in its model."""
    if not has_blocks(model) and (model._parameters or not any(model.children())):
        yield Unit(name, model)
    else:
        yield from split(model, name)


def named_units(model: nn.Module, patterns: Sequence[str]) -> list[Unit]:
    """Return the outermost modules that match a pattern."""
    names = dict(model.named_modules())
    chosen = [name for name in names if any(fnmatchcase(name, p) for p in patterns)]
    outer = [n for n in chosen if not any(n != m and inside(n, m) for m in chosen)]
    return [Unit(name, names[name]) for name in outer]


def inside(name: str, outer: str) -> bool:
    """Return whether a dotted name is ``outer`` or lies below it."""
    return outer == "" or name == outer or name.startswith(outer + ".")


def makes_anew(module: nn.Module) -> bool:
    """Whether listing a module's parameters makes new ones each time; see [Note: made anew]."""
    first = list(module.parameters())
    return any(one is not other for one, other in zip(first, module.parameters(), strict=True))


def has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def repeated(parent: nn.Module) -> set[type]:
    """Return the classes that appear at least twice among a list's children with parameters, or
    what stands for such."""
    if not isinstance(parent, LISTS):
        return set()
    children = list(parent.children())
    counts = Counter(type(child) for child in children if has_params(child))
    counts += Counter(vars(child)[STANDS_FOR] for child in children if STANDS_FOR in vars(child))
    return {kind for kind, n in counts.items() if n > 1}


def has_blocks(module: nn.Module) -> bool:
    """Return whether some list at or below ``module`` repeats a class."""
    return any(repeated(m) for m in module.modules())


def split(module: nn.Module, name: str) -> Iterator[Unit]:
    """Yield the units below a module that is not one itself."""
    blocks = repeated(module)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if not has_params(child):
            continue
        is_block = type(child) in blocks and not isinstance(child, LISTS)
        if is_block or (calls_itself(child) and not has_blocks(child)):
            yield Unit(full, child)
        else:  # also a list of one block, which is never called
            yield from split(child, full)


def unique(units: Iterator[Unit]) -> Iterator[Unit]:
    """Drop second appearances of a module."""
    seen: set[int] = set()
    for unit in units:
        if id(unit.module) not in seen:
            seen.add(id(unit.module))
            yield unit


def assign(model: nn.Module, units: list[Unit]) -> tuple[list[Unit], dict[str, int]]:
    """Return all units, and the unit of every parameter name.

    Parameters outside every unit's module form units of their own, one per owning module. A tied
    parameter belongs to the first unit that holds it.
    """
    units = list(units)
    of_module = {id(unit.module): i for i, unit in enumerate(units)}
    by_name = {unit.name: i for i, unit in enumerate(units)}
    loose: dict[str, int] = {}
    home: dict[str, int] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, _ in model.named_parameters():
        owner, _, _ = name.rpartition(".")
        index = next(
            (i for up in ancestors(owner) if (i := _unit_at(up, by_name, of_module, modules)) >= 0),
            -1,
        )
        if index < 0:
            if owner not in loose:
                loose[owner] = len(units)
                units.append(Unit(f"{owner or 'model'} (own parameters)", None))
            index = loose[owner]
        home[name] = index
    return units, home


def _unit_at(
    name: str, by_name: dict[str, int], of_module: dict[int, int], modules: dict[str, nn.Module]
) -> int:
    """Return the unit whose module has a name, also as its second one; else -1."""
    found = by_name.get(name)
    return found if found is not None else of_module.get(id(modules[name]), -1)


def ancestors(name: str) -> Iterator[str]:
    """Yield a dotted name and all its prefixes, the empty one last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
