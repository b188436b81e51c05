"""The container: a safetensors file that is not trusted, read and written whole.

The header is checked entirely (offsets against shapes, dtypes and the size of the file) before
memory is taken for a tensor, and data is read from the descriptor that was checked, never mapped:
a file cut short while it is read gives an error, not a bus fault.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from io import BufferedReader
from typing import Any, NamedTuple

import torch

MAX_HEADER = 1 << 20  # a call has at most ten tensors: a larger header is no call's

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
MAX_DIM = 2**31
_MAX_NDIM = 8


class Malformed(ValueError):
    """Not a safetensors file, or one that says impossible things."""


class Entry(NamedTuple):
    """A tensor as the header declares it; its bytes are ``begin:end`` of the data part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def opened(path: str | os.PathLike[str]) -> BufferedReader:
    """The file for reading, if it is a regular one; a pipe or a device is not waited for."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except ValueError as fault:  # a NUL in the name
        raise OSError(0, str(fault)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(0, "Is a directory" if stat.S_ISDIR(mode) else "Is not a regular file")
    return os.fdopen(descriptor, "rb")


def header(file: BufferedReader, size: int) -> tuple[dict[str, Entry], dict[str, str], int]:
    """The tensors and metadata that the header declares, all checked; where the data starts."""
    if size < 8:
        raise Malformed(f"it has {size} bytes, too few for a header")
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER, size - 8):
        raise Malformed(
            f"its header should have {length} bytes, of {size} in the file (limit {MAX_HEADER})"
        )
    try:
        header = json.loads(
            file.read(length).decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
        json.dumps(header, ensure_ascii=False).encode("utf-8")  # refuses half a surrogate pair
    except Malformed:
        raise
    except (ValueError, RecursionError):
        raise Malformed("its header is not JSON in UTF-8") from None
    if not isinstance(header, dict):
        raise Malformed("its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise Malformed("its metadata is not a map from text to text")
    entries = {name: _entry(name, declared) for name, declared in header.items()}
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != position:
            raise Malformed(f"tensor {shown(name)} starts at byte {entry.begin}, not at {position}")
        position = entry.end
    if 8 + length + position != size:
        raise Malformed(f"it has {size} bytes, its header declares {8 + length + position}")
    return entries, metadata, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise Malformed("its header has a name twice")
    return unique


def _no_constant(text: str) -> Any:
    raise Malformed(f"its header is not JSON: {text}")


def _entry(name: str, declared: Any) -> Entry:
    if not isinstance(declared, dict) or declared.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"tensor {shown(name)} is not declared by dtype, shape and data_offsets")
    dtype, shape, offsets = (declared[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not is_shape(shape) or not is_sizes(offsets, limit=2**63) or len(offsets) != 2:
        raise Malformed(f"tensor {shown(name)} has an impossible shape or offsets")
    need = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != need:
        span = f"its offsets span {offsets[1] - offsets[0]}"
        raise Malformed(f"tensor {shown(name)} needs {need} bytes for its shape, {span}")
    return Entry(DTYPES[dtype], tuple(shape), offsets[0], offsets[1])


def is_shape(value: Any) -> bool:
    """Whether this piece of JSON is a shape whose strides torch can count, also an empty one's."""
    return is_sizes(value) and math.prod(max(size, 1) for size in value) < 2**59


def is_sizes(value: Any, limit: int = MAX_DIM) -> bool:
    """Whether this piece of JSON is a list of few sizes, each below ``limit``."""
    return (
        isinstance(value, list)
        and len(value) <= _MAX_NDIM
        and all(type(item) is int and 0 <= item < limit for item in value)
    )


def tensor(file: BufferedReader, start: int, entry: Entry) -> torch.Tensor:
    """The tensor of ``entry``, in memory of its own."""
    if entry.begin == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    data = bytearray(entry.end - entry.begin)
    file.seek(start + entry.begin)
    if file.readinto(data) != len(data):
        raise Malformed("it became shorter while it was read")
    return torch.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def write(
    path: str | os.PathLike[str],
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str],
    mode: int,
) -> None:
    """Write a safetensors file to ``path`` by rename; ``OSError`` when that does not work."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = os.path.realpath(path)  # a link keeps pointing at what it points at
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(0, "exists and is not a regular file")
    folder, name = os.path.split(target)
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(6)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        permissions = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        save_file(_packed(tensors), temporary, metadata)
        os.chmod(temporary, permissions)
        os.replace(temporary, target)
    except SafetensorError as fault:
        raise OSError(0, str(fault)) from fault
    except KeyError as fault:
        raise OSError(0, f"this safetensors does not hold {fault.args[0]}") from fault
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _packed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors contiguous, on the CPU and in memory of their own, as safetensors wants them."""
    packed: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise OSError(0, f"{name} is {tensor.dtype}, which safetensors does not hold")
        here = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        storage = here.untyped_storage().data_ptr()
        packed[name] = here.clone() if storage in storages else here
        storages.add(storage)
    return packed


def shown(text: object) -> str:
    """Text from outside in one line that no terminal obeys: escaped unless printable, and cut."""
    plain = os.fsdecode(text) if isinstance(text, (bytes, os.PathLike)) else str(text)
    plain = plain if len(plain) <= 1000 else plain[:1000] + "..."
    return plain if plain.isprintable() else repr(plain)
