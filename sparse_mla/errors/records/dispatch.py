"""Backends that are unknown, unwilling or slow."""

from __future__ import annotations

from ..record import BackendError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, general

# The operators infer shapes for meta tensors; below them, meta is a device without a backend.
_PROBLEM = """\
import torch
from sparse_mla import dispatch
from sparse_mla.checks import check_prefill

q = torch.randn(4, 16, 576).to(torch.float8_e4m3fn)
kv = torch.randn(300, 576).to(torch.float8_e4m3fn)
indices = torch.randint(0, 300, (4, 100), dtype=torch.int32)
device = "{device}"
problem = check_prefill(
    q.to(device), kv.to(device), indices.to(device), q_scale=1.0, kv_scale=1.0
)
dispatch.run(problem, backend="{backend}")
"""

RECORDS = (
    ErrorRecord(
        id="backend-unknown",
        exception=BackendError,
        title="There is no backend of that name",
        message="unknown backend {backend}; known: {known}",
        detail=(
            "The name comes from the backend argument, or from the environment variable"
            " SPARSE_MLA_BACKEND."
        ),
        fix="use one of the known names, or 'auto'; unset SPARSE_MLA_BACKEND if it was not meant.",
        yours="Your call asked for the backend {backend}.",
        meaning=(
            "A backend is named to compare results or to rule one out. A name that does not exist"
            " is reported rather than replaced by 'auto', because a comparison would then compare a"
            " backend with itself."
        ),
        trigger="the backend argument or SPARSE_MLA_BACKEND is no name in the registry",
        situations=(
            "The name is another project's: flashmla_sparse, tilelang, fa3, trtllm.",
            "A typing slip, or upper case: the names are lower case.",
            "SPARSE_MLA_BACKEND was set in a shell profile or a container image and forgotten.",
            "The backend exists only in a newer version of this library.",
        ),
        solutions=(
            Solution(
                "List the backends of this machine and why each can or cannot run.",
                "sparse-mla doctor",
            ),
            Solution(
                "Leave the choice to the library.",
                "out = sparse_mla_prefill(q, kv, indices, kv_scale=kv_scale, backend='auto')",
            ),
        ),
        before=general(more='kv_scale=1.0, backend="flashmla_sparse"'),
        after=general(more='kv_scale=1.0, backend="auto"'),
        related=("backend-refused", "no-backend"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("SPARSE_MLA_BACKEND", "flashmla_sparse", "tilelang", "fa3", "backend name"),
        foreign=(
            (
                r"(?:[Uu]nknown|[Ii]nvalid|[Uu]nsupported) (?:attention |nsa |dsa )?backend:?"
                r" ['\"]?(?P<backend>[\w.]{1,40})"
            ),
            r"--(?:nsa|dsa|attention)[\w-]{0,40}backend: invalid choice: '(?P<backend>\w{1,40})'",
        ),
    ),
    ErrorRecord(
        id="backend-refused",
        exception=BackendError,
        title="The backend that was asked for cannot run this problem",
        message="backend {backend} cannot run this problem: {reason}",
        detail=(
            "It was named in the call or in SPARSE_MLA_BACKEND, so no other backend was tried in"
            " its place."
        ),
        fix="change what the reason names, or pass backend='auto' so that another backend runs it.",
        yours="Your call asked for {backend}, which says: {reason}.",
        meaning=(
            "Every backend states why it does not take a problem: the device, the GPU generation,"
            " unquantised data, a missing package. A backend named by the caller either runs or"
            " says so; it is never exchanged behind your back."
        ),
        trigger=(
            "the backend argument or SPARSE_MLA_BACKEND names a backend whose `refusal(problem)`"
            " gives a reason"
        ),
        situations=(
            (
                "sm90 was asked for on a GPU that is not Hopper (A100, RTX 4090, B200, RTX PRO"
                " 6000, DGX Spark)."
            ),
            "A CPU backend was asked for with tensors on another device.",
            "An unquantised kv (bfloat16) was given to a backend that computes in FP8 only.",
            "SPARSE_MLA_BACKEND is set for one model and another one runs in the same environment.",
        ),
        solutions=(
            Solution(
                "Leave the choice to the library.",
                "out = sparse_mla_prefill(q, kv, indices, kv_scale=kv_scale, backend='auto')",
            ),
            Solution("See what each backend says on this machine.", "sparse-mla doctor"),
        ),
        before=_PROBLEM.format(device="meta", backend="cpu"),
        after=_PROBLEM.format(device="cpu", backend="cpu"),
        related=(
            "backend-unknown",
            "no-backend",
            "slow-backend",
            "kernel-load-failed",
            "gpu-unsupported",
        ),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "not supported on this GPU",
            "compute capability",
            "Hopper only",
            "sm_80",
            "sm_89",
            "sm_100",
            "sm_120",
            "RTX",
            "A100",
            "B200",
        ),
        foreign=(
            r"(?P<backend>FlashMLA[\w ]{0,40}) (?P<reason>is only supported on [^.\n]{1,200})",
            (
                r"Selected backend (?:AttentionBackendEnum\.)?(?P<backend>\w{1,40}) is not valid"
                r" for this configuration\. Reason: (?P<reason>.{1,200})"
            ),
            r"(?:requires?|only supports?) (?:SM|sm_?)90a?\b",
            r"[Uu]nsupported (?:GPU )?(?:compute capability|architecture|sm version)",
        ),
    ),
    ErrorRecord(
        id="no-backend",
        exception=BackendError,
        title="No backend runs on this device",
        message="no backend runs on {device}",
        detail="Every backend refused: {reasons}.",
        fix="move the tensors to a CUDA or CPU device.",
        yours="Your tensors are on {device}, where no backend runs.",
        meaning=(
            "Backends exist for CUDA GPUs and for the CPU. On other devices there is nothing to"
            " run, and copying the cache to another device on every call would be slower than"
            " anything a user expects."
        ),
        trigger="`auto` tried every backend of the device and each gave a reason for refusing",
        situations=(
            "The tensors are on mps (Apple), xpu (Intel) or npu.",
            "Meta tensors from shape inference or a model built under torch.device('meta').",
            "A CUDA build of torch without a usable GPU, with tensors on another device type.",
        ),
        solutions=(
            Solution(
                "Compute on the CPU.",
                "out = sparse_mla_prefill(q.cpu(), kv.cpu(), indices.cpu(), kv_scale=kv_scale)",
            ),
            Solution(
                "For shapes only use FakeTensorMode or torch.compile, which the operators support."
            ),
            Solution("See what each backend says on this machine.", "sparse-mla doctor"),
        ),
        before=_PROBLEM.format(device="meta", backend="auto"),
        after=_PROBLEM.format(device="cpu", backend="auto"),
        related=("backend-unknown", "backend-refused", "device-mismatch", "slow-backend"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("mps", "xpu", "Apple", "Intel", "meta tensor", "no attention backend"),
        foreign=(
            r"No valid attention backend found for (?P<device>\w{1,40})",
            r"[Cc]ould not run '[\w:]{1,80}' with arguments from the '(?P<device>\w{1,40})'",
        ),
    ),
    ErrorRecord(
        id="slow-backend",
        exception=BackendError,
        title="A slower backend runs than you may expect (a warning)",
        message="{chosen} runs this problem, slower than {better} would",
        detail="Refused by the faster ones: {reasons}.",
        fix=(
            "change what the reasons name; or name the backend, as with backend='{chosen}', to"
            " accept it without a warning."
        ),
        yours="Your call runs on {chosen} rather than on {better}.",
        meaning=(
            "The result is right, only late. A backend that stands in silently would look like a"
            " slow library, so it is said, once for each combination of backend and reasons. The"
            " warning is of class sparse_mla.errors.SlowBackendWarning."
        ),
        trigger="`auto` passed over a faster backend of the device",
        situations=(
            "An unquantised kv (bfloat16) on a Hopper GPU: the FP8 kernel does not take it.",
            "FP8 rows of q or kv that do not start at multiples of 16 bytes, as in some views.",
            "A GPU of another generation than the kernel was built for.",
            (
                "The packages for the GPU kernels are not installed, so that only the reference is"
                " left."
            ),
        ),
        solutions=(
            Solution("Quantise the cache for the FP8 kernel.", "kv, kv_scale = quantize_fp8(kv)"),
            Solution(
                "Give the rows addresses that the kernels take.", "q, kv = q.clone(), kv.clone()"
            ),
            Solution(
                "Accept the backend by name.",
                "out = sparse_mla_prefill(q, kv, indices, backend='reference')",
            ),
            Solution(
                "Turn the warning into an error in a service that must not run slowly.",
                "warnings.simplefilter('error', sparse_mla.errors.SlowBackendWarning)",
            ),
        ),
        before=(
            "import warnings\n\nfrom sparse_mla.errors import"
            ' SlowBackendWarning\n\nwarnings.simplefilter("error", SlowBackendWarning)\n'
        )
        + general(
            q='torch.randn(4, 16, 576, dtype=torch.bfloat16, device="cuda")',
            kv='torch.randn(300, 576, dtype=torch.bfloat16, device="cuda")',
            indices='torch.randint(0, 300, (4, 100), dtype=torch.int32, device="cuda")',
            more="",
        ),
        after=(
            "import warnings\n\nfrom sparse_mla.errors import"
            ' SlowBackendWarning\n\nwarnings.simplefilter("error", SlowBackendWarning)\n'
        )
        + general(
            q='torch.randn(4, 16, 576, dtype=torch.bfloat16, device="cuda")',
            kv='torch.randn(300, 576, dtype=torch.bfloat16, device="cuda")',
            indices='torch.randint(0, 300, (4, 100), dtype=torch.int32, device="cuda")',
            more='backend="reference"',
        ),
        related=("backend-refused", "no-backend", "nvrtc-missing", "out-of-memory"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "slow",
            "why is it slow",
            "reference backend",
            "SlowBackendWarning",
            "performance",
            "aligned to 16 bytes",
        ),
        foreign=(r"rows of q and kv must start at multiples of 16 bytes",),
        needs=("cuda", "hopper"),
    ),
)
