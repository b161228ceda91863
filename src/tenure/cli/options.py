"""Settings as command-line options: every command that takes settings gets its flags from tenure.config."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tenure.config import BY_NAME, Setting, resolve
from tenure.errors import TenureError

R = TypeVar("R")
USAGE_ERROR = 2
"""Exit code when the operator has to change something."""


def takes(*names: str) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Decorate a command `body(resolved, **its own options)` so that it takes the settings called `names` as flags."""

    def decorate(body: Callable[..., int | None]) -> Callable[..., None]:
        own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]

        def command(config: Path | None, **values: Any) -> None:
            def run() -> int | None:
                resolved = resolve({name: values[name] for name in names}, os.environ, config)
                for warning in resolved.warnings:
                    complain(warning)
                return body(resolved, **{parameter.name: values[parameter.name] for parameter in own})

            guarded(run)

        settings = [_parameter(BY_NAME[name]) for name in names]
        keyword_only = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*settings, *own, _config_option())]
        command.__name__ = body.__name__
        command.__doc__ = body.__doc__
        command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in keyword_only}
        return command

    return decorate


def options_of(record: type[R]) -> Callable[[Callable[[R], int | None]], Callable[..., None]]:
    """Decorate a command `body(options)` whose options are the fields of a dataclass, with typer's annotations."""

    def decorate(body: Callable[[R], int | None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            guarded(lambda: body(record(**values)))

        parameters = list(inspect.signature(record, eval_str=True).parameters.values())
        command.__name__ = body.__name__
        command.__doc__ = body.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def guarded(run: Callable[[], int | None]) -> None:
    """Run a command's body and leave with its exit code. What is wrong on purpose takes one line, a bug a traceback."""
    try:
        code = run()
    except TenureError as error:
        complain(str(error))
        code = USAGE_ERROR
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Whoever read our output left; say nothing more, not even when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception:  # noqa: BLE001 — the last line of defence: shown in full, then the process ends
        traceback.print_exc()
        complain("this is a bug in Tenure: please report it with the lines above and the output of `tenure doctor`")
        code = 1
    raise typer.Exit(code or 0)


def help_unless_told(context: typer.Context) -> None:
    """A command with others below it was named alone: show them. That is no mistake, so exit with 0."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def complain(message: str) -> None:
    """One line on standard error."""
    print(f"tenure: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _parameter(setting: Setting) -> inspect.Parameter:
    words = f"{setting.help} Default: {setting.shown}. Environment: {setting.env}."
    annotation: Any
    if setting.name == "model":
        annotation = Annotated[str | None, typer.Argument(help=words, metavar="MODEL", show_default=False)]
    elif setting.is_switch:
        both = f"{setting.flag}/--no-{setting.flag[2:]}"
        annotation = Annotated[
            bool | None, typer.Option(both, help=words, rich_help_panel=setting.group, show_default=False)
        ]
    else:
        option = typer.Option(
            setting.flag, help=words, metavar=setting.form.label, rich_help_panel=setting.group, show_default=False
        )
        annotation = Annotated[str | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _config_option() -> inspect.Parameter:
    option = typer.Option("--config", help="A TOML file with settings; flags and environment beat it.", metavar="FILE")
    annotation = Annotated[Path | None, option]
    return inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
