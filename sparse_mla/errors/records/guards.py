"""For each record a few lines that a caller can paste before the call, by id.

They name the caller's variables as the operators name their arguments.
"""

from __future__ import annotations

_SOURCES: dict[str, str] = {
    "not-a-tensor": """
if not isinstance(indices, torch.Tensor):
    indices = torch.as_tensor(indices, dtype=torch.int32, device=q.device)
""",
    "not-strided": """
if indices.layout is not torch.strided:
    indices = indices.to_dense()
""",
    "q-ndim": """
if q.ndim == 4:  # (batch, sequence, heads, d_qk)
    q = q.flatten(0, 1)
""",
    "kv-ndim": """
if kv.ndim == 2:
    kv = kv.unsqueeze(1)
""",
    "indices-ndim": """
if indices.ndim == 2:
    indices = indices.unsqueeze(1)
""",
    "indices-shape": """
if indices.shape[0] != q.shape[0]:
    raise ValueError(f"{indices.shape[0]} rows of indices for {q.shape[0]} queries")
""",
    "topk-not-multiple-of-128": """
missing = -indices.shape[-1] % 128
indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
""",
    "d-qk-mismatch": """
if q.shape[-1] != kv.shape[-1]:
    raise ValueError(f"q has rows of {q.shape[-1]} numbers, kv of {kv.shape[-1]}")
""",
    "h-q-not-multiple-of-64": """
heads = q.shape[1]
call = sparse_mla_q8kv8_prefill_fwd if heads and heads % 64 == 0 else sparse_mla_prefill
""",
    "h-kv-not-one": """
if kv.shape[1] != 1:
    raise ValueError(f"not MLA: the cache has {kv.shape[1]} KV heads")
""",
    "d-qk-unsupported": """
if q.shape[-1] not in (512, 576):
    raise ValueError(f"q has {q.shape[-1]} numbers a head: has W_UK been absorbed?")
""",
    "d-v-unsupported": """
if d_v != 512:
    raise ValueError(f"d_v is {d_v}: apply W_UV after the call, to rows of 512")
""",
    "device-mismatch": """
for name, tensor in {"kv": kv, "indices": indices}.items():
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
""",
    "not-e4m3fn": """
for name, tensor in {"q": q, "kv": kv}.items():
    if tensor.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} is {tensor.dtype}: quantise it with quantize_fp8")
""",
    "not-contiguous": """
q, kv, indices = q.contiguous(), kv.contiguous(), indices.contiguous()
""",
    "indices-not-int32": """
indices = indices.to(torch.int32)
""",
    "output-invalid": """
wanted = (q.shape[0], q.shape[1], 512)
if out.dtype != torch.bfloat16 or out.shape != wanted:
    out = torch.empty(wanted, dtype=torch.bfloat16, device=q.device)
""",
    "outputs-overlap": """
if max_logits.data_ptr() == lse.data_ptr():
    lse = torch.empty_like(max_logits)
""",
    "topk-length-invalid": """
topk_length = topk_length.to(torch.int32).reshape(q.shape[0])
""",
    "attn-sink-invalid": """
attn_sink = attn_sink.float().reshape(q.shape[1])
""",
    "scale-invalid": """
scale = torch.as_tensor(scale, dtype=torch.float32, device=q.device).reshape(1)
""",
    "sm-scale-invalid": """
if not 0 < sm_scale < float("inf"):
    raise ValueError(f"sm_scale is {sm_scale}; for DeepSeek-V3.2 it is 192 ** -0.5")
""",
    "kv-shape": """
if kv.ndim == 3 and kv.shape[1] != 1:
    raise ValueError(f"not MLA: the cache has {kv.shape[1]} KV heads")
""",
    "indices-shape-general": """
if indices.shape[0] != q.shape[0]:
    raise ValueError(f"{indices.shape[0]} rows of indices for {q.shape[0]} queries")
""",
    "last-dim-not-dense": """
if q.stride(-1) != 1:
    q = q.contiguous()
""",
    "d-qk-unsupported-general": """
if q.shape[-1] not in (512, 576):
    raise ValueError(f"q has {q.shape[-1]} numbers a head: has W_UK been absorbed?")
""",
    "no-heads": """
if q.shape[1] == 0:
    raise ValueError("this rank was given no heads")
""",
    "q-dtype-unsupported": """
if q.dtype == torch.float64:
    q = q.to(torch.bfloat16)
elif q.dtype == torch.float8_e5m2:
    q, q_scale = quantize_fp8(q.float() * q_scale)
""",
    "kv-dtype-unsupported": """
if kv.dtype == torch.uint8:  # the bytes of a cache
    kv = kv.view(torch.float8_e4m3fn)
""",
    "unquantised-kv-with-fp8-q": """
if q.dtype == torch.float8_e4m3fn and kv.dtype != q.dtype:
    raise TypeError(f"q is FP8 and kv is {kv.dtype}: quantise both or q neither")
""",
    "no-backward": """
q, kv = q.detach(), kv.detach()
""",
    "scale-missing": """
if kv.dtype == torch.float8_e4m3fn and kv_scale is None:
    raise ValueError("an FP8 cache without its scale")
""",
    "scale-without-fp8": """
if kv.dtype != torch.float8_e4m3fn:
    kv_scale = None
""",
    "q-scale-shape": """
q_scale = q_scale.float().reshape(q.shape[:2])
""",
    "kv-scale-shape": """
kv_scale = kv_scale.float().flatten()
""",
    "scale-not-positive-number": """
if not 0 < kv_scale < float("inf"):
    raise ValueError(f"kv_scale is {kv_scale}")
""",
    "index-out-of-range": """
if ((indices < -1) | (indices >= kv.shape[0])).any():  # waits for the GPU
    raise IndexError("an index outside the cache")
""",
    "topk-length-out-of-range": """
topk_length = topk_length.clamp(0, indices.shape[-1])
""",
    "scale-data-invalid": """
if not (scale.isfinite() & (scale > 0)).all():  # waits for the GPU
    raise ValueError(f"a scale is {scale}")
""",
    "nan-in-input": """
if q.float().isnan().any():  # waits for the GPU
    raise ValueError("q holds NaN")
""",
    "quantize-input": """
if not x.is_floating_point():
    x = x.float()
""",
    "quantize-per": """
if per not in ("tensor", "token", "token-head"):
    raise ValueError(f"{per!r} is no granularity of quantize_fp8")
""",
    "quantize-scale": """
if scale is not None and not 0 < scale < float("inf"):
    scale = None  # chosen from the data
""",
    "merge-shapes": """
for part, lse in zip(outs, lses):
    if lse.shape != part.shape[:-1]:
        raise ValueError(f"lse {tuple(lse.shape)} beside out {tuple(part.shape)}")
""",
    "backend-unknown": """
if backend not in ("auto", "sm90", "cpu", "reference"):
    raise ValueError(f"{backend!r} is no backend of sparse-mla")
""",
    "backend-refused": """
from sparse_mla.errors import BackendError

try:
    out = sparse_mla_prefill(q, kv, indices, kv_scale=kv_scale, backend=backend)
except BackendError as fault:
    print(fault.context["reason"])
    out = sparse_mla_prefill(q, kv, indices, kv_scale=kv_scale)
""",
    "no-backend": """
if device not in ("cpu", "cuda"):
    raise ValueError(f"sparse-mla computes on CPUs and CUDA GPUs, not on {device}")
""",
    "slow-backend": """
import warnings

from sparse_mla.errors import SlowBackendWarning

warnings.simplefilter("error", SlowBackendWarning)
""",
    "nvrtc-missing": """
from sparse_mla import jit

if reason := jit.available():
    raise SystemExit(f"no GPU kernels: {reason}")
""",
    "cuda-driver-missing": """
from sparse_mla import jit

if reason := jit.available():
    raise SystemExit(f"no GPU kernels: {reason}")
""",
    "kernel-compile-failed": """
from sparse_mla.errors import BackendError

try:
    compile_variant(variant)  # at start-up, not at the first request
except BackendError as fault:
    raise SystemExit(str(fault))
""",
    "kernel-load-failed": """
if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    os.environ["SPARSE_MLA_BACKEND"] = "reference"
""",
    "kernel-launch-failed": """
os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")  # before torch is imported; while testing
""",
    "cache-unwritable": """
if not os.access(os.environ.get("SPARSE_MLA_CACHE_DIR", os.path.expanduser("~")), os.W_OK):
    os.environ["SPARSE_MLA_CACHE_DIR"] = tempfile.mkdtemp()
""",
    "cache-untrusted": """
folder = os.environ.get("SPARSE_MLA_CACHE_DIR")
if folder and os.path.isdir(folder):
    os.chmod(folder, 0o700)
""",
    "cache-corrupt": """
import warnings

from sparse_mla.jit_cache import KernelCacheWarning

warnings.simplefilter("always", KernelCacheWarning)
""",
    "illegal-memory-access": """
os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")  # before torch is imported; while testing
""",
    "nan-in-output": """
if out.isnan().any():  # waits for the GPU
    raise FloatingPointError("the output holds NaN")
""",
    "gpu-unsupported": """
if torch.cuda.is_available():
    major, minor = torch.cuda.get_device_capability()
    if f"sm_{major}{minor}" not in torch.cuda.get_arch_list():
        raise SystemExit(f"this torch has no kernels for sm_{major}{minor}")
""",
    "driver-too-old": """
if torch.version.cuda and not torch.cuda.is_available():
    raise SystemExit(f"no driver for CUDA {torch.version.cuda}")
""",
    "out-of-memory": """
free, _ = torch.cuda.mem_get_info()
rows = min(len(q), max(1, free // (4 * q.shape[1] * 512)))  # half of what is free
""",
    "file-unreadable": """
if not os.access(path, os.R_OK):
    raise FileNotFoundError(path)
""",
    "file-not-safetensors": """
from sparse_mla.errors import FileError

try:
    call = load_call(path)
except FileError as fault:
    print(fault)
    raise
""",
    "file-too-large": """
call = load_call(path, max_bytes=2 * os.path.getsize(path))
""",
    "file-not-a-call": """
from sparse_mla.errors import FileError

try:
    call = load_call(path)
except FileError as fault:
    print(fault)
    raise
""",
    "file-tensor-missing": """
for name in ("q", "kv", "indices"):
    if name not in tensors:
        raise KeyError(name)
""",
    "file-not-written": """
os.makedirs(os.path.dirname(path), exist_ok=True)
""",
    "dump-failed": """
folder = os.environ["SPARSE_MLA_DUMP"]
if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
    raise SystemExit(f"calls cannot be written to {folder}")
""",
}

GUARDS = {id: source.strip("\n") + "\n" for id, source in _SOURCES.items()}
