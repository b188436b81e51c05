"""The command ``sparse-mla``: one file a command.

``main`` is what the installed command runs. The commands import torch in their bodies, so that
``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def build() -> typer.Typer:
    """The typer application with every command."""
    import typer

    from ..version import __version__
    from .bench import bench
    from .check import check
    from .demo import demo
    from .doctor import doctor
    from .errors import commands as errors
    from .explain import explain
    from .inspect_call import inspect_call
    from .run import run

    app = typer.Typer(
        name="sparse-mla",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"sparse-mla {__version__}")
            raise typer.Exit

    @app.callback(epilog="Exit codes: 0 fine, 1 a fault was found, 2 usage or unreadable input.")
    def command(
        version: bool = typer.Option(
            False, "--version", help="Show the version.", callback=show_version, is_eager=True
        ),
    ) -> None:
        """FP8 sparse MLA attention for DeepSeek sparse attention models."""

    for function in (demo, run, check, inspect_call, bench, doctor, explain):
        text = inspect.cleandoc(function.__doc__ or "")
        name = function.__name__.removesuffix("_call")
        app.command(name, help=_with_lines(text), short_help=text.partition("\n")[0])(function)
    app.add_typer(errors(), name="errors")
    return app


def _with_lines(text: str) -> str:
    """A command's help, its examples marked as lines that are not to be joined."""
    return text.replace("\n\nExamples:", "\n\n\b\nExamples:")


def main() -> None:
    """Run the command line and exit."""
    try:
        build()(prog_name="sparse-mla")
    except OSError as fault:  # standard output itself: a full disk behind it
        from .terminal import UNUSABLE, say, unwritable

        say(f"error: {unwritable(fault)}", err=True)
        sys.exit(UNUSABLE)
