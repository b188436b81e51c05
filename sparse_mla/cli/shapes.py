"""``sparse-mla doctor --shape``: which Hopper kernels run a shape, from the plan itself."""

from __future__ import annotations

import re
from typing import Any

from .terminal import say, usage

FIELDS = {"s_q": 4096, "h_q": 128, "topk": 2048, "d_qk": 576}
"""What a shape says, and what it is where it does not."""
SCALES = ("q_scale", "kv_scale")
"""May be ``tensor``, one for all, which they are unless told, or ``token``: each has its own."""
H200_MULTIPROCESSORS = 132


def parse(text: str) -> tuple[dict[str, int], dict[str, bool]]:
    """A shape written as ``s_q=4096,h_q=16,kv_scale=token``: numbers, and what has many scales."""
    from ..params import D_QK_SUPPORTED

    shape, scales = dict(FIELDS), dict.fromkeys(SCALES, False)
    known = f"{', '.join(FIELDS)}, or {', '.join(f'{name}=token' for name in SCALES)}"
    words = list(filter(None, re.split(r"[,\s]+", text)))
    if not words:
        raise usage(f"{text!r} says nothing; NAME=NUMBER with a name among {known}", "--shape")
    for pair in words:
        name, equals, value = pair.partition("=")
        if name in SCALES and equals:
            if value not in ("tensor", "token"):
                raise usage(f"{name} must be tensor or token, got {value!r}", "--shape")
            scales[name] = value == "token"
            continue
        if name not in FIELDS or not equals:
            raise usage(f"{pair!r} is not NAME=NUMBER with a name among {known}", "--shape")
        if not re.fullmatch(r"[0-9]{1,10}", value) or not 1 <= int(value) < 2**31:
            raise usage(f"{name} must be a number from 1 to 2**31 - 1, got {value!r}", "--shape")
        shape[name] = int(value)
    if shape["d_qk"] not in D_QK_SUPPORTED:
        raise usage(f"d_qk must be 512 or 576, got {shape['d_qk']}", "--shape")
    return shape, scales


def examine(texts: list[str], devices: list[dict[str, Any]]) -> dict[str, Any]:
    """For each shape the launches that compute it, on the first Hopper GPU or else an H200."""
    import torch

    from ..backends import sm90

    hopper = [d["device"] for d in devices if d["capability"] == "{}.{}".format(*sm90.CAPABILITY)]
    multiprocessors = H200_MULTIPROCESSORS
    if hopper:
        multiprocessors = torch.cuda.get_device_properties(hopper[0]).multi_processor_count
    return {
        "device": hopper[0] if hopper else None,
        "multiprocessors": multiprocessors,
        "shapes": [_examined(*parse(text), multiprocessors) for text in texts],
    }


def _examined(
    shape: dict[str, int], scales: dict[str, bool], multiprocessors: int
) -> dict[str, Any]:
    """A shape with its launches, or with the reason for having none."""
    from ..backends import sm90_plan

    s_q, h_q, topk, d_qk = shape.values()
    reason = sm90_plan.past_range(s_q, h_q, 1, topk)
    parts = sm90_plan.plan(s_q, h_q, topk, multiprocessors, scales["kv_scale"])
    launches = [
        {
            "kernel": part.variant(d_qk, *scales.values()).name,
            "heads": [part.first_head, part.first_head + part.heads - 1],
            "heads_per_item": part.heads_per_item,
            "ctas_per_item": part.ctas_per_item,
            "ctas": part.ctas(s_q, multiprocessors),
        }
        for part in parts
    ]
    return {
        **shape,
        **{name: "token" if many else "tensor" for name, many in scales.items()},
        "reason": reason,
        "launches": [] if reason else launches,
    }


def say_shapes(report: dict[str, Any]) -> None:
    """The same as text."""
    where = report["device"] or "an H200 (there is no Hopper GPU here)"
    say(f"\nkernels of sm90 on {where}, {report['multiprocessors']} multiprocessors")
    for shape in report["shapes"]:
        named = [name for name in (*FIELDS, *SCALES) if shape[name] != "tensor"]
        say("  " + " ".join(f"{name}={shape[name]}" for name in named))
        if shape["reason"]:
            say(f"    none: {shape['reason']}")
        width = max([18, *(len(launch["kernel"]) for launch in shape["launches"])])
        for launch in shape["launches"]:
            first, last = launch["heads"]
            heads = f"head {first}" if first == last else f"heads {first} to {last}"
            shared = launch["ctas_per_item"]
            slots = f", each query's slots over {shared} of them" if shared > 1 else ""
            say(f"    {launch['kernel']:<{width}} {heads}, {launch['ctas']} CTAs{slots}")
