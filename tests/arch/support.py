"""Where the sources are, and what the architecture tests need to read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "tenure"
CORE = (
    "errors",
    "types",
    "clock",
    "events",
    "spec",
    "config",
    "summary",
    "tenants",
    "views",
    "overflow",
    "policy",
    "tiers",
    "cache",
    "sched",
    "sim",
    "planner",
)
"""Layers 0 to 5."""


def python_files(*folders: Path) -> list[Path]:
    """Every Python file below `folders`, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def core_files() -> list[Path]:
    """The Python files of layers 0 to 5."""
    return [path for path in python_files(SRC) if path.relative_to(SRC).parts[0].removesuffix(".py") in CORE]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(path: Path) -> Iterator[str]:
    """The dotted names a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
