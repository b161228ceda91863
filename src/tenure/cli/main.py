"""The `tenure` command. Heavy modules are imported by the command that needs them, so `tenure --help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

import tenure
from tenure.cli.bench import bench
from tenure.cli.chat import chat
from tenure.cli.doctor import doctor
from tenure.cli.explain import explain
from tenure.cli.lint import lint
from tenure.cli.options import help_unless_told
from tenure.cli.plan import plan
from tenure.cli.quality import quality
from tenure.cli.replay import replay
from tenure.cli.serve import serve
from tenure.cli.trace import app as trace

app = typer.Typer(
    name="tenure",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve open-weights language models to many conversations from one fixed, visible KV budget.",
)
for command in (serve, chat, plan, quality, explain, doctor, bench, replay, lint):
    app.command()(command)
app.add_typer(trace, name="trace")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tenure {tenure.__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and exit.")
    ] = False,
) -> None:
    """Serve open-weights language models to many conversations from one fixed, visible KV budget."""
    help_unless_told(context)


def main() -> None:
    """Entry point of the `tenure` script."""
    app(prog_name="tenure")


if __name__ == "__main__":
    main()
