"""Which backend runs a problem, and why each other one does not.

A backend is a module of ``backends`` with ``NAME``, ``available() -> str | None`` (why it can run
nothing on this machine), ``refusal(problem) -> str | None`` (why it cannot run this problem) and
``run(problem)``, which writes every element of the three outputs. One that quantises float queries
faster than torch has ``quantize_queries(q, q_scale)`` besides; one that works out a launch from
metadata alone has ``prepare(problem) -> Prepared``, which is then what runs a problem.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from typing import TYPE_CHECKING, Protocol, cast

import torch

from . import environment
from .errors import SlowBackendWarning, error, warn

if TYPE_CHECKING:
    from .params import Addresses, PrefillProblem

BACKENDS = tuple(
    name
    for name in ("sm90", "portable", "cpu", "reference")
    if importlib.util.find_spec(f".backends.{name}", __package__)
)
"""Every backend, by module name."""

_FASTEST_FIRST = {
    device: tuple(name for name in names if name in BACKENDS)
    for device, names in {
        "cuda": ("sm90", "portable", "reference"),
        "cpu": ("cpu", "reference"),
    }.items()
}
_ELSEWHERE = ("reference",)

_MAX_WARNINGS = 64
"""Reasons may hold shapes: a process remembers, and says, no more warnings than this."""


class Prepared(Protocol):
    """A problem but for the addresses of its tensors."""

    def launch(self, addresses: Addresses) -> bool:
        """``run`` with tensors that lie there; false, with nothing done, where ``refusal`` might
        have something against these addresses.
        """


class Backend(Protocol):
    """What a module of ``backends`` offers."""

    NAME: str

    def available(self) -> str | None:
        """Why this backend can run nothing on this machine; ``None``: it can."""

    def refusal(self, problem: PrefillProblem) -> str | None:
        """Why this backend cannot run this problem; ``None``: it can."""

    def run(self, problem: PrefillProblem) -> None:
        """Write every element of the problem's outputs."""


_loaded: dict[str, Backend] = {}
_warned: set[tuple[str, str]] = set()
_thread = threading.local()


def load(name: str) -> Backend:
    """The backend called ``name``; imported at its first use."""
    backend = _loaded.get(name) if _is_name(name) else None
    if backend is None:
        if not _is_name(name) or name not in BACKENDS:
            raise error("backend-unknown", backend=name, known=", ".join(("auto", *BACKENDS)))
        module = importlib.import_module(f".backends.{name}", __package__)
        backend = _loaded[name] = cast(Backend, module)
    return backend


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def order(device_type: str) -> tuple[str, ...]:
    """Names of the backends that ``auto`` tries on a device, fastest first."""
    return _FASTEST_FIRST.get(device_type, _ELSEWHERE)


def choose(problem: PrefillProblem, backend: str = "auto") -> Backend:
    """The named backend, else ``SPARSE_MLA_BACKEND``, else the fastest one that runs ``problem``.

    Raises:
        BackendError: ``backend-unknown``, ``backend-refused``, ``no-backend``.
    """
    if not _is_name(backend):
        load(backend)  # raises; an array in its place could not be compared with a name
    if backend == "auto":
        backend = environment.forced_backend()
    if backend != "auto":
        chosen = load(backend)
        reason = chosen.refusal(problem)
        if reason is not None:
            raise error("backend-refused", backend=backend, reason=reason)
        return chosen

    q = problem.q
    names = order("cuda" if q.is_cuda else q.device.type)  # the first is a quarter of the price
    first = _loaded.get(names[0]) or load(names[0])
    reason = first.refusal(problem)
    if reason is None:
        return first
    refused = [(names[0], reason)]
    for name in names[1:]:
        candidate = load(name)
        reason = candidate.refusal(problem)
        if reason is None:
            _warn_slow(name, refused)
            return candidate
        refused.append((name, reason))
    raise error("no-backend", device=problem.q.device, reasons=_listed(refused))


def refusals(problem: PrefillProblem) -> dict[str, str | None]:
    """Each backend's reason for not running ``problem``; ``None`` where it would."""
    return {name: load(name).refusal(problem) for name in BACKENDS}


def quantize_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A float q in FP8 and its scales, by the backend that is named or would be tried first.

    ``None`` where that backend has no faster way than ``quantize.quantize_queries``, whose results
    these are, bit for bit: they do not depend on which backend runs the problem afterwards.
    """
    if not _is_name(backend):
        return None  # `choose` refuses it
    if backend == "auto":
        backend = environment.forced_backend()
    name = order(q.device.type)[0] if backend == "auto" else backend
    quantise = getattr(load(name), "quantize_queries", None)
    return None if quantise is None else quantise(q, q_scale)


def run(problem: PrefillProblem, backend: str = "auto") -> str:
    """Compute ``problem`` into its outputs; the name of the backend that did.

    No gradient is recorded. Without queries nothing is launched.
    """
    return run_prepared(problem, backend)[0]


def run_prepared(problem: PrefillProblem, backend: str = "auto") -> tuple[str, Prepared | None]:
    """`run`; and what runs the next problem like this one, where the backend prepares it."""
    chosen = choose(problem, backend)
    name = chosen.NAME
    ran(name)
    if problem.s_q == 0:
        return name, None
    prepare = getattr(chosen, "prepare", None)
    if prepare is not None:
        prepared: Prepared = prepare(problem)
        launched = prepared.launch(problem.addresses)
        assert launched, f"{name} refuses addresses that its refusal took"
        return name, prepared
    if torch.is_grad_enabled() and requires_grad(problem):
        with torch.no_grad():
            chosen.run(problem)
    else:
        chosen.run(problem)
    return name, None


def ran(name: str) -> None:
    """Note that a backend runs this thread's call."""
    _thread.last = name


def last_backend() -> str:
    """The backend that ran this thread's latest call, ``""`` before the first."""
    return getattr(_thread, "last", "")


def requires_grad(problem: PrefillProblem) -> bool:
    """Whether autograd would follow a backend's operations."""
    optional = (problem.q_scale, problem.kv_scale, problem.attn_sink)
    return (
        problem.q.requires_grad
        or problem.kv.requires_grad
        or problem.out.requires_grad
        or problem.max_logits.requires_grad
        or problem.lse.requires_grad
        or any(tensor is not None and tensor.requires_grad for tensor in optional)
    )


def _warn_slow(chosen: str, refused: list[tuple[str, str]]) -> None:
    """Say once that ``chosen`` stands in for faster backends, and why each of them refused."""
    key = (chosen, _listed(refused))
    if key in _warned or len(_warned) >= _MAX_WARNINGS:
        return
    _warned.add(key)
    better = " or ".join(name for name, _ in refused)
    text = str(error("slow-backend", chosen=chosen, better=better, reasons=key[1]))
    warn(text, SlowBackendWarning)


def _listed(refused: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refused)
