"""Scales that the general operator refuses."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, general

_FP8_Q = "torch.randn(4, 16, 576).to(torch.float8_e4m3fn)"
_BF16_KV = "torch.randn(300, 576, dtype=torch.bfloat16)"

RECORDS = (
    ErrorRecord(
        id="scale-missing",
        exception=ContractError,
        title="FP8 data came without its scale",
        message="{name} is required when {tensor} is torch.float8_e4m3fn",
        detail=(
            "An FP8 value means stored value * scale; without the scale the magnitude of {tensor}"
            " is unknown, and a guess of 1 would be a plausible wrong number."
        ),
        fix=(
            "pass {name}: the scale that quantisation returned, or 1.0 if {tensor} was written by a"
            " plain cast."
        ),
        yours="Your {tensor} is FP8 and your call gave no {name}.",
        meaning=(
            "A float query beside an FP8 cache needs no q_scale, because it is quantised in the"
            " call with a scale of its own for each token and head. FP8 data that you pass needs"
            " the scale it was made with."
        ),
        trigger=(
            "kv is float8_e4m3fn and kv_scale is None, or q is float8_e4m3fn and q_scale is None"
        ),
        situations=(
            "layer.k_scale is None because the checkpoint carries no KV-cache scales.",
            "The cache was written by a plain cast, x.to(torch.float8_e4m3fn), whose scale is 1.",
            "The scale was returned by quantize_fp8 and dropped.",
        ),
        solutions=(
            Solution(
                "Keep the scale with the data.",
                "kv, kv_scale = quantize_fp8(kv)\nout = sparse_mla_prefill(q, kv, indices,"
                " kv_scale=kv_scale)",
            ),
            Solution(
                "After a plain cast pass 1.0.",
                "out = sparse_mla_prefill(q, kv, indices, kv_scale=1.0)",
            ),
        ),
        before=general(more=""),
        after=general(more="kv_scale=1.0"),
        related=(
            "scale-invalid",
            "scale-without-fp8",
            "unquantised-kv-with-fp8-q",
            "kv-scale-shape",
            "q-scale-shape",
        ),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("k_scale None", "missing scale", "uncalibrated checkpoint", "default scale 1.0"),
        foreign=(
            (
                r"(?P<name>k_scale|v_scale|kv_scale|q_scale|descale_\w{1,40})\S{0,40}"
                r" (?:is not None|must be (?:provided|specified|set)|is required)"
            ),
        ),
    ),
    ErrorRecord(
        id="scale-without-fp8",
        exception=ContractError,
        title="A scale was given for data that is not quantised",
        message="{name} was given, but {tensor} is {dtype} and is not quantised",
        detail=(
            "A scale belongs to FP8 data; multiplying real values by it would give a wrong result."
        ),
        fix="leave {name} out, or pass the quantised {tensor} that it belongs to.",
        yours="Your call gave {name} while {tensor} is {dtype}.",
        meaning=(
            "With an unquantised cache the whole computation is unquantised and knows no scales. A"
            " scale beside it usually means that the wrong one of two tensors, quantised and"
            " original, was passed."
        ),
        trigger="kv is bfloat16, float16 or float32 and a scale is given",
        situations=(
            "The tensor before quantisation was passed together with the scale after it.",
            "kv_cache_dtype is 'auto' (bfloat16) but the layer still has its k_scale of 1.0.",
            "The cache was dequantised for debugging and the call was not changed.",
        ),
        solutions=(
            Solution(
                "Leave the scales out for unquantised data.",
                "out = sparse_mla_prefill(q, kv_bf16, indices)",
            ),
            Solution(
                "Pass the FP8 tensor.",
                "kv_fp8, kv_scale = quantize_fp8(kv_bf16)\nout = sparse_mla_prefill(q, kv_fp8,"
                " indices, kv_scale=kv_scale)",
            ),
        ),
        before=general(kv=_BF16_KV, more="kv_scale=0.5"),
        after=general(kv=_BF16_KV, more=""),
        related=("scale-missing", "unquantised-kv-with-fp8-q"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("bf16 cache with scale", "double scaling", "dequantised twice"),
    ),
    ErrorRecord(
        id="q-scale-shape",
        exception=ContractError,
        title="q_scale does not fit q",
        message=(
            "q_scale must be a float, or float32 of one element, ({s_q},) or ({s_q}, {h_q}), got"
            " {shape}/{dtype}"
        ),
        detail=(
            "q has {s_q} tokens and {h_q} heads: its scale is one for all, one per token, or one"
            " per token and head."
        ),
        fix="squeeze or transpose q_scale into one of these shapes and pass it as float32.",
        yours=(
            "Your q has {s_q} tokens and {h_q} heads; your q_scale has shape {shape} and dtype"
            " {dtype}."
        ),
        meaning=(
            "q_scale multiplies logits, so it can differ between tokens and heads but not along the"
            " columns of a row, where the dot product has already summed."
        ),
        trigger=(
            "q_scale is a tensor that is not float32, or has a shape other than one element,"
            " `(s_q,)` and `(s_q, h_q)`"
        ),
        situations=(
            "The scale was kept with keepdim: (s_q, h_q, 1).",
            "The scale is per head, (h_q,), without a token dimension.",
            (
                "Scales are per block of 128 columns, as in the quantisation of weights and"
                " activations for DeepGEMM."
            ),
            "The scale is in bfloat16, or in UE8M0 bytes.",
        ),
        solutions=(
            Solution("Drop the kept dimension.", "q_scale = q_scale.squeeze(-1)"),
            Solution(
                "Repeat a per-head scale for each token.",
                "q_scale = q_scale.expand(s_q, h_q).contiguous()",
            ),
            Solution(
                "Pass the bfloat16 query without a scale; it is quantised in the call, per token"
                " and head."
            ),
        ),
        before=general(
            "q_scale = torch.ones(4, 16, 1)", q=_FP8_Q, more="q_scale=q_scale, kv_scale=1.0"
        ),
        after=general(
            "q_scale = torch.ones(4, 16, 1).squeeze(-1)",
            q=_FP8_Q,
            more="q_scale=q_scale, kv_scale=1.0",
        ),
        related=("kv-scale-shape", "scale-invalid", "scale-missing"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=(
            "keepdim",
            "per-block scale",
            "block 128 quantisation",
            "per-head scale",
            "UE8M0",
        ),
    ),
    ErrorRecord(
        id="kv-scale-shape",
        exception=ContractError,
        title="kv_scale does not fit kv",
        message=(
            "kv_scale must be a float, or float32 of one element or ({s_kv},), got {shape}/{dtype}"
        ),
        detail="kv has {s_kv} rows: its scale is one for all, or one per cached token.",
        fix="squeeze kv_scale to ({s_kv},) and pass it as float32.",
        yours="Your kv has {s_kv} rows; your kv_scale has shape {shape} and dtype {dtype}.",
        meaning=(
            "A row of kv is both key and value, so its scale belongs to the whole row. Scales per"
            " block of columns inside the row (the 656-byte and 584-byte layouts) must be undone"
            " when the row is unpacked."
        ),
        trigger=(
            "kv_scale is a tensor that is not float32, or has a shape other than one element and"
            " `(s_kv,)`"
        ),
        situations=(
            "The scale was kept with keepdim: (s_kv, 1) or (s_kv, 1, 1).",
            "Four scales per row, (s_kv, 4), one per 128 columns, from the 656-byte layout.",
            "Scales for the used part of the cache only, while kv is the whole cache.",
            "The scale is in bfloat16, or in UE8M0 bytes.",
        ),
        solutions=(
            Solution("Drop the kept dimensions.", "kv_scale = kv_scale.flatten()"),
            Solution(
                "For scales per 128 columns, dequantise the row with sparse_mla.kv_cache and"
                " quantise it again with one scale per token."
            ),
            Solution(
                "Cut kv and kv_scale to the same rows.", "kv, kv_scale = kv[:used], kv_scale[:used]"
            ),
        ),
        before=general("kv_scale = torch.ones(300, 1)", more="kv_scale=kv_scale"),
        after=general("kv_scale = torch.ones(300, 1).flatten()", more="kv_scale=kv_scale"),
        related=("q-scale-shape", "scale-invalid", "scale-missing"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("keepdim", "656 byte layout", "scale per 128 columns", "per-tile scale", "UE8M0"),
    ),
    ErrorRecord(
        id="scale-not-positive-number",
        exception=ContractError,
        title="A scale given as a number is not finite and positive",
        message="{name} must be a finite positive number, got {value}",
        detail=(
            "A scale turns stored values back into real ones: 0 erases them, a negative one flips"
            " them, NaN and infinity spoil every output. It is kept in float32, which holds nothing"
            " above 3.4e38 or below 1.4e-45."
        ),
        fix="pass the positive scale that quantisation used; for an all-zero tensor use 1.0.",
        yours="Your call passed {name} as {value}.",
        meaning=(
            "A scale given as a number can be checked without waiting for the GPU, and so it is."
            " The values inside a scale tensor are checked only with SPARSE_MLA_DEBUG=1."
        ),
        trigger="a scale is neither a tensor nor a number that is finite and above 0 in float32",
        situations=(
            "amax / 448 of an all-zero tensor is 0.",
            "The reciprocal was passed (448 / amax) and amax was 0, which gives infinity.",
            "A checkpoint stores -1 or 0 for 'not calibrated'.",
            "The scale is text from a configuration file, or another object that is not a number.",
        ),
        solutions=(
            Solution(
                "Use quantize_fp8, whose scale is never 0.", "kv, kv_scale = quantize_fp8(kv)"
            ),
            Solution("Guard the computation.", "kv_scale = amax / 448 if amax > 0 else 1.0"),
        ),
        before=general(more="kv_scale=0.0"),
        after=general(more="kv_scale=0.5"),
        related=("scale-data-invalid", "sm-scale-invalid", "quantize-scale"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("zero scale", "negative scale", "NaN scale", "amax 0", "uncalibrated -1"),
        foreign=(
            (
                r"(?P<name>\w{0,40}scale\w{0,40}) (?:must|should) be (?:strictly )?"
                r"(?:positive|finite|greater than (?:0|zero)|> ?0)"
                r"(?:.{0,80}?\bgot (?P<value>\S{1,60}))?"
            ),
        ),
    ),
)
