"""A sample of the calls that a program makes, as call files: what a serving engine really asks for.

    with capture("captures", rate=0.05, max_bytes=1 << 30) as log:
        serve()
    log.files, log.seen, log.too_large

or, with no change to the program, ``SPARSE_MLA_CAPTURE=DIR``, with ``SPARSE_MLA_CAPTURE_RATE`` (1)
and ``SPARSE_MLA_CAPTURE_MAX_BYTES`` (1073741824) beside it.

A recorded call on CUDA is waited for, before and after, so that its time is its own; the others
run as they would without a capture. Files are written once the time is taken. A call that raises is
recorded whatever the rate. One that takes the process with it is not: ``SPARSE_MLA_DUMP`` is for
that. A forked process counts, and draws, for itself.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import environment
from .call import Call, encoded
from .dump import has_data, recorded_call, warn_once, written

MAX_BYTES = 1 << 30
"""Bytes of files that one capture writes unless told otherwise."""
HEADER_BYTES = 4096
"""More than what a file holds beside its tensors and its metadata."""
ERROR_LENGTH = 4000
"""Characters kept of the message of a call that raised."""


@dataclass(eq=False)
class Capture:
    """One capture: what it is to do, and what it has done so far."""

    folder: str
    rate: float = 1.0
    """Share of the calls to record; which ones is drawn, so that no layer is always missed."""
    max_bytes: int = MAX_BYTES
    seed: int = 0
    seen: int = 0
    """Calls that came by."""
    files: list[str] = field(default_factory=list)
    bytes: int = 0
    too_large: int = 0
    """Calls that were drawn, or raised, and had no room left under ``max_bytes``."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate must lie between 0 and 1, got {self.rate}")
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {self.max_bytes}")
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def see(self) -> tuple[int, bool]:
        """Count a call: its number, and whether it is drawn."""
        with self._lock:
            self.seen += 1
            return self.seen, self._random.random() < self.rate

    def record(self, call: Call) -> None:
        """Write ``call``, where there is room for it; the lock is not held while it is written."""
        size = _most_bytes(call)
        with self._lock:
            room = self.max_bytes - self.bytes
            fits = size <= room
            if fits:
                self.bytes += size
            else:
                self.too_large += 1
                first = self.too_large == 1
        if not fits:
            if first:
                warn_once(
                    self.folder,
                    f"this call takes {size} bytes and {room} of {self.max_bytes} are left; from "
                    "now on, calls without room are not recorded",
                )
            return
        path, real = written(self.folder, call.operator, lambda: call), 0
        if path is not None:
            with suppress(OSError):
                real = os.path.getsize(path)
        with self._lock:
            self.bytes += real - size
            if path is not None:
                self.files.append(path)

    def forked(self) -> None:
        """In a child process: a thread of the parent, which is not here, may hold the lock."""
        self._lock = threading.Lock()


def _most_bytes(call: Call) -> int:
    """What the file of ``call`` takes at most: JSON makes six bytes of one at worst."""
    tensors = sum(x.numel() * x.element_size() for x in call.tensors.values())
    texts = (text for item in encoded(call).items() for text in item)
    return HEADER_BYTES + tensors + 6 * sum(len(x.encode("utf-8", "replace")) for x in texts)


_open: list[Capture] = []
_from_environment: Capture | None = None
_change = threading.Lock()


@contextmanager
def capture(
    folder: str | os.PathLike[str], *, rate: float = 1.0, max_bytes: int = MAX_BYTES, seed: int = 0
) -> Iterator[Capture]:
    """Record calls of our operators, of all threads, into files of ``folder`` while it is open.

    Args:
        folder: created when first needed, readable by its owner only.
        rate: share of the calls to record, drawn from ``seed``.
        max_bytes: the files stay below this in total; a call that would not fit is counted only.
        seed: which calls are drawn.

    A file that cannot be written warns once and lets the call go on.
    """
    log = Capture(os.fspath(folder), rate, max_bytes, seed)
    with _change:
        _open.append(log)
        environment.captures_open += 1
    try:
        yield log
    finally:
        with _change:
            _open.remove(log)
            environment.captures_open -= 1


@contextmanager
def capture_call(operator: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Around a call: every capture that is open, and that of the environment, sees it."""
    given = environment_capture()
    seen = [(log, *log.see()) for log in [*_open, *([given] if given else [])]]
    seen = [entry for entry in seen if has_data(entry[0].folder, arguments)]
    drawn = [(log, number) for log, number, is_drawn in seen if is_drawn]
    device = next((x.device for x in arguments.values() if isinstance(x, torch.Tensor)), None)
    if drawn:
        _wait_for(device)
    start = time.perf_counter()
    try:
        yield
        if drawn:
            _wait_for(device)
    except BaseException as fault:
        text = f"{type(fault).__name__}: {fault}"[:ERROR_LENGTH]
        for log, number, _ in seen:
            _record(log, number, operator, arguments, {"error": text})
        raise
    notes = {"seconds": f"{time.perf_counter() - start:.9f}", "backend": _last_backend()}
    for log, number in drawn:
        _record(log, number, operator, arguments, notes)


def _record(
    log: Capture, number: int, operator: str, arguments: Mapping[str, Any], notes: dict[str, str]
) -> None:
    """Have ``log`` write the call; whatever keeps it from that is said once and no failure."""
    try:
        call = recorded_call(operator, arguments)
        call.metadata.update(notes, created_by="capture", call=str(number))
        log.record(call)
    except Warning:
        raise  # the user made an error of it
    except Exception as fault:  # the call matters more than its record
        warn_once(log.folder, str(fault))


def environment_capture() -> Capture | None:
    """The capture that ``SPARSE_MLA_CAPTURE`` asks for; a new one when its settings change."""
    global _from_environment
    folder = environment.read("SPARSE_MLA_CAPTURE")
    if not folder:
        return None
    rate, max_bytes = _number(folder, "RATE", 1.0), int(_number(folder, "MAX_BYTES", MAX_BYTES))
    with _change:
        old = _from_environment
        if old is None or (old.folder, old.rate, old.max_bytes) != (folder, rate, max_bytes):
            try:
                _from_environment = Capture(folder, rate, max_bytes, seed=os.getpid())
            except ValueError as fault:
                warn_once(folder, str(fault))
                return None
        return _from_environment


def _number(folder: str, name: str, default: float) -> float:
    text = environment.read(f"SPARSE_MLA_CAPTURE_{name}")
    try:
        value = float(text) if text else default
        int(value)  # not for nan and inf
    except (ValueError, OverflowError):
        warn_once(folder, f"SPARSE_MLA_CAPTURE_{name} is no number: {text[:40]!r}")
        return default
    return value


def _wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


def _last_backend() -> str:
    from ..dispatch import last_backend

    return last_backend()


def _after_fork() -> None:
    """A child process is a process of its own: it draws for itself, and its files count anew."""
    global _change, _from_environment
    _change, _from_environment = threading.Lock(), None
    for log in _open:
        log.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
