"""The checks that both operators make, one function a kind; ``checks`` puts them in order.

Each is a generator of violations, or gives one. An argument that is not a tensor, or whose own
shape depends on a broken one, ends or skips the check, so that ``sparse-mla check`` can list all
that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral, Number, Real
from typing import Any

import torch

from .errors import SparseMLAError, error
from .params import D_V

Violations = Iterator[SparseMLAError]

E4M3 = torch.float8_e4m3fn
UNQUANTISED = (torch.bfloat16, torch.float16, torch.float32)
FLOAT32_SMALLEST, FLOAT32_LARGEST = 2.0**-149, torch.finfo(torch.float32).max
_Tensor = torch.Tensor
_STRIDED = torch.strided
_SYMBOLS = (torch.SymFloat, torch.SymInt)
_NAMES = (
    "out",
    "max_logits",
    "lse",
    "q",
    "kv",
    "indices",
    "q_scale",
    "kv_scale",
    "attn_sink",
    "topk_length",
)

_OUTPUTS = _NAMES[:3]


def not_a_tensor(name: str, value: Any) -> SparseMLAError:
    """``value`` where a tensor is needed."""
    return error("not-a-tensor", name=name, type=type(value).__name__)


def no_tensors(**arguments: Any) -> Violations:
    """Those of the arguments that are no tensors."""
    for name, value in arguments.items():
        if not isinstance(value, _Tensor):
            yield not_a_tensor(name, value)


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory by strides; of others not even these are known."""
    return tensor.layout is _STRIDED and not tensor.is_nested


def not_strided(name: str, tensor: torch.Tensor) -> SparseMLAError:
    """A sparse, nested or oneDNN tensor."""
    return error("not-strided", name=name, layout=_layout(tensor))


def none_strided(*arguments: Any) -> Violations:
    """Those of q, kv, indices, ..., outputs last, that are tensors without strides."""
    for name, tensor in zip((*_NAMES[3:], *_OUTPUTS), arguments, strict=False):
        if isinstance(tensor, _Tensor) and not is_strided(tensor):
            yield not_strided(name, tensor)


def q_ndim(q: torch.Tensor) -> SparseMLAError:
    """A q without its three dimensions."""
    return error("q-ndim", shape=tuple(q.shape))


def d_qk_mismatch(d_qk: int, kv_d_qk: int) -> SparseMLAError:
    """Rows of q and kv of different width."""
    return error("d-qk-mismatch", d_qk=d_qk, kv_d_qk=kv_d_qk)


def not_int32(indices: torch.Tensor) -> SparseMLAError:
    """Indices of another dtype."""
    return error("indices-not-int32", dtype=indices.dtype)


def device_mismatch(name: str, tensor: torch.Tensor, device: torch.device) -> SparseMLAError:
    """A tensor away from q."""
    return error("device-mismatch", name=name, device=device, got=tensor.device)


def not_contiguous(name: str, tensor: torch.Tensor) -> SparseMLAError:
    """A tensor with gaps, or in another order."""
    return error("not-contiguous", name=name, shape=tuple(tensor.shape), strides=tensor.stride())


def place(name: str, tensor: torch.Tensor, device: torch.device) -> Violations:
    """On q's device, and contiguous."""
    if tensor.device != device:
        yield device_mismatch(name, tensor, device)
    if not tensor.is_contiguous():
        yield not_contiguous(name, tensor)


def dense_last(name: str, tensor: torch.Tensor) -> Violations:
    """Elements of a row side by side in memory; the rows may lie anywhere."""
    if tensor.ndim and tensor.stride(-1) != 1 and tensor.shape[-1] > 1 and tensor.numel() > 0:
        yield error(
            "last-dim-not-dense", name=name, shape=tuple(tensor.shape), strides=tensor.stride()
        )


def topk_length(tensor: Any, device: torch.device, s_q: int | None) -> Violations:
    """int32 [s_q]."""
    if not isinstance(tensor, _Tensor):
        yield not_a_tensor("topk_length", tensor)
        return
    if tensor.layout is not _STRIDED:
        yield not_strided("topk_length", tensor)
        return
    yield from place("topk_length", tensor, device)
    shape = tensor.shape
    if tensor.dtype is not torch.int32 or (s_q is not None and shape != (s_q,)):
        wanted = "s_q" if s_q is None else s_q
        yield error("topk-length-invalid", s_q=wanted, shape=tuple(shape), dtype=tensor.dtype)


def attn_sink(tensor: Any, device: torch.device, h_q: int | None) -> Violations:
    """float32 [h_q]."""
    if not isinstance(tensor, _Tensor):
        yield not_a_tensor("attn_sink", tensor)
        return
    if tensor.layout is not _STRIDED:
        yield not_strided("attn_sink", tensor)
        return
    yield from place("attn_sink", tensor, device)
    shape = tensor.shape
    if tensor.dtype is not torch.float32 or (h_q is not None and shape != (h_q,)):
        wanted = "h_q" if h_q is None else h_q
        yield error("attn-sink-invalid", h_q=wanted, shape=tuple(shape), dtype=tensor.dtype)


def scale_invalid(name: str, scale: Any, device: torch.device) -> SparseMLAError:
    """A scale that is not what the strict operator's kernels read: one float32 beside q."""
    if isinstance(scale, _Tensor) and scale.device != device:
        what = f"{_short(scale.dtype)} tensor on {scale.device}"
    else:
        what = described(scale)
    return error("scale-invalid", name=name, what=what)


def is_positive(value: Any) -> bool:
    """Whether ``value`` is a number, finite and above zero as a float. Never reads a tensor."""
    return bool(0.0 < _float(value) < math.inf)


def is_float32_positive(value: Any) -> bool:
    """Whether ``value`` is a number that is finite and above zero also in float32."""
    return bool(FLOAT32_SMALLEST <= _float(value) <= FLOAT32_LARGEST)


def _float(value: Any) -> Any:
    """A number as a float, a traced one as it is; 0 for anything else."""
    if isinstance(value, _SYMBOLS):
        return value
    try:
        return float(value) if isinstance(value, Real) else 0.0
    except OverflowError:  # an integer that no float holds
        return math.inf


def is_d_v(value: Any) -> bool:
    """Whether ``value`` is the one supported width of the values."""
    return isinstance(value, (Integral, torch.SymInt)) and bool(value == D_V)


def sm_scale(value: Any) -> Violations:
    """A finite positive number."""
    if not is_positive(value):
        yield error("sm-scale-invalid", value=plain(value))


def outputs(
    given: tuple[Any, Any, Any],
    device: torch.device,
    s_q: int | None,
    h_q: int | None,
    inputs: tuple[Any, ...] | None,
    *,
    float32_out: bool = False,
) -> Violations:
    """The outputs that the caller gave: place, shape, dtype, and memory shared with nothing.

    ``inputs`` in the order of the strict operator; ``None`` leaves the memory out. ``float32_out``
    allows ``out`` in float32 as well.
    """
    out, max_logits, lse = given
    stats = (s_q, h_q)
    wide = float32_out and isinstance(out, _Tensor) and out.dtype is torch.float32
    for name, tensor, shape, dtype in (
        ("out", out, (s_q, h_q, D_V), torch.float32 if wide else torch.bfloat16),
        ("max_logits", max_logits, stats, torch.float32),
        ("lse", lse, stats, torch.float32),
    ):
        if tensor is None:
            continue
        if not isinstance(tensor, _Tensor):
            yield not_a_tensor(name, tensor)
            continue
        if tensor.layout is not _STRIDED:
            yield not_strided(name, tensor)
            continue
        if tensor.device != device or not tensor.is_contiguous():
            yield from place(name, tensor, device)
        got = tensor.shape
        if tensor.dtype is not dtype or (s_q is not None and got != shape):
            yield error(
                "output-invalid",
                name=name,
                shape=shape,
                dtype=dtype,
                got_shape=tuple(got),
                got_dtype=tensor.dtype,
            )
    if inputs is not None:
        pair = _first_overlap(given + inputs)
        if pair is not None:
            yield error("outputs-overlap", first=pair[0], second=pair[1])


def _first_overlap(tensors: tuple[Any, ...]) -> tuple[str, str] | None:
    """Two names, an output first, whose tensors share a byte."""
    spans = [
        (*_span(tensor), name)
        for name, tensor in zip(_NAMES, tensors, strict=True)
        if isinstance(tensor, _Tensor) and tensor.layout is _STRIDED
    ]
    spans.sort()
    latest_end, latest = 0, ""
    output_end, output = 0, ""  # the output that reaches furthest, and before it whatever does
    for start, end, name in spans:
        if start == 0:  # empty, or without memory
            continue
        if start < output_end:
            first, second = sorted((output, name), key=_NAMES.index)
            return first, second
        if name in _OUTPUTS:
            if start < latest_end:
                return name, latest
            output_end, output = end, name
        if end > latest_end:
            latest_end, latest = end, name
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one past the last; an empty tensor is at 0."""
    start = tensor.data_ptr()
    return start, start + size(tensor)


def size(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last, gaps included."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def described(value: Any) -> str:
    """An argument in words, for a message; a tensor by its metadata only."""
    if isinstance(value, _Tensor):
        if not is_strided(value):
            return f"{_layout(value)} tensor"
        return f"{_short(value.dtype)} tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{kind} {value!r}" if isinstance(value, (Number, str)) else kind


def plain(value: Any) -> Any:
    """A value for an error's context: never the data of a tensor."""
    return described(value) if isinstance(value, _Tensor) else value


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else _short(tensor.layout)
