"""`tenure trace`: what is done to traces before they are shown to others."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, TextIO

import typer

from tenure.cli.options import guarded, help_unless_told
from tenure.errors import ConfigError

app = typer.Typer(invoke_without_command=True, help="Work on traces.")

Source = Annotated[Path, typer.Argument(help="A trace in any of the forms that `tenure replay` reads.")]
Target = Annotated[Path | None, typer.Argument(help="Where to write it. Default: standard output.")]
ModelName = Annotated[str | None, typer.Option("--model", help="Whose tokenizer reads a log with text.")]
KEPT = ("kv", "prompt_ms")
"""Further fields that say nothing of people or texts."""


@app.callback()
def root(context: typer.Context) -> None:
    """Work on traces."""
    help_unless_told(context)


@app.command()
def anonymise(source: Source, target: Target = None, model: ModelName = None) -> None:
    """Write a trace anew in Tenure's own form with names, blocks and clock made meaningless; what is equal stays equal.

    Texts and unknown fields go. The key that names were hashed with is thrown away, so nobody can try names out.
    """
    guarded(lambda: _anonymise(source, target, model))


def _anonymise(source: Path, target: Path | None, model: str | None) -> int:
    from tenure import traces
    from tenure.cli.files import lines
    from tenure.cli.jobs import tokeniser

    key = secrets.token_bytes(32)

    def name(raw: str) -> str:
        return blake2b(raw.encode("utf-8", "surrogatepass"), key=key, digest_size=8).hexdigest()

    def block(raw: int) -> int:
        return int.from_bytes(blake2b(raw.to_bytes(8, "little"), key=key, digest_size=8).digest(), "little")

    with contextlib.ExitStack() as stack:
        out: TextIO = sys.stdout
        if target:
            try:
                out = stack.enter_context(target.open("w", encoding="utf-8"))
            except OSError as error:
                raise ConfigError("target", f"{target}: {error.strerror}") from None
        began: float | None = None
        for request in traces.read(lines(source), tokeniser(model)):
            began = request.at if began is None else began
            plain = dataclasses.replace(
                request,
                at=max(0.0, request.at - began),
                blocks=tuple(map(block, request.blocks)),
                answer=tuple(map(block, request.answer)),
                tenant=name(request.tenant) if request.tenant else "",
                session=None if request.session is None else name(str(request.session)),
                extra={field: value for field, value in request.extra.items() if field in KEPT},
            )
            out.write(traces.write(plain) + "\n")
    return 0
