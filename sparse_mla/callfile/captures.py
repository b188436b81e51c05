"""A sample of the calls that a program makes, as call files: what a serving engine really asks for.

    with capture("captures", rate=0.05, max_bytes=1 << 30) as log:
        serve()
    log.files, log.seen, log.too_large

or, with no change to the program, ``SPARSE_MLA_CAPTURE=DIR``, with ``SPARSE_MLA_CAPTURE_RATE`` (1)
and ``SPARSE_MLA_CAPTURE_MAX_BYTES`` (1073741824) beside it.

A recorded call on CUDA is waited for, before and after, so that its time is its own; the others
run as they would without a capture. A call that raises is recorded whatever the rate. One that
takes the process with it is not: ``SPARSE_MLA_DUMP`` is for that.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import environment
from .call import Call
from .dump import has_data, recorded_call, warn_once, written

MAX_BYTES = 1 << 30
"""Bytes of files that one capture writes unless told otherwise."""
HEADER_BYTES = 4096
"""More than what a file holds beside its tensors and notes."""


@dataclass
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

    @contextmanager
    def around(self, operator: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Record the call that is made within, if it is drawn or raises."""
        with self._lock:
            self.seen += 1
            number, drawn = self.seen, self._random.random() < self.rate
        if not has_data(self.folder, arguments):
            yield
            return
        notes = {"created_by": "capture", "call": str(number)}
        device = next((x.device for x in arguments.values() if isinstance(x, torch.Tensor)), None)
        if drawn:
            _wait_for(device)
        start = time.perf_counter()
        try:
            yield
            if drawn:
                _wait_for(device)
        except BaseException as fault:
            notes["error"] = f"{type(fault).__name__}: {fault}"
            self._record(operator, arguments, notes)
            raise
        if drawn:
            notes["seconds"] = f"{time.perf_counter() - start:.9f}"
            notes["backend"] = _last_backend()
            self._record(operator, arguments, notes)

    def _record(self, operator: str, arguments: Mapping[str, Any], notes: dict[str, str]) -> None:
        with self._lock:
            call = recorded_call(operator, arguments)
            size = sum(x.numel() * x.element_size() for x in call.tensors.values())
            size += HEADER_BYTES + sum(map(len, notes.values()))
            if self.bytes + size > self.max_bytes:
                self.too_large += 1
                return
            call.metadata.update(notes)
            path = written(self.folder, operator, lambda: call)
            if path is not None:
                self.files.append(path)
                self.bytes += os.path.getsize(path)


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
    with ExitStack() as stack:
        for log in [*_open, *([given] if given else [])]:
            stack.enter_context(log.around(operator, arguments))
        yield


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


def call_seconds(call: Call) -> float | None:
    """How long a captured call took, where its file says so."""
    try:
        return float(call.metadata["seconds"])
    except (KeyError, ValueError):
        return None
