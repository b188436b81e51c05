"""Quantisation and merging."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution

_QUANTIZE = "import torch\nfrom sparse_mla import quantize_fp8\n\n"
_MERGE = (
    "import torch\nfrom sparse_mla import merge_attention_states\n\nouts = torch.randn(2, 4, 16,"
    " 512)\n"
)

RECORDS = (
    ErrorRecord(
        id="quantize-input",
        exception=ContractError,
        title="The tensor cannot be quantised to FP8",
        message="x must be a float tensor with a non-empty last dimension, got {shape}/{dtype}",
        detail=(
            "Quantisation looks for the largest magnitude of float data and divides by it;"
            " integers, booleans and FP8 data have no such meaning."
        ),
        fix="pass bfloat16, float16 or float32 data with at least one column.",
        yours="Your tensor has shape {shape} and dtype {dtype}.",
        meaning=(
            "The scale is the largest magnitude / 448, so that every value fits e4m3fn. Data that"
            " is FP8 already would be scaled twice, and a tensor without columns has no largest"
            " value."
        ),
        trigger=(
            "`x` is not bfloat16, float16, float32 or float64, has no dimension, or `x.shape[-1]"
            " == 0`"
        ),
        situations=(
            "The tensor is quantised already.",
            "The packed uint8 cache was passed instead of its values.",
            "A slice of columns came out empty.",
        ),
        solutions=(
            Solution("Convert integers first.", "x = x.float()"),
            Solution(
                "To change the scale of FP8 data, dequantise it first.", "x = x_fp8.float() * scale"
            ),
        ),
        before=_QUANTIZE + "x, scale = quantize_fp8(torch.arange(576).reshape(1, 576))\n",
        after=_QUANTIZE + "x, scale = quantize_fp8(torch.arange(576).reshape(1, 576).float())\n",
        related=("quantize-scale", "quantize-per", "not-e4m3fn", "nan-in-input"),
        operators=("quantize_fp8",),
        since="0.1.0",
        symptoms=("quantise twice", "integer tensor", "empty tensor", "uint8 cache"),
    ),
    ErrorRecord(
        id="quantize-per",
        exception=ContractError,
        title="quantize_fp8 was asked for a scale per something unknown",
        message='per must be "tensor", "token" or "token-head", got {per}',
        detail="per says what shares one scale: the tensor, one token, or one row of a token.",
        fix='pass per="tensor" for the strict operator, or per="token" for one scale a cached row.',
        yours="Your call asked for per={per}.",
        meaning=(
            "The operators take one scale per tensor, and the general operator also one per token"
            " or, for queries, per token and head. Scales per block of columns or per channel have"
            " no place in their formula, so they are not made here."
        ),
        trigger="`per` is none of the three names",
        situations=(
            "Another library's name was used: per_tensor, channel, block, row.",
            "A positional argument that other quantisers take, such as a block size, landed here.",
            "The KV-cache layouts with scales inside the row were meant; those are in"
            " sparse_mla.kv_cache.",
        ),
        solutions=(
            Solution(
                "One scale for each cached row.", 'kv, kv_scale = quantize_fp8(kv, per="token")'
            ),
            Solution(
                "One scale for each token and head of a query.",
                'q, q_scale = quantize_fp8(q, per="token-head")',
            ),
        ),
        before=_QUANTIZE + 'x, scale = quantize_fp8(torch.randn(4, 576), per="block")\n',
        after=_QUANTIZE + 'x, scale = quantize_fp8(torch.randn(4, 576), per="token")\n',
        related=("quantize-input", "quantize-scale"),
        operators=("quantize_fp8",),
        since="0.1.0",
        symptoms=("per_tensor", "per channel", "blockwise", "block size", "per head", "rowwise"),
    ),
    ErrorRecord(
        id="quantize-scale",
        exception=ContractError,
        title="The scale given to quantize_fp8 cannot be used",
        message="scale must be a finite positive number or float32 of shape {expected}, got {what}",
        detail=(
            "The input is divided by the scale; a scale of 0, a negative one or one of another"
            " shape has no meaning."
        ),
        fix=(
            "leave the scale out, so that it is computed from the data, or pass a positive one of"
            " shape {expected}."
        ),
        yours="Your scale is {what}.",
        meaning=(
            "A scale is passed to quantise with a calibrated value rather than with the data's own"
            " largest magnitude. Values that exceed 448 after the division are clamped to 448."
        ),
        trigger=(
            "`scale` is given and is neither a finite number above 0 nor a float32 tensor of the"
            " right shape"
        ),
        situations=(
            "amax / 448 of an all-zero calibration batch is 0.",
            (
                "The reciprocal scale was passed: this library multiplies by the scale to get real"
                " values back."
            ),
            (
                "A scale per head or per block of columns was passed for a quantisation per tensor"
                " or per token."
            ),
        ),
        solutions=(
            Solution("Let it be computed.", "x_fp8, scale = quantize_fp8(x)"),
            Solution("Guard the calibration.", "scale = max(amax, 1e-12) / 448"),
        ),
        before=_QUANTIZE + "x, scale = quantize_fp8(torch.randn(4, 576), scale=0.0)\n",
        after=_QUANTIZE + "x, scale = quantize_fp8(torch.randn(4, 576), scale=0.01)\n",
        related=(
            "quantize-input",
            "quantize-per",
            "scale-not-positive-number",
            "scale-data-invalid",
        ),
        operators=("quantize_fp8",),
        since="0.1.0",
        symptoms=("amax 0", "reciprocal scale", "calibration", "inverse scale"),
    ),
    ErrorRecord(
        id="merge-shapes",
        exception=ContractError,
        title="Partial results that do not belong together",
        message="merge_attention_states: {name} must be {wanted}, got {got}",
        detail=(
            "Merging weighs each part's out by its lse, token by token and head by head, so all"
            " parts need the same tokens and heads."
        ),
        fix=(
            "pass parts of the same queries, each out (s_q, h_q, d_v) with its lse (s_q, h_q) in"
            " float32."
        ),
        yours="For {name} your call gave {got}, in the place of {wanted}.",
        meaning=(
            "The parts are attention of the same queries over disjoint pieces of the cache. Their"
            " lse must be the natural logarithm, without the sink; a part with a non-finite lse"
            " counts as empty."
        ),
        trigger=(
            "the parts are no tensors, differ in shape or device, or an lse is not float32 with the"
            " shape of its out without the last dimension"
        ),
        situations=(
            "lse is heads-first, (h_q, s_q), as FlashAttention returns it.",
            "The number of outs and of lses differ.",
            "Context parallelism gathered out over all ranks and lse over none.",
            (
                "Parts of different chunks, hence of different queries, were passed; those are"
                " concatenated, not merged."
            ),
        ),
        solutions=(
            Solution("Transpose a heads-first lse.", "lse = lse.transpose(0, 1).contiguous()"),
            Solution("Gather both.", "outs, lses = all_gather(out), all_gather(lse)"),
        ),
        before=_MERGE
        + "lses = torch.randn(2, 16, 4)\nout, lse = merge_attention_states(outs, lses)\n",
        after=_MERGE
        + "lses = torch.randn(2, 16, 4).transpose(1, 2)\nout, lse = merge_attention_states(outs,"
        " lses)\n",
        related=("output-invalid",),
        operators=("merge_attention_states",),
        since="0.1.0",
        symptoms=("split-KV", "context parallel", "lse transposed", "merge_state", "log2 lse"),
    ),
)
