"""The docs say what the code does: generated pages are up to date, links lead somewhere, README commands run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import typer

import tenure
from tenure.cli.main import app
from tenure.config import SETTINGS
from tenure.policy import registry

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    expected = load_generator().PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == expected, "run: python docs/generate.py"


def test_every_setting_fact_and_policy_is_documented() -> None:
    settings, metrics = (DOCS / "settings.md").read_text(), (DOCS / "metrics.md").read_text()
    policies = (DOCS / "policies.md").read_text()
    for setting in SETTINGS:
        assert setting.env in settings
    for fact in load_generator().all_facts():
        assert f"`{fact.__name__}`" in metrics
    for name in (*registry.EVICTION, *registry.ADMISSION, *registry.PRESSURE):
        assert f"`{name}`" in policies


def test_every_metric_of_the_source_is_documented() -> None:
    source = (ROOT / "src" / "tenure" / "server" / "metrics.py").read_text()
    names = set(re.findall(r'"((?:vllm|tenure):[a-z_]+)"', source))
    assert len(names) > 30
    page = (DOCS / "metrics.md").read_text()
    assert {name for name in names if name not in page} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name}: {target}"


def command_flags() -> set[str]:
    """The options of every command of `tenure`."""
    found: set[str] = set()
    commands = [typer.main.get_command(app)]
    for command in commands:
        found |= {flag for parameter in command.params for flag in parameter.opts}
        commands += getattr(command, "commands", {}).values()
    return found


def test_flags_named_in_the_docs_exist() -> None:
    own = {"--url", "--max-tokens", "--config", "--help", "--no-deps", "--json", "--no-quality-gate"}
    known = {setting.flag for setting in SETTINGS} | own | command_flags()
    for page in PAGES:
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")):
            assert flag in known, f"{page.name}: {flag}"


@pytest.mark.parametrize("picture", sorted((DOCS / "img").glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_real_and_readable(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{space}title") is not None
    assert root.find(f"{space}desc") is not None
    assert "prefers-color-scheme: dark" in picture.read_text()
    width = float(root.attrib["viewBox"].split()[2])
    for text in root.iter(f"{space}text"):
        words, x = text.text or "", float(text.attrib["x"])
        # A rough measure: 7 px a character at 14 px. Enough to catch a label that runs out of the picture.
        spread = 7 * len(words)
        left = x - spread / 2 if text.attrib.get("text-anchor") == "middle" else x
        assert left >= 0, words
        assert left + spread <= width * 1.05, words
    assert any(f"img/{picture.name}" in page.read_text(encoding="utf-8") for page in PAGES)


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(path.name[:4]) for path in sorted((DOCS / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_readme_begins_with_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:25]
    makefile = (ROOT / "Makefile").read_text()
    for command in ("make serve", "make test"):
        assert any(line.startswith(command) for line in first_screen)
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_readme_receipt_adds_up() -> None:
    block = re.search(r'"kv":\s+(\{.*\})', (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    receipt = json.loads(re.sub(r",\s*…\s*}", "}", block[1].split("```")[0]))
    assert receipt["prompt_tokens"] == receipt["cached_tokens"] + receipt["computed_tokens"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["chat", "--help"]])
def test_quick_commands_run(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tenure.cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr == ""
    assert tenure.__version__ in result.stdout or "Usage: tenure" in result.stdout


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == tenure.__version__
    assert project["scripts"]["tenure"] == "tenure.cli.main:main"


def test_dependencies_have_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (DOCS / "adr" / "0001-dependencies.md").read_text()
    for dependency in project["dependencies"]:
        assert re.split(r"[<>=!~\[ ]", dependency)[0] in reasons
