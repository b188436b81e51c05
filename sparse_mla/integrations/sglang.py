"""Our operator in the place of SGLang's ``sparse_mla_q8kv8_prefill_fwd``.

    from sparse_mla.integrations import sglang
    done = sglang.install()      # in the process that runs the model, before or after it is loaded
    done.module, done.holders    # where the operator was, and every module that held it
    sglang.uninstall()

Nothing of SGLang is imported until ``install`` looks for the operator.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from .. import sparse_mla_q8kv8_prefill_fwd

NAME = "sparse_mla_q8kv8_prefill_fwd"
MODULES = (
    "sglang.kernels.ops.attention.sparse_mla_q8kv8_prefill_sm90",
    "sglang.jit_kernel.sparse_mla_q8kv8_prefill_sm90",
)
"""Where releases of SGLang keep the operator, the newer place first."""


@dataclass(frozen=True)
class Installed:
    """What ``install`` did."""

    module: str
    """The module that defines the operator."""
    signature: str
    """The signature of what was replaced."""
    holders: tuple[str, ...]
    """``module.name`` of every place that held it and now holds ours."""
    sglang_version: str
    """The installed distribution, ``"unknown"`` where there is none."""

    def __str__(self) -> str:
        return (
            f"sparse_mla runs {NAME} of {self.module} (sglang {self.sglang_version}), "
            f"replaced in {len(self.holders)} place{'s' * (len(self.holders) != 1)}: "
            + ", ".join(self.holders)
        )


@dataclass
class _State:
    record: Installed
    original: Callable[..., Any]
    replacement: Callable[..., Any]
    places: list[tuple[dict[str, Any], str]]


_lock = threading.Lock()
_state: _State | None = None


def install(
    module: str | None = None, operator: Callable[..., Any] = sparse_mla_q8kv8_prefill_fwd
) -> Installed:
    """Replace SGLang's operator by ours, in its module and wherever it was imported to.

    Args:
        module: the module that holds it; left out, the first of ``MODULES`` that is there.
        operator: what to put there; ours, or something around it with the same signature.

    Returns:
        What was done. Installed already, nothing is done and the first record is returned.

    Raises:
        ModuleNotFoundError: no such module.
        AttributeError: the module has no such function.
        TypeError: its signature is not the one that ours stands in for; the text says how they
            differ. Nothing was replaced.
    """
    global _state
    with _lock:
        if _state is not None:
            return _state.record
        home = _home(module)
        original = getattr(home, NAME, None)
        if not callable(original):
            raise AttributeError(f"{home.__name__} has no function {NAME}")
        differences = signature_differences(original)
        if differences:
            raise TypeError(
                f"{home.__name__}.{NAME} is not what this version of sparse_mla stands in for: "
                + "; ".join(differences)
            )
        places = _places(original)
        for namespace, name in places:
            namespace[name] = operator
        record = Installed(
            module=home.__name__,
            signature=str(inspect.signature(original)),
            holders=tuple(sorted(f"{n['__name__']}.{name}" for n, name in places)),
            sglang_version=_version(),
        )
        _state = _State(record, original, operator, places)
        return record


def uninstall() -> Installed | None:
    """Put SGLang's operator back wherever ours still is; ``None`` where nothing was installed."""
    global _state
    with _lock:
        if _state is None:
            return None
        state, _state = _state, None
        # Ours may have been imported to further places since.
        for namespace, name in state.places + _places(state.replacement):
            if namespace.get(name) is state.replacement:
                namespace[name] = state.original
        return state.record


def installed() -> Installed | None:
    """What ``install`` did, or ``None``."""
    return None if _state is None else _state.record


def signature_differences(original: Callable[..., Any]) -> list[str]:
    """Why calls of ``original`` could not all be made of ours; empty where they can.

    Ours may take more than ``original`` (older releases have no ``out``); names, order, kinds and
    defaults of what both take are the same. Annotations do not matter.
    """
    theirs = list(inspect.signature(original).parameters.values())
    ours = inspect.signature(sparse_mla_q8kv8_prefill_fwd).parameters
    order = [name for name in ours if name in {parameter.name for parameter in theirs}]
    found = [f"it takes {p.name!r}, ours does not" for p in theirs if p.name not in ours]
    if order != [parameter.name for parameter in theirs if parameter.name in ours]:
        found.append("its arguments come in another order")
    for parameter in theirs:
        own = ours.get(parameter.name)
        if own is None:
            continue
        if parameter.kind is not own.kind:
            found.append(f"{parameter.name!r} is {parameter.kind.description}")
        if parameter.default is not own.default and parameter.default != own.default:
            found.append(f"{parameter.name!r} has another default")
    wanted = {parameter.name for parameter in theirs}
    for name, own in ours.items():
        if name not in wanted and own.kind is not inspect.Parameter.KEYWORD_ONLY:
            found.append(f"it does not take {name!r}")
    return found


def _home(module: str | None) -> Any:
    names = MODULES if module is None else (module,)
    for name in names:
        try:
            return importlib.import_module(f"sglang.{name.removeprefix('sglang.')}")
        except ModuleNotFoundError as fault:
            missing = fault.name or ""
            if missing != name and not name.startswith(f"{missing}."):
                raise  # the module is there, something that it needs is not
    raise ModuleNotFoundError(
        f"no module {' or '.join(names)}: is an SGLang with {NAME} installed?", name=names[0]
    )


def _places(function: Callable[..., Any]) -> list[tuple[dict[str, Any], str]]:
    """Every module-level name within SGLang that holds ``function``."""
    return [
        (vars(module), name)
        for module_name, module in list(sys.modules.items())
        if module is not None and module_name.partition(".")[0] == "sglang"
        for name, value in list(vars(module).items())
        if value is function
    ]


def _version() -> str:
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "unknown"
