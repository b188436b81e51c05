"""The CUDA driver through ctypes: load a cubin on a device, launch its kernel on a stream.

The functions are called without declared argument types, which halves the cost of a call: a Python
int is then passed as a C int, so every pointer and handle must be a `c_void_p`, ``byref`` of
something, or bytes. The driver copies the parameters during the call, so buffers need to live no
longer than that.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

from .errors import error

# Values of the driver's enumerations, from cuda.h.
CAPTURE_MODE_RELAXED = 2
DEVICE_MULTIPROCESSORS = 16
DEVICE_CAPABILITY_MAJOR = 75
DEVICE_CAPABILITY_MINOR = 76
DEVICE_MAX_SHARED_OPTIN = 97
FUNCTION_STATIC_SHARED = 1
FUNCTION_MAX_DYNAMIC_SHARED = 8
LAUNCH_CLUSTER_DIMENSION = 4

# CUlaunchConfig: grid, block, dynamic shared memory and padding; the stream; address and number of
# the attributes, and padding. And one CUlaunchAttribute: which, padding, the cluster's dimensions.
_GRID = struct.Struct("<7I4x")
_STREAM = struct.Struct("<Q")
_ATTRIBUTES = struct.Struct("<QI4x")
_CLUSTER = struct.Struct("<I4x3I52x")


class DriverCallError(Exception):
    """A driver function returned something else than success; the text is the driver's."""


@functools.lru_cache(maxsize=1)
def driver() -> Any:
    """The driver's library, initialised, as a ctypes object; raises ``cuda-driver-missing``."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        check(library, library.cuInit(0))
    except (OSError, DriverCallError) as failure:
        raise error("cuda-driver-missing", reason=failure) from failure
    return library


def check(library: Any, status: int) -> None:
    """Turn a status other than success into `DriverCallError`."""
    if status != 0:
        raise DriverCallError(describe(library, status))


def describe(library: Any, status: int) -> str:
    """The driver's name and text of a status: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    name, text = c_char_p(), c_char_p()
    library.cuGetErrorName(status, byref(name))
    library.cuGetErrorString(status, byref(text))
    if not name.value:
        return f"driver status {status}"
    return f"{name.value.decode()} ({(text.value or b'').decode()})"


def device_attribute(library: Any, device: int, attribute: int) -> int:
    """One of the ``DEVICE_`` numbers of a device."""
    value = c_int()
    check(library, library.cuDeviceGetAttribute(byref(value), attribute, device))
    return value.value


class Kernel:
    """One kernel on one device, for the life of the process. `launch` may be called from any
    thread.
    """

    __slots__ = (
        "arch",
        "capability",
        "context",
        "current",
        "device_index",
        "enqueue",
        "function",
        "library",
        "max_dynamic_smem",
        "multiprocessors",
        "name",
    )

    def __init__(
        self, library: Any, name: str, entry: str, arch: str, cubin: bytes, device_index: int
    ) -> None:
        self.name = name
        self.arch = arch
        self.device_index = device_index
        self.capability = "unknown"
        self.library = library
        self.enqueue = library.cuLaunchKernelEx
        self.current = library.cuCtxGetCurrent
        try:
            self._load(entry, cubin)
        except DriverCallError as failure:
            raise error("kernel-load-failed", **self.where(), reason=failure) from failure

    def _load(self, entry: str, cubin: bytes) -> None:
        library = self.library
        done = functools.partial(check, library)
        device, context, module, function = c_int(), c_void_p(), c_void_p(), c_void_p()
        static = c_int()
        done(library.cuDeviceGet(byref(device), self.device_index))
        major, minor, self.multiprocessors, most_shared = (
            device_attribute(library, device.value, attribute)
            for attribute in (
                DEVICE_CAPABILITY_MAJOR,
                DEVICE_CAPABILITY_MINOR,
                DEVICE_MULTIPROCESSORS,
                DEVICE_MAX_SHARED_OPTIN,
            )
        )
        self.capability = f"{major}.{minor}"
        # The context that torch uses too. Kept for the life of the process, as the kernel is.
        done(library.cuDevicePrimaryCtxRetain(byref(context), device))
        with pushed(library, context), relaxed_capture(library):
            done(library.cuModuleLoadData(byref(module), cubin))
            done(library.cuModuleGetFunction(byref(function), module, entry.encode()))
            done(library.cuFuncGetAttribute(byref(static), FUNCTION_STATIC_SHARED, function))
            # Per function and per device: allow all the shared memory that a launch may ask for.
            self.max_dynamic_smem = most_shared - static.value
            done(
                library.cuFuncSetAttribute(
                    function, FUNCTION_MAX_DYNAMIC_SHARED, self.max_dynamic_smem
                )
            )
        self.function = function
        self.context = context.value

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem: int,
        stream_ptr: int,
        params_address: int,
        cluster: int = 1,
    ) -> None:
        """Put the kernel on the stream. Its only parameter is the struct at ``params_address``,
        which is copied now.

        ``smem`` is dynamic shared memory in bytes, ``stream_ptr`` a ``cudaStream_t`` of this
        kernel's device (torch's ``stream.cuda_stream``), ``cluster`` the CTAs of a cluster, along
        x. Neither waits nor changes the thread's current device. Raises ``kernel-launch-failed``.
        """
        Launch(self, grid, block, smem, cluster).put(stream_ptr, c_void_p(params_address))

    def where(self) -> dict[str, Any]:
        """What the error records say about this kernel and its device."""
        return {
            "kernel": self.name,
            "arch": self.arch,
            "device": f"cuda:{self.device_index}",
            "capability": self.capability,
        }


class Launch:
    """A kernel with its grid: what is left to say are the stream and the parameters.

    It may be put on streams any number of times, from any thread: what the driver reads is never
    written again.
    """

    __slots__ = ("_attribute", "_block", "_grid", "_head", "_kernel", "_last", "_smem", "_tail")

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem: int,
        cluster: int = 1,
    ) -> None:
        self._kernel, self._grid, self._block, self._smem = kernel, grid, block, smem
        self._attribute = ctypes.create_string_buffer(  # kept for its address
            _CLUSTER.pack(LAUNCH_CLUSTER_DIMENSION, cluster, 1, 1), _CLUSTER.size
        )
        self._head = _GRID.pack(*grid, *block, smem)
        self._tail = _ATTRIBUTES.pack(ctypes.addressof(self._attribute), int(cluster > 1))
        self._last = (-1, b"")  # the latest stream, and the configuration for it

    def put(self, stream_ptr: int, params: c_void_p | c_char_p) -> None:
        """`Kernel.launch`; ``params`` points to the struct."""
        kernel = self._kernel
        stream, config = self._last
        if stream != stream_ptr:
            config = self._head + _STREAM.pack(stream_ptr) + self._tail
            self._last = stream_ptr, config
        current = c_void_p()
        kernel.current(byref(current))
        if current.value == kernel.context:
            status = kernel.enqueue(config, kernel.function, byref(params), None)
        else:
            status = self._put_elsewhere(config, params)
        if status != 0:
            reason = describe(kernel.library, status)
            raise error(
                "kernel-launch-failed",
                **kernel.where(),
                reason=reason,
                grid=self._grid,
                block=self._block,
                smem=self._smem,
            )

    def _put_elsewhere(self, config: bytes, params: c_void_p | c_char_p) -> int:
        """Where another device is current, or this thread has used none yet; the status."""
        kernel, library = self._kernel, self._kernel.library
        status: int = library.cuCtxPushCurrent_v2(c_void_p(kernel.context))
        if status == 0:
            status = kernel.enqueue(config, kernel.function, byref(params), None)
            library.cuCtxPopCurrent_v2(byref(c_void_p()))
        return status


@contextmanager
def pushed(library: Any, context: c_void_p) -> Iterator[None]:
    """Make a context current on this thread, and afterwards what was current before: torch sees no
    change of device.
    """
    check(library, library.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(byref(c_void_p()))


@contextmanager
def relaxed_capture(library: Any) -> Iterator[None]:
    """Let a module be loaded while some thread captures a CUDA graph: loading allocates, which a
    capture forbids by default.
    """
    mode = c_int(CAPTURE_MODE_RELAXED)
    check(library, library.cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(byref(mode))
