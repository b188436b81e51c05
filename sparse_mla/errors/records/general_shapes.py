"""Shapes that only the general operator refuses."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, general

RECORDS = (
    ErrorRecord(
        id="kv-shape",
        exception=ContractError,
        title="kv is not a list of latent rows",
        message="kv must have shape (s_kv, d_qk) or (s_kv, 1, d_qk), got {shape}",
        detail=(
            "MLA has one latent head: kv is a list of rows that all query heads share, with or"
            " without a head dimension of 1."
        ),
        fix=(
            "flatten pages with kv.view(-1, d_qk), or make rows of packed pages (656 or 584 bytes a"
            " token) with sparse_mla.kv_cache.gather_fp8; a model with several KV heads (GQA) needs"
            " a GQA kernel."
        ),
        yours="Your kv has shape {shape}.",
        meaning=(
            "indices counts rows of kv from its start. More dimensions, or a head dimension other"
            " than 1, leave it open what a row number means."
        ),
        trigger="kv has neither two dimensions, nor three with `kv.shape[1] == 1`",
        situations=(
            (
                "A paged cache was passed as (blocks, page_size, d_qk) or (blocks, page_size, 1,"
                " d_qk)."
            ),
            "The cache of a GQA or MHA model, with a row for each KV head.",
            "A batch dimension was kept, (batch, s_kv, d_qk).",
            "One row was taken with kv[i], which leaves one dimension.",
        ),
        solutions=(
            Solution(
                "See the pages as one list of rows, and pass physical slots in indices.",
                "kv = pages.view(-1, pages.shape[-1])",
            ),
            Solution(
                "Make FP8 rows of a packed cache; indices then counts the gathered rows.",
                "kv, kv_scale = kv_cache.gather_fp8(cache, slots, kv_cache.V32)  # or kv_cache.V4",
            ),
            Solution(
                "With a batch, flatten it and add batch * s_kv to the indices of each sequence."
            ),
            Solution("For a GQA model use a GQA kernel; sparse MLA cannot compute it."),
        ),
        before=general(kv="torch.randn(300, 8, 576).to(torch.float8_e4m3fn)"),
        after=general(kv="torch.randn(300, 1, 576).to(torch.float8_e4m3fn)"),
        related=("h-kv-not-one", "kv-ndim", "indices-shape-general"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("GQA", "paged cache", "block table", "page_size", "batch dimension"),
    ),
    ErrorRecord(
        id="indices-shape-general",
        exception=ContractError,
        title="indices does not fit q",
        message=(
            "indices must have shape ({s_q}, topk) or ({s_q}, 1, topk) with topk >= 1, got {shape}"
        ),
        detail=(
            "q has {s_q} tokens, so indices needs {s_q} lists of slots with at least one slot each"
            " (use -1 for an unused one)."
        ),
        fix=(
            "make q and indices from the same tokens; for an empty selection pass one column of -1."
        ),
        yours="Your q has {s_q} tokens and your indices have shape {shape}.",
        meaning=(
            "Row t of indices says which cache rows query t reads. Any width from 1 up is allowed,"
            " and unused slots are -1."
        ),
        trigger="indices is neither `(s_q, topk)` nor `(s_q, 1, topk)`, or topk is 0",
        situations=(
            "q was padded or cut and indices was not, or the other way round.",
            "Context parallelism or chunked prefill: the two come from different token ranges.",
            "Nothing was selected, so that indices has a width of 0.",
            "indices has a list for each query head; the selection is shared by all heads.",
        ),
        solutions=(
            Solution(
                "Take the same token range for both.",
                "indices = indices[start : start + q.shape[0]]",
            ),
            Solution(
                "For an empty selection, one column of -1 gives out = 0 and lse = +inf.",
                "indices = torch.full((q.shape[0], 1), -1, dtype=torch.int32, device=q.device)",
            ),
        ),
        before=general(indices="torch.randint(0, 300, (2, 100), dtype=torch.int32)"),
        after=general(indices="torch.randint(0, 300, (4, 100), dtype=torch.int32)"),
        related=("indices-shape", "indices-ndim", "topk-not-multiple-of-128", "kv-shape"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=(
            "rows differ",
            "context parallel",
            "chunked prefill",
            "empty selection",
            "topk 0",
        ),
    ),
    ErrorRecord(
        id="last-dim-not-dense",
        exception=ContractError,
        title="The last dimension has gaps",
        message="{name} must be dense in its last dimension, got strides {strides}",
        detail=(
            "{name} has shape {shape}: rows may lie anywhere, but the columns of one row must be"
            " next to each other (a last stride of 1)."
        ),
        fix="pass {name}.contiguous(), or slice rows rather than columns.",
        yours="Your call passed {name} with strides {strides}.",
        meaning=(
            "The general operator reads rows with any distance between them, so slices of tokens,"
            " heads or a wider buffer cost no copy. Within a row it loads many columns at once,"
            " which needs them side by side."
        ),
        trigger="`x.stride(-1) != 1` for q, kv or indices with more than one column",
        situations=(
            (
                "The tensor is a transpose whose last dimension was not the last in memory:"
                " x.transpose(1, 2) or x.mT."
            ),
            "Columns were taken with a step, x[..., ::2], as for interleaved rotary pairs.",
            "expand() along the last dimension gave a stride of 0.",
        ),
        solutions=(
            Solution("Copy once, outside the layer loop.", "q = q.contiguous()"),
            Solution("Write the data with columns last where it is made."),
        ),
        before=general(q="torch.randn(4, 576, 16, dtype=torch.bfloat16).transpose(1, 2)"),
        after=general(
            q="torch.randn(4, 576, 16, dtype=torch.bfloat16).transpose(1, 2).contiguous()"
        ),
        related=("not-contiguous",),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("transpose", "stride", "non-contiguous", "mT", "step slice"),
    ),
    ErrorRecord(
        id="d-qk-unsupported-general",
        exception=ContractError,
        title="Rows are neither 512 nor 576 wide (sparse_mla_prefill)",
        message="sparse_mla_prefill supports d_qk=512/576, got {d_qk}",
        detail=(
            "A row is 512 latent columns, with 64 rotary ones after them (576) or without (512)."
        ),
        fix=(
            "pass the absorbed query and the latent cache; make rows of a packed cache (656 or"
            " 584 bytes a token) with sparse_mla.kv_cache.gather_fp8."
        ),
        yours="Your rows have {d_qk} columns.",
        meaning=(
            "The general operator is free in heads, slots and scales, not in the row: its value is"
            " the first 512 columns, and the kernels know the widths 512 and 576."
        ),
        trigger="`q.shape[-1]` is neither 512 nor 576",
        situations=(
            "The query is not absorbed: 192 columns per head for DeepSeek, 256 for GLM.",
            (
                "The packed cache bytes were viewed as FP8: 656 per token for V3.2 and GLM-5, 584"
                " for V4."
            ),
            "A small model for tests with an invented width such as 64.",
        ),
        solutions=(
            Solution(
                "Absorb the key up-projection into the query and append the rotary part.",
                "q = torch.cat([torch.einsum('shd,hdc->shc', q_nope, w_uk), q_pe], dim=-1)",
            ),
            Solution(
                "Make FP8 rows of a packed cache; indices then counts the gathered rows.",
                "kv, kv_scale = kv_cache.gather_fp8(cache, slots, kv_cache.V32)  # or kv_cache.V4",
            ),
            Solution(
                "In tests keep the real geometry and shrink s_q, h_q, s_kv and topk instead; all of"
                " them may be 1."
            ),
        ),
        before=general(
            q="torch.randn(4, 16, 192, dtype=torch.bfloat16)",
            kv="torch.randn(300, 192).to(torch.float8_e4m3fn)",
        ),
        after=general(),
        related=("d-qk-unsupported", "d-qk-mismatch"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("192", "656", "584", "kv_lora_rank", "absorb", "small test model"),
    ),
    ErrorRecord(
        id="no-heads",
        exception=ContractError,
        title="q has no heads",
        message="q must have at least one head, got shape {shape}",
        detail=(
            "q may have no tokens (s_q = 0), but a query without heads points to a mistake"
            " upstream."
        ),
        fix=(
            "check how q was sliced or split over the ranks; its second dimension is the number of"
            " heads."
        ),
        yours="Your q has shape {shape}, with no heads.",
        meaning=(
            "An empty batch is a normal case and returns empty outputs. A head count of 0 does not"
            " occur in a model, so it is reported instead of returning an empty result."
        ),
        trigger="`q.shape[1] == 0`",
        situations=(
            "More tensor-parallel ranks than heads: the last ranks get an empty slice.",
            "A slice of heads with wrong bounds, q[:, start:start].",
        ),
        solutions=(
            Solution(
                "Check the split: heads per rank must be at least 1.",
                "assert num_heads % tp_size == 0 and num_heads // tp_size >= 1",
            ),
            Solution(
                "A rank without heads must skip the call, and still take part in the collectives"
                " around it."
            ),
        ),
        before=general(q="torch.randn(4, 0, 576, dtype=torch.bfloat16)"),
        after=general(q="torch.randn(4, 1, 576, dtype=torch.bfloat16)"),
        related=("h-q-not-multiple-of-64", "q-ndim"),
        operators=(GENERAL,),
        since="0.1.0",
        symptoms=("empty slice", "zero heads", "too many ranks"),
    ),
)
