"""Loading and launching, against a stand-in for the driver that keeps the driver's books.

What only hardware can show is in tests/gpu. Here: which calls are made, in which context, and what
an error says.
"""

from __future__ import annotations

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparse_mla import jit, jit_driver
from sparse_mla.errors import BackendError
from sparse_mla.jit import Variant, load

CONTEXT = 0x7F0000001000  # of device 0; device 1 has the next one: wider than a C int
FUNCTION = 0x7F0000002000
CAPTURE_GLOBAL, CAPTURE_RELAXED = 0, 2
STATIC_SHARED = 1024
MOST_SHARED = 232448
ATTRIBUTES = {16: 132, 75: 9, 76: 0, 97: MOST_SHARED}


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("count", ctypes.c_int))


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` of cuda.h."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class StandIn:
    """Two devices, a stack of contexts for each thread, and a log of what was asked."""

    def __init__(self) -> None:
        self.thread = threading.local()
        self.most_shared: dict[int, int] = {}  # by function
        self.loads: list[tuple[int, bytes]] = []  # context, cubin
        self.launches: list[dict] = []
        self.fails: dict[str, int] = {}  # function name -> status

    @property
    def stack(self) -> list[int]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack, self.thread.mode = [], CAPTURE_GLOBAL
        return self.thread.stack

    def __getattribute__(self, name: str):
        if name.startswith("cu") and name in self.fails:
            return lambda *arguments: self.fails[name]
        return super().__getattribute__(name)

    def cuGetErrorName(self, status, name) -> int:
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 209: b"CUDA_ERROR_NO_BINARY"}.get(status)
        return 0

    def cuGetErrorString(self, status, text) -> int:
        text._obj.value = b"text of the driver"
        return 0

    def cuDeviceGet(self, device, ordinal) -> int:
        device._obj.value = ordinal
        return 0 if ordinal < 2 else 101

    def cuDeviceGetAttribute(self, value, attribute, device) -> int:
        value._obj.value = ATTRIBUTES[attribute]
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device) -> int:
        context._obj.value = CONTEXT + device.value
        return 0

    def cuCtxGetCurrent(self, context) -> int:
        context._obj.value = self.stack[-1] if self.stack else None
        return 0

    def cuCtxPushCurrent_v2(self, context) -> int:
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context) -> int:
        context._obj.value = self.stack.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:
        self.thread.mode, mode._obj.value = mode._obj.value, self.thread.mode
        return 0

    def cuModuleLoadData(self, module, cubin) -> int:
        assert self.thread.mode == CAPTURE_RELAXED
        self.loads.append((self.stack[-1], cubin))
        module._obj.value = self.stack[-1]
        return 0

    def cuModuleGetFunction(self, function, module, name) -> int:
        assert name == b"reverse"
        function._obj.value = FUNCTION + module.value - CONTEXT
        return 0

    def cuFuncGetAttribute(self, value, attribute, function) -> int:
        assert attribute == 1
        value._obj.value = STATIC_SHARED
        return 0

    def cuFuncSetAttribute(self, function, attribute, value) -> int:
        assert attribute == 8
        assert self.stack[-1] - CONTEXT == function.value - FUNCTION
        self.most_shared[function.value] = value
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra) -> int:
        config = LaunchConfig.from_buffer_copy(config)
        device = function.value - FUNCTION
        if self.stack[-1] != CONTEXT + device:
            return 400
        if config.smem > self.most_shared.get(function.value, 48 * 1024):
            return 1
        params = ctypes.cast(parameters._obj, ctypes.POINTER(Params)).contents
        attributes = [config.attributes[i] for i in range(config.count)]
        self.launches.append(
            {
                "device": device,
                "sizes": (*config.grid, *config.block),
                "smem": config.smem,
                "stream": config.stream,
                "attributes": [(a.id, *a.value[:3]) for a in attributes],
                "params": (params.x, params.count),
                "extra": extra,
            }
        )
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, with nothing loaded yet and compiling replaced by a count."""
    stand_in = StandIn()
    compiled = jit.Compiled(b"cubin", "", jit.Resources(0, 0, 0, 0, 0, 0), "", "sm_90a")
    monkeypatch.setattr(jit, "driver", lambda: stand_in)
    monkeypatch.setattr(jit, "compile_variant", lambda variant, arch: compiled)
    monkeypatch.setattr(jit, "_kernels", {})
    return stand_in


VARIANT = Variant("reverse", "reverse.cu", "reverse")
PARAMS = Params(0x7F0012345678, 7)
STREAM = 0x7F0000AABBCC


def launch(kernel: jit_driver.Kernel, smem: int = 0, **cluster: int) -> None:
    kernel.launch((132, 2, 3), (384, 1, 1), smem, STREAM, ctypes.addressof(PARAMS), **cluster)


def test_launch_hands_everything_on(driver: StandIn) -> None:
    driver.stack.append(CONTEXT)
    launch(load(VARIANT, 0), smem=200_000)
    assert driver.launches == [
        {
            "device": 0,
            "sizes": (132, 2, 3, 384, 1, 1),
            "smem": 200_000,
            "stream": STREAM,
            "attributes": [],
            "params": (0x7F0012345678, 7),
            "extra": None,
        }
    ]


def test_launch_in_clusters(driver: StandIn) -> None:
    """CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION is 4; the next launch has no cluster of this one."""
    driver.stack.append(CONTEXT)
    kernel = load(VARIANT, 0)
    launch(kernel, cluster=4)
    launch(kernel)
    assert [done["attributes"] for done in driver.launches] == [[(4, 4, 1, 1)], []]
    assert driver.launches[0]["sizes"] == driver.launches[1]["sizes"] == (132, 2, 3, 384, 1, 1)


def test_threads_do_not_write_into_each_others_launch(driver: StandIn) -> None:
    driver.stack.append(CONTEXT)
    kernel = load(VARIANT, 0)

    def many(cluster: int) -> None:
        for _ in range(200):
            launch(kernel, smem=cluster, cluster=cluster)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, (1, 2, 4, 8)))
    assert len(driver.launches) == 800
    for done in driver.launches:
        cluster = done["smem"]
        assert done["attributes"] == ([(4, cluster, 1, 1)] if cluster > 1 else [])


def test_a_launch_is_put_on_any_stream_with_any_parameters(driver: StandIn) -> None:
    """The configuration for the latest stream is kept, and must not be used for another."""
    driver.stack.append(CONTEXT)
    kernel = load(VARIANT, 0)
    one = jit_driver.Launch(kernel, (132, 2, 3), (384, 1, 1), 7, 4)
    for stream, count in ((0, 1), (STREAM, 2), (STREAM, 3), (0, 4)):
        one.put(stream, ctypes.c_char_p(bytes(Params(0x7F00000000 + count, count))))
    assert [(done["stream"] or 0, *done["params"]) for done in driver.launches] == [
        (0, 0x7F00000001, 1),
        (STREAM, 0x7F00000002, 2),
        (STREAM, 0x7F00000003, 3),
        (0, 0x7F00000004, 4),
    ]
    for done in driver.launches:
        assert (done["sizes"], done["smem"]) == ((132, 2, 3, 384, 1, 1), 7)
        assert done["attributes"] == [(4, 4, 1, 1)]


def test_threads_share_a_launch(driver: StandIn) -> None:
    kernel = load(VARIANT, 0)
    one = jit_driver.Launch(kernel, (132, 1, 1), (384, 1, 1), 0)

    def many(stream: int) -> None:
        for _ in range(200):
            one.put(stream, ctypes.c_char_p(bytes(Params(stream, stream))))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(many, (1, 2, 3, 4)))
    assert len(driver.launches) == 800
    assert all(done["params"] == (done["stream"],) * 2 for done in driver.launches)


def test_what_a_kernel_knows_of_its_device(driver: StandIn) -> None:
    kernel = load(VARIANT, 1)
    assert kernel.device_index == 1
    assert kernel.multiprocessors == 132
    assert kernel.capability == "9.0"
    assert kernel.max_dynamic_smem == MOST_SHARED - STATIC_SHARED


def test_shared_memory_is_allowed_on_every_device(driver: StandIn) -> None:
    """The attribute belongs to one device: set once in the process, the second device fails."""
    for device in (0, 1):
        launch(load(VARIANT, device), smem=MOST_SHARED - STATIC_SHARED)
    assert [done["device"] for done in driver.launches] == [0, 1]


@pytest.mark.parametrize("current", [[], [CONTEXT + 1], [CONTEXT], [0x1234]])
def test_current_context_is_left_alone(current: list[int], driver: StandIn) -> None:
    driver.stack.extend(current)
    launch(load(VARIANT, 0))
    assert driver.stack == current
    assert driver.thread.mode == CAPTURE_GLOBAL
    assert len(driver.launches) == 1


def test_thread_that_has_used_no_device(driver: StandIn) -> None:
    driver.stack.append(CONTEXT)
    kernel = load(VARIANT, 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(launch, kernel).result()
    assert len(driver.launches) == 1


def test_loaded_once_for_each_device_and_variant(driver: StandIn) -> None:
    kernel = load(VARIANT, 0)
    assert load(VARIANT, 0) is kernel
    assert load(VARIANT, 1) is not kernel
    assert load(Variant("reverse", "reverse.cu", "reverse"), 0) is not kernel
    assert [context for context, _ in driver.loads] == [CONTEXT, CONTEXT + 1, CONTEXT]


def test_threads_load_once(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = jit.compile_variant(VARIANT, "sm_90a")
    start = threading.Barrier(4)
    compiles = []

    def slow(variant: Variant, arch: str) -> jit.Compiled:
        compiles.append(variant)
        threading.Event().wait(0.1)
        return compiled

    monkeypatch.setattr(jit, "compile_variant", slow)

    def work(_: int) -> jit_driver.Kernel:
        start.wait(10)
        return load(VARIANT, 0)

    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(work, range(4)))
    assert len(kernels) == len(compiles) == len(driver.loads) == 1


@pytest.mark.parametrize(
    "function",
    [
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuThreadExchangeStreamCaptureMode",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuFuncGetAttribute",
        "cuFuncSetAttribute",
    ],
)
def test_load_that_the_driver_refuses(function: str, driver: StandIn) -> None:
    driver.fails[function] = 209
    with pytest.raises(BackendError) as caught:
        load(VARIANT, 1)
    assert caught.value.id == "kernel-load-failed"
    assert str(caught.value).startswith(
        "kernel reverse could not be loaded on cuda:1: CUDA_ERROR_NO_BINARY (text of the driver)"
    )
    assert driver.stack == []
    if function not in ("cuDeviceGetAttribute", "cuThreadExchangeStreamCaptureMode"):
        assert "compute capability 9.0" in str(caught.value)

    driver.fails.clear()
    launch(load(VARIANT, 1))
    assert driver.thread.mode == CAPTURE_GLOBAL


def test_device_that_is_not_there(driver: StandIn) -> None:
    with pytest.raises(BackendError, match="loaded on cuda:2: driver status 101"):
        load(VARIANT, 2)


@pytest.mark.parametrize("current", [CONTEXT, CONTEXT + 1])
def test_launch_that_the_driver_refuses(current: int, driver: StandIn) -> None:
    driver.stack.append(current)
    kernel = load(VARIANT, 0)
    with pytest.raises(BackendError) as caught:
        launch(kernel, smem=MOST_SHARED)
    assert caught.value.id == "kernel-launch-failed"
    assert str(caught.value).startswith(
        "kernel reverse could not be launched on cuda:0: CUDA_ERROR_INVALID_VALUE"
    )
    assert caught.value.context["grid"] == (132, 2, 3)
    assert caught.value.context["smem"] == MOST_SHARED
    assert driver.stack == [current]


def test_launch_where_the_context_is_gone(driver: StandIn) -> None:
    kernel = load(VARIANT, 0)
    driver.fails["cuCtxPushCurrent_v2"] = 1
    with pytest.raises(BackendError, match="CUDA_ERROR_INVALID_VALUE"):
        launch(kernel)
    assert driver.stack == []
    assert driver.launches == []


def test_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(BackendError) as caught:
        jit_driver.driver.__wrapped__()
    assert caught.value.id == "cuda-driver-missing"
    assert "libcuda.so.1: cannot open shared object file" in str(caught.value)
    assert "docker run --gpus all" in str(caught.value)


def test_driver_without_a_gpu(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.fails["cuInit"] = 1
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    with pytest.raises(BackendError, match="is not usable: CUDA_ERROR_INVALID_VALUE") as caught:
        jit_driver.driver.__wrapped__()
    assert caught.value.id == "cuda-driver-missing"


def test_available_says_what_is_missing(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_nvrtc", lambda: None)
    assert jit.available() is None
    driver.fails["cuInit"] = 1
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(jit, "driver", jit_driver.driver.__wrapped__)
    assert jit.available().startswith("the CUDA driver is not usable: CUDA_ERROR_INVALID_VALUE")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.timeout(60)
def test_child_does_not_wait_for_a_thread_of_its_parent(driver: StandIn) -> None:
    """Forked while another thread of the parent was compiling: that thread is not in the child."""
    load(VARIANT, 0)
    with jit._loading:
        child = os.fork()
        if child == 0:
            free = jit._loading.acquire(timeout=5)
            os._exit(0 if free and not jit._kernels else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(jit._kernels) == 1
