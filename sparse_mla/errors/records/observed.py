"""Faults that no code here raises: a driver, torch or the numbers themselves report them."""

from __future__ import annotations

from ..record import BackendError, ErrorRecord, Solution
from ._programs import GENERAL, KERNEL, STRICT

SINCE = "0.1.0"
OPERATORS = (STRICT, GENERAL)

RECORDS: tuple[ErrorRecord, ...] = (
    ErrorRecord(
        id="illegal-memory-access",
        exception=BackendError,
        reported_as="torch.AcceleratorError",
        title="A kernel left its buffers, and a later call reports it",
        message="CUDA error: an illegal memory access was encountered",
        detail=(
            "The call that reports this is seldom the one that did it: kernels run later than "
            "the calls that queue them."
        ),
        fix="run once with CUDA_LAUNCH_BLOCKING=1: the traceback then ends at the call at fault.",
        meaning=(
            "Some kernel of this process read or wrote outside its memory. A GPU works through "
            "a queue, so the error surfaces at the next call that waits: a copy, a "
            "synchronisation, the next launch. Every CUDA call of this process fails from then on."
        ),
        trigger=(
            "a kernel launched earlier, by any library in the process, touched an address "
            "that is not mapped."
        ),
        situations=(
            (
                "A kernel of another library was given indices outside the cache. The operators "
                "here skip such indices and never read through them."
            ),
            "A cache was freed or resized while a captured CUDA graph still holds its address.",
            "A tensor's memory was reused on another stream without an event between the two.",
            "Shapes told to a kernel do not fit the buffers, as after a change of page size.",
        ),
        solutions=(
            Solution(
                "Make each launch wait, to see which call it was.",
                "CUDA_LAUNCH_BLOCKING=1 python serve.py",
            ),
            Solution(
                "Let the sanitizer name the kernel and the address.",
                "compute-sanitizer --tool memcheck python serve.py",
            ),
            Solution(
                "Write the inputs of each call to a folder; a call that crashes leaves its file.",
                "SPARSE_MLA_DUMP=calls CUDA_LAUNCH_BLOCKING=1 python serve.py",
            ),
            Solution(
                "Make that one call again, alone.", "sparse-mla run calls/FILE.safetensors --verify"
            ),
            Solution(
                "Look for indices that do not belong to the cache.",
                "SPARSE_MLA_DEBUG=1 python serve.py",
            ),
        ),
        before=KERNEL
        + """\
import ctypes
import torch

torch.zeros(1, device="cuda")
parameters = ctypes.c_void_p(16)  # no memory is there
with use_cache:
    kernel = load(variant, 0)
stream = torch.cuda.current_stream().cuda_stream
kernel.launch((1, 1, 1), (1, 1, 1), 0, stream, ctypes.addressof(parameters))
torch.cuda.synchronize()  # the launch said nothing; this call reports it
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
torch.cuda.synchronize()
""",
        related=("kernel-launch-failed", "index-out-of-range"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "cudaErrorIllegalAddress",
            "error 700",
            "asynchronously reported at some other API call",
            "device-side assert triggered",
            "server crashes at random",
            "Xid 31",
        ),
        foreign=(
            r"an illegal memory access was encountered",
            r"CUDA_ERROR_ILLEGAL_ADDRESS",
            r"cudaErrorIllegalAddress",
            r"CUDA error: (?:misaligned address|unspecified launch failure)",
            r"CUDA error: device-side assert triggered",
        ),
        needs=("cuda", "hopper", "nvrtc"),
    ),
    ErrorRecord(
        id="nan-in-output",
        exception=BackendError,
        reported_as="no exception",
        title="The output is NaN",
        message="the output holds NaN",
        detail=(
            "From finite inputs no NaN comes out: a query without a valid slot gives out 0, "
            "max_logits -inf and lse +inf."
        ),
        fix=(
            "run once with SPARSE_MLA_DEBUG=1, which names the first input, row and value that "
            "is not a number."
        ),
        meaning=(
            "NaN spreads: one NaN in a query row or in a KV row that a query selected makes that "
            "query's whole output NaN, and the next layer spreads it to every token. Rows that "
            "no query selects are never read, so what lies there does not matter."
        ),
        trigger="a selected KV row, a query row, a scale or attn_sink holds NaN or infinity.",
        situations=(
            "An index points to a cache row that was never written.",
            (
                "The cache is of another FP8 format: e4m3fnuz and e5m2 bytes read as e4m3fn "
                "are other numbers, some of them NaN."
            ),
            "An activation overflowed float16 before it was quantised.",
            "q_scale or kv_scale is inf or NaN: the maximum of a row was zero, and was divided by.",
            "Partial results were merged by code that subtracts an lse of +inf from another.",
        ),
        solutions=(
            Solution("Name the first bad input.", "SPARSE_MLA_DEBUG=1 python serve.py"),
            Solution(
                "Keep the call, and compare it with the float64 reference.",
                "SPARSE_MLA_DUMP=calls SPARSE_MLA_DUMP_ALL=1 python serve.py\n"
                "sparse-mla run calls/FILE.safetensors --verify",
            ),
            Solution(
                "See which queries are hit: all of them points to a scale, one to a KV row.",
                "print(out.isnan().any(-1).any(-1).nonzero().flatten())",
            ),
            Solution(
                "Bisect the cached rows that one bad query selects.",
                "rows = indices[t].flatten()\n"
                "rows = rows[(rows >= 0) & (rows < len(kv))]\n"
                "print(rows[kv[rows.long()].float().isnan().flatten(1).any(1)])",
            ),
            Solution(
                "Bisect the layers: the first one whose output is NaN has the fault.",
                "for name, module in model.named_modules():\n"
                "    module.register_forward_hook(\n"
                "        lambda _, __, y, name=name: print(name, y.isnan().any().item())\n"
                "    )",
            ),
        ),
        before="""\
import torch
from sparse_mla import sparse_mla_prefill

q = torch.randn(4, 16, 576, dtype=torch.bfloat16)
kv = torch.randn(300, 576).to(torch.float8_e4m3fn)
kv.view(torch.uint8)[7] = 0x7F  # a row that was never written
indices = torch.arange(100, dtype=torch.int32).expand(4, 100)
out = sparse_mla_prefill(q, kv, indices, kv_scale=1.0)
if out.isnan().any():
    raise FloatingPointError("the output holds NaN")
""",
        after="""\
import torch
from sparse_mla import sparse_mla_prefill

q = torch.randn(4, 16, 576, dtype=torch.bfloat16)
kv = torch.randn(300, 576).to(torch.float8_e4m3fn)
kv.view(torch.uint8)[7] = 0x7F  # a row that was never written
indices = torch.arange(100, dtype=torch.int32).expand(4, 100).clone()
indices[indices == 7] = -1
out = sparse_mla_prefill(q, kv, indices, kv_scale=1.0)
if out.isnan().any():
    raise FloatingPointError("the output holds NaN")
""",
        related=("nan-in-input", "scale-data-invalid", "index-out-of-range"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "NaN in the output",
            "NaN logits",
            "loss is nan",
            "how to bisect NaN",
            "sampling fails after a prefill",
            "the model repeats one token",
        ),
        foreign=(
            r"probability tensor contains either `?inf`?, `?nan`?",
            r"(?:[Nn]a[Nn]|non-finite)\w{0,40} (?:values? )?(?:detected|found|in) (?:in )?"
            r"(?:the )?(?:logits|outputs?|hidden)",
        ),
    ),
    ErrorRecord(
        id="gpu-unsupported",
        exception=BackendError,
        reported_as="torch.AcceleratorError",
        title="A package has no kernels for this GPU",
        message="CUDA error: no kernel image is available for execution on the device",
        detail=(
            "A compiled kernel runs on the GPU generations it was compiled for. Torch, or a "
            "package beside it, was built without this one."
        ),
        fix="run sparse-mla doctor: it names the GPU, and the backends that take it.",
        meaning=(
            "The message comes from a kernel that was shipped compiled: torch's own, or that of "
            "another attention package. The kernels here are compiled on the machine; the "
            "backend sm90 takes Hopper only, and refuses other GPUs before anything is launched."
        ),
        trigger="a compiled package holds no code for the compute capability of the GPU.",
        situations=(
            "The GPU is newer than the installed torch (Blackwell with a build for CUDA 12.4).",
            "The GPU is older than the oldest that the torch wheel holds (Volta, Pascal).",
            "An attention package was built for sm_90a alone, and the GPU is an A100 or RTX card.",
        ),
        solutions=(
            Solution("See the GPU and what can run on it.", "sparse-mla doctor"),
            Solution(
                "Compare the GPU with what torch was built for.",
                'python -c "import torch; print(torch.cuda.get_device_capability(), '
                'torch.cuda.get_arch_list())"',
            ),
            Solution("Install a torch built for a CUDA version that knows the GPU."),
            Solution(
                "Compute with the reference meanwhile: plain torch, on any GPU that torch runs on.",
                "SPARSE_MLA_BACKEND=reference python serve.py",
            ),
        ),
        before="""\
from unittest import mock

import torch

# As on a GPU for which this torch has no kernels.
text = "CUDA error: no kernel image is available for execution on the device"
with mock.patch("torch.zeros", side_effect=RuntimeError(text)):
    torch.zeros(1, device="cuda")
""",
        after="""\
import torch

device = "cpu"
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    if f"sm_{major}{minor}" in torch.cuda.get_arch_list():
        device = "cuda"
torch.zeros(1, device=device)
""",
        related=("backend-refused", "kernel-load-failed", "driver-too-old"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "unsupported GPU",
            "cudaErrorNoKernelImageForDevice",
            "is not compatible with the current PyTorch installation",
            "missing kernel image",
        ),
        foreign=(
            r"no kernel image is available for execution on the device",
            r"with CUDA capability sm_\d+a? is not compatible with the current PyTorch",
            r"cudaErrorNoKernelImageForDevice",
        ),
    ),
    ErrorRecord(
        id="driver-too-old",
        exception=BackendError,
        reported_as="RuntimeError",
        title="The NVIDIA driver is older than the CUDA version in use",
        message="The NVIDIA driver on your system is too old (found version {version})",
        detail="The driver knows CUDA up to {version}: 12040 stands for 12.4.",
        fix="update the driver (580 or newer for CUDA 13), or install a torch for an older CUDA.",
        yours="Your driver knows CUDA up to version {version} (12040 stands for 12.4).",
        meaning=(
            "Torch, and the NVRTC of the extra cuda, come with a CUDA version of their own. The "
            "driver, which comes with the machine, has to be at least as new in its major version."
        ),
        trigger="the driver's CUDA version is lower than the package's, in a way that matters.",
        situations=(
            "A container with a new torch runs on a host whose driver is of the year before.",
            "pip took the newest torch, a build for CUDA 13, on a machine set up for CUDA 12.",
        ),
        solutions=(
            Solution("See the driver and its CUDA version.", "nvidia-smi"),
            Solution(
                "See the CUDA version of torch.",
                'python -c "import torch; print(torch.version.cuda)"',
            ),
            Solution("See what this machine can run.", "sparse-mla doctor"),
            Solution("Update the host's driver, or install the torch built for its CUDA version."),
        ),
        before="""\
from unittest import mock

import torch

# As on a machine whose driver knows CUDA 12.4.
text = "The NVIDIA driver on your system is too old (found version 12040). Please update it."
with mock.patch("torch.cuda.init", side_effect=RuntimeError(text)):
    torch.cuda.init()
""",
        after="""\
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"  # false under a driver too old
torch.zeros(1, device=device)
""",
        related=("cuda-driver-missing", "kernel-load-failed", "gpu-unsupported"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "CUDA driver version is insufficient",
            "unsupported driver",
            "cudaErrorInsufficientDriver",
            "unsupported toolchain",
        ),
        foreign=(
            r"CUDA driver version is insufficient for CUDA runtime version",
            r"provided PTX was compiled with an unsupported toolchain",
            r"cudaErrorInsufficientDriver",
            r"forward compatibility was attempted on non supported HW",
        ),
    ),
    ErrorRecord(
        id="out-of-memory",
        exception=BackendError,
        reported_as="torch.OutOfMemoryError",
        title="The GPU has no memory left for the call",
        message="CUDA out of memory. Tried to allocate {size}",
        detail="{size} could not be had in one piece.",
        fix="compute the queries in parts: each query's result depends on its own row alone.",
        yours="{size} could not be had in one piece on your GPU.",
        meaning=(
            "A call allocates its results: out takes 2 bytes x s_q x h_q x 512, which is 512 MiB "
            "for 4,096 queries of 128 heads; max_logits and lse take 4 bytes x s_q x h_q each. "
            "Everything else that fills the GPU is the model's and its cache's."
        ),
        trigger="torch's allocator finds no free block of that size.",
        situations=(
            "A serving engine gave nearly all memory to its KV cache: the results find no room.",
            "A long prompt was computed in one call instead of in chunks.",
            "The reference backend, which works in float64, was run on a large problem.",
        ),
        solutions=(
            Solution(
                "Compute in parts.",
                "for rows in torch.arange(len(q)).split(1024):\n"
                "    out[rows] = sparse_mla_prefill(q[rows], kv, indices[rows], kv_scale=kv_scale)",
            ),
            Solution(
                "Keep one set of results and hand it in, so that no call allocates.",
                "sparse_mla_q8kv8_prefill_fwd(..., out=out, max_logits=max_logits, lse=lse)",
            ),
            Solution("Leave the engine's cache a smaller share of the memory."),
        ),
        before="""\
import torch

out = torch.empty(1 << 30, 128, 512, dtype=torch.bfloat16, device="cuda")
""",
        after="""\
import torch

out = torch.empty(1 << 10, 128, 512, dtype=torch.bfloat16, device="cuda")
""",
        related=("slow-backend",),
        operators=OPERATORS,
        since=SINCE,
        symptoms=("OOM", "torch.OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY", "memory full"),
        foreign=(r"CUDA out of memory", r"CUDA_ERROR_OUT_OF_MEMORY", r"torch\.OutOfMemoryError"),
        needs=("cuda",),
    ),
)
