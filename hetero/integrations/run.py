"""A user's script, run under hetero without an edit (floor 4).

[Note: at the constructor]  While a script runs, the constructors of accelerate's `Accelerator` and
of Transformers' `Trainer` build hetero's. The classes stay the same objects, so the import path in
a script or library does not matter, and subclasses follow. A library is patched when the script has
imported it, and never imported without need: the first constructor imports hetero's module for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero.config import Config


class Session:
    """The run of a script: settings for all that it builds, and counts of it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.trainers: list[str] = []
        """Class names of the Trainers built, in order."""
        self.accelerators = 0

    def run(self, target: str, args: Sequence[str], *, module: bool = False) -> None:
        """Run a script, or a module by its name, as ``python`` would; raises what it raises."""
        with self.acting(), started_as(target, args, module=module):
            if module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(target, run_name="__main__")

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let the two constructors build hetero's; see [Note: at the constructor]."""
        with ExitStack() as undo:
            acts = {
                "accelerate.accelerator": self._adopt_accelerators,
                "transformers.trainer": self._adopt_trainers,
            }
            watch = Imports({name: functools.partial(act, undo) for name, act in acts.items()})
            sys.meta_path.insert(0, watch)
            undo.callback(sys.meta_path.remove, watch)
            for name in acts.keys() & sys.modules.keys():
                acts[name](undo, sys.modules[name])
            yield

    def _adopt_accelerators(self, undo: ExitStack, module: ModuleType) -> None:
        def __init__(plain: Callable[..., None], it: Any, *args: Any, **kwargs: Any) -> None:
            from hetero.integrations.accelerate import HeteroAccelerator, HeteroPlugin

            plain(it, *args, **kwargs)
            if not isinstance(it, HeteroAccelerator):
                HeteroAccelerator.adopt(it, HeteroPlugin(self.config))
                self.accelerators += 1

        construct_with(module.Accelerator, __init__, undo)

    def _adopt_trainers(self, undo: ExitStack, module: ModuleType) -> None:
        def __init__(plain: Callable[..., None], it: Any, *args: Any, **kwargs: Any) -> None:
            from hetero.integrations.transformers import HeteroTrainer, trainer

            if not isinstance(it, HeteroTrainer):
                self.trainers.append(type(it).__name__)
                it.__class__ = trainer(type(it))
                it.hetero_given = self.config
            plain(it, *args, **kwargs)

        construct_with(module.Trainer, __init__, undo)


def construct_with(cls: Any, construct: Callable[..., None], undo: ExitStack) -> None:
    """Replace a class's constructor by ``construct(the plain one, self, ...)``."""
    plain = cls.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(plain, self, *args, **kwargs)

    cls.__init__ = __init__
    undo.callback(setattr, cls, "__init__", plain)


class Imports(importlib.abc.MetaPathFinder):
    """Calls a function with a module after its import, by the module's name."""

    def __init__(self, acts: dict[str, Callable[[ModuleType], None]]) -> None:
        self._acts = acts

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the other finders' spec, with a loader that calls the function afterwards."""
        if name not in self._acts:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target))), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._acts[name](module)

            loader.exec_module = exec_module
        return spec


@contextmanager
def started_as(target: str, args: Sequence[str], *, module: bool) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as ``python`` does for a script or a module."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv[:] = [target, *args]
    sys.path.insert(0, os.getcwd() if module else str(Path(target).resolve().parent))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
