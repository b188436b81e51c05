"""``sparse-mla errors``: the error reference as a static site, and on a local server."""

from __future__ import annotations

import contextlib
import inspect
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..version import __version__
from .terminal import UNUSABLE, Json, say, say_json, unwritable

if TYPE_CHECKING:
    from ..errors.site import Release

_HOST = "127.0.0.1"
_LONGEST_REQUEST = 256 * 1024
"""Bytes of an address and headers: a traceback in an address has many characters of three bytes."""

Revision = Annotated[
    str,
    typer.Option(
        "--revision",
        metavar="COMMIT",
        help="Commit or tag for links to the source (default: the checkout's, else the release's).",
    ),
]


def commands() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        help="The error reference: build it as a static site, or serve it on this machine.",
        short_help="Build the error reference as a site, or serve it.",
    )
    for function in (build, serve):
        text = inspect.cleandoc(function.__doc__ or "")
        shown = text.replace("\n\nExamples:", "\n\n\b\nExamples:")
        app.command(help=shown, short_help=text.partition("\n")[0])(function)
    return app


def build(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where to write it.")],
    revision: Revision = "",
    as_json: Json = False,
) -> None:
    """Write the error reference into a folder.

    A page for each error, an index with a search that needs no server, and the same as JSON
    under api/errors. The folder is new, empty, or holds an earlier reference, which is replaced.

    Examples:
      sparse-mla errors build --out site
      sparse-mla errors build --out site --revision v0.1.0

    Exit codes: 0 written, 2 the folder cannot be used, or the extra `site` is not installed.
    """
    with _refusing(as_json):
        from ..errors.site import build as build_site

        built = build_site(out, _release(revision))
    if as_json:
        say_json({"ok": True, "out": str(out), **vars(built)})
        return
    say(
        f"{built.pages} pages, {built.files} files, {built.bytes / 1000:.0f} kB in {out}; "
        f"the largest page is {built.largest} with {built.largest_bytes / 1000:.1f} kB"
    )


def serve(
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes a free one.")
    ] = 8000,
    site: Annotated[
        Path | None,
        typer.Option("--site", metavar="DIR", help="A reference already built (default: build)."),
    ] = None,
    revision: Revision = "",
) -> None:
    """Serve the error reference on this machine, for browsers and programs.

    Only 127.0.0.1 is listened on. /api/errors lists the errors, /api/errors/ID gives one, and
    /api/errors?message=TEXT explains a message. Ctrl-C stops it.

    Examples:
      sparse-mla errors serve
      curl 'http://127.0.0.1:8000/api/errors?message=q+must+be+contiguous'

    Exit codes: 0 stopped, 2 the port or the folder cannot be used, or the extra `site` is not
    installed.
    """
    with _refusing(), contextlib.ExitStack() as stack:
        import uvicorn

        from ..errors.serve import application
        from ..errors.site import INDEX, NotASite
        from ..errors.site import build as build_site

        release = _release(revision)
        if site is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparse-mla-errors-"))
            site = Path(folder)
            build_site(site, release)
        elif not (site / INDEX).is_file():
            raise NotASite(f"{site} holds no error reference; sparse-mla errors build makes one")
        listening = stack.enter_context(_listening(port))
        say(f"http://{_HOST}:{listening.getsockname()[1]}/ (Ctrl-C stops it)")
        config = uvicorn.Config(
            application(site, release),
            http="h11",
            h11_max_incomplete_event_size=_LONGEST_REQUEST,
            log_level="warning",
            access_log=False,
        )
        # uvicorn hands on the Ctrl-C that stopped it
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
        except OSError as fault:
            raise OSError(fault.errno, fault.strerror, f"port {port}") from None
        listening.listen()
        yield listening


def _release(revision: str) -> Release:
    from ..errors.site import Release, revision_of

    return Release(__version__, revision or revision_of(__version__))


@contextlib.contextmanager
def _refusing(as_json: bool = False) -> Iterator[None]:
    """What cannot be done, in one line and with exit code 2."""
    from ..errors.site import NotASite

    try:
        yield
        return
    except ModuleNotFoundError as fault:
        if (fault.name or "").partition(".")[0] not in ("jinja2", "starlette", "uvicorn"):
            raise
        text = f"{fault.name} is not installed: pip install 'sparse-mla[site]'"
    except NotASite as fault:
        text = str(fault)
    except BrokenPipeError:
        raise
    except OSError as fault:
        text = unwritable(fault)
    if as_json:
        say_json({"ok": False, "error": {"message": text}})
    else:
        say(f"error: {text}", err=True)
    raise typer.Exit(UNUSABLE)
