"""Write the reference pages from the sources: python docs/reference.py [--check]

``reference/settings.md`` is from the fields of `hetero.Config`, ``reference/cli.md`` from the
commands of click, ``reference/api.md`` from ``hetero.__all__``. Sources are read, torch is not
imported. With ``--check`` nothing is written; the exit status is 1 if a page is not up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import hetero
from hetero.cli import main as cli
from hetero.recipes.options import documented

DOCS = Path(__file__).resolve().parent
PACKAGE = Path(hetero.__file__).resolve().parent
MADE = "<!-- Written by `python docs/reference.py`; do not edit. -->"
SECTION = re.compile(r"(Args|Returns|Raises|Yields):\s*(.*)")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \w+)*): (.*)")
Definition = ast.FunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """Return the text of each page, by its path in docs/."""
    return {
        "reference/settings.md": settings_page(),
        "reference/cli.md": cli_page(),
        "reference/api.md": api_page(),
    }


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MADE, *parts]) + "\n"


def cell(text: str) -> str:
    """Return text as it may stand in a table."""
    return escaped(plain(" ".join(text.split()))).replace("|", "\\|")


def escaped(text: str) -> str:
    """Return text in which nothing outside of code is a tag, or emphasis."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"<|\*(?=\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def plain(text: str) -> str:
    """Return the text of a docstring as Markdown, in which code has one backtick."""
    return text.replace("``", "`")


# -- settings ------------------------------------------------------------------------------------


def settings_page() -> str:
    said = documented(hetero.Config)
    rows = [
        f"| `{f.name}` | `{cell(repr(f.default))}` | {cell(said[f.name])} |"
        for f in dataclasses.fields(hetero.Config)
    ]
    return page(
        "Settings",
        "Keywords of `hetero.prepare`, `hetero.plan`, `hetero.from_pretrained` and"
        " `hetero.enable`; fields of `hetero.Config`; keys of a TOML or YAML file for `config=`. On"
        " the [command line](cli.md) `nvme_bytes` is `--nvme-bytes`.",
        "A size is a number of bytes, or text in any case: `20GiB`, `20Gi` and `20G` are 20 x 2^30"
        " bytes (K, M, G and T alone are binary, as in docker's options), `20GB` is 20 x 10^9.",
        "\n".join(["| setting | default | what it says |", "|---|---|---|", *rows]),
    )


# -- command line --------------------------------------------------------------------------------


def cli_page() -> str:
    commands = [command_text(name, command) for name, command in sorted(cli.commands.items())]
    return page(
        "Command line",
        f"{plain(inspect.cleandoc(cli.help or ''))} Every command has `--help` and `--json`."
        " Without a console script, `python -m hetero` is the same.",
        *commands,
    )


def command_text(name: str, command: click.Command) -> str:
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option)]
    words = " ".join(["hetero", name, "[OPTIONS]", *map(argument_form, arguments)])
    rows = [f"| {option_form(option)} | {cell(option.help or '')} |" for option in options]
    table = "\n".join(["| option | what it says |", "|---|---|", *rows])
    return "\n\n".join([f"## hetero {name}", f"`{words}`", prose(command.help or ""), table])


def argument_form(argument: click.Argument) -> str:
    name = (argument.metavar or argument.name or "").upper()
    form = f"{name}..." if argument.nargs == -1 else name
    return form if argument.required else f"[{form}]"


def option_form(option: click.Option) -> str:
    """Return an option as it is written, with the values that it takes."""
    names = " ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    if isinstance(option.type, click.Choice):
        return f"{names} {', '.join(map(str, option.type.choices))}"
    return f"{names} {option.type.name.upper().split()[0]}"


# -- Python names --------------------------------------------------------------------------------


def api_page() -> str:
    names = sorted((name for name in hetero.__all__ if name != "__version__"), key=str.lower)
    found = {name: definition(name) for name in names}
    parts: list[str] = []
    for title in ("Functions", "Classes", "Errors"):
        own = {name: node for name, node in found.items() if kind_of(name, node) == title}
        parts += [f"## {title}", *(name_text(name, node) for name, node in own.items())]
    return page(
        "Python names",
        "All of `hetero.__all__`; what is not here is private and may change. Optimizers are in"
        " [`hetero.optim`](optimizers.md), all errors in [Troubleshooting]"
        "(../help/troubleshooting.md), integrations in their own pages. `hetero.__version__` is"
        " the version.",
        *parts,
    )


def kind_of(name: str, node: Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        return "Functions"
    return "Errors" if name.endswith("Error") else "Classes"


def definition(name: str) -> Definition:
    """Return the source of a public name: of an overloaded function, its last definition."""
    for module in (hetero._LAZY.get(name), "hetero.config", "hetero.errors"):
        body = ast.parse(source_of(module)).body if module else []
        named = [n for n in body if isinstance(n, Definition) and n.name == name]
        if named:
            return named[-1]
    raise LookupError(f"hetero.{name} is neither a function nor a class")


def source_of(module: str) -> str:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


def name_text(name: str, node: Definition) -> str:
    if isinstance(node, ast.FunctionDef):
        code = f"```python\n{signature(node)}\n```"
        return "\n\n".join([f"### hetero.{name}", code, prose(ast.get_docstring(node) or "")])
    said = prose(ast.get_docstring(node) or "")
    rows = [f"| {first} | {second} |" for first, second in members(node)]
    table = "\n".join(["| member | what it is |", "|---|---|", *rows]) if rows else ""
    if name == "Config":
        table = "Its fields are the [settings](settings.md)."
    return "\n\n".join(part for part in (f"### hetero.{name}", said, table) if part)


def signature(node: ast.FunctionDef) -> str:
    """Return the first lines of a function as a stub, one argument a line where they are long."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    arguments = [*each_argument(node.args)]
    line = f"def {node.name}({', '.join(arguments)}){result}: ..."
    if len(line) <= 100:
        return line
    body = ",\n    ".join(arguments)
    return f"def {node.name}(\n    {body},\n){result}: ..."


def each_argument(arguments: ast.arguments) -> Iterator[str]:
    """Yield each argument of a function as it is written."""
    plain_ones = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain_ones) - len(arguments.defaults)) + [*arguments.defaults]
    yield from map(argument_text, plain_ones, defaults)
    if arguments.vararg:
        yield f"*{argument_text(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    yield from map(argument_text, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{argument_text(arguments.kwarg, None)}"


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    said = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    if default is None:
        return f"{argument.arg}{said}"
    value = ast.unparse(default)
    value = f'"{value[1:-1]}"' if value.startswith("'") else value
    return f"{argument.arg}{said} = {value}" if said else f"{argument.arg}={value}"


def members(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield the public fields, properties and methods of a class that say what they are."""
    for here, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name):
            said = getattr(getattr(after, "value", None), "value", None)
            form, text = f"`{here.target.id}`", said if isinstance(said, str) else ""
        elif isinstance(here, ast.FunctionDef) and (text := ast.get_docstring(here) or ""):
            form = member_form(here)
        else:
            continue
        if not form.startswith("`_"):
            yield form, cell(text.split("\n\n")[0])


def member_form(node: ast.FunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        return f"`{node.name}`"
    names = [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
    return f"`{node.name}({', '.join(name for name in names if name not in ('self', 'cls'))})`"


# -- docstrings ----------------------------------------------------------------------------------


def prose(text: str) -> str:
    """Return a docstring, or the help of a command, as Markdown: sections become lists."""
    text, _, example = inspect.cleandoc(text.replace("\b", "")).partition("\nExample:\n")
    paragraphs = plain(text.rstrip()).split("\n\n")
    shown = [escaped(section(paragraph)) for paragraph in paragraphs]
    if example:
        shown.append(f"```pycon\n{inspect.cleandoc(chr(10) + example)}\n```")
    return "\n\n".join(shown)


def section(paragraph: str) -> str:
    """Return a paragraph; what begins with ``Args:`` and the like becomes a list of its entries."""
    first, _, rest = paragraph.partition("\n")
    match = SECTION.fullmatch(first)
    if match is None:
        return paragraph
    title, inline = match.groups()
    entries = list(listed([inline] if inline else [], inspect.cleandoc("\n" + rest).splitlines()))
    return "\n".join([f"{title}:", "", *entries])


def listed(before: list[str], lines: list[str]) -> Iterator[str]:
    """Yield one item of a list for each entry; lines that are indented go on with it."""
    items = [*before]
    for line in lines:
        if items and (line.startswith(" ") or not ENTRY.match(line)):
            items[-1] += f" {line.strip()}"
        else:
            items.append(line)
    for item in items:
        match = ENTRY.match(item)
        yield f"* `{match[1]}`: {match[2]}" if match else f"* {item}"


def main(arguments: list[str]) -> int:
    """Write the pages that are not up to date, or name them."""
    stale = {
        name: text
        for name, text in pages().items()
        if not (DOCS / name).exists() or (DOCS / name).read_text(encoding="utf-8") != text
    }
    for name, text in stale.items():
        print(f"docs/{name}")
        if "--check" not in arguments:
            (DOCS / name).write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
