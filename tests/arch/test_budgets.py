"""The budgets of DESIGN.md §3: when one breaks, split or simplify; don't raise it."""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import fields

import pytest
from tests.arch.support import ROOT, SRC, core_files, functions, python_files

from tenure.config import SETTINGS, Settings

FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 8
SETTINGS_COUNT = 45
CORE_LINES = 6000

NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip

NATIVE = sorted(path for path in (ROOT / "native").rglob("*") if path.suffix in (".cpp", ".h", ".inc"))


def test_files_are_short() -> None:
    paths = [*python_files(SRC, ROOT / "tests", ROOT / "bench"), *NATIVE]
    assert len(paths) > 20
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = [(path, node) for path in python_files(SRC) for node in functions(path)]
    assert len(found) > 100
    long = {
        f"{path.relative_to(ROOT)}:{node.name}": _lines(node) for path, node in found if _lines(node) > FUNCTION_LINES
    }
    assert long == {}


def test_functions_take_few_parameters() -> None:
    found = [(path, node) for path in python_files(SRC) for node in functions(path)]
    many = {f"{path.relative_to(ROOT)}:{node.name}": _count(node) for path, node in found if _count(node) > PARAMETERS}
    assert many == {}


def test_settings_are_few() -> None:
    assert 0 < len(SETTINGS) <= SETTINGS_COUNT
    assert [setting.name for setting in SETTINGS] == [f.name for f in fields(Settings)]


def test_the_core_is_small() -> None:
    """Lines of code, as for functions: blank lines, comments and docstrings are free (ADR 0011)."""
    assert 0 < sum(_code_lines(path.read_text(encoding="utf-8")) for path in core_files()) <= CORE_LINES


def test_explaining_costs_no_budget() -> None:
    lines = ['"""What it is."""', "", "# why", "x = (", "    1,", ")", "", "def f() -> None:"]
    lines += ['    """Docs.', "    More.", '    """', '    g("""a', 'b""")', ""]
    source = "\n".join(lines)
    assert _code_lines(source) == 3 + 1 + 2


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"])
def test_nothing_is_left_for_later(mark: str) -> None:
    paths = [*python_files(SRC, ROOT / "tests", ROOT / "bench"), *NATIVE]
    assert [str(path.relative_to(ROOT)) for path in paths if mark in path.read_text(encoding="utf-8")] == []


def _code_lines(source: str) -> int:
    """Lines that hold a token of code."""
    free: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            free.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - free)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: explaining more must not cost budget."""
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def _count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function. A declaration without a body describes another one, a native one say: not counted."""
    last = node.body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant) and last.value.value is Ellipsis:
        return 0
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len([argument for argument in arguments if argument.arg not in ("self", "cls")])
