"""docs/extending.md names the places that a family, a codec and a policy take: they exist, and there are no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.arch.support import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = {"A family": r"SmolLM3\w*|\bsmollm3\b", "A KV codec": r"\bk8v4\b", "A policy": r"\b[Gg]ittins\b"}
PLACE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|md)):(\w+)`")


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def sources() -> list[Path]:
    found = [path for folder in ("src", "native") for path in (ROOT / folder).rglob("*")]
    return [path for path in found if path.suffix in (".py", ".cpp", ".h")]


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_places_exist(title: str) -> None:
    places = PLACE.findall(section(title))
    assert len(places) >= 5
    for file, name in places:
        path = ROOT / file
        assert path.is_file(), file
        assert re.search(rf"\b{name}", path.read_text(encoding="utf-8")), f"{file} has no {name}"


@pytest.mark.parametrize("title", EXAMPLES)
def test_the_example_is_nowhere_else(title: str) -> None:
    named = {file for file, _ in PLACE.findall(section(title))}
    holding = {
        str(path.relative_to(ROOT))
        for path in sources()
        if re.search(EXAMPLES[title], path.read_text(encoding="utf-8"))
    }
    assert holding
    assert holding - named == set()
