"""Lengths, sinks and scales that the prefill operators refuse."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, strict

RECORDS = (
    ErrorRecord(
        id="topk-length-invalid",
        exception=ContractError,
        title="topk_length is not int32 with one value per query",
        message="topk_length must be int32 with shape ({s_q},), got {shape}/{dtype}",
        detail=(
            "topk_length[t] is the number of leading slots of query t that count; q has {s_q} query"
            " tokens."
        ),
        fix=(
            "pass int32 lengths of shape ({s_q},), or leave topk_length out and mark unused slots"
            " with -1."
        ),
        yours="Your topk_length has shape {shape} and dtype {dtype}; your q has {s_q} tokens.",
        meaning=(
            "With topk_length, slots from that position on are ignored whatever they hold. It is"
            " counted per query token, not per sequence, and never exceeds the width of indices."
        ),
        trigger="topk_length is given and is not int32 of shape `(s_q,)`",
        situations=(
            "A length per sequence (batch,) was passed where one per token is needed.",
            "Lengths computed with sum, clamp or arange are int64.",
            "The shape is (s_q, 1), one value per KV head.",
            "q was padded with extra tokens and the lengths were not.",
            "Cumulative lengths (cu_seqlens, s_q + 1 values) were passed.",
        ),
        solutions=(
            Solution(
                "Count the valid slots of each query, in int32.",
                "topk_length = (indices >= 0).sum(-1, dtype=torch.int32).flatten()",
            ),
            Solution(
                "For a causal prefill, position + 1 limited to topk.",
                "topk_length = (positions + 1).clamp(max=topk).to(torch.int32)",
            ),
            Solution("Leave it out when unused slots are -1 already; the result is the same."),
        ),
        before=strict("topk_length = torch.full((4,), 100)", more="topk_length=topk_length"),
        after=strict(
            "topk_length = torch.full((4,), 100, dtype=torch.int32)", more="topk_length=topk_length"
        ),
        related=(
            "topk-length-out-of-range",
            "indices-shape",
            "indices-not-int32",
            "topk-not-multiple-of-128",
            "attn-sink-invalid",
        ),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "seq_lens",
            "cache_seqlens",
            "cu_seqlens",
            "length per sequence",
            "int64 lengths",
        ),
        foreign=(
            r"topk_length\S{0,40} (?:must|should) (?:be|have)\b",
            r"topk_length\.(?:dtype|scalar_type|size|shape)",
        ),
    ),
    ErrorRecord(
        id="attn-sink-invalid",
        exception=ContractError,
        title="attn_sink is not float32 with one value per head",
        message="attn_sink must be float32 with shape ({h_q},), got {shape}/{dtype}",
        detail=(
            "attn_sink[h] is a logit that takes part in head h's softmax and carries no value; q"
            " has {h_q} heads."
        ),
        fix="pass attn_sink.float() with exactly {h_q} values, this rank's heads, padded like q.",
        yours="Your attn_sink has shape {shape} and dtype {dtype}; your q has {h_q} heads.",
        meaning=(
            "The sink is a learned logit (natural log units) per query head. It is read in float32"
            " for all heads of q, so pad heads need a value too; which one does not matter, as"
            " their output is dropped."
        ),
        trigger="attn_sink is given and is not float32 of shape `(h_q,)`",
        situations=(
            "Tensor parallelism: the parameter still has all 128 heads while q has this rank's 16.",
            "q was padded to 64 heads and the sink was not.",
            "The parameter was loaded in bfloat16 with the rest of the model.",
            "The shape is (1, h_q, 1), as for broadcasting over logits.",
        ),
        solutions=(
            Solution(
                "Cut the parameter to this rank's heads and convert it once at load time.",
                "sink = sink[rank * h_q : (rank + 1) * h_q].float().contiguous()",
            ),
            Solution(
                "Pad it together with q; -inf means no sink.",
                "sink = torch.nn.functional.pad(sink, (0, 64 - sink.numel()), value=float('-inf'))",
            ),
            Solution("Leave it out for models without a sink."),
        ),
        before=strict("sink = torch.zeros(64, dtype=torch.bfloat16)", more="attn_sink=sink"),
        after=strict("sink = torch.zeros(64, dtype=torch.bfloat16).float()", more="attn_sink=sink"),
        related=("h-q-not-multiple-of-64", "topk-length-invalid", "no-backward"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("attention sink", "sinks", "learned sink", "tensor parallel sink", "bf16 sink"),
        foreign=(
            r"(?:attn_)?sinks?\S{0,40} (?:must|should) (?:be|have)\b",
            r"(?:attn_)?sinks?\.(?:dtype|scalar_type|size|shape)\b",
        ),
    ),
    ErrorRecord(
        id="scale-invalid",
        exception=ContractError,
        title="A scale is not a one-element float32 tensor on q's device",
        message="{name} must be a one-element float32 tensor on q's device, got {what}",
        detail=(
            "The kernel reads the scale in device memory, so that a CUDA graph replays with the"
            " value of the moment and no call waits for the GPU."
        ),
        fix=(
            "make it once: torch.tensor([value], dtype=torch.float32, device=q.device); or call"
            " sparse_mla_prefill, which takes floats."
        ),
        yours="Your call passed {name} as {what}.",
        meaning=(
            "q_scale and kv_scale turn stored FP8 values back into real ones. The strict operator"
            " takes them as tensors for the whole of q and of kv, as the operator it replaces does."
            " The general operator also takes floats and per-token scales."
        ),
        trigger=(
            "q_scale or kv_scale is not a tensor, has not exactly one element, is not float32, or"
            " is on another device than q"
        ),
        situations=(
            (
                "scale.item() or float(scale) was passed: a Python float, and a wait for the GPU"
                " that breaks graph capture."
            ),
            (
                "The scale is a CPU tensor, from a checkpoint that was loaded on the CPU or from"
                " torch.tensor(0.5)."
            ),
            "layer.k_scale is None, because the checkpoint carries no KV-cache scales.",
            "The scales were left out; Python then says which arguments are missing.",
            "A per-token scale (s_kv,) or a per-head one was passed.",
            "The scale has the model's dtype, bfloat16 or float16.",
        ),
        solutions=(
            Solution(
                "Keep the scale as a float32 buffer of the layer.",
                "self.register_buffer('kv_scale', torch.ones(1, dtype=torch.float32,"
                " device=device))",
            ),
            Solution(
                "Without a calibrated scale, 1.0 is right when the cache was written by a plain"
                " cast to e4m3fn.",
                "kv_scale = torch.ones(1, dtype=torch.float32, device=q.device)",
            ),
            Solution(
                "For floats or per-token scales call sparse_mla_prefill.",
                "out = sparse_mla_prefill(q, kv, indices, q_scale=0.5,"
                " kv_scale=kv_scale_per_token)",
            ),
        ),
        before=strict(scale="1.0"),
        after=strict(scale="torch.tensor([1.0], dtype=torch.float32)"),
        related=(
            "device-mismatch",
            "not-a-tensor",
            "scale-missing",
            "q-scale-shape",
            "kv-scale-shape",
            "scale-data-invalid",
            "sm-scale-invalid",
        ),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "scale.item()",
            "python float scale",
            "k_scale None",
            "scale on CPU",
            "operation not permitted when stream is capturing",
            "per-token scale",
            "descale",
        ),
        foreign=(
            (
                r"(?P<name>[qk]v?_?(?:de)?scale\w{0,40}) (?:must|should) be (?:a"
                r" )?(?:scalar|tensor|float32|fp32|on)"
            ),
            r"(?P<name>[qk]v?_?(?:de)?scale\w{0,40}) is (?:required|None|missing)",
            r"missing \d+ required positional arguments?: '(?P<name>q_scale|kv_scale)'",
        ),
    ),
    ErrorRecord(
        id="sm-scale-invalid",
        exception=ContractError,
        title="sm_scale is not a finite positive number",
        message="sm_scale must be a finite positive number, got {value}",
        detail=(
            "sm_scale multiplies every logit before the softmax; zero, a negative number, NaN or"
            " infinity leaves no meaningful attention."
        ),
        fix=(
            "pass the model's softmax scale as a Python float: 192 ** -0.5 for DeepSeek, 256 **"
            " -0.5 for GLM, times the square of the YaRN factor where the model has one."
        ),
        yours="Your sm_scale is {value}.",
        meaning=(
            "The scale belongs to the model's width before absorption (192 for DeepSeek, 256 for"
            " GLM), times the square of the YaRN factor where the model uses it. It does not follow"
            " from the row width of 576."
        ),
        trigger="sm_scale is not an int or float, is NaN or infinite, or is <= 0",
        situations=(
            "A configuration value is missing and 0, None or NaN was passed instead.",
            "It was left out: only sparse_mla_prefill has a default.",
            "sm_scale is a tensor; it is a host number, baked into the launch.",
            "Positional arguments shifted, so that a scale tensor landed in sm_scale.",
            "The YaRN factor overflowed or was computed from an uninitialised value.",
        ),
        solutions=(
            Solution(
                "Compute it once from the model's configuration.",
                "sm_scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5",
            ),
            Solution(
                "With YaRN, multiply by the factor as the model code does.",
                "sm_scale *= yarn_factor * yarn_factor",
            ),
            Solution(
                "In sparse_mla_prefill leave it out only if 1/sqrt(d_qk) is what the model uses;"
                " for DeepSeek it is not."
            ),
        ),
        before=strict(sm_scale="0.0"),
        after=strict(sm_scale="192 ** -0.5"),
        related=("scale-invalid", "scale-not-positive-number"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("softmax_scale", "1/sqrt(576)", "yarn mscale", "logits too large", "scale None"),
        foreign=(
            r"(?:sm|softmax)_scale\S{0,40} (?:must|should) be\b",
            r"missing \d+ required positional arguments?: 'sm_scale'",
        ),
    ),
)
