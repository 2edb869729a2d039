"""The pictures of a report that the documentation shows, taken in a browser.

`python -m tests.report.pictures RUN [FOLDER]` writes the page of a recorded run and takes one
picture per entry of `LOOKS`, in `docs/images` or a folder. A run worth showing, in a minute or two:

    hetero train --width 192 --layers 8 --heads 4 --seq 128 --steps 16 --hbm 12MiB --host 24MiB
    python -m tests.report.pictures runs/1/run
"""

from __future__ import annotations

import base64
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hetero.report.make import report

from .browser import Browser, browser

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


class Look(NamedTuple):
    """A window, and the part of the page that is at its top."""

    width: int
    height: int
    is_dark: bool
    section: str = ""

    @property
    def name(self) -> str:
        return f"report-{self.width}-{'dark' if self.is_dark else 'light'}.png"


LOOKS = (
    Look(1280, 1000, is_dark=False),
    Look(1280, 1000, is_dark=True, section="residency"),
    Look(400, 900, is_dark=False),
    Look(400, 900, is_dark=True, section="peak"),
)


def taken(page: Browser, path: Path, look: Look) -> bytes:
    """Return the picture of a page as PNG."""
    page.look(look.width, look.height, look.is_dark)
    page.send("Emulation.setScrollbarsHidden", hidden=True)
    page.open(path)
    page.ask(f"document.getElementById({look.section!r})?.scrollIntoView()")
    page.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return base64.b64decode(page.send("Page.captureScreenshot")["data"])


def pictures(run: Path, looks: tuple[Look, ...] = LOOKS) -> Iterator[tuple[Look, bytes]]:
    """Yield each look at a recorded run with its picture."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as page:
        path = Path(folder) / "report.html"
        report(run, path)
        for look in looks:
            yield look, taken(page, path, look)


def main(run: str, folder: str = str(IMAGES)) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for look, picture in pictures(Path(run)):
        (Path(folder) / look.name).write_bytes(picture)
        print(Path(folder) / look.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
