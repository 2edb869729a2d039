"""What the house measures: `python -m tests.house [DIRECTORY]` prints it for a checkout.

Figures to look at before and after a change; none of them is asserted. Rules that have to hold are
in test_imports.py.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LARGEST = 6
ASKED = (r"\.mode\b", r"extents is (not )?None", r"pool is (not )?None", r"codec\.exact")
DIALECT = ("behind", "beside", "besides", "nobody", "somebody", "whoever", "what")
PRIVATE = re.compile(r"torch(\.\w+)*\._[A-Za-z]|_engine_run_backward|_execution_engine")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path) -> dict[Path, str]:
    """Return the source of every module of the package."""
    return {p: p.read_text(encoding="utf-8") for p in sorted((root / "hetero").rglob("*.py"))}


def functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def lines_of(node: ast.AST) -> int:
    """Return the lines of a function's or a class's code, decorators left out."""
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


def attributes(cls: ast.ClassDef) -> set[str]:
    """Return the names that methods of a class assign on ``self``."""
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def figures(root: Path) -> Iterator[str]:
    """Yield what there is to say of a checkout, line by line."""
    sources = modules(root)
    trees = {path: ast.parse(text) for path, text in sources.items()}
    sizes = {path: text.count("\n") for path, text in sources.items()}
    yield f"files {len(sources)}, lines {sum(sizes.values())}"
    over = sorted((n, str(p.relative_to(root))) for p, n in sizes.items() if n > 500)
    yield f"files over 500 lines {len(over)}: " + ", ".join(f"{p} {n}" for n, p in over[::-1])
    found = sorted(lines_of(f) for tree in trees.values() for f in functions(tree))
    p95 = found[len(found) * 95 // 100]
    yield f"functions {len(found)}: median {statistics.median(found)}, p95 {p95}, max {found[-1]}"
    classes = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    by_methods = sorted(((len(list(functions(c))), c) for c in classes), key=lambda x: -x[0])
    for n_methods, cls in by_methods[:LARGEST]:
        n_attributes = len(attributes(cls))
        yield f"  {cls.name}: {n_methods} methods, {n_attributes} attributes, {lines_of(cls)} lines"
    twice = sorted(name for name, n in Counter(c.name for c in classes).items() if n > 1)
    yield f"class names that mean two things {len(twice)} of {len(classes)}: " + ", ".join(twice)
    for pattern in ASKED:
        hits = [len(re.findall(pattern, text)) for text in sources.values()]
        yield f"{pattern}: {sum(hits)} times in {sum(map(bool, hits))} files"
    private = [p for p, text in sources.items() if PRIVATE.search(text)]
    yield f"files that name torch's private names {len(private)}"
    words = Counter(re.findall(r"[a-z]+", "\n".join(prose(t) for t in sources.values()).lower()))
    yield f"words of prose {words.total()}: " + ", ".join(f"{w} {words[w]}" for w in DIALECT)


def prose(text: str) -> str:
    """Return the comments and docstrings of a module."""
    strings = (
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return "\n".join((*re.findall(r"#\s(.*)", text), *strings))


if __name__ == "__main__":
    for line in figures(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()):
        print(line)
