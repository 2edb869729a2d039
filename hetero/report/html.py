"""The report as one HTML file that needs no network, and no server (floor 4)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.resources import files

from hetero.report.advice import Advice
from hetero.report.measure import Measured, Summary
from hetero.report.page import View
from hetero.report.series import series_of
from hetero.report.views import Beside, views
from hetero.report.words import LIGHT, part_colour, shades
from hetero.version import __version__

PHASES = {"forward": "#7a8b99", "backward": "#cc79a7", "step": "#e6b800"}
STAY, AHEAD, MISS = "#8fb8d8", "#0072b2", "#d55e00"
DARK = {"part-compute_forward": "#9aa4af", "part-compute_backward": "#8a949f", "stay": "#2f5d80",
        "ahead": "#56b4e9", "miss": "#f07f33"}  # fmt: skip


def render(measured: Measured, summary: Summary, advice: tuple[Advice, ...], beside: Beside) -> str:
    """Return the whole page."""
    style = "\n".join((asset("uplot/uPlot.min.css"), asset("report.css"), palette(measured)))
    script = "\n".join((licence(), asset("uplot/uPlot.iife.min.js"), asset("report.js")))
    shown = views(measured, summary, advice, beside)
    meta = measured.meta
    title = f"hetero report: {meta.model or 'a run'}"
    size = f"{meta.n_params:,} parameters" if meta.n_params else ""
    about = (size, meta.device, meta.mode, meta.precision, meta.kind)
    return PAGE.format(
        title=escape(title),
        policy=policy(script, style),
        style=style,
        heading=escape(meta.model or "a run"),
        about=escape(", ".join(part for part in about if part)),
        links="".join(f'<a href="#{view.name}">{escape(short(view))}</a>' for view in shown),
        zoom=ZOOM if measured.timelines else "",
        verdict=shown[0].body,
        sections="".join(section(view) for view in shown[1:]),
        version=escape(__version__),
        licence=escape(asset("uplot/LICENSE")),
        data=embedded(measured),
        script=script,
    )


def section(view: View) -> str:
    return (
        f'<section id="{view.name}" aria-labelledby="{view.name}-title">'
        f'<h2 id="{view.name}-title">{escape(view.title)}</h2>{view.body}</section>'
    )


NAMES = {"timelines": "timelines", "step": "step time", "whatif": "what if"}


def short(view: View) -> str:
    return NAMES.get(view.name, view.name)


def embedded(measured: Measured) -> str:
    """Return the data as JSON that cannot end the script element it stands in."""
    return json.dumps(series_of(measured), separators=(",", ":")).replace("<", "\\u003c")


# -- one script, one style -----------------------------------------------------------------------


@cache
def asset(name: str) -> str:
    """Return a file of the package's assets."""
    return (files("hetero.report") / "assets" / name).read_text(encoding="utf-8")


def licence() -> str:
    return f"/*! uPlot 1.6.32\n{asset('uplot/LICENSE')}\n*/"


def policy(script: str, style: str) -> str:
    """Return a policy that lets this script and this style in, and nothing else."""
    return (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def digest(content: str) -> str:
    """Return the hash by which a policy names an element with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def palette(measured: Measured) -> str:
    """Return the colours of tiers, categories, parts and phases as variables."""
    light = "".join(f"--{name}:{colour};" for name, colour in colours(measured))
    dark = "".join(f"--{name}:{colour};" for name, colour in DARK.items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def colours(measured: Measured) -> Iterator[tuple[str, str]]:
    """Yield (name, colour) of everything that has one."""
    yield from ((tier, LIGHT.get(tier, LIGHT["HBM"])) for tier in (*LIGHT, *measured.timelines))
    yield from ((f"phase-{name}", colour) for name, colour in PHASES.items())
    yield from (("stay", STAY), ("ahead", AHEAD), ("miss", MISS))
    yield from ((f"part-{part}", part_colour(part)) for part in measured.parts)
    for tier, line in measured.timelines.items():
        shown = sum(any(column) for column in line.columns)
        for i, colour in enumerate(shades(tier, shown)):
            yield f"cat-{tier}-{i}", colour


ZOOM = (
    '<span class="zoom" role="group" aria-label="Time shown by all charts">'
    '<span id="range" class="soft"></span>'
    '<button type="button" data-zoom="before" aria-label="the step before">&lsaquo; step</button>'
    '<button type="button" data-zoom="after" aria-label="the next step">step &rsaquo;</button>'
    '<button type="button" data-zoom="typical">typical step</button>'
    '<button type="button" data-zoom="all">whole run</button>'
    '<button type="button" data-zoom="closer" aria-label="zoom in">+</button>'
    '<button type="button" data-zoom="wider" aria-label="zoom out">&minus;</button></span>'
)

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav aria-label="Views"><div>{links}{zoom}</div></nav>
<header id="verdict"><h1>{heading} <small>{about}</small></h1>{verdict}</header>
<main>{sections}</main>
<footer><p>Made by hetero {version}; it needs no network and sends nothing.</p>
<details><summary>Licence of uPlot 1.6.32, which draws the timelines</summary>
<p>{licence}</p></details></footer>
<div class="tip" role="tooltip" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
