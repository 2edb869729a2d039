"""Who may import whom, and who may touch what: the house rules of ARCHITECTURE.md, over `ast`."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "hetero"
FLOORS = {
    **dict.fromkeys(("types", "boxes", "config", "crc", "errors", "version", "events"), 0),
    **dict.fromkeys(("forks", "members"), 0),
    **dict.fromkeys(("interrupts", "internals", "modes", "optim", "jobs", "cores"), 0),
    **dict.fromkeys(("device", "dry", "io", "mounts", "parse", "tensorfile", "weights"), 0),
    **dict.fromkeys(("memory", "plan", "functional"), 1),
    "train": 2,
    "parallel": 3,
    **dict.fromkeys(("api", "checkpoint", "exchange", "export", "status", "cli", "__main__"), 4),
    **dict.fromkeys(("report", "rehearse", "integrations", "bench", "recipes"), 4),
    **dict.fromkeys(("testing", "watch"), 4),
}
ROOMS = {  # of train/: a room imports those below it
    "model": 0,
    **dict.fromkeys(("gradients", "activations"), 1),
    "update": 2,
    "access": 3,
    "engine": 4,
}
PRODUCT = 4  # rooms of the top floor may stand on each other (cli on report/, bench/, recipes/)
PRINTERS = ("cli", "report", "bench", "recipes", "watch")
HOOKED = (
    *(f"train.access.{name}" for name in ("attachments", "entries", "hooks", "listening")),
    "train.model.looking",  # nodes of one pass
)
HOOK = re.compile(r"_?register_\w*hook")
SAVED = re.compile(r"((push|pop)_saved_(tensors_default_)?hooks|saved_tensors_hooks|save_on_cpu)")

Trees = Mapping[str, ast.Module]
Rule = Callable[[Trees], "list[str]"]


FACTORY = re.compile(
    r"torch\.(empty|empty_strided|empty_permuted|ones|zeros|full|tensor|as_tensor|asarray|arange|eye"
    r"|linspace|logspace|normal|rand|randn|randint|randperm|range|scalar_tensor|tril_indices"
    r"|triu_indices|\w+_window|sparse_\w+_tensor)"
)
OF_THE_USERS = (
    "recipes",
    "integrations",
    "report",
    "rehearse",
    "watch",
)  # programs, with models and batches


def parse(sources: Mapping[str, str]) -> dict[str, ast.Module]:
    """Return {dotted module name without ``hetero.``: tree}; the package itself is ''."""
    return {name: ast.parse(text) for name, text in sources.items()}


def house() -> dict[str, str]:
    """Return the source of every module, without ``hetero/__init__.py``, which is exempt."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            found[".".join(parts)] = path.read_text(encoding="utf-8")
    return found


@pytest.fixture(scope="module", autouse=True)
def trees_go() -> Iterator[None]:
    """Let go of 800,000 objects: each collection would look at them, of other tests too."""
    gc.disable()
    yield
    house_trees.cache_clear()
    nodes.cache_clear()
    gc.enable()


@functools.cache
def house_trees() -> Trees:
    """Return the parsed house, which no rule changes."""
    return parse(house())


def room(module: str) -> str:
    return module.split(".")[0]


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def imported(tree: ast.AST, module: str = "") -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, wherever it stands."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["hetero", *module.split(".")][: -node.level]
                base = ".".join([*parents, *([base] if base else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own_imports(trees: Trees, module: str) -> list[tuple[int, str]]:
    """Return (line, module) of the hetero modules that a module imports; '' is the package."""
    found = []
    for line, name in imported(trees[module], module):
        head, _, rest = name.partition(".")
        if head == "hetero" and (rest in trees or not rest or rest in FLOORS):
            found.append((line, rest))
    # `from hetero.x import y` also yields the bare package of `from hetero import x`: keep targets
    precise = {line for line, rest in found if rest}
    return [(line, rest) for line, rest in found if rest or line not in precise]


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for an attribute chain on a name, '' for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def uses(tree: ast.AST, module: str, name: str) -> list[int]:
    """Return the lines that import or name ``name`` (a module) or anything under it."""
    lines = [n for n, given in imported(tree, module) if f"{given}.".startswith(f"{name}.")]
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and f"{dotted(node)}.".startswith(f"{name}."):
            lines.append(node.lineno)
    return sorted(set(lines))


def only_in(*allowed: str) -> Callable[[str], bool]:
    """Return whether a module is one of ``allowed``: modules, or rooms with all they hold."""
    return lambda module: module in allowed or any(module.startswith(f"{a}.") for a in allowed)


# -- the rules -----------------------------------------------------------------------------------


def wrong_floor(trees: Trees) -> list[str]:
    bad = []
    for module in trees:
        if room(module) not in FLOORS:
            bad.append(f"{module}: has no floor")
            continue
        here = FLOORS[room(module)]
        for line, target in own_imports(trees, module):
            there = FLOORS[room(target)] if target else PRODUCT
            same = room(target) == room(module) or (here == there and here in (0, PRODUCT))
            if there > here or (there == here and not same):
                bad.append(f"{module}:{line} imports {target or 'hetero'} of floor {there}")
    return bad


def wrong_room(trees: Trees) -> list[str]:
    """Return what modules of train/ import of rooms beside or above their own."""
    bad = []
    for module in trees:
        here = inner_room(module)
        if room(module) == "train" and here not in ROOMS and module != "train":
            bad.append(f"{module}: is in no room")
            continue
        for line, target in own_imports(trees, module):
            there = inner_room(target)
            if here in (None, there) or there is None:
                continue
            if ROOMS[there] >= ROOMS[here]:
                bad.append(f"{module}:{line} imports {target} of room {there}")
    return bad


def inner_room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "train" and len(parts) > 1 and parts[1] in ROOMS else None


def reaches_engine(trees: Trees) -> list[str]:
    """Return who imports what builds a prepared model: the product's rooms alone may."""
    return [
        f"{module}:{line} imports {target}"
        for module in trees
        if FLOORS.get(room(module)) != PRODUCT and inner_room(module) != "engine"
        for line, target in own_imports(trees, module)
        if inner_room(target) == "engine"
    ]


def cycle(trees: Trees) -> list[str]:
    edges = {m: {t for _, t in own_imports(trees, m) if t in trees and t != m} for m in trees}
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> list[str]:
        if module in path:
            return [" -> ".join([*path[path.index(module) :], module])]
        if module in done:
            return []
        found = [c for target in sorted(edges[module]) for c in walk(target, (*path, module))]
        done.add(module)
        return found

    return [found for module in sorted(edges) for found in walk(module, ())]


def plan_imports_torch(trees: Trees) -> list[str]:
    bad, seen = [], set()
    todo = [module for module in trees if room(module) == "plan"]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        bad += [f"{module}:{line}" for line in uses(trees[module], module, "torch")]
        todo += [target for _, target in own_imports(trees, module) if target in trees]
    return bad


def plan_imports_memory(trees: Trees) -> list[str]:
    return naming(trees, "hetero.memory", lambda module: room(module) != "plan")


def memory_imports_upwards(trees: Trees) -> list[str]:
    banned = ("hetero.plan", "torch.nn", "torch.distributed")
    return [b for name in banned for b in naming(trees, name, lambda m: room(m) != "memory")]


def naming(trees: Trees, name: str, may: Callable[[str], bool]) -> list[str]:
    return [
        f"{module}:{line} names {name}"
        for module, tree in trees.items()
        if not may(module)
        for line in uses(tree, module, name)
    ]


def names_cuda(trees: Trees) -> list[str]:
    return naming(trees, "torch.cuda", only_in("device"))


def names_distributed(trees: Trees) -> list[str]:
    may = only_in("train.engine.replicas", "parallel", "checkpoint", "testing.ranks")
    return naming(trees, "torch.distributed", may)


def names_testing(trees: Trees) -> list[str]:
    return naming(trees, "hetero.testing", only_in("testing"))


def names_crc(trees: Trees) -> list[str]:
    return [b for n in ("zlib.crc32", "zlib_ng") for b in naming(trees, n, only_in("crc"))]


PRIVATE = re.compile(r"torch(\.\w+)*\._[A-Za-z]\w*")
ENGINE = re.compile(r"_execution_engine|_engine_run_backward")


def names_private_torch(trees: Trees) -> list[str]:
    """Return who names what torch may change with any release; CUDA's have a door of their own."""
    bad = []
    for module, tree in trees.items():
        if module == "internals":
            continue
        names = [(line, name) for line, name in imported(tree, module)]
        for node in nodes(tree):
            if isinstance(node, ast.Attribute):
                names.append((node.lineno, dotted(node) or node.attr))
        bad += [
            f"{module}:{line} names {name}"
            for line, name in names
            if (PRIVATE.match(name) and not name.startswith("torch.cuda.")) or ENGINE.search(name)
        ]
    return sorted(set(bad))


ECOSYSTEM = ("accelerate", "transformers", "peft", "datasets", "lightning")


def names_ecosystem(trees: Trees) -> list[str]:
    may = only_in("integrations", "recipes", "bench", "rehearse.models")
    return [b for n in ECOSYSTEM for b in naming(trees, n, may)]


def targets(node: ast.AST) -> list[ast.expr]:
    """Return the single targets that a statement assigns or deletes."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        todo = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        todo = [node.target]
    elif isinstance(node, ast.withitem):
        todo = [node.optional_vars] if node.optional_vars else []
    else:
        return []
    flat: list[ast.expr] = []
    while todo:
        target = todo.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            todo += target.elts
        elif isinstance(target, ast.Starred):
            todo.append(target.value)
        else:
            flat.append(target)
    return flat


def setters(tree: ast.AST, attribute: str) -> set[str]:
    """Return the names that stand for ``<something>.<attribute>.__set__`` in a module."""
    found: set[str] = set()
    for node in nodes(tree):
        if not isinstance(node, ast.Assign):
            continue
        pairs = [(target, node.value) for target in node.targets]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        for target, value in pairs:
            if isinstance(target, ast.Name) and is_setter(value, attribute):
                found.add(target.id)
    return found


def is_setter(node: ast.expr, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "__set__"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == attribute
    )


def assigns(trees: Trees, attribute: str, may: Callable[[str], bool]) -> list[str]:
    """Return where an attribute is assigned: plainly, by setattr, or through its descriptor."""
    bad = []
    for module, tree in trees.items():
        if may(module):
            continue
        names = setters(tree, attribute)
        for node in nodes(tree):
            hit = any(isinstance(t, ast.Attribute) and t.attr == attribute for t in targets(node))
            if isinstance(node, ast.Call):
                func = node.func
                hit |= is_setter(func, attribute)
                hit |= isinstance(func, ast.Name) and func.id in names
                hit |= (
                    dotted(func) in ("setattr", "object.__setattr__")
                    and len(node.args) > 1
                    and isinstance(node.args[1], ast.Constant)
                    and node.args[1].value == attribute
                )
            if hit:
                bad.append(f"{module}:{getattr(node, 'lineno', '?')} assigns .{attribute}")
    return bad


def assigns_data(trees: Trees) -> list[str]:
    return assigns(trees, "data", only_in("train.model.binding"))


def assigns_pins(trees: Trees) -> list[str]:
    return assigns(trees, "pins", only_in("memory"))


def pushes_saved_tensors_hooks(trees: Trees) -> list[str]:
    bad = []
    for module, tree in trees.items():
        if module in ("train.activations.saved", "internals"):
            continue
        for node in nodes(tree):
            name = getattr(node, "attr", getattr(node, "id", getattr(node, "name", "")))
            if isinstance(node, (ast.Attribute, ast.Name, ast.alias)) and SAVED.search(name):
                bad.append(f"{module}:{node.lineno} names {name}")
    return bad


def calls(trees: Trees, pattern: re.Pattern[str], may: Callable[[str], bool]) -> list[str]:
    """Return where something is called whose last name matches."""
    bad = []
    for module, tree in trees.items():
        if may(module):
            continue
        for node in nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if pattern.fullmatch(name):
                bad.append(f"{module}:{node.lineno} calls {name}")
    return bad


def registers_hooks(trees: Trees) -> list[str]:
    return calls(trees, HOOK, only_in(*HOOKED))


def changes_states(trees: Trees) -> list[str]:
    return calls(trees, re.compile("transition"), only_in("memory"))


INSIDE = ("_flat", "_bytes", "_slab", "_extents", "extents")  # of a home
ONCE_PUBLIC = ("flat", "bytes", "segments")  # which replicas and buckets have, too
A_HOME = re.compile(r"(home|homes|low|wide|narrow|master|views)$")


def indexes_homes(trees: Trees) -> list[str]:
    """Return who reaches into the memory of a home: others ask it for parts, views and values."""
    bad = []
    for module, tree in trees.items():
        if room(module) == "memory":
            continue
        for node in nodes(tree):
            if not isinstance(node, ast.Attribute) or dotted(node) == f"self.{node.attr}":
                continue
            if node.attr in INSIDE or (node.attr in ONCE_PUBLIC and is_home(node.value)):
                bad.append(f"{module}:{node.lineno} names .{node.attr} of a home")
    return bad


def is_home(node: ast.expr) -> bool:
    """Whether an expression is called a home: by its name, its method, or where it is kept."""
    if isinstance(node, ast.Call):
        return is_home(node.func)
    if isinstance(node, ast.Subscript):
        return is_home(node.value)
    return bool(A_HOME.search(getattr(node, "attr", getattr(node, "id", ""))))


def prints(trees: Trees) -> list[str]:
    written = [
        f"{module}:{node.lineno} writes to a standard stream"
        for module, tree in trees.items()
        if not only_in(*PRINTERS)(module)
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and dotted(node) in ("sys.stdout", "sys.stderr")
    ]
    return calls(trees, re.compile("print|pprint"), only_in(*PRINTERS)) + written


def makes_tensors_anywhere(trees: Trees) -> list[str]:
    """Return where a tensor is made on torch's default device, which is the user's to set."""
    bad = []
    for module, tree in trees.items():
        if only_in(*OF_THE_USERS)(module):
            continue
        for node in nodes(tree):
            if not isinstance(node, ast.Call) or not FACTORY.fullmatch(dotted(node.func)):
                continue
            if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                bad.append(f"{module}:{node.lineno} calls {dotted(node.func)} without device=")
    return bad


RULES: dict[str, Rule] = {
    "modules import lower floors and their own folder": wrong_floor,
    "rooms of train import the rooms below them": wrong_room,
    "only engine and the product rooms import engine": reaches_engine,
    "imports make no cycle": cycle,
    "plan never imports torch": plan_imports_torch,
    "plan never imports memory": plan_imports_memory,
    "memory never imports plan, torch.nn or torch.distributed": memory_imports_upwards,
    "only device names torch.cuda": names_cuda,
    "only replicas, parallel, checkpoint, testing name torch.distributed": names_distributed,
    "only internals.py names what is private to torch": names_private_torch,
    "only crc.py names zlib's CRC-32, or zlib-ng": names_crc,
    "only tests name what is for tests": names_testing,
    "what is built on torch stays in its rooms": names_ecosystem,
    "only binding.py assigns param.data": assigns_data,
    "only memory changes a pin count": assigns_pins,
    "only saved.py pushes saved-tensor hooks": pushes_saved_tensors_hooks,
    "only access registers hooks": registers_hooks,
    "only memory changes a copy's state": changes_states,
    "only memory indexes a home": indexes_homes,
    "only the product rooms print": prints,
    "tensors are made on a device that is named": makes_tensors_anywhere,
}

PLANTED: list[tuple[str, dict[str, str]]] = [
    ("modules import lower floors and their own folder", {"memory.a": "import hetero.train"}),
    ("modules import lower floors and their own folder", {"memory.a": "import hetero"}),
    ("modules import lower floors and their own folder", {"train.a": "from hetero import api"}),
    ("modules import lower floors and their own folder", {"attic.a": ""}),
    (
        "modules import lower floors and their own folder",
        {"types": "def f():\n from .memory import x", "memory": ""},
    ),
    (
        "rooms of train import the rooms below them",
        {"train.model.a": "from hetero.train.update.b import x", "train.update.b": ""},
    ),
    (
        "rooms of train import the rooms below them",
        {"train.gradients.a": "def f():\n from ..activations import b", "train.activations.b": ""},
    ),
    ("rooms of train import the rooms below them", {"train.attic.a": ""}),
    (
        "only engine and the product rooms import engine",
        {"train.access.a": "import hetero.train.engine.b", "train.engine.b": ""},
    ),
    (
        "imports make no cycle",
        {"train.a": "from hetero.train import b", "train.b": "import hetero.train.a"},
    ),
    (
        "imports make no cycle",
        {
            "train.a": "def f():\n from . import b",
            "train.b": "from hetero.train.c import x",
            "train.c": "from .a import y",
        },
    ),
    ("plan never imports torch", {"plan.a": "def f():\n from torch import nn"}),
    ("plan never imports torch", {"plan.a": "import hetero.io", "io": "import torch"}),
    ("plan never imports memory", {"plan.a": "from hetero.memory.frame import FrameMap"}),
    (
        "memory never imports plan, torch.nn or torch.distributed",
        {"memory.a": "import torch\nx = torch.nn.Linear"},
    ),
    (
        "memory never imports plan, torch.nn or torch.distributed",
        {"memory.a": "from torch import distributed"},
    ),
    (
        "memory never imports plan, torch.nn or torch.distributed",
        {"memory.a": "from hetero import plan"},
    ),
    ("only device names torch.cuda", {"train.a": "import torch\ntorch.cuda.synchronize()"}),
    ("only device names torch.cuda", {"api": "from torch import cuda"}),
    ("only device names torch.cuda", {"api": "import torch.cuda.nvtx"}),
    (
        "only replicas, parallel, checkpoint, testing name torch.distributed",
        {"train.a": "import torch.distributed as dist"},
    ),
    ("only internals.py names what is private to torch", {"api": "import torch\ntorch._C.x()"}),
    (
        "only internals.py names what is private to torch",
        {"train.model.a": "from torch.utils._pytree import tree_iter"},
    ),
    (
        "only internals.py names what is private to torch",
        {"train.model.a": "from torch import _dynamo"},
    ),
    (
        "only internals.py names what is private to torch",
        {"report.a": "a = torch.autograd\na._engine_run_backward = f"},
    ),
    ("only crc.py names zlib's CRC-32, or zlib-ng", {"io": "import zlib\nzlib.crc32(b'')"}),
    ("only crc.py names zlib's CRC-32, or zlib-ng", {"io": "from zlib import crc32"}),
    ("only crc.py names zlib's CRC-32, or zlib-ng", {"io": "from zlib_ng import zlib_ng"}),
    (
        "only tests name what is for tests",
        {"cli": "from hetero.testing.faults import FaultPlan", "testing.faults": ""},
    ),
    ("what is built on torch stays in its rooms", {"api": "import transformers"}),
    ("what is built on torch stays in its rooms", {"api": "import lightning"}),
    ("only binding.py assigns param.data", {"train.a": "param.data = x"}),
    ("only binding.py assigns param.data", {"train.a": "a, (b.data, c) = x"}),
    ("only binding.py assigns param.data", {"train.a": "setattr(param, 'data', x)"}),
    ("only binding.py assigns param.data", {"train.a": "torch.Tensor.data.__set__(p, x)"}),
    (
        "only binding.py assigns param.data",
        {"train.a": "get, put = T.data.__get__, T.data.__set__\nput(p, x)"},
    ),
    ("only memory changes a pin count", {"train.a": "replica.pins += 1"}),
    (
        "only saved.py pushes saved-tensor hooks",
        {"train.a": "from hetero.internals import push_saved_hooks"},
    ),
    (
        "only saved.py pushes saved-tensor hooks",
        {"train.a": "from torch.autograd.graph import saved_tensors_hooks"},
    ),
    ("only access registers hooks", {"train.a": "module.register_full_backward_hook(f)"}),
    ("only access registers hooks", {"train.a": "m.register_forward_pre_hook(f)"}),
    ("only access registers hooks", {"api": "p.register_post_accumulate_grad_hook(f)"}),
    (
        "only memory changes a copy's state",
        {"train.a": "table.transition(0, tier, new, 'why')"},
    ),
    ("only memory indexes a home", {"train.a": "x = store.homes[key].flat[run]"}),
    ("only memory indexes a home", {"train.a": "x = self._masters.low(bucket).bytes"}),
    ("only memory indexes a home", {"checkpoint.a": "view = home.segments[0]"}),
    ("only memory indexes a home", {"api": "if home.extents is None: pass"}),
    ("only memory indexes a home", {"report.a": "n = home._flat.numel()"}),
    ("only the product rooms print", {"train.a": "print('hello')"}),
    ("only the product rooms print", {"memory.a": "import sys\nsys.stderr.write('x')"}),
    ("tensors are made on a device that is named", {"memory.a": "x = torch.empty(3)"}),
    ("tensors are made on a device that is named", {"train.a": "x = torch.tensor(1, dtype=d)"}),
    ("tensors are made on a device that is named", {"api": "x = torch.as_tensor(y)"}),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.replace(" ", "_"))
def test_the_house_keeps(rule: str) -> None:
    assert RULES[rule](house_trees()) == []


@pytest.mark.parametrize(("rule", "sources"), PLANTED)
def test_a_planted_violation_is_caught(rule: str, sources: dict[str, str]) -> None:
    assert RULES[rule](parse(sources)) != []


@pytest.mark.parametrize(
    "sources",
    [
        {"device": "import torch\ntorch.cuda.synchronize()"},
        {"train.model.binding": "put = torch.Tensor.data.__set__\nput(p, x)\np.data = x"},
        {"train.model.faults": "put = T.data.__set__\nif f == put: x = p.data\np.data.copy_(x)"},
        {"train.activations.saved": "from hetero.internals import push_saved_hooks"},
        {"train.access.hooks": "module.register_forward_hook(f)"},
        {"memory.manager": "table.transition(0, t, s, 'w')\nreplica.pins -= 1"},
        {"cli": "from hetero.report import x\nprint(x)", "report": ""},
        {"train.model.a": "from hetero.memory import b", "memory.b": "import torch"},
        {"crc": "from zlib_ng.zlib_ng import crc32", "report.run": "import zlib\nzlib.error"},
        {"plan.a": "from hetero.types import Tier", "types": "", "plan": ""},
        {
            "train.model.a": "x = home.part(run), bucket.segments, replica.flat",
            "memory.a": "home._flat",
        },
        {"report.html": "print('x')", "bench.run": "import hetero", "recipes.t": "import peft"},
        {"memory.a": "torch.empty(3, device='cpu')\ntorch.zeros_like(x)\ntorch.empty(3, **like)"},
        {"recipes.a": "x = torch.randn(3)"},
    ],
)
def test_what_is_allowed_breaks_no_rule(sources: dict[str, str]) -> None:
    assert [bad for rule in RULES.values() for bad in rule(parse(sources))] == []


def test_every_floor_below_the_top_is_inhabited() -> None:
    rooms = {room(module) for module in house()}

    assert {"types", "config", "errors", "device", "events", "memory", "plan", "train"} <= rooms


def modules_after(statement: str) -> set[str]:
    """Return ``sys.modules`` of a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(done.stdout.split())


def test_importing_hetero_does_not_load_torch() -> None:
    loaded = modules_after("import hetero; hetero.Config; hetero.BudgetError")

    assert "hetero.config" in loaded
    assert "torch" not in loaded


def test_importing_the_command_line_does_not_load_torch() -> None:
    loaded = modules_after("import hetero.cli")

    assert "hetero.cli" in loaded
    assert "torch" not in loaded


def test_importing_the_plan_does_not_load_torch() -> None:
    loaded = modules_after("import hetero.plan.planner, hetero.plan.hardware, hetero.plan.trace")

    assert "hetero.plan.planner" in loaded
    assert "torch" not in loaded


@pytest.mark.campaign(seconds=3)
def test_a_torch_bound_name_of_hetero_loads_torch_when_it_is_used() -> None:
    assert "torch" in modules_after("import hetero; hetero.prepare")


def test_modules_say_their_own_floor() -> None:
    said = {
        module: int(found[1])
        for module, tree in house_trees().items()
        if (found := re.search(r"\(floor (\d)", ast.get_docstring(tree) or ""))
    }
    assert len(said) > 100
    assert {m: n for m, n in said.items() if n != FLOORS.get(m.partition(".")[0], n)} == {}


def test_the_map_names_every_module() -> None:
    told = set(re.findall(r"\w+", (PACKAGE / "README.md").read_text(encoding="utf-8")))
    known = {module.rsplit(".", 1)[-1] for module in house()} - {"__main__", "version"}
    assert known - told == set()
