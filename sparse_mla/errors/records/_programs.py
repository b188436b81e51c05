"""The example programs of the records: a complete call, of which a record changes a line."""

from __future__ import annotations

STRICT = "sparse_mla_q8kv8_prefill_fwd"
GENERAL = "sparse_mla_prefill"

KERNEL = """\
import os
import tempfile
from pathlib import Path
from unittest import mock

from sparse_mla.jit import Variant, compile_variant, load

root = Path(tempfile.mkdtemp())
(root / "one.cu").write_text('extern "C" __global__ void one(float* x) { x[0] = 1.0f; }')
variant = Variant(name="one", source="one.cu", entry="one", root=root)
cache = root / "cache"
use_cache = mock.patch.dict(os.environ, {"SPARSE_MLA_CACHE_DIR": str(cache)})
"""


def strict(
    *extra: str,
    q: str = "torch.randn(4, 64, 576).to(torch.float8_e4m3fn)",
    kv: str = "torch.randn(300, 1, 576).to(torch.float8_e4m3fn)",
    indices: str = "torch.randint(0, 300, (4, 1, 128), dtype=torch.int32)",
    scale: str = "torch.ones(1)",
    sm_scale: str = "192 ** -0.5",
    more: str = "",
) -> str:
    """A program that calls the strict operator; ``extra`` lines stand right before the call."""
    lines = [
        "import torch",
        f"from sparse_mla import {STRICT}",
        "",
        f"q = {q}",
        f"kv = {kv}",
        f"indices = {indices}",
        f"scale = {scale}",
        f"sm_scale = {sm_scale}",
        *extra,
        f"out, max_logits, lse = {STRICT}(",
        f"    q, kv, indices, sm_scale, q_scale=scale, kv_scale=scale{', ' if more else ''}{more}",
        ")",
    ]
    return "\n".join(lines) + "\n"


def general(
    *extra: str,
    q: str = "torch.randn(4, 16, 576, dtype=torch.bfloat16)",
    kv: str = "torch.randn(300, 576).to(torch.float8_e4m3fn)",
    indices: str = "torch.randint(0, 300, (4, 100), dtype=torch.int32)",
    more: str = "kv_scale=1.0",
    imports: str = GENERAL,
) -> str:
    """A program that calls the general operator; ``extra`` lines stand right before the call."""
    lines = [
        "import torch",
        f"from sparse_mla import {imports}",
        "",
        f"q = {q}",
        f"kv = {kv}",
        f"indices = {indices}",
        *extra,
        f"out = {GENERAL}(q, kv, indices{', ' if more else ''}{more})",
    ]
    return "\n".join(lines) + "\n"


def debugged(program: str) -> str:
    """``program`` with the data-dependent checks on."""
    return 'import os\n\nos.environ["SPARSE_MLA_DEBUG"] = "1"\n' + program
