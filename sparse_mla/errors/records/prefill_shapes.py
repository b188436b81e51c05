"""Shapes of q, kv and indices that the prefill operators refuse."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, strict

RECORDS = (
    ErrorRecord(
        id="not-a-tensor",
        exception=ContractError,
        title="An argument is not a tensor",
        message="{name} must be a torch.Tensor, got {type}",
        detail=(
            "The operators take torch tensors; a list, a NumPy array or None has neither device nor"
            " strides."
        ),
        fix=(
            "convert it where it is made, once: torch.as_tensor({name}, device=...), on the one"
            " device that all tensors of the call are on."
        ),
        yours="Your call passed {name} as {type}.",
        meaning=(
            "q, kv and indices, and the optional tensors when they are given, must be torch"
            " tensors. Nothing is converted silently, because a conversion would copy the cache on"
            " every call and hide where it lives."
        ),
        trigger=(
            "`isinstance(x, torch.Tensor)` is false for q, kv or indices, or for attn_sink,"
            " topk_length or an output that is not None."
        ),
        situations=(
            (
                "The selection comes from NumPy or from a Python list, as in a test or a script"
                " that replays logged indices."
            ),
            (
                "The cache object of a serving framework was passed instead of the tensor inside it"
                " (kv_cache rather than kv_cache[layer])."
            ),
            "An attribute of a metadata object is None for a dummy or warm-up batch.",
            (
                "A tuple (values, indices) of torch.topk was passed where only its second half was"
                " meant."
            ),
        ),
        solutions=(
            Solution(
                "Convert once, where the data is made, and keep the tensor.",
                "indices = torch.as_tensor(indices, dtype=torch.int32, device=q.device)",
            ),
            Solution(
                "For None from a dummy batch: skip the call, or pass tensors with s_q = 0, which"
                " are allowed.",
                "indices = q.new_empty((0, 1, 128), dtype=torch.int32)",
            ),
        ),
        before=strict(indices="[[[0] * 128]] * 4"),
        after=strict(indices="torch.tensor([[[0] * 128]] * 4, dtype=torch.int32)"),
        related=("not-strided", "indices-not-int32", "device-mismatch", "scale-invalid"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "numpy array",
            "list",
            "NoneType",
            "AttributeError object has no attribute ndim",
            "tuple from torch.topk",
        ),
        foreign=(
            r"(?P<name>topk_indices_offset) must be a CUDA tensor",
            r"'NoneType' object has no attribute '(?:shape|dtype|stride|is_contiguous)'",
        ),
    ),
    ErrorRecord(
        id="not-strided",
        exception=ContractError,
        title="A tensor is sparse, nested or otherwise without strides",
        message="{name} must be a strided tensor, got layout {layout}",
        detail=(
            "The operators read elements by address, from shape and strides; a tensor of layout"
            " {layout} has no single block of memory to read."
        ),
        fix="pass {name}.to_dense(), or for a nested tensor its values packed into one.",
        yours="Your call passed {name} with the layout {layout}.",
        meaning=(
            "Sparse, nested and oneDNN tensors are torch tensors that keep their values elsewhere"
            " than in one block of memory. The sparsity of this attention is not that of a tensor:"
            " it is in `indices`, beside a plain q and kv."
        ),
        trigger="`x.layout is not torch.strided` or `x.is_nested` for any tensor of the call",
        situations=(
            (
                "A mask or a selection was built as a sparse tensor because the attention is called"
                " sparse."
            ),
            "Sequences of different lengths were joined with torch.nested.nested_tensor.",
            "A model was converted with torch.utils.mkldnn.to_mkldnn.",
        ),
        solutions=(
            Solution("Make the tensor dense where it comes from.", "kv = kv.to_dense()"),
            Solution(
                "Pack sequences of different lengths one after the other, and let the indices say"
                " which rows belong to which query.",
                "q = torch.cat(list(nested_q.unbind()))",
            ),
        ),
        before=strict(indices="torch.zeros(4, 1, 128, dtype=torch.int32).to_sparse()"),
        after=strict(indices="torch.zeros(4, 1, 128, dtype=torch.int32).to_sparse().to_dense()"),
        related=("not-a-tensor", "not-contiguous"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "sparse tensor",
            "sparse_coo",
            "sparse_csr",
            "nested tensor",
            "jagged",
            "Cannot access data pointer of Tensor that doesn't have storage",
            "NestedTensorImpl doesn't support sizes",
        ),
    ),
    ErrorRecord(
        id="q-ndim",
        exception=ContractError,
        title="q is not (tokens, heads, columns)",
        message="q must have shape (s_q, h_q, d_qk), got {shape}",
        detail=(
            "q holds one row for each query token and head; the tokens of all sequences are"
            " concatenated, there is no batch dimension."
        ),
        fix=(
            "reshape q to three dimensions: q.flatten(0, 1) for (batch, s_q, h_q, d_qk),"
            " q.unsqueeze(1) for one head of each token, q.unsqueeze(0) for all heads of one"
            " token; if kv was passed as q, swap them."
        ),
        yours="Your q has shape {shape}, which is not three-dimensional.",
        meaning=(
            "Sparse prefill treats every query token on its own: indices says which cache rows it"
            " reads, wherever they are. So sequences are packed along the token dimension and no"
            " batch dimension remains."
        ),
        trigger="`q.ndim != 3`",
        situations=(
            (
                "A batch dimension was kept: (batch, s_q, h_q, d_qk) from model code or from"
                " FlashMLA's decode interface."
            ),
            "The heads are still fused, (s_q, h_q * d_qk), straight from the query projection.",
            "A single query was taken with q[0], which drops the token dimension.",
            "q and kv were swapped, and the cache is (s_kv, d_qk).",
            "Only the latent or only the rotary part was passed, in a layout of its own.",
        ),
        solutions=(
            Solution(
                "Pack the batch into the token dimension; indices must then point into the one"
                " shared cache.",
                "q = q.flatten(0, 1)  # (batch, s_q, h_q, d_qk) -> (batch * s_q, h_q, d_qk)",
            ),
            Solution("Split fused heads.", "q = q.view(s_q, h_q, 576)"),
            Solution("Keep the dimension when taking one token.", "q = q[i : i + 1]"),
        ),
        before=strict(q="torch.randn(1, 4, 64, 576).to(torch.float8_e4m3fn)"),
        after=strict(q="torch.randn(1, 4, 64, 576).to(torch.float8_e4m3fn).flatten(0, 1)"),
        related=("kv-ndim", "indices-ndim", "no-heads", "h-q-not-multiple-of-64"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("batch dimension", "4-D query", "bshd", "varlen", "packed sequences"),
    ),
    ErrorRecord(
        id="kv-ndim",
        exception=ContractError,
        title="kv is not (rows, 1, columns)",
        message="kv must have shape (s_kv, h_kv, d_qk), got {shape}",
        detail=(
            "kv is the flat latent cache: one row per cached token, one head; indices counts rows"
            " from its start, across pages."
        ),
        fix=(
            "for a flat cache pass kv.unsqueeze(1); for pages (blocks, page_size, 1, d_qk) pass"
            " kv.flatten(0, 1)."
        ),
        yours="Your kv has shape {shape}, which is not three-dimensional.",
        meaning=(
            "The strict operator addresses the cache by row number. A paged cache is the same"
            " memory seen as one long list of rows, so that indices must hold physical slots: page"
            " * page_size + offset."
        ),
        trigger="`kv.ndim != 3`",
        situations=(
            (
                "The flat cache (s_kv, 576) lacks the head dimension that the strict operator keeps"
                " for its drop-in signature."
            ),
            (
                "A paged cache (blocks, page_size, 1, 576) was passed as FlashMLA's decode"
                " interface takes it."
            ),
            "A batch dimension was kept around the cache.",
        ),
        solutions=(
            Solution(
                "Add the head dimension; it is a view and costs nothing.",
                "kv = kv.unsqueeze(1)  # (s_kv, 576) -> (s_kv, 1, 576)",
            ),
            Solution(
                "Flatten pages and pass physical slots in indices.",
                "kv = pages.flatten(0, 1)  # (blocks, page_size, 1, 576) -> (blocks * page_size, 1,"
                " 576)",
            ),
            Solution(
                "Or call sparse_mla_prefill, which takes (s_kv, d_qk) as it is.",
                "out = sparse_mla_prefill(q, kv, indices, q_scale=q_scale, kv_scale=kv_scale)",
            ),
        ),
        before=strict(kv="torch.randn(300, 576).to(torch.float8_e4m3fn)"),
        after=strict(kv="torch.randn(300, 576).to(torch.float8_e4m3fn).unsqueeze(1)"),
        related=("q-ndim", "indices-ndim", "h-kv-not-one", "kv-shape"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=("paged cache", "page_size", "block table", "4-D kv cache", "flat cache"),
    ),
    ErrorRecord(
        id="indices-ndim",
        exception=ContractError,
        title="indices is not (tokens, 1, topk)",
        message="indices must have shape (s_q, h_kv, topk), got {shape}",
        detail="Each query token has one list of topk slots for the one KV head.",
        fix=(
            "pass indices.unsqueeze(1) when it is (s_q, topk), and indices.flatten(0, 1) when it"
            " still has a batch dimension."
        ),
        yours="Your indices have shape {shape}, which is not three-dimensional.",
        meaning=(
            "The strict operator keeps a KV-head dimension of 1 in indices, as SGLang and FlashMLA"
            " do. An indexer returns (s_q, topk), so that the dimension has to be added."
        ),
        trigger="`indices.ndim != 3`",
        situations=(
            "The indexer's torch.topk result (s_q, topk) was passed as it is.",
            "A batch dimension was kept: (batch, s_q, 1, topk).",
            "Only one query's list (topk,) was passed.",
        ),
        solutions=(
            Solution(
                "Add the head dimension; it is a view and stays contiguous.",
                "indices = indices.unsqueeze(1)",
            ),
            Solution("Or call sparse_mla_prefill, which takes (s_q, topk) as it is."),
        ),
        before=strict(indices="torch.randint(0, 300, (4, 128), dtype=torch.int32)"),
        after=strict(indices="torch.randint(0, 300, (4, 128), dtype=torch.int32).unsqueeze(1)"),
        related=(
            "indices-shape",
            "indices-not-int32",
            "q-ndim",
            "kv-ndim",
            "indices-shape-general",
        ),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=("indexer output", "topk_indices", "2-D indices", "unsqueeze"),
    ),
    ErrorRecord(
        id="indices-shape",
        exception=ContractError,
        title="indices has another number of rows than q",
        message="indices must have shape ({s_q}, {h_kv}, topk), got {shape}",
        detail="q has {s_q} tokens, so indices needs {s_q} lists of slots, one for each.",
        fix="make q and indices from the same tokens: cut both, or pad both (indices with -1).",
        yours="Your q has {s_q} tokens and your indices have shape {shape}.",
        meaning=(
            "Row t of indices says which cache rows query t reads. If the counts differ, some"
            " queries would read lists of other queries, or memory past the end."
        ),
        trigger="`indices.shape[:2] != (q.shape[0], kv.shape[1])`",
        situations=(
            (
                "q was padded (for CUDA graphs, to a multiple of a tile, or for data parallelism)"
                " and indices was not."
            ),
            (
                "Context parallelism: q holds this rank's tokens, indices those of all ranks, or"
                " the other way round."
            ),
            "Chunked prefill: q is the current chunk, indices comes from the whole prompt.",
            "Speculative decoding: draft tokens were added to q after the indexer ran.",
            "indices has a list for each query head; the selection is shared by all heads.",
        ),
        solutions=(
            Solution(
                "Take the same token range for both.",
                "indices = indices[start : start + q.shape[0]]",
            ),
            Solution(
                "Pad the missing rows with -1: such a query gives out = 0 and lse = +inf.",
                "indices = torch.nn.functional.pad(indices, (0, 0, 0, 0, 0, q.shape[0] -"
                " indices.shape[0]), value=-1)",
            ),
        ),
        before=strict(indices="torch.randint(0, 300, (2, 1, 128), dtype=torch.int32)"),
        after=strict(indices="torch.randint(0, 300, (4, 1, 128), dtype=torch.int32)"),
        related=(
            "indices-ndim",
            "topk-length-invalid",
            "topk-not-multiple-of-128",
            "indices-shape-general",
            "index-out-of-range",
        ),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "context parallel",
            "chunked prefill",
            "padded tokens",
            "cuda graph padding",
            "speculative decoding",
            "rows differ",
        ),
        foreign=(
            r"(?:topk_)?indices\.(?:shape|size)(?:\(0\)|\[0\])\s*==\s*(?:q\.|s_q|num_tokens)",
            r"index rows and (?:offset|query) rows differ",
        ),
    ),
    ErrorRecord(
        id="topk-not-multiple-of-128",
        exception=ContractError,
        title="topk is not a multiple of 128",
        message="Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got {topk}",
        detail=(
            "The strict operator walks the slots in blocks of 128 and leaves padding to the caller."
        ),
        fix=(
            "pad indices with -1 up to the next multiple of 128, or call sparse_mla_prefill, which"
            " takes any topk."
        ),
        yours="Your indices have {topk} slots per query.",
        meaning=(
            "The width of indices, not the number of valid slots, must be a multiple of 128. A slot"
            " of -1 contributes nothing, so padding changes no result."
        ),
        trigger="`indices.shape[2] == 0 or indices.shape[2] % 128 != 0`",
        situations=(
            (
                "A short prompt: the indexer selected min(topk, s_kv) slots, so that a prompt of 10"
                " tokens gives a width of 10 instead of 2048."
            ),
            "A sliding window or extra tokens were appended to the selection: 2048 + 3 is 2051.",
            "A model with another index_topk (192, 2000) or a warm-up batch of width 1.",
            "indices has the layout (s_q, topk, 1), so that a width of 1 is read.",
        ),
        solutions=(
            Solution(
                "Pad with -1.",
                "indices = torch.nn.functional.pad(indices, (0, -indices.shape[-1] % 128),"
                " value=-1)",
            ),
            Solution(
                "Give the indexer's output a fixed width (index_topk) filled with -1 and write the"
                " selection into it; fixed shapes also suit CUDA graphs."
            ),
            Solution("Call sparse_mla_prefill, which takes any topk >= 1."),
        ),
        before=strict(indices="torch.randint(0, 300, (4, 1, 10), dtype=torch.int32)"),
        after=strict(
            indices=(
                "torch.nn.functional.pad(\n    torch.randint(0, 300, (4, 1, 10),"
                " dtype=torch.int32), (0, 118), value=-1\n)"
            )
        ),
        related=("indices-shape", "topk-length-invalid", "indices-shape-general"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "short prompt",
            "index_topk",
            "topk 192",
            "topk 2051",
            "sequence shorter than topk",
            "selected index k out of range",
            "warm-up",
        ),
        foreign=(
            (
                r"[Uu]nsupported sparse-MLA prefill"
                r" configuration:.{0,200}num_heads=(?:64|128)\b.{0,200}topk=(?P<topk>\d+)"
            ),
            r"(?:params\.)?topk\s*%\s*(?:\(?2\s*\*\s*)?(?:B_TOPK|64|128)\)?\s*==\s*0",
            (
                r"topk\D{0,40}(?:multiple of|divisible by|aligned to) (?:64|128)\b(?:.{0,80}?\bgot"
                r" (?P<topk>\d+))?"
            ),
            r"[Uu]nsupported topk\D{0,20}(?P<topk>\d+)",
        ),
    ),
)
