"""``SPARSE_MLA_DUMP``: the inputs of a call in a file before the call runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import error, warn
from . import container
from .call import ARGUMENTS, RESULTS, Buffer, Call, encoded
from .container import shown

_counter = itertools.count(1)
_mark = secrets.token_hex(3)
"""Processes of several machines or containers may share a folder, and have the same number."""
_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def dump_call(operator: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Around a call: with ``SPARSE_MLA_DUMP=DIR`` its inputs are in a file of ``DIR`` when it runs.

    The file stays when the call raises or takes the process with it, and goes when the call
    returns, unless ``SPARSE_MLA_DUMP_ALL=1``. A call on CUDA is waited for, so that a fault that
    comes later still leaves its file. A dump that cannot be written warns once and lets the call
    go on.
    """
    folder = os.environ.get("SPARSE_MLA_DUMP")
    path = _dumped(folder, operator, arguments) if folder else None
    if path is None:
        yield
        return
    try:
        yield
        for value in arguments.values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                torch.cuda.synchronize(value.device)
                break
    except BaseException as fault:
        if hasattr(fault, "add_note"):  # Python 3.11
            fault.add_note(f"  Inputs: {path} (replay: sparse-mla run FILE)")
        raise
    if os.environ.get("SPARSE_MLA_DUMP_ALL") != "1":
        with contextlib.suppress(OSError):
            os.unlink(path)


def _dumped(folder: str, operator: str, arguments: Mapping[str, Any]) -> str | None:
    """Write the inputs of a call into ``folder``; ``None`` when that is not possible."""
    if not has_data(folder, arguments):
        return None
    return written(folder, operator, lambda: recorded_call(operator, arguments))


def has_data(folder: str, arguments: Mapping[str, Any]) -> bool:
    """Whether the tensors of a call can be read now."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    plain = (torch.Tensor, torch.nn.Parameter)
    if any(type(value) not in plain or value.is_meta for value in tensors):
        return False  # a compiler traces the call: there is no data
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        warn_once(
            folder,
            "calls inside CUDA graph capture are not dumped: capture allows no copy to the host",
        )
        return False
    return True


def written(folder: str, operator: str, record: Callable[[], Call]) -> str | None:
    """Write a call into a new file of ``folder``; ``None``, and a warning, when that fails."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    path = os.path.join(
        folder, f"{operator}-{stamp}-{os.getpid()}-{_mark}-{next(_counter):04d}.safetensors"
    )
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        call = record()
        container.write(path, call.tensors, encoded(call), mode=0o600)
    except Exception as fault:  # the call matters more than its record
        warn_once(folder, getattr(fault, "strerror", None) or str(fault))
        return None
    return path


def recorded_call(operator: str, arguments: Mapping[str, Any]) -> Call:
    """The call that ``arguments`` make, given outputs described but not kept."""
    call = Call(operator, {}, {}, {"created_by": "SPARSE_MLA_DUMP"})
    devices = {}
    for name in (*ARGUMENTS, *RESULTS):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            devices[name] = str(value.device)
            if name in RESULTS:
                call.arguments[name] = Buffer(value.dtype, tuple(value.shape), value.stride())
            else:
                call.tensors[name] = value
        elif value is not None and name not in RESULTS:
            call.arguments[name] = value
    main = devices.get("q", "cpu")
    call.metadata["device"] = ", ".join(
        [main, *(f"{name} on {device}" for name, device in devices.items() if device != main)]
    )
    return call


def warn_once(folder: str, reason: str) -> None:
    """Say once that calls are not recorded in ``folder``, and why."""
    if (folder, reason) not in _warned:
        _warned.add((folder, reason))
        fault = error("dump-failed", path=shown(folder), reason=reason)
        warn(str(fault), RuntimeWarning)
