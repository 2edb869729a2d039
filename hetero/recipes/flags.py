"""Options of the command line: made from fields, and separated from a script's (no torch)."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import click

from hetero.config import ACTIVATIONS, DEVICES, FROZEN, PRECISIONS, Config
from hetero.plan.pipeline import SCHEDULES
from hetero.recipes.guide import DeviceName, GroupedCommand, SizeType
from hetero.recipes.options import SETTINGS, FieldForm, TrainOptions, documented, forms

SPOKEN = (*forms(Config), *forms(TrainOptions), "nvme_burnin")  # names that errors may use
SIZE = SizeType()
POSITIVE = click.IntRange(min=1)
DEVICE = DeviceName(DEVICES)
PRECISION = click.Choice(PRECISIONS)
SCHEDULE = click.Choice(SCHEDULES)
KINDS = {  # of options whose field has too general a type
    "device": DEVICE,
    "precision": PRECISION,
    "activations": click.Choice(ACTIVATIONS),
    "frozen": click.Choice(FROZEN),
    **dict.fromkeys(("hbm", "host", "nvme_bytes", "chunk_bytes", "pinned"), SIZE),
}


def option(*names: Any) -> Callable[..., Any]:
    """Return an option, None if not given: names, type, text, and maybe the default to show."""
    first = next(i for i, part in enumerate(names) if not str(part).startswith("--"))
    kind, text, *rest = names[first:]
    said = f"{text}  [default: {rest[0]}]" if rest else text
    return click.option(*names[:first], type=kind, default=None, help=said)


def unit_options(command: Any) -> Any:
    """Give a command the options of how units compute."""
    leave = option("--activations", KINDS["activations"], "What units leave for backward.", "auto")
    cut = option("--micro-batch", POSITIVE, "Samples that a unit takes at once.", "all")
    return leave(cut(command))


def fields_as_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command an option for every field of `TrainOptions` and every setting of `Config`."""
    for cls, names in ((Config, SETTINGS), (TrainOptions, tuple(forms(TrainOptions)))):
        said = documented(cls)
        for field in reversed([f for f in dataclasses.fields(cls) if f.name in names]):
            command = field_option(field, forms(cls)[field.name], said[field.name])(command)
    return command


def field_option(field: dataclasses.Field[Any], form: FieldForm, text: str) -> Callable[..., Any]:
    """Return the option of a field, with the field's type and default."""
    flag = f"--{field.name.replace('_', '-')}"
    if form.kind is bool:
        return click.option(f"{flag}/--no{flag[1:]}", default=None, help=text)
    said = isinstance(field.default, (int, float, str))
    text = f"{text}  [default: {field.default}]" if said else text
    if form.is_list:
        return click.option(flag, multiple=True, help=text)
    kind = form.kind if form.kind in (int, float) else str
    own = click.Choice(form.choices) if form.choices else kind
    return click.option(flag, type=KINDS.get(field.name, own), default=None, help=text)


class RunCommand(GroupedCommand):
    """Options of hetero precede SCRIPT; those of `AFTER` may also follow it directly."""

    AFTER = (
        *("--hbm", "--host", "--nvme", "--nvme-bytes"),
        *("--activations", "--micro-batch", "--chunk-bytes"),
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move hetero's options before SCRIPT; everything else after it belongs to the script."""
        values = {name: not option.is_flag for option in self._options() for name in option.opts}
        at = taken(args, values)
        after = at + 1 + taken(args[at + 1 :], dict.fromkeys(self.AFTER, True))
        rest = args[after:]
        if rest[:1] == ["--"]:  # it marks the begin of the script's own
            rest = rest[1:]
        else:
            tell_of_late(word for word in rest if word.partition("=")[0] in self.AFTER)
        return super().parse_args(ctx, [*args[at + 1 : after], *args[: at + 1], *rest])

    def _options(self) -> Iterator[click.Option]:
        return (param for param in self.params if isinstance(param, click.Option))


def tell_of_late(words: Iterable[str]) -> None:
    """Warn about words passed to the script that look like budgets."""
    for word in words:
        click.echo(
            f"{word} comes after the script's own arguments, so it was passed to the script. Put"
            " hetero's options before the script's name, or -- after it to silence this",
            err=True,
        )


def taken(args: list[str], values: Mapping[str, bool]) -> int:
    """Return how many leading words are options; ``values`` tells which of them take a value."""
    count = 0
    while count < len(args):
        name, equals, _ = args[count].partition("=")
        if name not in values:
            break
        count += 1 if equals or not values[name] else 2
    return min(count, len(args))


SETTING = re.compile(
    r"""(?<![\w.(-])(\w+)=(?:(['"])([^'"\s]*)\2|(-?\d[\w.]*|True|False|None)(?!\w))?"""
)
"""A setting in a sentence, as hbm=, hbm='20GiB' or lr=0.1; one in a call stays Python's."""


def as_flags(text: str, command: click.Command) -> str:
    """Return a text whose settings of Python, as hbm='20GiB', are options of a command."""
    known = {name: flag for name, flag in flags_of(command) if name in SPOKEN}

    def flag(match: re.Match[str]) -> str:
        if match[1] not in known:
            return match[0]
        value = match[3] if match[2] else match[4]
        if value in (None, "True"):  # what follows hbm= in a sentence, or is a value of no number
            return known[match[1]] + " " * text[match.end() :].startswith(("{", "[", "("))
        return f"{known[match[1]]} {shlex.quote(value)}"

    return SETTING.sub(flag, text)


def flags_of(command: click.Command) -> Iterator[tuple[str, str]]:
    """Yield each option by the name that it has in Python."""
    for param in command.params:
        flags = param.opts if isinstance(param, click.Option) else []
        yield from ((flag.lstrip("-").replace("-", "_"), flag) for flag in flags)
