"""What only the data can tell; looked for under SPARSE_MLA_DEBUG=1."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, debugged, strict

RECORDS = (
    ErrorRecord(
        id="index-out-of-range",
        exception=ContractError,
        title="An index points outside the cache",
        message=(
            "indices[{query}, {slot}] is {index}, outside [0, {s_kv}) and not -1 ({count} such)"
        ),
        detail=(
            "A normal run ignores such a slot, so that nothing crashes and a part of the context is"
            " silently missing."
        ),
        fix=(
            "find out who computed it; the usual causes are a logical position in place of a"
            " physical slot, and a page table of another batch."
        ),
        yours=(
            "Query {query} asks for row {index} of a cache of {s_kv} rows; {count} slots are out of"
            " range."
        ),
        meaning=(
            "-1 marks an unused slot and is never reported. Any other index outside the cache means"
            " that the selection and the cache do not belong together, and the model reads less"
            " context than it believes."
        ),
        trigger=(
            "`SPARSE_MLA_DEBUG=1` and a slot before topk_length holds an index that is neither -1"
            " nor in `[0, s_kv)`"
        ),
        situations=(
            (
                "Token positions were passed where physical slots are needed, page * page_size +"
                " offset."
            ),
            (
                "indices counts rows of the whole cache while kv is a view of one layer's or one"
                " sequence's part."
            ),
            (
                "Padded or warm-up requests have no row in the page table, and stale values are"
                " converted."
            ),
            (
                "The index buffer was not initialised beyond the valid slots and no topk_length was"
                " passed."
            ),
            (
                "Indexer scores past the sequence end were 0 rather than -inf, so that positions"
                " past the end won the top-k."
            ),
            "An int64 buffer was viewed as int32.",
        ),
        solutions=(
            Solution("Look at the reported query: print its indices next to its page table row."),
            Solution(
                "Convert positions to slots.",
                "slots = block_table[request, positions // page_size] * page_size + positions %"
                " page_size",
            ),
            Solution(
                "Mask what is past the end before the selection.",
                "scores.masked_fill_(positions >= seq_len, float('-inf'))",
            ),
            Solution(
                "Mark unused slots with -1, or pass topk_length.",
                "indices.masked_fill_(slot >= valid[:, None, None], -1)",
            ),
        ),
        before=debugged(strict("indices[0, 0, 0] = 300")),
        after=debugged(strict("indices[0, 0, 0] = 299")),
        related=(
            "topk-length-out-of-range",
            "nan-in-input",
            "indices-shape",
            "illegal-memory-access",
            "nan-in-output",
        ),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "index out of range",
            "block table",
            "page table",
            "slot mapping",
            "illegal memory access",
            "garbage output",
            "model forgets context",
            "SPARSE_MLA_DEBUG",
        ),
        foreign=(
            r"index(?:es|ing)? (?:\S{1,60} )?(?:is |are )?out of (?:bounds|range)(?! for dim)",
            r"(?:vectorized_gather_kernel|IndexKernel|indexSelect\w{0,40}).{0,200}[Aa]ssert",
        ),
    ),
    ErrorRecord(
        id="topk-length-out-of-range",
        exception=ContractError,
        title="A length is negative or exceeds topk",
        message="topk_length[{query}] is {length}, outside [0, {topk}] ({count} such)",
        detail=(
            "A normal run clamps the length to [0, {topk}], so that the query uses fewer slots than"
            " asked for, or none."
        ),
        fix=(
            "limit the lengths to the width of indices where they are computed, and check that they"
            " belong to this batch."
        ),
        yours=(
            "Query {query} has length {length} for {topk} slots; {count} lengths are out of range."
        ),
        meaning=(
            "A length counts the leading slots of a query that hold a selection. More than the"
            " width cannot be there, and a negative one shows that it was computed from another"
            " batch or overflowed."
        ),
        trigger=(
            "`SPARSE_MLA_DEBUG=1` and a value of topk_length is below 0 or above"
            " `indices.shape[-1]`"
        ),
        situations=(
            (
                "The sequence length was passed without limiting it to topk: 5000 tokens with topk"
                " 2048."
            ),
            "Lengths of a padded batch are stale beyond the real requests.",
            "A subtraction (sequence length minus prefix) went negative for cached prefixes.",
        ),
        solutions=(
            Solution(
                "Limit them.",
                "topk_length = seq_len.clamp(min=0, max=indices.shape[-1]).to(torch.int32)",
            ),
            Solution(
                "Set the lengths of padding rows to 0; such a row gives out = 0 and lse = +inf."
            ),
        ),
        before=debugged(
            strict("lengths = torch.full((4,), 129, dtype=torch.int32)", more="topk_length=lengths")
        ),
        after=debugged(
            strict("lengths = torch.full((4,), 128, dtype=torch.int32)", more="topk_length=lengths")
        ),
        related=("topk-length-invalid", "index-out-of-range"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("seq_lens", "negative length", "stale lengths", "clamped", "SPARSE_MLA_DEBUG"),
    ),
    ErrorRecord(
        id="scale-data-invalid",
        exception=ContractError,
        title="A scale tensor holds a value that is no scale",
        message="{name} holds {value}, which is not a finite positive number ({count} such)",
        detail=(
            "A normal run gives NaN for what such a scale touches, rather than a plausible wrong"
            " number."
        ),
        fix=(
            "look at how {name} was computed; amax / 448 of an all-zero tensor is 0, and its"
            " reciprocal is infinite."
        ),
        yours="There is {value} in your {name} ({count} such values).",
        meaning=(
            "Scales must be finite and above 0. The operator cannot look at the value without"
            " waiting for the GPU, so a bad one shows as NaN in the output, and by name only in a"
            " debug run."
        ),
        trigger=(
            "`SPARSE_MLA_DEBUG=1` and an element of q_scale or kv_scale is NaN, infinite or <= 0"
        ),
        situations=(
            "amax was taken over an empty or all-zero tensor.",
            "The scale buffer was allocated with torch.empty and never filled.",
            "The checkpoint stores 0 or -1 for 'not calibrated'.",
            "A per-token scale of a cache row that was never written.",
            "A NaN in the quantised tensor made its amax NaN.",
        ),
        solutions=(
            Solution(
                "Use quantize_fp8, whose scales are never 0.", "kv, kv_scale = quantize_fp8(kv)"
            ),
            Solution(
                "Fill scale buffers with ones when they are allocated.",
                "kv_scale = torch.ones(s_kv, dtype=torch.float32, device=device)",
            ),
        ),
        before=debugged(strict(scale="torch.zeros(1)")),
        after=debugged(strict(scale="torch.ones(1)")),
        related=(
            "scale-invalid",
            "scale-not-positive-number",
            "nan-in-input",
            "quantize-scale",
            "nan-in-output",
        ),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "NaN output",
            "zero scale",
            "uninitialised scale",
            "all outputs NaN",
            "SPARSE_MLA_DEBUG",
        ),
    ),
    ErrorRecord(
        id="nan-in-input",
        exception=ContractError,
        title="An input that takes part in the result holds NaN",
        message="{name} row {row} holds NaN ({count} such rows)",
        detail=(
            "It reaches the output of every query that reads it; rows that no valid slot selects"
            " are not looked at."
        ),
        fix=(
            "find who wrote row {row} of {name}: uninitialised memory, an overflow before"
            " quantisation, or other bytes read as FP8."
        ),
        yours="In your {name} row {row} holds NaN; {count} rows do.",
        meaning=(
            "In e4m3fn the bytes 0x7f and 0xff are NaN, and there is no infinity. Such bytes come"
            " from a cast without clamping, or from memory that holds something else than e4m3fn"
            " values."
        ),
        trigger=(
            "`SPARSE_MLA_DEBUG=1` and q, attn_sink (NaN only), or a KV row that a valid slot"
            " selects, holds a value that is not finite"
        ),
        situations=(
            "A cast to FP8 without clamping: values above 448 may become NaN.",
            "Cache rows that were never written are selected, because indices or lengths are off.",
            "Packed rows (scales and bfloat16 rotary values inside) are read as plain FP8.",
            "float8_e4m3fnuz bytes are read as e4m3fn, or the other way round, where 0x80 is NaN.",
            "An earlier layer produced NaN; this is only the first place that looks.",
            (
                "Pad heads of q were left uninitialised. They do not reach the real heads, but they"
                " are reported."
            ),
        ),
        solutions=(
            Solution("Quantise with clamping.", "kv, kv_scale = quantize_fp8(kv)"),
            Solution("Look at the bytes of the reported row.", "print(kv[row].view(torch.uint8))"),
            Solution(
                "Check the layers before, one by one, for the first NaN.",
                "assert hidden.isfinite().all(), layer_index",
            ),
        ),
        before=debugged(strict("q.view(torch.uint8)[0, 0, 0] = 0x7F")),
        after=debugged(strict("q.view(torch.uint8)[0, 0, 0] = 0x7E")),
        related=("scale-data-invalid", "index-out-of-range", "quantize-input", "nan-in-output"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "NaN output",
            "nan",
            "inf",
            "garbage tokens",
            "exclamation marks !!!!",
            "uninitialised cache",
            "intermittent NaN",
            "SPARSE_MLA_DEBUG",
        ),
        foreign=(
            r"(?:[Nn]a[Nn]|non-finite)\w{0,40} (?:values? )?(?:(?:detected|found) )?in (?:the )?"
            r"(?:q|kv|inputs?|kv[_ ]cache)\b",
        ),
    ),
)
