"""The report as one HTML file that needs neither network nor server (floor 4)."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment
from markupsafe import Markup

from hetero.config import SIZES
from hetero.report import views, words
from hetero.report.advice import Advice, headline, verdict
from hetero.report.measure import NS, Measured, Summary, figures
from hetero.report.peaks import unit_name
from hetero.report.run import Meta
from hetero.report.series import series_of
from hetero.report.still import paint, still_curve, still_lanes, still_levels, still_stays, top_of
from hetero.report.svg import WIDE, fits, placed, plane_height
from hetero.report.templating import templates
from hetero.report.traffic import BINS
from hetero.report.values import curves
from hetero.report.views import Sidecar
from hetero.report.words import (
    COPY_LANES,
    LIGHT,
    format_rate,
    format_seconds,
    format_share,
    part_colour,
    part_label,
    shades,
    three,
    tier_label,
)
from hetero.types import format_bytes
from hetero.version import __version__

PHASES = {"forward": "#7a8b99", "backward": "#cc79a7", "step": "#e6b800"}
STAY, AHEAD, MISS = "#8fb8d8", "#0072b2", "#d55e00"
DARK = {"part-compute_forward": "#9aa4af", "part-compute_backward": "#8a949f", "stay": "#2f5d80",
        "ahead": "#56b4e9", "miss": "#f07f33"}  # fmt: skip


class View(NamedTuple):
    """A section of the page; its template has the same name."""

    name: str
    """Name of its anchor."""
    title: str
    short: str


VIEWS = (
    View("verdict", "Verdict", "verdict"),
    View("timelines", "What was where, when", "timelines"),
    View("residency", "Who stayed on HBM, and why", "residency"),
    View("lanes", "How busy the lanes were", "lanes"),
    View("step", "Where a step's time went", "step time"),
    View("peak", "Whose bytes the peak was", "peak"),
    View("traffic", "What moved, and what had to", "traffic"),
    View("whatif", "What would fit", "what if"),
    View("predicted", "Predicted and measured", "predicted"),
    View("provenance", "Where these figures come from", "provenance"),
)
LONGEST = 400  # rows of a table


def has(view: View, sidecar: Sidecar) -> bool:
    """Whether there is anything to show in a view: plans are next to few runs."""
    there = {"whatif": sidecar.whatif, "predicted": sidecar.predicted}
    return bool(there.get(view.name, True))


def render(
    measured: Measured, summary: Summary, advice: tuple[Advice, ...], sidecar: Sidecar
) -> str:
    style = "\n".join((asset("uplot/uPlot.min.css"), asset("report.css"), palette(measured)))
    script = "\n".join((licence(), asset("uplot/uPlot.iife.min.js"), asset("report.js")))
    meta = measured.meta
    size = f"{meta.n_params:,} parameters" if meta.n_params else ""
    about = (size, meta.device, meta.mode, meta.precision, meta.kind, meta.program)
    return (
        pages()
        .get_template("page.html")
        .render(
            measured=measured,
            summary=summary,
            advice=advice,
            sidecar=sidecar,
            guesses=figures(sidecar.predicted),
            heading=meta.model or "a run",
            found=summary.figures(),
            shown=[view for view in VIEWS[1:] if has(view, sidecar)],
            about=", ".join(part for part in about if part),
            policy=policy(script, style),
            style=Markup(style),
            script=Markup(script),
            data=Markup(embedded(measured)),
            licence=asset("uplot/LICENSE"),
            version=__version__,
        )
    )


@cache
def pages() -> Environment:
    """Return the templates with their words, filters and rows."""
    made = templates("hetero.report")
    made.filters.update(
        size=size,
        timed=timed,
        bytes=format_bytes,
        seconds=format_seconds,
        share=format_share,
        rate=format_rate,
        three=three,
        per_cent=lambda share: f"{100 * share:.3f}%",
        numeric=lambda head: f"#{head}",
        for_rank=lambda rank: f"#for {rank}",
        part_label=part_label,
        glued=glued,
    )
    made.globals.update(
        {
            each.__name__: each
            for each in (*ROWS, headline, verdict, unit_name, tier_label, part_label)
        },
        **WORDS,
        VIEWS=VIEWS,
        LONGEST=LONGEST,
    )
    return made


def size(n_bytes: float | None) -> Markup | str:
    """Return a size for people; pointing at it shows its bytes."""
    if n_bytes is None:
        return "no limit"
    whole = round(n_bytes)
    return DATA.format(whole, Markup(' title="{:,} bytes"').format(whole), format_bytes(n_bytes))


def glued(text: str) -> str:
    """Return a sentence whose numbers stay on one line with their units."""
    return re.sub(r"(?<=\d) (?=\S)", "\N{NO-BREAK SPACE}", text)


def timed(seconds: float) -> Markup:
    """Return a time for people with its seconds."""
    return DATA.format(f"{seconds:.9f}", "", format_seconds(seconds))


DATA = Markup('<data value="{}"{}>{}</data>')


def figure(key: str, value: float) -> Markup | str:
    """Return a figure of a summary in the unit that its key names."""
    if key.endswith("_bytes"):
        return size(value)
    if key.endswith("_seconds"):
        return timed(value)
    return format_rate(value) if key.endswith("per_second") else format_share(value)


def keyed(found: Mapping[str, float], key: str) -> Markup:
    """Return a figure of a summary for people, with its key and value for programs."""
    return KEYED.format(key, found[key], said_of(key, found[key]))


def said_of(key: str, value: float) -> str:
    """Return a figure for people, in the unit that its key names."""
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_seconds"):
        return format_seconds(value)
    if key.endswith("bytes_per_second"):
        return format_rate(value)
    return f"{value:,.0f}" if value >= 100 else three(value)


KEYED = Markup('<data data-key="{}" value="{}">{}</data>')


def settings_of(meta: Meta) -> str:
    """Return a run's settings as people write them, with sizes in units."""
    return "; ".join(f"{name}={setting(name, value)}" for name, value in meta.settings.items())


def setting(name: str, value: object) -> str:
    if isinstance(value, int) and name in (*SIZES, "chunk_bytes"):
        return format_bytes(value)
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def listed(values: Mapping[str, object], form: str) -> str:
    return ", ".join(form.format(name, value) for name, value in values.items())


ROWS: tuple[Callable[..., Any], ...] = (
    *(views.allocated, views.by_place, views.by_step, views.charged, views.comings),
    *(views.compared, views.doubts),
    *(views.filled, views.leaves_of, views.off, views.parts_of, views.peak_colours),
    *(views.peak_keys, views.refetches, views.step_parts, placed, plane_height, fits, figure),
    *(
        keyed,
        listed,
        settings_of,
        paint,
        still_curve,
        still_lanes,
        still_levels,
        still_stays,
        top_of,
        curves,
    ),
)
WORDS = {
    "BINS": BINS,
    "CATEGORY_NOTES": words.CATEGORY_NOTES,
    "LANE_LABELS": words.LANE_LABELS,
    "NO_LINE": views.NO_LINE,
    "NO_MODULE": views.NO_MODULE,
    "NO_STEPS": views.NO_STEPS,
    "NS": NS,
    "PART_NOTES": words.PART_NOTES,
    "REASONS": words.REASONS,
    "UNATTRIBUTED": words.UNATTRIBUTED,
    "WIDE": WIDE,
    "zip": zip,
    "WITHOUT_WHY": words.WITHOUT_WHY,
}


def embedded(measured: Measured) -> str:
    """Return the data as JSON that cannot end the script element around it."""
    return json.dumps(series_of(measured), separators=(",", ":")).replace("<", "\\u003c")


# -- one script, one style -----------------------------------------------------------------------


@cache
def asset(name: str) -> str:
    return (files("hetero.report") / "assets" / name).read_text(encoding="utf-8")


def licence() -> str:
    return f"/*! uPlot 1.6.32\n{asset('uplot/LICENSE')}\n*/"


def policy(script: str, style: str) -> str:
    """Return a policy that allows this script and this style, and nothing else."""
    return (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}';"
        " img-src data:; base-uri 'none'; form-action 'none'"
    )


def digest(content: str) -> str:
    """Return the hash by which a policy allows an element with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def palette(measured: Measured) -> str:
    """Return the colours of tiers, categories, parts and phases as variables."""
    light = "".join(f"--{name}:{colour};" for name, colour in colours(measured))
    dark = "".join(f"--{name}:{colour};" for name, colour in DARK.items())
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def colours(measured: Measured) -> Iterator[tuple[str, str]]:
    """Yield (name, colour) of everything that has a colour."""
    yield from ((tier, LIGHT.get(tier, LIGHT["HBM"])) for tier in (*LIGHT, *measured.timelines))
    yield from ((f"phase-{name}", colour) for name, colour in PHASES.items())
    yield from ((f"lane-{lane}", part_colour(f"wait_{lane}")) for lane in COPY_LANES)
    yield from (("stay", STAY), ("ahead", AHEAD), ("miss", MISS))
    yield from ((f"part-{part}", part_colour(part)) for part in measured.parts)
    for tier, line in measured.timelines.items():
        shown = sum(any(column) for column in line.columns)
        for i, colour in enumerate(shades(tier, shown)):
            yield f"cat-{tier}-{i}", colour
