"""Devices, dtypes and layouts that the prefill operators refuse."""

from __future__ import annotations

from ..record import ContractError, ErrorRecord, Solution
from ._programs import GENERAL, STRICT, strict

RECORDS = (
    ErrorRecord(
        id="device-mismatch",
        exception=ContractError,
        title="A tensor is on another device than q",
        message="{name} must be on q's device {device}, got {got}",
        detail=(
            "All tensors of a call live on one device; nothing is copied silently, because a copy"
            " would wait for the GPU and cannot be captured in a CUDA graph."
        ),
        fix="move {name} once, where it is made: {name} = {name}.to(q.device).",
        yours="Your call passed q on {device} and {name} on {got}.",
        meaning=(
            "The kernel gets plain addresses, valid on one device. A tensor elsewhere would be an"
            " illegal access, or a hidden copy of the whole cache for every call."
        ),
        trigger=(
            "`x.device != q.device` for kv, indices, attn_sink, topk_length or an output; a scale"
            " on another device is scale-invalid in the strict operator"
        ),
        situations=(
            (
                "torch.tensor([...]) or torch.arange(...) without device= makes a CPU tensor:"
                " lengths and sinks often start like this."
            ),
            "An offloaded KV cache or indexer cache stayed on the CPU.",
            (
                "Several GPUs: the model is on cuda:1 while a buffer was made with device='cuda',"
                " which means the current device, cuda:0."
            ),
            "kv or indices was made under torch.device('meta') and never filled with real data.",
        ),
        solutions=(
            Solution(
                "Make the tensor on q's device from the start.",
                "topk_length = torch.full((s_q,), topk, dtype=torch.int32, device=q.device)",
            ),
            Solution(
                "Move it once, outside the layer loop.", "kv = kv.to(q.device, non_blocking=True)"
            ),
            Solution(
                "With several GPUs, set the device before anything is allocated.",
                "torch.cuda.set_device(rank)",
            ),
        ),
        before=strict(kv='torch.empty(300, 1, 576, dtype=torch.float8_e4m3fn, device="meta")'),
        after=strict(kv="torch.randn(300, 1, 576).to(torch.float8_e4m3fn)"),
        related=("scale-invalid", "not-a-tensor", "no-backend"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("cpu and cuda:0", "cuda:1", "offloaded cache", "same device", "meta tensor"),
        foreign=(
            r"Expected all tensors to be on the same device, but (?:found|got)",
            r"(?P<name>(?!topk_indices_offset)\w{1,40}) must be a CUDA tensor",
            r"(?P<name>\w{1,40})\.(?:is_cuda|device\(\)\.is_cuda\(\))",
            r"(?P<name>\w{1,40}) must be on (?:CUDA|GPU)",
        ),
    ),
    ErrorRecord(
        id="not-e4m3fn",
        exception=ContractError,
        title="q or kv is not torch.float8_e4m3fn",
        message="{name} must be torch.float8_e4m3fn, got {dtype}",
        detail=(
            "The strict operator reads e4m3fn bytes. Other 8-bit types hold other values in the"
            " same bytes, so they are refused rather than reinterpreted."
        ),
        fix=(
            "quantise a float {name} with sparse_mla.quantize_fp8, or leave q to"
            " sparse_mla_prefill; make rows of a packed cache (656 or 584 bytes a token) with"
            " sparse_mla.kv_cache.gather_fp8."
        ),
        yours="Your call passed {name} as {dtype}.",
        meaning=(
            "float8_e4m3fn is the FP8 type of NVIDIA GPUs: largest value 448, no infinity."
            " float8_e4m3fnuz (AMD) gives every byte half that value and reads 0x80 as NaN;"
            " float8_e5m2 has another split of bits; uint8 carries no number format at all."
        ),
        trigger="`q.dtype` or `kv.dtype` is not `torch.float8_e4m3fn`",
        situations=(
            (
                "A checkpoint or cache made on AMD hardware is float8_e4m3fnuz. Viewing it as"
                " e4m3fn doubles every value and turns zeros of the wrong sign into NaN."
            ),
            (
                "The cache buffer is torch.uint8, as serving frameworks allocate it, or holds the"
                " packed 656-byte rows."
            ),
            "q is still bfloat16: the cache was quantised, the query was not.",
            "float8_e5m2 was chosen for its range, as for gradients.",
            "kv_cache_dtype was left at 'auto', so that the cache is bfloat16.",
            "kv and indices were swapped: the order is q, kv, indices.",
        ),
        solutions=(
            Solution(
                "Quantise bfloat16 data; the scale goes to the call.",
                "q, q_scale = quantize_fp8(q)",
            ),
            Solution(
                "Or let the general operator quantise the query on the device.",
                "out = sparse_mla_prefill(q_bf16, kv, indices, kv_scale=kv_scale)",
            ),
            Solution(
                "Make FP8 rows of a packed cache; indices then counts the gathered rows.",
                "kv, kv_scale = kv_cache.gather_fp8(cache, slots, kv_cache.V32)  # or kv_cache.V4",
            ),
            Solution(
                "Reinterpret uint8 only when you know the bytes are e4m3fn values, one per column.",
                "kv = kv_bytes.view(torch.float8_e4m3fn)",
            ),
            Solution(
                "Convert fnuz by value, not by view: through float, then quantise again.",
                "kv, kv_scale = quantize_fp8(kv_fnuz.float() * fnuz_scale)",
            ),
        ),
        before=strict(q="torch.randn(4, 64, 576, dtype=torch.bfloat16)"),
        after=(
            "import torch\nfrom sparse_mla import quantize_fp8, sparse_mla_q8kv8_prefill_fwd\n\nq,"
            " q_scale = quantize_fp8(torch.randn(4, 64, 576, dtype=torch.bfloat16))\nkv ="
            " torch.randn(300, 1, 576).to(torch.float8_e4m3fn)\nindices = torch.randint(0, 300, (4,"
            " 1, 128), dtype=torch.int32)\nscale = torch.ones(1)\nsm_scale = 192 ** -0.5\nout,"
            " max_logits, lse = sparse_mla_q8kv8_prefill_fwd(\n    q, kv, indices, sm_scale,"
            " q_scale=q_scale, kv_scale=scale\n)\n"
        ),
        related=(
            "q-dtype-unsupported",
            "kv-dtype-unsupported",
            "quantize-input",
            "unquantised-kv-with-fp8-q",
        ),
        operators=(STRICT,),
        since="0.1.0",
        symptoms=(
            "fnuz",
            "AMD",
            "ROCm",
            "MI300",
            "e5m2",
            "uint8 cache",
            "kv_cache_dtype",
            "fp8 versus fp8_e4m3",
            "bf16 query",
        ),
        foreign=(
            (
                r"(?P<name>q|kv|k_cache|kv_cache)\S{0,40} (?:must|should) (?:be|have dtype)"
                r" (?:fp8|float8|torch\.float8|Float8)\w{0,40}"
                r"(?:.{0,80}?\bgot (?P<dtype>[\w.]{1,40}))?"
            ),
            r"(?:float8|fp8|Float8)_e4m3fnuz",
            (
                r"[Uu]nsupported (?:kv[_ ]cache[_ ])?d(?:ata[_ ]?)?type:?"
                r" (?P<dtype>(?:torch\.)?(?:uint8|float8_e5m2|Float8_e5m2))"
            ),
        ),
    ),
    ErrorRecord(
        id="not-contiguous",
        exception=ContractError,
        title="A tensor is not contiguous",
        message="{name} must be contiguous",
        detail=(
            "{name} has shape {shape} and strides {strides}; a contiguous tensor of that shape has"
            " no gaps between rows."
        ),
        fix=(
            "pass {name}.contiguous(); for q and kv with dense rows sparse_mla_prefill takes the"
            " strides as they are."
        ),
        yours="Your call passed {name} as a view with gaps, or transposed.",
        meaning=(
            "The strict operator computes addresses from shapes alone, as the operator it replaces"
            " does. A slice or a transpose has other strides, and reading it by shape would give"
            " wrong numbers without any crash."
        ),
        trigger=(
            "`x.is_contiguous()` is false for q, kv, indices, attn_sink, topk_length, a scale or an"
            " output"
        ),
        situations=(
            (
                "kv is a slice of a wider buffer (cache[:, :, :576] of 640 columns), or every"
                " second row (cache[::2])."
            ),
            "q is x.transpose(0, 1) from a heads-first computation: same values, other strides.",
            "topk_length or attn_sink is a column of a larger tensor, t[:, 0].",
            "indices is a slice of a wider index buffer, buffer[:, :, :topk].",
            "expand() or broadcast_to() gave a stride of 0.",
        ),
        solutions=(
            Solution(
                "Copy small tensors (lengths, sinks, indices).", "indices = indices.contiguous()"
            ),
            Solution(
                "For a large cache avoid the copy: allocate it with the width that is used, or call"
                " sparse_mla_prefill, which takes row strides as long as the last dimension is"
                " dense."
            ),
            Solution(
                "Write the query directly in (s_q, h_q, d_qk) order instead of transposing it."
            ),
        ),
        before=strict(kv="torch.randn(300, 1, 640).to(torch.float8_e4m3fn)[:, :, :576]"),
        after=strict(
            kv="torch.randn(300, 1, 640).to(torch.float8_e4m3fn)[:, :, :576].contiguous()"
        ),
        related=("not-strided", "last-dim-not-dense", "output-invalid"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "strides",
            "slice of a cache",
            "transpose",
            "view",
            "expand",
            "column of lengths",
            "wrong numbers from a view",
        ),
        foreign=(
            r"(?P<name>\w{1,40})\.is_contiguous\(\)",
            r"(?P<name>\w{1,40}) (?:tensor )?(?:is not|should be|has to be) contiguous",
            r"(?P<name>\w{1,40})\.stride\(-1\)\s*==\s*1",
            r"(?P<name>\w{1,40}) must have contiguous last dimension",
        ),
    ),
    ErrorRecord(
        id="indices-not-int32",
        exception=ContractError,
        title="indices is not int32",
        message="indices must be int32, got {dtype}",
        detail="The kernel reads 4-byte slots; torch.topk and torch.arange give int64.",
        fix="pass indices.to(torch.int32).",
        yours="Your indices are {dtype}.",
        meaning=(
            "Read as int32, an int64 tensor would be a list in which every second slot is 0, so"
            " every query would attend to row 0 a thousand times. It is refused rather than"
            " converted, because the conversion is a kernel launch on every layer."
        ),
        trigger="`indices.dtype != torch.int32`",
        situations=(
            "torch.topk, argsort, nonzero and arange return int64.",
            (
                "A slot mapping is int64 in the framework's metadata (vLLM's slot_mapping, for"
                " example)."
            ),
            "indices came through a float computation or a JSON file.",
        ),
        solutions=(
            Solution(
                "Convert once after the selection; the same indices serve all heads.",
                "indices = scores.topk(2048).indices.to(torch.int32)",
            ),
            Solution("Use an indexer that writes int32 itself, into a preallocated buffer."),
        ),
        before=strict(indices="torch.randn(4, 1, 300).topk(128).indices"),
        after=strict(indices="torch.randn(4, 1, 300).topk(128).indices.to(torch.int32)"),
        related=("indices-ndim", "not-a-tensor", "topk-length-invalid"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("int64", "long", "torch.topk", "argsort", "arange", "slot_mapping"),
        foreign=(
            (
                r"(?:topk_)?indices\S{0,40} (?:must|should) (?:be|have dtype)(?: of type)?"
                r" (?:torch\.)?int32(?:.{0,80}?\bgot (?P<dtype>[\w.]{1,40}))?"
            ),
            r"[Ee]xpected (?:scalar type )?Int but (?:found|got) Long",
            r"indices\.(?:dtype|scalar_type)\(?\)? == (?:torch::kInt32|torch\.int32)",
        ),
    ),
    ErrorRecord(
        id="output-invalid",
        exception=ContractError,
        title="An output given by the caller has the wrong shape or dtype",
        message="{name} must have shape {shape} and dtype {dtype}, got {got_shape}/{got_dtype}",
        detail=(
            "An output that the caller passes is written in place, every element of it, so it must"
            " have exactly the result's shape and dtype."
        ),
        fix=(
            "allocate {name} with torch.empty({shape}, dtype={dtype}, device=q.device), or leave it"
            " out."
        ),
        yours=(
            "Your call passed {name} with shape {got_shape} and dtype {got_dtype}; it writes"
            " {shape} of {dtype}."
        ),
        meaning=(
            "out is bfloat16 (s_q, h_q, 512), of sparse_mla_prefill with an unquantised kv also"
            " float32; max_logits and lse are float32 (s_q, h_q). Nothing is resized or converted"
            " on the way out."
        ),
        trigger="out, max_logits or lse is given with another shape or dtype than the result",
        situations=(
            (
                "A buffer for the largest batch was passed whole; it must be cut to this call's"
                " tokens."
            ),
            "out was allocated in float16, or with q's dtype, which is FP8.",
            "out has the model's head width (128) or the row width (576) instead of 512.",
            "lse was allocated heads-first, (h_q, s_q), as some kernels return it.",
        ),
        solutions=(
            Solution(
                "Cut the reused buffer; a leading slice stays contiguous.",
                "out = buffer[: q.shape[0]]",
            ),
            Solution(
                "Allocate with the right type.",
                "out = torch.empty(s_q, h_q, 512, dtype=torch.bfloat16, device=q.device)",
            ),
            Solution("Leave the outputs out; torch's caching allocator makes this cheap."),
        ),
        before=strict("buffer = torch.empty(4, 64, 512, dtype=torch.float16)", more="out=buffer"),
        after=strict("buffer = torch.empty(4, 64, 512, dtype=torch.bfloat16)", more="out=buffer"),
        related=("outputs-overlap", "not-contiguous", "merge-shapes"),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=("preallocated output", "out=", "fp16 output", "lse transposed", "buffer reuse"),
    ),
    ErrorRecord(
        id="outputs-overlap",
        exception=ContractError,
        title="Outputs share memory",
        message="out, max_logits and lse must not overlap each other or an input",
        detail=(
            "{first} and {second} share memory, so that writing one would change the other while"
            " the call runs."
        ),
        fix="give {first} and {second} memory of their own.",
        yours="Two of the tensors in your call share memory.",
        meaning=(
            "Outputs are written while other queries still read the inputs, in no fixed order. If"
            " two of them share bytes the result depends on timing."
        ),
        trigger=(
            "the byte ranges of two outputs, or of an output and an input, intersect; empty tensors"
            " share nothing"
        ),
        situations=(
            "One scratch tensor was passed as both max_logits and lse because only out was wanted.",
            "Outputs were cut from one workspace with a wrong offset.",
            "out was made as a view of q's or kv's storage to save memory.",
        ),
        solutions=(
            Solution(
                "Leave out the outputs that you do not need.",
                "out, _, _ = sparse_mla_q8kv8_prefill_fwd(q, kv, indices, sm_scale, q_scale,"
                " kv_scale, out=out)",
            ),
            Solution(
                "Allocate the two statistics together but as separate halves.",
                "max_logits, lse = torch.empty(2, s_q, h_q, dtype=torch.float32, device=q.device)",
            ),
        ),
        before=strict("stats = torch.empty(4, 64)", more="max_logits=stats, lse=stats"),
        after=strict("stats = torch.empty(2, 4, 64)", more="max_logits=stats[0], lse=stats[1]"),
        related=("output-invalid",),
        operators=(STRICT, GENERAL),
        since="0.1.0",
        symptoms=(
            "aliasing",
            "in-place",
            "shared workspace",
            "same buffer twice",
            "memory overlap",
        ),
        foreign=(
            (
                r"unsupported operation: some elements of the input tensor and the written-to"
                r" tensor refer to a single memory location"
            ),
        ),
    ),
)
