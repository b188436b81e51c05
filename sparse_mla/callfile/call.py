"""The call as an object, and its form in the file."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import error
from ..params import D_V
from . import container
from .container import Entry, Malformed, shown

FORMAT = "sparse-mla-call"
RESULT_FORMAT = "sparse-mla-result"
VERSION = "1"
STRICT = "sparse_mla_q8kv8_prefill_fwd"
GENERAL = "sparse_mla_prefill"
OPERATORS = (STRICT, GENERAL)
INPUTS = ("q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length")
RESULTS = ("out", "max_logits", "lse")
ARGUMENTS = (*INPUTS, "sm_scale", "d_v")
"""What a call is given by name; the outputs come on top."""

MAX_BYTES = 4 << 30
"""Largest file that ``load_call`` reads unless told otherwise."""


class NotACall(ValueError):
    """A sound safetensors file that is no call."""


class Buffer(NamedTuple):
    """An output tensor that the caller gave: what it looked like, not what it held."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class Call:
    """One operator call: the file in memory.

    ``tensors`` holds inputs and expected results, ``arguments`` what else the operator was given,
    ``metadata`` free text.
    """

    operator: str
    tensors: dict[str, torch.Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """The results that the file says the call gives; empty when it says nothing."""
        return {name: self.tensors[name] for name in RESULTS if name in self.tensors}

    def keywords(self, device: str | torch.device | None = None) -> dict[str, Any]:
        """The operator's keyword arguments: tensors on ``device``, given outputs as fresh memory.

        What the operator requires is always there, as ``None`` when the file lacks it, so that the
        contract speaks rather than Python.
        """
        required = INPUTS[:3] + (
            ("sm_scale", "q_scale", "kv_scale") if self.operator == STRICT else ()
        )
        given: dict[str, Any] = dict.fromkeys(required)
        given.update((name, value) for name, value in self.arguments.items() if name not in RESULTS)
        for name in INPUTS:
            if name in self.tensors:
                given[name] = (
                    self.tensors[name] if device is None else _moved(self.tensors[name], device)
                )
        place = device or getattr(given["q"], "device", "cpu")
        for name in RESULTS:
            buffer = self.arguments.get(name)
            if isinstance(buffer, Buffer):
                given[name] = torch.empty_strided(
                    buffer.shape, buffer.stride, dtype=buffer.dtype, device=place
                )
        return given

    def run(
        self, device: str | torch.device | None = None, backend: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The call made again: ``(out, max_logits, lse)``.

        ``device`` moves the inputs first. ``backend`` forces one, also for the strict operator,
        which has no such argument: its contract is checked, the problem handed to that backend.
        """
        given = self.keywords(device)
        if self.operator == STRICT and backend is not None:
            problem = _sibling("checks").check_q8kv8(**given)
            _sibling("dispatch").run(problem, backend)
            return problem.out, problem.max_logits, problem.lse
        interface = _sibling("interface")
        if self.operator == STRICT:
            results = interface.sparse_mla_q8kv8_prefill_fwd(**given)
        else:
            results = interface.sparse_mla_prefill(
                **given, return_stats=True, backend=backend or "auto"
            )
        out, max_logits, lse = results
        return out, max_logits, lse


def _sibling(name: str) -> Any:
    """A module of ours above this one, imported only when a call is replayed."""
    return importlib.import_module(f"{__package__.rpartition('.')[0]}.{name}")


def _moved(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """``tensor`` on ``device`` with its strides: ``Tensor.to`` packs what is not dense."""
    if tensor.is_contiguous() or tensor.device == torch.device(device):
        return tensor.to(device)
    return _with_stride(tensor.contiguous().to(device), tensor.stride())


def _with_stride(packed: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """What ``packed`` holds, laid out by ``stride``; a stride of 0 is an expanded dimension."""
    once = tuple(
        min(size, 1) if step == 0 else size for size, step in zip(packed.shape, stride, strict=True)
    )
    strided = torch.empty_strided(once, stride, dtype=packed.dtype, device=packed.device)
    strided.copy_(packed[tuple(slice(size) for size in once)])
    return strided.expand(packed.shape)


def save_call(path: str | os.PathLike[str], call: Call) -> None:
    """Write ``call`` to ``path``, by rename: on a fault nothing is left there."""
    _save(path, call.tensors, encoded(call))


def save_results(
    path: str | os.PathLike[str], results: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write the results of a call as safetensors, by rename."""
    _save(path, dict(results), {**metadata, "format": RESULT_FORMAT, "version": VERSION})


def _save(
    path: str | os.PathLike[str], tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    try:
        container.write(path, tensors, metadata, mode=0o666)
    except OSError as fault:
        raise error(
            "file-not-written", path=shown(path), reason=fault.strerror or str(fault)
        ) from fault


def encoded(call: Call) -> dict[str, str]:
    """The metadata of a call file."""
    metadata = dict(call.metadata)
    metadata.update(format=FORMAT, version=VERSION, operator=call.operator)
    for name, value in call.arguments.items():
        if isinstance(value, Buffer):
            entry = {
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": value.shape,
                "stride": value.stride,
            }
            metadata[f"buffer.{name}"] = json.dumps(entry)
        elif value is not None:
            metadata[name] = json.dumps(_plain(value))
    for name, tensor in call.tensors.items():
        if not tensor.is_contiguous() and not _overlaps(tensor.shape, tensor.stride()):
            metadata[f"stride.{name}"] = json.dumps(tensor.stride())
    return metadata


def _plain(value: Any) -> Any:
    """A scalar as JSON holds it; of anything else its type, which is what the contract names."""
    if not isinstance(value, (bool, int, float, str)) and hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if isinstance(value, (bool, int, float, str)):
        return value
    return {"type": type(value).__name__}


def load_call(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Call:
    """Read a call file of at most ``max_bytes``; anything else is a ``FileError`` of one line.

    The tensors are on the CPU. A tensor that was recorded with gaps between its rows takes the
    memory of the gaps too, which all together stay under ``max_bytes``.
    """
    name = shown(path)
    try:
        with container.opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise error("file-too-large", path=name, bytes=size, limit=max_bytes)
            entries, metadata, start = container.header(file, size)
            call, strides = _decoded(entries, metadata, max_bytes)
            for wanted in INPUTS[:3]:
                if wanted not in entries and wanted not in call.arguments:
                    raise error("file-tensor-missing", path=name, name=wanted)
            for tensor_name in filter(entries.__contains__, (*INPUTS, *RESULTS)):
                tensor = container.tensor(file, start, entries[tensor_name])
                stride = strides.get(tensor_name)
                call.tensors[tensor_name] = (
                    tensor if stride is None else _with_stride(tensor, stride)
                )
    except (OSError, MemoryError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault) or "not enough memory"
        raise error("file-unreadable", path=name, reason=reason) from None
    except Malformed as fault:
        raise error("file-not-safetensors", path=name, reason=str(fault)) from None
    except NotACall as fault:
        raise error("file-not-a-call", path=name, reason=str(fault)) from None
    return call


def _decoded(
    entries: dict[str, Entry], metadata: dict[str, str], max_bytes: int
) -> tuple[Call, dict[str, tuple[int, ...]]]:
    """The call without its tensors, and the strides of those that were not contiguous."""
    free = dict(metadata)
    stated = {name: free.pop(name, None) for name in ("format", "version", "operator")}
    for name, known in (("format", (FORMAT,)), ("version", (VERSION,)), ("operator", OPERATORS)):
        if stated[name] not in known:
            has = "no" if stated[name] is None else f"the {name} {shown(stated[name])}, not"
            raise NotACall(f"its metadata has {has} {name if has == 'no' else ' or '.join(known)}")
    unknown = entries.keys() - {*INPUTS, *RESULTS}
    if unknown:
        raise NotACall(f"a call has no tensor {shown(min(unknown))}")
    call = Call(str(stated["operator"]), {}, {}, free)
    budget = max_bytes
    strides = {}
    for name in ARGUMENTS:
        if name in free:
            if name in entries:
                raise NotACall(f"{name} is given twice, as a tensor and in the metadata")
            call.arguments[name] = _scalar(name, free.pop(name))
        label = f"stride.{name}"
        if label in free and name in entries:
            strides[name] = _strides(label, _json(label, free.pop(label)))
            budget -= _extent(label, entries[name].dtype, entries[name].shape, strides[name])
    for name in RESULTS:
        label = f"buffer.{name}"
        if label in free:
            buffer = _buffer(label, _json(label, free.pop(label)))
            budget -= _extent(label, *buffer)
            call.arguments[name] = buffer
    if call.operator == GENERAL and call.arguments.pop("d_v", D_V) != D_V:
        raise NotACall(f"{GENERAL} has d_v={D_V} and no such argument")
    if budget < 0:
        raise NotACall(f"the strides in its metadata ask for {max_bytes - budget} bytes of memory")
    return call, strides


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall(f"its metadata {name} is not JSON: {shown(text[:60])}") from None


def _scalar(name: str, text: str) -> Any:
    """An argument that is no tensor; of no plain type, it is an object of a type of that name."""
    value = float(text) if text in ("nan", "inf", "-inf") else _json(name, text)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = value.get("type") if isinstance(value, dict) and len(value) == 1 else None
    if isinstance(kind, str) and re.fullmatch(r"[A-Za-z_]\w{0,80}", kind, re.ASCII):
        return type(kind, (), {})()
    raise NotACall(f"its metadata {name} is no scalar: {shown(text[:60])}")


def _strides(label: str, value: Any) -> tuple[int, ...]:
    if not container.is_sizes(value, limit=2**61):
        raise NotACall(f"its metadata {label} is not a list of sizes")
    return tuple(value)


def _buffer(label: str, value: Any) -> Buffer:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "stride"}:
        raise NotACall(f"its metadata {label} does not describe a tensor")
    dtype = container.DTYPE_NAMES.get(str(value["dtype"]))
    if dtype is None:
        raise NotACall(f"its metadata {label} has an unknown dtype")
    if not container.is_shape(value["shape"]):
        raise NotACall(f"its metadata {label} has an impossible shape")
    shape = tuple(value["shape"])
    return Buffer(dtype, shape, _strides(label, value["stride"]))


def _extent(label: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Bytes that a tensor of this shape and stride spans."""
    if len(shape) != len(stride):
        raise NotACall(
            f"its metadata {label} has {len(stride)} strides for {len(shape)} dimensions"
        )
    if _overlaps(shape, stride):
        raise NotACall(f"its metadata {label} puts two elements in one place")
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements share memory other than by a stride of 0."""
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step > 0:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False
