"""`tenure lint`: why prompts of a log or trace were not reused, what that cost, and what to change first."""

from __future__ import annotations

import dataclasses
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from tenure.cli.options import guarded

FOUND = 1
"""Exit code when there is something to change."""

Log = Annotated[Path, typer.Argument(help="A trace or an OpenAI-style log, as `tenure replay` takes them.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Whose tokenizer reads a log with text.")]
Cost = Annotated[
    float | None,
    typer.Option("--ms-per-token", min=0.0, help="What computing a prompt token costs. Default: as calibrated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")]


def lint(log: Log, model: ModelName = None, ms_per_token: Cost = None, as_json: Json = False) -> None:
    """Find what keeps prompts from being reused, the dearest first. Exits with 1 when there is something to change."""
    guarded(lambda: _lint(log, model, ms_per_token, as_json))


def _lint(log: Path, model: str | None, ms_per_token: float | None, as_json: bool) -> int:
    from tenure import traces
    from tenure.cli import costs
    from tenure.cli.files import lines
    from tenure.cli.jobs import tokeniser
    from tenure.lint import Lint

    source = lines(log)
    first = next(source, "")
    known = costs.known(costs.anatomy_of(model), "auto", "bf16")
    cost = known.costs.prefill_ms if ms_per_token is None else ms_per_token
    reader = Lint(traces.header([first]), cost)
    for request in traces.read(chain([first], source), tokeniser(model)):
        reader.read(request)
    findings = reader.findings()
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1))
        return FOUND if findings else 0
    basis = "the log's own times" if reader.timed else known.source if ms_per_token is None else "--ms-per-token"
    print(f"{reader.requests} requests, {reader.prompt_tokens} prompt tokens; seconds by {basis}", file=sys.stderr)
    for finding in findings:
        share = finding.tokens / max(1, reader.prompt_tokens)
        print(
            f"{finding.rule}: {finding.tokens} tokens ({share:.1%}), about {finding.seconds:.1f} s, "
            f"in {finding.requests} requests\n"
            f"  first at {finding.where}; told by {finding.evidence}\n  {finding.advice}"
        )
    if not findings:
        print("nothing found: what could be reused was")
    return FOUND if findings else 0
