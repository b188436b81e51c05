"""Dtypes that only the general operator refuses, and gradients, which no operator has."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, general

RECORDS = (
    ErrorRecord(
        id="q-dtype-unsupported",
        exception=ContractError,
        title="q has a dtype that cannot be attended with",
        message="q must be float8_e4m3fn, bfloat16, float16 or float32, got {dtype}",
        detail=(
            "A float query is quantised on the device, an FP8 query must be e4m3fn; other types"
            " have no agreed meaning here."
        ),
        fix=(
            "convert q, for example q.to(torch.bfloat16); another FP8 type through float, times the"
            " scale that it was written with."
        ),
        yours="Your q is {dtype}.",
        meaning=(
            "float8_e4m3fnuz and float8_e5m2 hold other values in the same bytes, integers carry no"
            " scale, and float64 would hide an unintended promotion. Each is refused rather than"
            " guessed at."
        ),
        trigger="`q.dtype` is none of the four named types",
        situations=(
            "NumPy data became float64 on its way to torch.",
            (
                "The query was quantised to float8_e5m2, for its range, or because the cache is"
                " kept so (kv_cache_dtype='fp8_e5m2')."
            ),
            "The query comes from AMD hardware as float8_e4m3fnuz.",
            "The query is an integer tensor, such as token ids or uint8 bytes.",
        ),
        solutions=(
            Solution("Convert float64 by value.", "q = q.to(torch.bfloat16)"),
            Solution(
                "Convert another FP8 type by value, through float and with its scale, and quantise"
                " again; viewing it as e4m3fn would give other numbers.",
                "q, q_scale = quantize_fp8(q.float() * q_scale)",
            ),
            Solution(
                "For FP8 bytes in a uint8 buffer, view them, if they are e4m3fn.",
                "q = q.view(torch.float8_e4m3fn)",
            ),
        ),
        before=general(
            "q_scale = torch.tensor([0.01])",
            q="(torch.randn(4, 16, 576) / 0.01).to(torch.float8_e5m2)",
            more="q_scale=q_scale, kv_scale=1.0",
        ),
        after=general(
            "q_scale = torch.tensor([0.01])",
            "q, q_scale = quantize_fp8(q.float() * q_scale)",
            q="(torch.randn(4, 16, 576) / 0.01).to(torch.float8_e5m2)",
            more="q_scale=q_scale, kv_scale=1.0",
            imports=f"quantize_fp8, {GENERAL}",
        ),
        related=("kv-dtype-unsupported", "not-e4m3fn"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("float64", "double", "fnuz", "e5m2", "uint8", "int8"),
    ),
    ErrorRecord(
        id="kv-dtype-unsupported",
        exception=ContractError,
        title="kv has a dtype that cannot be attended to",
        message="kv must be float8_e4m3fn, bfloat16, float16 or float32, got {dtype}",
        detail=(
            "The cache is e4m3fn with a scale, or unquantised in one of three float types; other"
            " types have no agreed meaning here."
        ),
        fix=(
            "make rows of a packed cache (656 or 584 bytes a token) with"
            " sparse_mla.kv_cache.gather_fp8, view other uint8 as float8_e4m3fn; convert other FP8"
            " types by value."
        ),
        yours="Your kv is {dtype}.",
        meaning=(
            "A uint8 cache is only bytes: it may be e4m3fn values, or packed rows with scales"
            " inside. float8_e4m3fnuz and float8_e5m2 hold other values in the same bytes."
        ),
        trigger="`kv.dtype` is none of the four named types",
        situations=(
            "The serving framework allocates its FP8 cache as torch.uint8.",
            "The cache was written on AMD hardware as float8_e4m3fnuz.",
            "The cache is float8_e5m2 (kv_cache_dtype='fp8_e5m2').",
        ),
        solutions=(
            Solution(
                "View bytes that are e4m3fn values, one per column.",
                "kv = kv.view(torch.float8_e4m3fn)",
            ),
            Solution(
                "Make FP8 rows of a packed cache; indices then counts the gathered rows.",
                "kv, kv_scale = kv_cache.gather_fp8(cache, slots, kv_cache.V32)  # or kv_cache.V4",
            ),
            Solution(
                "Convert other FP8 types through float and quantise again.",
                "kv, kv_scale = quantize_fp8(kv.float() * old_scale)",
            ),
        ),
        before=general(kv="torch.randint(0, 120, (300, 576), dtype=torch.uint8)"),
        after=general(
            kv="torch.randint(0, 120, (300, 576), dtype=torch.uint8).view(torch.float8_e4m3fn)"
        ),
        related=("q-dtype-unsupported", "not-e4m3fn", "unquantised-kv-with-fp8-q"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("uint8 cache", "fnuz", "e5m2", "kv_cache_dtype", "packed cache"),
    ),
    ErrorRecord(
        id="unquantised-kv-with-fp8-q",
        exception=ContractError,
        title="An FP8 query beside an unquantised cache",
        message="q must be of a float type when kv is {kv_dtype}, got {q_dtype}",
        detail=(
            "An unquantised cache is computed unquantised throughout, for studies and for models"
            " that do not quantise; an FP8 query has no place in that."
        ),
        fix="pass q before quantisation, or quantise kv as well: kv, kv_scale = quantize_fp8(kv).",
        yours="Your kv is {kv_dtype} and your q is {q_dtype}.",
        meaning=(
            "Two computations exist: FP8 query and cache with scales, or float query and cache"
            " without. The mixture that is allowed is a float query beside an FP8 cache, because"
            " the query can be quantised on the way in."
        ),
        trigger="kv is bfloat16, float16 or float32 and q is float8_e4m3fn",
        situations=(
            (
                "kv_cache_dtype was left at 'auto', so that the cache is bfloat16, while the query"
                " path quantises."
            ),
            "A cache was dequantised for debugging and passed with the quantised query.",
        ),
        solutions=(
            Solution(
                "Keep the query in its float type.",
                "out = sparse_mla_prefill(q_bf16, kv_bf16, indices)",
            ),
            Solution("Quantise the cache too.", "kv, kv_scale = quantize_fp8(kv)"),
        ),
        before=general(
            q="torch.randn(4, 16, 576).to(torch.float8_e4m3fn)",
            kv="torch.randn(300, 576, dtype=torch.bfloat16)",
            more="",
        ),
        after=general(
            q="torch.randn(4, 16, 576, dtype=torch.bfloat16)",
            kv="torch.randn(300, 576, dtype=torch.bfloat16)",
            more="",
        ),
        related=("scale-without-fp8", "scale-missing", "not-e4m3fn", "kv-dtype-unsupported"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("mixed dtypes", "bf16 cache", "kv_cache_dtype auto", "fp8 query with bf16 cache"),
        foreign=(
            r"(?:query|q) and (?:key|kv|k_cache|kv cache) must have the same d(?:ata )?type",
            r"fp8 kv[_ ]cache (?:is )?not supported with",
        ),
    ),
    ErrorRecord(
        id="no-backward",
        exception=ContractError,
        title="There is no backward",
        message="{name} requires grad, but sparse MLA attention here has no backward",
        detail=(
            "The operators are for inference; returning a result without gradient would silently"
            " cut the graph."
        ),
        fix="call under torch.no_grad() or torch.inference_mode(), or pass {name}.detach().",
        yours="Your call would need a gradient of {name}.",
        meaning=(
            "A result that looks differentiable but is not would train a model with missing"
            " gradients and no error. So an input that requires grad is refused while gradients are"
            " being recorded."
        ),
        trigger="gradients are enabled and an input tensor has requires_grad set",
        situations=(
            "An evaluation loop without torch.no_grad().",
            "attn_sink is a torch.nn.Parameter, which requires grad by default.",
            "A layer that is meant for inference was put into a training model.",
        ),
        solutions=(
            Solution(
                "Switch gradients off around inference.",
                "with torch.inference_mode():\n    out = sparse_mla_prefill(q, kv, indices,"
                " kv_scale=kv_scale)",
            ),
            Solution(
                "Detach the one tensor, if no gradient should flow through it.",
                "attn_sink = layer.sink.detach()",
            ),
            Solution(
                "For training use a differentiable implementation; there is none in this library."
            ),
        ),
        before=general(q="torch.randn(4, 16, 576, dtype=torch.bfloat16, requires_grad=True)"),
        after=general(
            "q = q.detach()", q="torch.randn(4, 16, 576, dtype=torch.bfloat16, requires_grad=True)"
        ),
        related=("attn-sink-invalid",),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "training",
            "backward",
            "gradient",
            "autograd",
            "nn.Parameter sink",
            "requires_grad",
        ),
        foreign=(
            r"derivative for .{0,80} is not implemented",
            r"does not (?:support|implement) (?:the )?backward",
        ),
    ),
)
