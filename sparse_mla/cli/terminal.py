"""What the commands share: text that no terminal obeys, one JSON object, exit codes."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..errors import ContractError, SparseMLAError

if TYPE_CHECKING:
    import torch

FAULT = 1
"""Exit code of a fault that was looked for and found: a broken contract, a result that is off."""
UNUSABLE = 2
"""Exit code of wrong usage, of input that cannot be read and of a machine that cannot do it."""

CallFile = Annotated[Path, typer.Argument(metavar="FILE.safetensors", help="A call file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Where to compute: cpu, cuda, cuda:1."),
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="Force one backend (see sparse-mla doctor)."),
]


def plain(text: object, stream: Any = None) -> str:
    """``text`` line by line without control characters, in characters that the stream can take."""
    lines = [
        "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
        for line in str(text).expandtabs(4).split("\n")
    ]
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    return "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)


def say(text: object = "", *, err: bool = False) -> None:
    """Print ``text``, whoever wrote it."""
    typer.echo(plain(text, sys.stderr if err else sys.stdout), err=err)


def say_row(label: str, text: object) -> None:
    """Print a labelled line; on a terminal it is wrapped, into a pipe it stays one."""
    line = f"  {label:<13} {text}"
    if sys.stdout is not None and sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size((80, 24)).columns)
        line = textwrap.fill(
            line, width, subsequent_indent=" " * 16, break_long_words=False, break_on_hyphens=False
        )
    say(line)


def say_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object; numbers that JSON does not have become text."""
    typer.echo(json.dumps(_json(value), indent=2, allow_nan=False))


def _json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


@contextmanager
def guarded(as_json: bool) -> Iterator[None]:
    """Around a command's work: our errors as text or JSON, warnings as a line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            yield
        except SparseMLAError as fault:
            code = FAULT if isinstance(fault, ContractError) else UNUSABLE
            _fail(as_json, code, str(fault), fault.to_dict())
        except BrokenPipeError:  # the reader has seen enough; typer ends the program quietly
            raise
        except OSError as fault:
            text = unwritable(fault)
            _fail(as_json, UNUSABLE, text, {"message": text})
        except (MemoryError, RuntimeError) as fault:
            if not _is_memory(fault):
                raise
            text = str(fault).partition("\n")[0] or "out of memory"
            _fail(as_json, UNUSABLE, f"not enough memory: {text}", {"message": text})


def unwritable(fault: OSError) -> str:
    """What the operating system refused, in one line."""
    where = "" if fault.filename is None else f"{fault.filename}: "
    return f"{where}{fault.strerror or fault}"


def _fail(as_json: bool, code: int, text: str, error: Mapping[str, Any]) -> NoReturn:
    if as_json:
        say_json({"ok": False, "error": error})
    else:
        say(f"error: {text}", err=True)
    raise typer.Exit(code)


def _is_memory(fault: BaseException) -> bool:
    return isinstance(fault, MemoryError) or any(
        words in str(fault) for words in ("out of memory", "can't allocate memory")
    )


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}", err=True)


def usage(text: str, option: str) -> typer.BadParameter:
    """The error of an option whose value cannot be used; the caller raises it."""
    return typer.BadParameter(plain(text, sys.stderr), param_hint=f"'{option}'")


def chosen_device(name: str | None) -> torch.device | None:
    """The device of ``--device``, if this machine has it."""
    import torch

    if name is None:
        return None
    try:
        device = torch.device(name)
    except RuntimeError:
        raise usage(f"{name!r} is no device; try cpu, cuda or cuda:1", "--device") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise usage("this machine has no CUDA device (see sparse-mla doctor)", "--device")
        if (device.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise usage(f"{name} is not there: this machine has {count}", "--device")
    elif device.type != "cpu":
        _require_data(name, device)
    return device


def _require_data(name: str, device: torch.device) -> None:
    """Refuse a device that this torch knows by name only: each kind fails in its own way."""
    import torch

    try:
        torch.zeros(1, device=device).cpu()
    except Exception as fault:
        reason = str(fault).partition("\n")[0][:120]
        raise usage(f"torch cannot compute on {name} here: {reason}", "--device") from None


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape and, where they say something, strides."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return text if tensor.is_contiguous() else f"{text}, strides {tensor.stride()}"
