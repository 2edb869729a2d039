"""Compile update.c's kernels with a host's C++ compiler, with NVRTC and a driver around them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from hetero.device import Toolchain
from hetero.device.nvrtc import Target
from hetero.train.update.device_kernel import (
    GRADS,
    LAYOUTS,
    SOURCE,
    DeviceLibrary,
    KernelKind,
)
from tests.emulator.build import cache, locked
from tests.train.test_formulas import CASES, rule

HERE = Path(__file__).parent
# as NVRTC is told: every operation rounds by itself
FLAGS = "-std=c++17 -O1 -w -fPIC -fvisibility=hidden -ffp-contract=off"
CHECKED = "-fsanitize=alignment"  # fake.cpp is told: a device cannot read quads of any address
CAPABILITY, STREAM = 90, 4096 + 2**40  # a handle is a pointer


def rules() -> dict[str, int]:
    """Return the number of states that each rule of update.c keeps for an element."""
    found = {}
    for kind, flags in CASES:
        formula, group = rule(kind, flags)
        name = formula.coefficients(group, formula.scalars(group), False)[0].rule
        found[name] = len(formula.arrays(group))
    return found


def rows() -> Iterator[tuple[str, str]]:
    """Yield the line and the name of every kernel."""
    for (name, states), layout, grad in product(rules().items(), LAYOUTS, GRADS):
        kind = KernelKind(name, layout, grad, states)
        yield kind.line, kind.name


def text() -> str:
    """Return the translation unit: shim, update.c, its kernels, NVRTC and the driver."""
    lines = "\n".join(line for line, _ in rows())
    table = ", ".join(f'{{"{line}", "{name}", {name}}}' for line, name in rows())
    source = SOURCE.read_text(encoding="utf-8")
    parts = [(HERE / "host.h").read_text(), source, lines, f"#define KERNELS {table}"]
    quoted = " ".join(json.dumps(part + "\n") for part in source.removesuffix("\n").split("\n"))
    parts += [f"static const char TEXT[] = {quoted};", (HERE / "fake.cpp").read_text()]
    return "\n".join(parts)


def compiler() -> list[str]:
    """Return the command of $CXX, c++, g++ or clang++: the first that there is."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise RuntimeError("the kernels are compiled for the host, and there is no C++ compiler")


def compile_by(*words: str) -> None:
    done = subprocess.run([*compiler(), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


@functools.cache
def fake() -> ctypes.CDLL:
    """Return the library of kernels, NVRTC and driver, compiled once for its text."""
    source, command = text(), [*compiler(), *FLAGS.split(), CHECKED]
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True).stdout
    key = "\0".join([source, *command, version])
    target = cache() / hashlib.sha256(key.encode()).hexdigest()[:16] / "kernels.so"
    if not target.exists():
        with locked(target.parent):
            if not target.exists():
                build(source, target)
    library = ctypes.CDLL(str(target))
    library.fake_calls.restype = ctypes.c_char_p
    return library


def build(source: str, target: Path) -> None:
    """Compile; the name appears when the file is whole."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        unit, part, made = (Path(folder) / f"fake.{end}" for end in ("cpp", "o", "so"))
        unit.write_text(source, encoding="utf-8")
        compile_by(*FLAGS.split(), CHECKED, "-c", str(unit), "-o", str(part))
        compile_by("-shared", str(part), "-o", str(made))
        os.replace(made, target)


def calls() -> list[str]:
    """Return the calls since `toolchain`."""
    return str(fake().fake_calls().decode()).splitlines()


def fail(name: str, status: int) -> None:
    """Let every call of a name fail."""
    fake().fake_fail(name.encode(), status)


def toolchain(capability: int = CAPABILITY, device: int = 1) -> Toolchain:
    """Return a toolchain over the fakes, for a device of CPU tensors; nothing was called yet."""
    fake().fake_reset()
    return Toolchain(
        *(fake(), fake()),
        target=lambda place: Target(device, capability),
        stream=lambda index: STREAM + index,
    )


def library(capability: int = CAPABILITY, kind: str = "cpu") -> DeviceLibrary:
    """Return the kernels of that device, which updates tensors whose memory is RAM."""
    made = toolchain(capability)
    return DeviceLibrary(lambda: made, kind=kind)
