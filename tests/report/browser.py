"""A headless Chromium, driven over a pipe by the DevTools protocol: no network, no packages."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chrome", "google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run"
PATIENCE_SECONDS = 60
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowDown": 40, "ArrowRight": 39, "ArrowUp": 38}


def find(names: tuple[str, ...] = NAMES) -> str | None:
    """Return the path of the first browser that starts, or None."""
    return next((path for path in map(shutil.which, names) if path and starts(path)), None)


def starts(path: str) -> bool:
    """Whether a program tells its version: Ubuntu has one that says how to install a browser."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, timeout=PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.returncode == 0


CHROMIUM = find()


class Browser:
    """One page, and all that it said."""

    def __init__(self, to_chromium: int, from_chromium: int) -> None:
        self._out, self._in = to_chromium, from_chromium
        self._buffer = b""
        self._count = 0
        self._session: str | None = None
        self.said: list[dict[str, Any]] = []
        """Events of the protocol, in order."""

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a command."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.said.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_SECONDS)
            assert ready, "the browser says nothing"
            got = os.read(self._in, 1 << 20)
            assert got, "the browser ended"
            self._buffer += got
        first, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(first))

    def attach(self, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a page that tells of its requests, errors and violations."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        answer = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.look(width, height, dark)

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a window of a size, on a system that is light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Go to a file and wait until its script says that it is drawn."""
        self.load(path)
        self._wait("document.body.dataset.ready == 'yes'")

    def load(self, path: Path) -> None:
        """Go to a file, with or without a script, and wait until all of it is there."""
        url = path.resolve().as_uri()
        self.send("Page.navigate", url=url)
        self._wait(f"location.href == {json.dumps(url)} && document.readyState == 'complete'")

    def _wait(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while self.ask(condition) is not True:
            assert time.monotonic() < until, f"the page was never drawn: {self.complaints()}"
            time.sleep(0.05)

    def ask(self, expression: str) -> Any:
        """Return what an expression is in the page, or what its promise becomes."""
        how = {"returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", expression=expression, **how)
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS.get(key, ord(key[0]))}
        down = {"type": "keyDown" if text else "rawKeyDown", **({"text": text} if text else {})}
        self.send("Input.dispatchKeyEvent", **down, **code)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def close(self) -> None:
        """End the browser."""
        self._session = None
        self.send("Browser.close")

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        asked = (e for e in self.said if e["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def complaints(self) -> list[str]:
        """Return errors of the page: exceptions, violations of its policy, console errors."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(e["params"])[:600] for e in self.said if e["method"] in kinds]


@contextmanager
def browser(folder: Path, **page: Any) -> Iterator[Browser]:
    """Yield a page of a Chromium of its own, that ends with the block."""
    child_in, to_chromium = os.pipe()
    from_chromium, child_out = os.pipe()
    flags = f"{FLAGS} --user-data-dir={shlex.quote(str(folder / 'chromium'))}"
    command = f"exec {CHROMIUM} {flags} 3<&{child_in} 4>&{child_out}"
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        driven = Browser(to_chromium, from_chromium)
        driven.attach(**page)
        yield driven
        driven.close()
        process.wait(PATIENCE_SECONDS)
    finally:
        os.close(to_chromium)
        os.close(from_chromium)
        process.terminate()
        process.wait()
