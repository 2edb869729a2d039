"""Links lead somewhere, and pages are found."""

from __future__ import annotations

import os
import re

import pytest

from tests.docs.pages import FRONT, PAGES, ROOT, anchors, links, read

WALLS = re.compile(r"(?<![\w.~])/(?:home|root|work|tmp|usr|opt|Users)/")
HOST = re.compile(r"https?://([^/\s)>`\"']+)|\b((?:[a-z0-9-]+\.)+(?:org|com|io|net|dev))\b", re.I)
NAMED = {"github.com", "ui.perfetto.dev"}
"""Hosts that pages may name."""


def broken(page: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    found = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        missing = path and not (ROOT / file).exists()
        if missing or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_of_a_page_leads_somewhere(page: str) -> None:
    assert broken(page) == []


def test_a_link_to_no_page_and_one_to_no_heading_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "# A page\n\n[a](docs/none.md) [b](README.md#no-heading) [c](#a-page) [d](README.md)"
    monkeypatch.setattr(
        "tests.docs.pages.read", lambda page: text if page == "x.md" else read(page)
    )
    assert broken("x.md") == ["docs/none.md", "README.md#no-heading"]


def test_every_page_is_reached_from_the_first_one() -> None:
    seen, todo = set(FRONT), ["README.md", "docs/index.md"]
    while todo:
        page = todo.pop()
        seen.add(page)
        here = (t.partition("#")[0] for t in links(page))
        found = {os.path.normpath(os.path.join(os.path.dirname(page), t)) for t in here if t}
        todo += sorted((found & set(PAGES)) - seen)
    assert set(PAGES) - seen == set()


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert read("README.md").count("\n") <= 200


def test_the_readme_says_at_its_top_which_gpus_have_run_it() -> None:
    top = "\n".join(read("README.md").splitlines()[:12])
    assert "One GPU has run it, for minutes" in top and "profiles/measured/" in top


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_no_path_of_one_machine_and_few_hosts(page: str) -> None:
    assert WALLS.findall(read(page)) == []
    assert hosts(read(page)) <= NAMED


def hosts(text: str) -> set[str]:
    return {(in_link or plain).lower() for in_link, plain in HOST.findall(text)}


def test_a_host_is_found_with_and_without_a_scheme() -> None:
    assert hosts("see https://a.example/x, and b.c.org") == {"a.example", "b.c.org"}
