"""The pages of the documentation as tests read them: their snippets, links and command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FRONT = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "hetero/README.md",
    "examples/README.md",
)
PAGES = (*FRONT, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
SIGNATURES = "docs/reference/api.md"  # its snippets are stubs
RANKS = (
    "docs/ranks.md",
    "docs/tensor-parallel.md",
    "docs/context-parallel.md",
    "docs/pipelines.md",
)  # whose snippets need several processes
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (prepared|compiled only: .+) -->\s*\Z")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
CODE = re.compile(r"`(hetero [^`]+)`")
CLASS = re.compile(r"\bhetero\.[A-Za-z_.]+")


class Snippet(NamedTuple):
    """A fenced block: where it is, its language, its text, and the comment before it."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def snippets(page: str, *languages: str) -> list[Snippet]:
    """Return the fenced blocks of a page in these languages; "" is one without any."""
    text = read(page)
    found = []
    for match in FENCE.finditer(text):
        mark = MARK.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Snippet(page, line, match[1], match[2], mark[1] if mark else ""))
    return [snippet for snippet in found if snippet.language in languages]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def links(page: str) -> list[str]:
    """Return the targets of a page's relative links."""
    text = FENCE.sub("", read(page))
    return [t for t in LINK.findall(text) if not re.match(r"[a-z]+:", t)]


def anchors(page: str) -> set[str]:
    """Return the names of a page's headings in links, as code hosts make them."""
    titles = HEADING.findall(FENCE.sub("", read(page)))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


class CommandLine(NamedTuple):
    """A command line of hetero, without the words before ``hetero``."""

    page: str
    words: list[str]
    is_whole: bool
    """Whether it is a line to type, and not a mention in a sentence."""


def command_lines(page: str) -> Iterator[CommandLine]:
    """Yield the command lines of hetero in a page's blocks and in its sentences."""
    for snippet in snippets(page, "bash", ""):
        for line in snippet.text.replace("\\\n", " ").splitlines():
            if "hetero" in line and snippet.language == "bash":
                yield from hetero_words(page, line, True)
    for mention in CODE.findall(FENCE.sub("", read(page))):
        yield from hetero_words(page, mention, False)


def hetero_words(page: str, line: str, is_whole: bool) -> Iterator[CommandLine]:
    words = [word for word in shlex.split(line, comments=True) if not word.startswith("[")]
    if "hetero" in words and (words[0] == "hetero" or words[words.index("hetero") - 1] == "-m"):
        yield CommandLine(page, words[words.index("hetero") + 1 :], is_whole)
