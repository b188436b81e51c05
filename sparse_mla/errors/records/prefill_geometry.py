"""Heads and row widths that the strict operator has no kernel for."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, general, strict

RECORDS = (
    ErrorRecord(
        id="d-qk-mismatch",
        exception=ContractError,
        title="q and kv have rows of different width",
        message="kv d_qk must match q d_qk={d_qk}, got {kv_d_qk}",
        detail=(
            "The logit is a dot product of a query row with a KV row, so both must have the same"
            " columns: 512 latent, then 64 rotary where the model has them."
        ),
        fix=(
            "build q and kv with the same parts, both with the rotary columns or both without; make"
            " rows of a packed cache (656 or 584 bytes a token) with"
            " sparse_mla.kv_cache.gather_fp8."
        ),
        yours="Your q has {d_qk} columns and your kv has {kv_d_qk}.",
        meaning=(
            "576 columns are 512 latent and 64 rotary ones; 512 columns are a model or a cache"
            " without rotary part. Mixing the two would multiply the wrong columns, or read past"
            " the end of a row."
        ),
        trigger="`q.shape[-1] != kv.shape[-1]`",
        situations=(
            (
                "q is the latent query alone (512) while the cache rows carry the rotary part"
                " (576), or the other way round."
            ),
            (
                "kv is the packed 656-byte row of DeepSeek-V3.2 and GLM-5 seen as FP8: 512 values,"
                " 4 float32 scales and 64 bfloat16 rotary values. Those bytes are not 656 FP8"
                " columns."
            ),
            "The query is not absorbed: 192 columns (128 + 64) per head instead of 576.",
            (
                "The cache comes from another model, as with a draft model that shares the code but"
                " not the geometry."
            ),
        ),
        solutions=(
            Solution(
                "Concatenate the absorbed latent query and the rotary query.",
                "q = torch.cat([q_nope @ w_uk, q_pe], dim=-1)  # (s_q, h_q, 512 + 64)",
            ),
            Solution(
                "Make FP8 rows of a packed cache; indices then counts the gathered rows.",
                "kv, kv_scale = kv_cache.gather_fp8(cache, slots, kv_cache.V32)  # or kv_cache.V4",
            ),
            Solution(
                "If the model has no rotary part in the cache, drop it from q too.",
                "q = q[..., :512].contiguous()",
            ),
        ),
        before=strict(q="torch.randn(4, 64, 512).to(torch.float8_e4m3fn)"),
        after=strict(q="torch.randn(4, 64, 576).to(torch.float8_e4m3fn)"),
        related=("d-qk-unsupported", "d-qk-unsupported-general", "d-v-unsupported"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "656 bytes per token",
            "584 bytes per token",
            "rope part missing",
            "absorbed query",
            "kv_lora_rank",
            "qk_rope_head_dim",
        ),
        foreign=(
            r"[Kk]_?[Nn]ope.{0,200}dim.{0,200}mismatch",
            r"head_dim(?:ension)? of q(?:uery)? .{0,200}(?:must|should) (?:match|equal) .{0,200}k",
        ),
    ),
    ErrorRecord(
        id="h-q-not-multiple-of-64",
        exception=ContractError,
        title="The number of query heads is not a multiple of 64",
        message=(
            "sparse_mla_q8kv8_prefill_fwd requires h_q padded to a positive multiple of 64, got"
            " {h_q}"
        ),
        detail=(
            "The strict operator works on 64 query heads at a time and leaves padding to the"
            " caller, as the operator it replaces does."
        ),
        fix=(
            "call sparse_mla_prefill, which takes any h_q without padding; or pad q with zero heads"
            " up to the next multiple of 64."
        ),
        yours="Your q has {h_q} heads.",
        meaning=(
            "One tile of the tensor-core product holds 64 heads of one query token. The strict"
            " operator keeps the contract of SGLang's operator, which asks for padded heads. The"
            " general operator has no such limit: it needs no padded copy, and on Hopper 8,"
            " 16, 24 and 32 heads have kernels of their own."
        ),
        trigger="`q.shape[1] == 0 or q.shape[1] % 64 != 0`",
        situations=(
            (
                "Tensor parallelism: a model of 128 heads over 8 ranks leaves 16 heads on each;"
                " over 4 ranks, 32. GLM-5's 64 heads over 8 ranks leave 8."
            ),
            "A reduced test model with a handful of heads.",
            (
                "q is (s_q, d_qk, h_q) or has heads and tokens swapped, so that the token count is"
                " read as heads."
            ),
            "q and kv were swapped: the one head of the cache is read as a query with h_q = 1.",
            "The code padded q but passed the unpadded view to the call.",
        ),
        solutions=(
            Solution(
                "Use the general operator, which needs no padded copy.",
                "out = sparse_mla_prefill(q, kv, indices, sm_scale=sm_scale, q_scale=q_scale,"
                " kv_scale=kv_scale)",
            ),
            Solution(
                "Keep the strict operator and pad with zeros (never with uninitialised memory),"
                " then cut the results. Pad attn_sink as well.",
                "padded = q.new_zeros(s_q, 64, d_qk)\npadded[:, :h_q] = q\nout ="
                " sparse_mla_q8kv8_prefill_fwd(padded, ...)[0][:, :h_q]",
            ),
            Solution(
                "Replicate attention over the ranks (data-parallel attention) instead of splitting"
                " heads."
            ),
        ),
        before=strict(q="torch.randn(4, 16, 576).to(torch.float8_e4m3fn)"),
        after=general(
            "scale = torch.ones(1)",
            "sm_scale = 192 ** -0.5",
            q="torch.randn(4, 16, 576).to(torch.float8_e4m3fn)",
            kv="torch.randn(300, 1, 576).to(torch.float8_e4m3fn)",
            indices="torch.randint(0, 300, (4, 1, 128), dtype=torch.int32)",
            more="sm_scale=sm_scale, q_scale=scale, kv_scale=scale",
        ),
        related=("q-ndim", "no-heads", "attn-sink-invalid", "h-kv-not-one"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "tensor parallel",
            "TP8",
            "TP4",
            "16 heads",
            "8 heads",
            "head padding",
            "num_attention_heads",
            "uninitialised pad heads give different output every run",
        ),
        foreign=(
            (
                r"[Uu]nsupported sparse-MLA prefill"
                r" configuration:.{0,200}num_heads=(?!64\b|128\b)(?P<h_q>\d+)"
            ),
            r"h_q\s*%\s*(?:B_H|64|128)\s*==\s*0",
            (
                r"(?:num_heads|num_q_heads|h_q|n_heads)\D{0,40}(?:multiple of|divisible by|padded"
                r" to|must be) (?:64|128)\b(?:.{0,80}?\bgot (?P<h_q>\d+))?"
            ),
            r"[Uu]nsupported (?:h_q|num_heads|number of (?:query )?heads)\D{0,20}(?P<h_q>\d+)",
        ),
    ),
    ErrorRecord(
        id="h-kv-not-one",
        exception=ContractError,
        title="kv has more than one head",
        message="sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got {h_kv}",
        detail="kv has shape {shape}: MLA keeps one latent head that all query heads share.",
        fix=(
            "pass the latent cache as (s_kv, 1, 576); a model with several KV heads (GQA) needs a"
            " GQA kernel."
        ),
        yours="Your kv has {h_kv} KV heads.",
        meaning=(
            "Multi-head latent attention caches one compressed row per token, and every query head"
            " attends to that same row. A cache with several heads belongs to another kind of"
            " attention, or is the latent row already expanded."
        ),
        trigger="`kv.shape[1] != 1`",
        situations=(
            (
                "The cache of a GQA or MHA model was passed; its rows are per KV head and are not"
                " latent."
            ),
            (
                "The latent was expanded with kv_b_proj into per-head keys and values before the"
                " call. Absorb the projection into q and out instead."
            ),
            (
                "kv is paged, (blocks, page_size, 576): its second dimension is the page, not the"
                " head."
            ),
            "kv was transposed to (1, s_kv, 576), so that the cached tokens are read as heads.",
            (
                "kv was repeated over the tensor-parallel heads; every rank needs the one latent"
                " head only."
            ),
        ),
        solutions=(
            Solution(
                "Pass the latent cache itself, with a head dimension of 1.",
                "kv = latent_cache.view(s_kv, 1, 576)",
            ),
            Solution(
                "For pages, flatten blocks and page and pass physical slots in indices.",
                "kv = pages.view(-1, 1, 576)",
            ),
            Solution(
                "For expanded keys, keep the latent row and absorb the up-projection: q_latent ="
                " q_nope @ w_uk, out_head = out_latent @ w_uv."
            ),
            Solution("For a GQA model use a GQA kernel; sparse MLA cannot compute it."),
        ),
        before=strict(kv="torch.randn(300, 8, 576).to(torch.float8_e4m3fn)"),
        after=strict(kv="torch.randn(300, 1, 576).to(torch.float8_e4m3fn)"),
        related=("kv-ndim", "kv-shape", "h-q-not-multiple-of-64", "d-v-unsupported"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "GQA",
            "grouped query attention",
            "num_key_value_heads",
            "num_kv_heads",
            "expanded keys",
            "kv_b_proj",
            "paged cache as heads",
        ),
        foreign=(
            r"(?:params\.)?h_kv\s*==\s*1",
            (
                r"(?:num_kv_heads|h_kv|number of (?:kv|KV) heads)\D{0,30}(?:must be|should"
                r" be|requires?|==|expected) 1\b(?:.{0,80}?\bgot (?P<h_kv>\d+))?"
            ),
            r"MLA (?:requires|only supports|supports only) (?:a single|one|1) (?:kv|KV) head",
        ),
    ),
    ErrorRecord(
        id="d-qk-unsupported",
        exception=ContractError,
        title="Rows are neither 512 nor 576 wide",
        message="sparse_mla_q8kv8_prefill_fwd supports d_qk=512/576, got {d_qk}",
        detail=(
            "A row is 512 latent columns, with 64 rotary ones after them (576) or without (512)."
        ),
        fix=(
            "pass the absorbed query and the latent cache; make rows of a packed cache (656 or"
            " 584 bytes a token) with sparse_mla.kv_cache.gather_fp8."
        ),
        yours="Your rows have {d_qk} columns.",
        meaning=(
            "The kernels are built for the geometry of DeepSeek-V3.2, DeepSeek-V4 and GLM-5:"
            " kv_lora_rank 512 and a rotary part of 64. Other widths have no kernel here."
        ),
        trigger="`q.shape[-1]` is neither 512 nor 576",
        situations=(
            "The query is not absorbed: 192 (128 + 64) columns per head for DeepSeek, 256 for GLM.",
            (
                "The packed cache bytes were viewed as FP8: 656 per token for V3.2 and GLM-5, 584"
                " for V4."
            ),
            "Only the rotary part (64) or only a head of 128 was passed.",
            "A model with another kv_lora_rank (256, for instance).",
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
                "For another latent rank there is no kernel; zero columns up to 512 keep the dot"
                " product right if the rank is smaller."
            ),
        ),
        before=strict(
            q="torch.randn(4, 64, 192).to(torch.float8_e4m3fn)",
            kv="torch.randn(300, 1, 192).to(torch.float8_e4m3fn)",
        ),
        after=strict(),
        related=("d-qk-mismatch", "d-v-unsupported", "d-qk-unsupported-general"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "192",
            "656",
            "584",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "absorb",
            "head_dim not supported",
        ),
        foreign=(
            r"(?:params\.)?d_qk\s*==\s*(?:576|512)",
            (
                r"(?:d_qk|head_?(?:dim|size)(?:_qk)?(?:_k)?)\D{0,30}(?:must be|should be|only"
                r" supports?|supports only|expected) (?:576|512)\b(?:.{0,80}?\bgot (?P<d_qk>\d+))?"
            ),
            r"(?:[Uu]nsupported|[Ii]nvalid) (?:d_qk|head_?(?:dim|size))\D{0,20}(?P<d_qk>\d+)",
        ),
    ),
    ErrorRecord(
        id="d-v-unsupported",
        exception=ContractError,
        title="d_v is not 512",
        message="sparse_mla_q8kv8_prefill_fwd only supports d_v=512, got {d_v}",
        detail=(
            "The value is the latent part of the same KV row, its first 512 columns; the model's"
            " v_head_dim appears only after the up-projection."
        ),
        fix=(
            "leave d_v at its default of 512 and multiply out with the value up-projection"
            " afterwards."
        ),
        yours="Your call asked for d_v={d_v}.",
        meaning=(
            "In the absorbed form attention returns a latent vector of 512 per head. The model's"
            " head width (128 for DeepSeek, 256 for GLM) comes from the projection that follows."
        ),
        trigger="`d_v != 512`",
        situations=(
            "The model's v_head_dim (128) was passed as d_v.",
            "d_v was taken from the row width (576), which includes the rotary columns.",
            "Positional arguments shifted by one: another number landed in d_v.",
        ),
        solutions=(
            Solution(
                "Leave d_v out and project afterwards.",
                "out = sparse_mla_q8kv8_prefill_fwd(q, kv, indices, sm_scale, q_scale,"
                " kv_scale)[0]\nheads = torch.einsum('shc,hcv->shv', out, w_uv)  # (s_q, h_q,"
                " v_head_dim)",
            ),
            Solution("Pass attn_sink and topk_length by keyword, so that no argument can shift."),
        ),
        before=strict(more="d_v=128"),
        after=strict(more="d_v=512"),
        related=("d-qk-unsupported", "d-qk-mismatch", "h-kv-not-one"),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=("v_head_dim", "value head width 128", "output width", "w_uv", "v_b_proj"),
        foreign=(
            r"(?:params\.)?d_v\s*==\s*512",
            (
                r"(?:d_v|head_?(?:dim|size)_v|v_head_dim)\D{0,30}(?:must be|should be|only"
                r" supports?|supports only|expected) 512\b(?:.{0,80}?\bgot (?P<d_v>\d+))?"
            ),
            (
                r"[Oo]nly support\w{0,40} (?:d_v|head_?(?:dim|size)_v|v_head_dim)\s*==?\s*512"
                r"(?:.{0,80}?\bgot (?P<d_v>\d+))?"
            ),
        ),
    ),
)
