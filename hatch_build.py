"""Build hook: a wheel carries profiles/, and hetero/csrc/update.c compiled into hetero/_update.so.

Without a C compiler, or where compiling fails, the package is pure Python and updates run as
torch's operations, with the same bits. The library knows nothing of Python's version: its wheel is
py3-none-<platform>, or py3-none-any where there is no compiler or HETERO_PURE_WHEEL=1 asks for it.

Why not a pure wheel whose kernel is compiled on first need: the first step of a run would wait for
a compiler, and the process would load a library from a cache that others may be able to write to.
Today every wheel is built where it runs, from a clone, so that its platform's own tag is right; a
wheel for an index is the pure one, or one that auditwheel has given a manylinux tag.

``python hatch_build.py`` compiles in place, as an editable install does.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "hetero" / "csrc" / "update.c"
LIBRARY = ROOT / "hetero" / "_update.so"
PROFILES = ROOT / "profiles"
# Every operation rounds by itself: no contraction, no fast-math. errno and trap flags, which nobody
# reads here, would keep square roots and selections out of vector registers; a loop of its own for
# every flag gains nothing and takes twice as long to compile.
FLAGS = (
    "-std=c11 -O3 -fPIC -shared -ffp-contract=off -fno-math-errno -fno-trapping-math"
    " -fno-unswitch-loops"
)


class BuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the package (editable) or into a wheel of this platform."""
        if version == "editable":
            compile_library(LIBRARY)  # profiles are found in the checkout
            return
        build_data["force_include"][str(PROFILES)] = "hetero/profiles"
        self._folder = tempfile.mkdtemp()
        library = Path(self._folder) / LIBRARY.name
        pure = os.environ.get("HETERO_PURE_WHEEL", "") not in ("", "0")
        if not pure and compile_library(library):
            build_data["force_include"][str(library)] = f"hetero/{LIBRARY.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._folder, ignore_errors=True)


def compiler() -> list[str] | None:
    """Return the command of $CC, cc, gcc or clang: the first that there is."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return None


def compile_library(target: Path) -> bool:
    """Compile for every instruction set that the loader can choose from, else for the plain one.

    Returns whether ``target`` is there; one line on stderr says why it is not.
    """
    target.unlink(missing_ok=True)
    command = compiler()
    problem = "no C compiler"
    for extra in ([], ["-DHETERO_PLAIN"]) if command else ():
        problem = _compile([*command, *extra], target)
        if not problem:
            return True
    print(f"hetero: no compiled update kernel ({problem}); torch will do its work", file=sys.stderr)
    return False


def platform_tag() -> str:
    """Return this platform's own tag: the library is linked to this machine's libc."""
    tags = (tag.platform for tag in sys_tags())
    return next(tag for tag in tags if "manylinux" not in tag and "musllinux" not in tag)


def _compile(command: list[str], target: Path) -> str:
    """Return what went wrong, in one line, or ''. A library that does not load is removed."""
    crc = zlib.crc32(SOURCE.read_bytes())
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        words = [*command, *FLAGS.split(), f"-DHETERO_SOURCE={crc}u", str(SOURCE)]
        try:
            subprocess.run(
                [*words, "-o", str(made), "-lm"], check=True, capture_output=True, timeout=120
            )
            ctypes.CDLL(str(made)).hetero_abi()
        except subprocess.CalledProcessError as error:
            return _first_error(error.stderr.decode(errors="replace"))
        except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
            return str(error)
        os.replace(made, target)
    return ""


def _first_error(log: str) -> str:
    lines = log.strip().splitlines() or ["the compiler failed"]
    return next((line for line in lines if "error" in line), lines[0])


if __name__ == "__main__":
    sys.exit(not compile_library(LIBRARY))
