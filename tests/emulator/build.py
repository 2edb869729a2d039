"""Compile csrc/ into a library, once for these sources, this torch and this Python, and load it.

The library is in the user's cache: all checkouts and processes share it, and a file lock lets one
of them compile (about half a minute of one core). Without a C++ compiler that is an error, as it is
for a test that needs the compiled update kernel: nothing is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
NAME = "fake_cuda_ext"
FLAGS = ("-std=c++20", "-w", "-DNDEBUG", "-fPIC")
OPTIMIZED = ("clocks.cpp", "memory.cpp")  # loops over lines; the others only call torch


def load() -> ModuleType:
    """Return the extension module; it is compiled first if that is due."""
    target = cache() / key() / f"{NAME}.so"
    if not target.exists():
        with locked(target.parent):
            if not target.exists():
                build(target)
    spec = importlib.util.spec_from_file_location(NAME, target)
    if spec is None or spec.loader is None:
        raise ImportError(f"{target} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero-emulator"


def key() -> str:
    """Return a name for what the library is made of."""
    parts = [torch.__version__, sys.version, shlex.join(FLAGS)]
    parts += [path.name + path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock file: processes that would build the same library wait."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiler() -> list[str]:
    """Return the command of $CXX, c++, g++ or clang++: the first that there is."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise RuntimeError(
        "the emulated CUDA device is compiled, and there is no C++ compiler: "
        "install g++ (or clang++), or name one in CXX"
    )


def build(target: Path) -> None:
    """Compile every source beside ``target``, and link them to it."""
    command = compiler()
    home, python = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    include = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include", f"-I{python}"]
    libraries = [f"-L{home}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{home}/lib"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for source in sorted(SOURCES.glob("*.cpp")):
            level = "-O2" if source.name in OPTIMIZED else "-O0"
            objects.append(f"{folder}/{source.stem}.o")
            run([*command, *FLAGS, level, *include, "-c", str(source), "-o", objects[-1]])
        made = f"{folder}/{target.name}"
        run([*command, "-shared", "-o", made, *objects, *libraries])
        os.replace(made, target)


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-4000:]}")
