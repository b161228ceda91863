"""The examples of docs/python.md run, in order, as one program each."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def examples(part: str) -> str:
    """All examples of a part as one program, each line where it stands on the page, so that an error names it."""
    text = PAGE.read_text(encoding="utf-8")
    engine, _, cache = text.partition("# The cache alone")
    before = "\n" * engine.count("\n") if part == "cache" else ""
    kept: list[str] = []
    inside = False
    for line in (cache if part == "cache" else engine).splitlines():
        if re.match("```", line):
            inside = line == "```python"
            kept.append("")
        else:
            kept.append(line if inside else "")
    return before + "\n".join(kept)


def test_the_engine_examples_run() -> None:
    source = examples("engine")
    assert source.count("engine.") > 10
    exec(compile(source, str(PAGE), "exec"), {"__name__": "docs"})


def test_the_cache_examples_run() -> None:
    source = examples("cache")
    names: dict[str, object] = {"__name__": "docs"}
    exec(compile(source, str(PAGE), "exec"), names)
    gone = names["gone"]
    assert isinstance(gone, list)
    assert gone
