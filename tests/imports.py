"""First-party modules that a module imports, transitively, read from the source."""

import ast
from pathlib import Path

PACKAGES = ("windquant", "tasks", "flows", "benchmarks")


def names(file: Path) -> set[str]:
    """Dotted names of everything a file imports, anywhere in it."""
    out = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            out |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return out


def first_party(file: Path) -> set[Path]:
    """The project's files that a file imports directly."""
    found = set()
    for name in names(file):
        if name.split(".")[0] in PACKAGES:
            path = Path(*name.split("."))
            found |= {p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()}
    return found


def closure(file: Path) -> set[Path]:
    """The file and all it imports, transitively; empty package files left out."""
    seen, todo = set(), [file]
    while todo:
        f = todo.pop()
        if f not in seen:
            seen.add(f)
            todo += first_party(f)
    return {f for f in seen if f.stat().st_size}
