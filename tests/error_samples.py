"""Values for the fields of error templates, and logs to hide a message in."""

from __future__ import annotations

import random
import string
from typing import Any

from sparse_mla.errors import ErrorRecord

_SHAPES = ("shape", "got_shape", "strides", "expected", "grid", "block")
_WORDS: dict[str, tuple[str, ...]] = {
    "name": ("q", "kv", "indices", "attn_sink", "q_scale"),
    "tensor": ("q", "kv"),
    "type": ("list", "ndarray", "NoneType"),
    "dtype": ("torch.bfloat16", "torch.float8_e5m2", "torch.int64"),
    "got_dtype": ("torch.float16", "torch.float64"),
    "q_dtype": ("torch.float8_e4m3fn",),
    "kv_dtype": ("torch.bfloat16", "torch.float16"),
    "device": ("cuda:0", "cpu", "mps:0"),
    "got": ("cuda:1", "cpu"),
    "wanted": ("at least one part", "float32 (2, 3) on cpu"),
    "value": ("nan", "-1.5", "0.0"),
    "what": ("float 0.5", "None", "float32 tensor of shape (2,)"),
    "backend": ("sm90", "flashmla_sparse"),
    "chosen": ("reference", "portable"),
    "better": ("sm90", "sm90 or portable"),
    "kernel": ("prefill", "prefill_576"),
    "first": ("kv", "out"),
    "second": ("lse", "q"),
    "arch": ("sm_90a",),
    "path": ("/tmp/calls/call-17.safetensors", "call.safetensors"),
    "reason": ("No such file or directory", "the device is cpu, not cuda"),
    "known": ("auto, cpu, reference",),
    "reasons": ("sm90: no GPU; cpu: tensors are on cuda",),
    "capability": ("8.9",),
    "size": ("2.00 GiB", "512.00 MiB"),
}


def fields(template: str) -> list[str]:
    """The fields of a template, in order."""
    return [field for _, field, _, _ in string.Formatter().parse(template) if field]


def context(record: ErrorRecord, seed: int) -> dict[str, Any]:
    """A value for each field of the record's texts."""
    names = fields(f"{record.message} {record.detail} {record.fix} {record.yours}")
    draw = random.Random(f"{record.id} {seed}")
    return {name: _value(name, draw) for name in names}


def _value(name: str, draw: random.Random) -> Any:
    if name in _SHAPES:
        return tuple(draw.randrange(1, 9999) for _ in range(draw.randrange(1, 5)))
    if name in _WORDS:
        return draw.choice(_WORDS[name])
    return draw.randrange(0, 2**20)


def first_line(record: ErrorRecord, values: dict[str, Any]) -> str:
    return str(record.exception(record, values)).splitlines()[0]


def traceback_around(message: str) -> str:
    """60 lines of a serving log with a traceback that ends in ``message``."""
    log = [
        f"[2026-12-01 12:00:{n:02d} TP{n % 8}] Prefill batch. #new-seq: {n}, #new-token: {64 * n},"
        f" token usage: 0.{n:02d}"
        for n in range(20)
    ]
    frames = ["[2026-12-01 12:01:00 TP3] Scheduler hit an exception: Traceback (most recent call"]
    for n in range(17):
        frames.append(f'  File "/opt/sglang/srt/layers/attention/layer{n}.py", line {n * 31}, in f')
        frames.append("    return self.attn(q, kv, topk_indices, sm_scale=scale, kv_scale=0.5)")
    tail = ["", "[2026-12-01 12:01:01] Received sigquit from a child process.", "Killed", "$"]
    return "\n".join([*log, *frames, f"ValueError: {message}", *tail])


def rich_frame(message: str, width: int = 78) -> str:
    """``message`` wrapped inside the frame that rich draws around an exception."""
    words, lines = message.split(" "), [""]
    for word in words:
        if len(lines[-1]) + len(word) > width - 6:
            lines.append("")
        lines[-1] += word + " "
    body = [f"│ {line:<{width - 4}} │" for line in lines]
    return "\n".join(["╭" + "─" * (width - 2) + "╮", *body, "╰" + "─" * (width - 2) + "╯"])
