"""Compiling, loading and launching kernels."""

from __future__ import annotations

from ..record import BackendError, ErrorRecord, Solution
from ._programs import GENERAL, KERNEL, STRICT

SINCE = "0.1.0"
OPERATORS = (STRICT, GENERAL)

RECORDS: tuple[ErrorRecord, ...] = (
    ErrorRecord(
        id="nvrtc-missing",
        exception=BackendError,
        title="The kernel compiler is not installed",
        message="NVRTC is not usable: {reason}",
        detail=(
            "GPU kernels are compiled at their first use, by NVIDIA's run-time compiler; it "
            "comes from pip and needs no CUDA toolkit."
        ),
        fix="pip install 'sparse-mla[cuda]'; or run on the CPU, which needs no compiler.",
        yours="NVRTC could not be used: {reason}.",
        meaning=(
            "The Hopper kernels are shipped as CUDA C++ and compiled once on the user's "
            "machine by NVRTC, which is reached through the package cuda-bindings. The "
            "package or the library libnvrtc behind it could not be loaded."
        ),
        trigger=(
            "cuda.bindings.nvrtc cannot be imported, or libnvrtc is not found, when a kernel "
            "is not in the cache."
        ),
        situations=(
            "sparse-mla was installed without its extra `cuda`.",
            (
                "cuda-bindings is there, but nvidia-cuda-nvrtc is not, or is of another CUDA "
                "major version."
            ),
            "A container image was slimmed down and lost the libraries under site-packages/nvidia.",
        ),
        solutions=(
            Solution(
                "Install the extra, which names both packages.", "pip install 'sparse-mla[cuda]'"
            ),
            Solution("See what this machine can run.", "sparse-mla doctor"),
            Solution("Use another backend.", "SPARSE_MLA_BACKEND=reference python serve.py"),
        ),
        before=KERNEL
        + """\
import sys
# As on a machine without the package cuda-bindings.
missing = {"cuda.bindings": None, "cuda.bindings.nvrtc": None}
with use_cache, mock.patch.dict(sys.modules, missing):
    compile_variant(variant)
""",
        after=KERNEL
        + """\
with use_cache:
    compile_variant(variant)
""",
        related=("cuda-driver-missing", "kernel-compile-failed", "slow-backend"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "libnvrtc.so not found",
            "No module named 'cuda.bindings'",
            "no nvcc",
            "CUDA_HOME",
        ),
        foreign=(
            r"DynamicLibNotFoundError.*nvrtc",
            r"No module named 'cuda(\.bindings)?'",
            r"CUDA_HOME (environment variable is not set|is unset)",
            r"Could not find nvcc",
        ),
        needs=("nvrtc",),
    ),
    ErrorRecord(
        id="cuda-driver-missing",
        exception=BackendError,
        title="There is no usable CUDA driver",
        message="the CUDA driver is not usable: {reason}",
        detail=(
            "A kernel can be compiled without a GPU, but only the driver, libcuda.so.1, can "
            "load and launch it."
        ),
        fix=(
            "install the NVIDIA driver, or start the container with its GPUs (docker run "
            "--gpus all)."
        ),
        yours="The CUDA driver could not be used: {reason}.",
        meaning=(
            "libcuda.so.1 comes with the NVIDIA driver, never with pip. It could not be "
            "opened, or it found no GPU, or it could not be initialised in this process."
        ),
        trigger="libcuda.so.1 cannot be opened, or cuInit reports an error.",
        situations=(
            "The machine has no NVIDIA GPU.",
            "A container was started without access to the host's GPUs.",
            "CUDA_VISIBLE_DEVICES is empty (CUDA_ERROR_NO_DEVICE).",
            (
                "A child process was forked after the parent had used CUDA "
                "(CUDA_ERROR_NOT_INITIALIZED)."
            ),
        ),
        solutions=(
            Solution("Check that the driver answers.", "nvidia-smi"),
            Solution("Give the container its GPUs.", "docker run --gpus all ..."),
            Solution(
                "Start worker processes with spawn.",
                "torch.multiprocessing.set_start_method('spawn')",
            ),
            Solution(
                "Compute on the CPU.",
                "out = sparse_mla.sparse_mla_prefill(q.cpu(), kv.cpu(), indices.cpu())",
            ),
        ),
        before="""\
from unittest import mock

from sparse_mla import jit_driver

# As on a machine without the NVIDIA driver.
absent = OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
with mock.patch("ctypes.CDLL", side_effect=absent):
    jit_driver.driver.__wrapped__()
""",
        after="""\
from sparse_mla import jit

print(jit.available() or "kernels can be compiled and loaded here")
""",
        related=("nvrtc-missing", "kernel-load-failed", "driver-too-old"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=("libcuda.so.1: cannot open shared object file", "no CUDA-capable device"),
        foreign=(
            r"libcuda\.so\.1: cannot open shared object file",
            r"Found no NVIDIA driver on your system",
            r"no CUDA-capable device is detected",
        ),
    ),
    ErrorRecord(
        id="kernel-compile-failed",
        exception=BackendError,
        title="A kernel did not compile",
        message="kernel {kernel} did not compile for {arch}: {first}",
        detail="{source}, compiled by {compiler}, said:\n{log}",
        fix=(
            "for a kernel of this package, install the compiler it was tested with (pip "
            "install -U 'sparse-mla[cuda]') and report what it said."
        ),
        yours="The kernel {kernel} did not compile for {arch}; the first error is {first}.",
        meaning=(
            "NVRTC refused a kernel's source or options. The kernels of a release compile "
            "with every NVRTC that the extra `cuda` admits, so either the compiler is an "
            "older one, or the source was changed."
        ),
        trigger=(
            "NVRTC reports an error for the source, or the source is missing, or lacks the "
            "entry function."
        ),
        situations=(
            "An NVRTC older than CUDA 12 does not know the architecture sm_90a.",
            "A kernel source in an editable checkout was changed.",
            'A kernel function is not extern "C", so that its name in the cubin is a mangled one.',
            "A header is included by a path that is not relative to the folder of kernels.",
        ),
        solutions=(
            Solution("Bring the compiler up to date.", "pip install -U 'sparse-mla[cuda]'"),
            Solution("Read the first error of the log: the others often follow from it."),
            Solution(
                "Use another backend meanwhile.", "SPARSE_MLA_BACKEND=reference python serve.py"
            ),
        ),
        before=KERNEL
        + """\
(root / "one.cu").write_text('extern "C" __global__ void one(float* x) { x[0] = undefined; }')
with use_cache:
    compile_variant(variant)
""",
        after=KERNEL
        + """\
with use_cache:
    compile_variant(variant)
""",
        related=("nvrtc-missing", "kernel-load-failed"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "NVRTC_ERROR_COMPILATION",
            "ptxas fatal",
            "catastrophic error: cannot open source file",
        ),
        foreign=(
            r"NVRTC_ERROR_COMPILATION",
            r"ptxas (fatal|error)\s*:",
            r"nvcc fatal\s*: Unsupported gpu architecture",
        ),
        needs=("nvrtc",),
    ),
    ErrorRecord(
        id="kernel-load-failed",
        exception=BackendError,
        title="The driver refused a compiled kernel",
        message="kernel {kernel} could not be loaded on {device}: {reason}",
        detail="It was compiled for {arch}; {device} has compute capability {capability}.",
        fix="use a GPU of that architecture, or a driver that knows it (580 or newer for CUDA 13).",
        yours="The kernel {kernel} did not load on {device}: {reason}.",
        meaning=(
            "The kernel is compiled for one architecture and runs on that one only: sm_90a is"
            " compute capability 9.0 (H100, H200, H20, GH200). Where the architecture fits, "
            "the driver may be older than the compiler's CUDA version, or the device may be "
            "out of memory."
        ),
        trigger=(
            "a driver call fails between opening the device and finding the kernel in the "
            "loaded cubin."
        ),
        situations=(
            "The GPU is no Hopper (CUDA_ERROR_NO_BINARY_FOR_GPU).",
            (
                "The driver is older than CUDA 13 (CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "
                "CUDA_ERROR_INVALID_IMAGE)."
            ),
            "An earlier kernel of this process crashed; every later driver call then fails.",
            "The device has no memory left for the kernel's code.",
        ),
        solutions=(
            Solution(
                "See which backends take this GPU, and why the others do not.", "sparse-mla doctor"
            ),
            Solution("Check the driver's version.", "nvidia-smi"),
            Solution("Find an earlier crash.", "CUDA_LAUNCH_BLOCKING=1 python serve.py"),
        ),
        before=KERNEL
        + """\
with use_cache:
    load(variant, 0, arch="sm_80")  # on a Hopper GPU
""",
        after=KERNEL
        + """\
with use_cache:
    load(variant, 0, arch="sm_90a")
""",
        related=(
            "kernel-compile-failed",
            "kernel-launch-failed",
            "cuda-driver-missing",
            "backend-refused",
            "gpu-unsupported",
            "driver-too-old",
        ),
        operators=OPERATORS,
        since=SINCE,
        symptoms=("no kernel image is available for execution on the device",),
        foreign=(
            r"CUDA_ERROR_(NO_BINARY_FOR_GPU|INVALID_IMAGE|UNSUPPORTED_PTX_VERSION)",
            r"device kernel image is invalid",
        ),
        needs=("hopper", "nvrtc"),
    ),
    ErrorRecord(
        id="kernel-launch-failed",
        exception=BackendError,
        title="A kernel could not be launched",
        message="kernel {kernel} could not be launched on {device}: {reason}",
        detail=(
            "The launch had grid {grid}, block {block} and {smem} bytes of dynamic shared memory."
        ),
        fix="look for an earlier crash first: run once with CUDA_LAUNCH_BLOCKING=1.",
        yours="The kernel {kernel} did not start on {device}: {reason}.",
        meaning=(
            "The driver refused a launch. It also reports here what went wrong in kernels "
            "that were launched before, by anyone in this process: CUDA_ERROR_ILLEGAL_ADDRESS"
            " means that such a kernel left its buffers."
        ),
        trigger="cuLaunchKernel returns an error.",
        situations=(
            "A kernel that ran earlier in this process crashed.",
            "The stream belongs to another device than the tensors (CUDA_ERROR_INVALID_HANDLE).",
            "The device was reset, or this process was forked after CUDA was used.",
        ),
        solutions=(
            Solution("Find the kernel that crashed.", "CUDA_LAUNCH_BLOCKING=1 python serve.py"),
            Solution("Find its wrong address.", "compute-sanitizer python serve.py"),
            Solution(
                "Keep the inputs of the call and report it.",
                "SPARSE_MLA_DUMP=calls python serve.py",
            ),
        ),
        before=KERNEL
        + """\
import ctypes
import torch

x = torch.zeros(1, device="cuda")
parameters = ctypes.c_void_p(x.data_ptr())
with use_cache:
    kernel = load(variant, 0)
stream = torch.cuda.current_stream().cuda_stream
# A block has at most 1024 threads.
kernel.launch((1, 1, 1), (2048, 1, 1), 0, stream, ctypes.addressof(parameters))
""",
        after=KERNEL
        + """\
import ctypes
import torch

x = torch.zeros(1, device="cuda")
parameters = ctypes.c_void_p(x.data_ptr())
with use_cache:
    kernel = load(variant, 0)
stream = torch.cuda.current_stream().cuda_stream
kernel.launch((1, 1, 1), (1, 1, 1), 0, stream, ctypes.addressof(parameters))
""",
        related=("kernel-load-failed", "illegal-memory-access"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=("an illegal memory access was encountered", "invalid resource handle"),
        foreign=(r"CUDA_ERROR_LAUNCH_(FAILED|OUT_OF_RESOURCES)",),
        needs=("cuda", "hopper", "nvrtc"),
    ),
)
