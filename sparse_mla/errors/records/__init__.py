"""The records of every error, by id."""

from __future__ import annotations

from ..record import BackendError, ContractError, ErrorRecord, FileError, SparseMLAError
from .jit import RECORDS as _JIT

_Q = "sparse_mla_q8kv8_prefill_fwd"


def _brief(
    id: str, exception: type[SparseMLAError], message: str, detail: str, fix: str
) -> ErrorRecord:
    return ErrorRecord(
        id=id,
        exception=exception,
        title=id.replace("-", " "),
        message=message,
        detail=detail,
        fix=fix,
        meaning=detail,
        trigger=message,
        situations=(),
        solutions=(),
        before="",
        after="",
        related=(),
        operators=(),
        since="0.1.0",
    )


_BRIEF: dict[type[SparseMLAError], list[tuple[str, str, str, str]]] = {
    ContractError: [
        ("not-a-tensor", "{name} must be a torch.Tensor, got {type}", "The operators take torch tensors.", "convert {name} with torch.as_tensor(...) on q's device."),
        ("q-ndim", "q must have shape (s_q, h_q, d_qk), got {shape}", "q has one row per query token and head.", "pass q as (tokens, heads, 576) or (tokens, heads, 512)."),
        ("kv-ndim", "kv must have shape (s_kv, h_kv, d_qk), got {shape}", "kv is the flat latent cache.", "pass kv as (s_kv, 1, 576)."),
        ("indices-ndim", "indices must have shape (s_q, h_kv, topk), got {shape}", "indices has one row per query token and KV head.", "pass indices.unsqueeze(1) when it is (s_q, topk)."),
        ("device-mismatch", "{name} must be on q's device {device}, got {got}", "All tensors of one call live on one device.", "move {name} with {name}.to(q.device)."),
        ("not-e4m3fn", "{name} must be torch.float8_e4m3fn, got {dtype}", "The strict operator reads e4m3fn bytes.", "quantise {name} with sparse_mla.quantize_fp8."),
        ("not-contiguous", "{name} must be contiguous", "{name} has shape {shape} and strides {strides}.", "pass {name}.contiguous()."),
        ("d-qk-mismatch", "kv d_qk must match q d_qk={d_qk}, got {kv_d_qk}", "A query row and a KV row are multiplied column by column.", "give q and kv the same last dimension."),
        ("h-q-not-multiple-of-64", _Q + " requires h_q padded to a positive multiple of 64, got {h_q}", "The kernel works on 64 heads at a time.", "call sparse_mla_prefill, which takes any h_q without padding."),
        ("h-kv-not-one", _Q + " requires h_kv=1, got {h_kv}", "kv has shape {shape}: MLA keeps one latent head that all query heads share.", "pass the latent cache as (s_kv, 1, 576)."),
        ("d-qk-unsupported", _Q + " supports d_qk=512/576, got {d_qk}", "512 latent columns, with or without 64 rotary.", "pass the absorbed latent query."),
        ("indices-shape", "indices must have shape ({s_q}, {h_kv}, topk), got {shape}", "One row of indices per query.", "cut or pad indices to q's tokens."),
        ("indices-not-int32", "indices must be int32, got {dtype}", "The kernel reads 4-byte indices.", "pass indices.to(torch.int32)."),
        ("topk-not-multiple-of-128", "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got {topk}", "The kernel walks the slots in blocks of 128.", "pad indices with -1 to a multiple of 128."),
        ("topk-length-invalid", "topk_length must be int32 with shape ({s_q},), got {shape}/{dtype}", "One length per query.", "pass int32 lengths of shape ({s_q},)."),
        ("d-v-unsupported", _Q + " only supports d_v=512, got {d_v}", "The value is the latent part of the KV row.", "leave d_v at 512."),
        ("attn-sink-invalid", "attn_sink must be float32 with shape ({h_q},), got {shape}/{dtype}", "One sink logit per query head.", "pass float32 sinks of shape ({h_q},)."),
        ("scale-invalid", "{name} must be a one-element float32 tensor on q's device, got {what}", "The kernel reads the scale on the device.", "pass torch.tensor([...], dtype=torch.float32, device=q.device)."),
        ("output-invalid", "{name} must have shape {shape} and dtype {dtype}, got {got_shape}/{got_dtype}", "An output given by the caller is written in place.", "allocate it with torch.empty({shape}, dtype={dtype}, device=q.device), or leave it out."),
        ("outputs-overlap", "out, max_logits and lse must not overlap each other or an input", "{first} and {second} share memory.", "give {first} its own memory."),
        ("sm-scale-invalid", "sm_scale must be a finite positive number, got {value}", "sm_scale multiplies every logit.", "pass the model's softmax scale as a Python float."),
        ("kv-shape", "kv must have shape (s_kv, d_qk) or (s_kv, 1, d_qk), got {shape}", "MLA has one latent head.", "pass the latent rows."),
        ("indices-shape-general", "indices must have shape ({s_q}, topk) or ({s_q}, 1, topk) with topk >= 1, got {shape}", "One row of indices per query.", "give indices {s_q} rows and at least one column."),
        ("last-dim-not-dense", "{name} must be dense in its last dimension, got strides {strides}", "{name} has shape {shape}.", "pass {name}.contiguous()."),
        ("d-qk-unsupported-general", "sparse_mla_prefill supports d_qk=512/576, got {d_qk}", "512 latent columns, with or without 64 rotary.", "pass the absorbed latent query."),
        ("no-heads", "q must have at least one head, got shape {shape}", "There is nothing to attend with.", "check how q was sliced."),
        ("q-dtype-unsupported", "q must be float8_e4m3fn, bfloat16, float16 or float32, got {dtype}", "Other types have no defined meaning here.", "convert q."),
        ("kv-dtype-unsupported", "kv must be float8_e4m3fn, bfloat16, float16 or float32, got {dtype}", "Other types have no defined meaning here.", "convert kv."),
        ("unquantised-kv-with-fp8-q", "q must be of a float type when kv is {kv_dtype}, got {q_dtype}", "An FP8 query goes with an FP8 cache.", "quantise kv too, or pass q unquantised."),
        ("scale-without-fp8", "{name} was given, but {tensor} is {dtype} and is not quantised", "A scale belongs to FP8 data.", "leave {name} out."),
        ("scale-missing", "{name} is required when {tensor} is torch.float8_e4m3fn", "FP8 bytes mean nothing without their scale.", "pass {name}."),
        ("q-scale-shape", "q_scale must be a float, or float32 of one element, ({s_q},) or ({s_q}, {h_q}), got {shape}/{dtype}", "A scale for the tensor, per token, or per token and head.", "reshape q_scale."),
        ("kv-scale-shape", "kv_scale must be a float, or float32 of one element or ({s_kv},), got {shape}/{dtype}", "A scale for the tensor or per token.", "reshape kv_scale."),
        ("scale-not-positive-number", "{name} must be a finite positive number, got {value}", "A scale multiplies stored values back to real ones.", "pass the positive scale."),
        ("no-backward", "{name} requires grad, but sparse MLA attention here has no backward", "There is no backward.", "call under torch.no_grad() or detach."),
        ("index-out-of-range", "indices[{query}, {slot}] is {index}, outside [0, {s_kv}) and not -1 ({count} such)", "A slot outside the cache is ignored in a normal run.", "check the page table."),
        ("topk-length-out-of-range", "topk_length[{query}] is {length}, outside [0, {topk}] ({count} such)", "A length is clamped in a normal run.", "check the lengths."),
        ("scale-data-invalid", "{name} holds {value}, which is not a finite positive number ({count} such)", "A bad scale gives NaN in a normal run.", "check how the scale was computed."),
        ("nan-in-input", "{name} row {row} holds NaN or Inf ({count} such rows)", "It reaches the output.", "find who wrote it."),
        ("quantize-input", "x must be a float tensor with a non-empty last dimension, got {shape}/{dtype}", "Only float data can be quantised.", "pass a float tensor."),
        ("quantize-scale", "scale must be a finite positive number or float32 of shape {expected}, got {what}", "The scale divides the input.", "pass a positive scale."),
        ("merge-shapes", "{name} must be {expected}, got {got}", "Every part has the same shape.", "stack parts of the same shape."),
    ],
    BackendError: [
        ("backend-unknown", "unknown backend {backend}; known: {known}", "The name is not in the registry.", "use one of the known names or auto."),
        ("backend-refused", "backend {backend} cannot run this problem: {reason}", "It was asked for by name.", "use backend='auto'."),
        ("no-backend", "no backend runs on {device}", "{reasons}", "move the tensors to a CPU or CUDA device."),
        ("slow-backend", "{chosen} runs this problem, slower than {better} would", "{reasons}", "see sparse-mla doctor."),
        ("nvrtc-missing", "NVRTC is not usable: {reason}", "Kernels are compiled at first use.", "pip install 'sparse-mla[cuda]'."),
        ("kernel-compile-failed", "kernel {kernel} did not compile for {arch}", "{log}", "report it."),
        ("kernel-load-failed", "kernel {kernel} could not be loaded on {device}: {reason}", "The driver refused it.", "update the driver."),
        ("cuda-driver-missing", "the CUDA driver is not usable: {reason}", "The kernel needs it.", "install the driver."),
    ],
    FileError: [
        ("file-unreadable", "cannot read {path}: {reason}", "The file could not be opened.", "check the path."),
        ("file-not-safetensors", "{path} is not a valid safetensors file: {reason}", "The header was refused.", "copy it again."),
        ("file-too-large", "{path} would need {bytes} bytes, more than the limit of {limit}", "Nothing was loaded.", "raise the limit."),
        ("file-not-a-call", "{path} is not a sparse-mla call file: {reason}", "The metadata does not fit.", "write it with save_call."),
        ("file-tensor-missing", "{path} has no tensor {name}", "The call needs it.", "capture the call again."),
        ("dump-failed", "cannot write the call to {path}: {reason}", "The call goes on without it.", "point SPARSE_MLA_DUMP at a writable directory."),
    ],
}

RECORDS: dict[str, ErrorRecord] = {
    brief[0]: _brief(brief[0], exception, *brief[1:])
    for exception, briefs in _BRIEF.items()
    for brief in briefs
}
RECORDS.update({record.id: record for record in _JIT})
