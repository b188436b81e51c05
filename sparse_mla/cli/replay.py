"""A captured call made again, timed, and compared with the reference and with its file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

    from ..callfile import Call
    from ..testing.compare import Errors, Tolerance

MAX_QUERIES = 64
"""Queries that are compared with the float64 reference; of a longer call, evenly spread ones."""


@dataclass(frozen=True)
class Comparison:
    """Results against others, worst row each, and what they may differ by."""

    against: str
    queries: int
    of: int
    errors: Errors
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        """Whether everything is within the tolerance."""
        errors = self.errors
        return errors.out <= self.tolerance.out and errors.max_logits <= 1.0 and errors.lse <= 1.0

    def text(self) -> str:
        """One line."""
        verdict = "agrees with" if self.ok else "DIFFERS from"
        off = [
            f"{name} off by {error:.2g} times its limit"
            for name, error in (("max_logits", self.errors.max_logits), ("lse", self.errors.lse))
            if not error <= 1.0
        ]
        return (
            f"{verdict} {self.against} ({self.queries} of {self.of} queries): error of out "
            f"{self.errors.out:.2%} (limit {self.tolerance.out:.1%}), "
            + (", ".join(off) or "max_logits and lse within limits")
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as data."""
        return {
            "ok": self.ok,
            "against": self.against,
            "queries": self.queries,
            "of": self.of,
            "out_relative_l2": self.errors.out,
            "out_limit": self.tolerance.out,
            "max_logits_of_limit": self.errors.max_logits,
            "lse_of_limit": self.errors.lse,
        }


@dataclass(frozen=True)
class Replay:
    """What a call gave, which backend ran it, and how long it took, first use included."""

    results: dict[str, torch.Tensor]
    backend: str
    seconds: float
    flop: int

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations a second, masked slots not counted."""
        return self.flop / self.seconds / 1e9


def replay(call: Call, device: torch.device | None, backend: str | None) -> Replay:
    """Make the call on ``device`` with ``backend``; a failing one raises what it raised."""
    from .. import dispatch
    from ..callfile import RESULTS

    moved = call if device is None else on_device(call, device)
    wait(moved.tensors.get("q"))
    start = time.perf_counter()
    results = moved.run(backend=backend)
    wait(results[0])
    seconds = time.perf_counter() - start
    name = dispatch.last_backend()
    return Replay(dict(zip(RESULTS, results, strict=True)), name, seconds, operations(call))


def on_device(call: Call, device: torch.device) -> Call:
    """The call with its inputs on ``device``."""
    moved = call.keywords(device)
    return replace(call, tensors={name: moved[name] for name in call.tensors if name in moved})


def wait(tensor: torch.Tensor | None) -> None:
    """Let the device of ``tensor`` finish what it has been given."""
    import torch

    if tensor is not None and tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def operations(call: Call) -> int:
    """Floating-point operations of the call's valid slots: two products a slot and head."""
    from ..params import D_V

    h_q, d_qk = call.tensors["q"].shape[1:]
    return 2 * int(valid_slots(call).sum()) * h_q * (d_qk + D_V)


def valid_slots(call: Call) -> torch.Tensor:
    """Which slots of the call select a row, [s_q, topk]."""
    import torch

    rows = slots(call)
    valid = (rows >= 0) & (rows < call.tensors["kv"].shape[0])
    length = call.tensors.get("topk_length")
    if length is not None:
        valid &= torch.arange(rows.shape[1], device=rows.device) < length.to(rows.device)[:, None]
    return valid


def slots(call: Call) -> torch.Tensor:
    """The call's indices, [s_q, topk]."""
    indices = call.tensors["indices"]
    return indices if indices.ndim == 2 else indices[:, 0]


def verify(call: Call, done: Replay) -> list[Comparison]:
    """The results against the reference and, where the file has them, against expected results."""
    s_q = call.tensors["q"].shape[0]
    queries = sample(s_q, MAX_QUERIES)
    tolerance = tolerance_of(done.backend)
    picked = {name: result[queries].cpu() for name, result in done.results.items()}
    reference = only(call, queries).run(backend="reference")
    wanted = dict(zip(done.results, reference, strict=True))
    found = [compared("the reference", picked, wanted, s_q, tolerance)]
    if call.expected:
        found.append(_against_file(call.expected, done.results, tolerance))
    return found


def _against_file(
    expected: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor], tolerance: Tolerance
) -> Comparison:
    """The results against those in the file; one of another shape is infinitely far off."""
    from ..testing.compare import Errors

    s_q = results["out"].shape[0]
    against = "the results in the file"
    if any(expected[name].shape != results[name].shape for name in expected):
        off = float("inf")
        return Comparison(
            against, s_q, s_q, Errors(off, off, off, (0, 0), (0, 0), (0, 0)), tolerance
        )
    got = {name: result.cpu() for name, result in results.items()}
    return compared(against, got, {**got, **expected}, s_q, tolerance)


def compared(
    against: str,
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    of: int,
    tolerance: Tolerance,
) -> Comparison:
    """Worst row of each result; both sides hold the same queries."""
    from ..backends.reference import Attention
    from ..testing.compare import measure

    exact = Attention(*(want[name].double() for name in ("out", "max_logits", "lse")))
    problem = cast(Any, SimpleNamespace(**got))  # measure reads the three results only
    errors = measure(problem, tolerance, exact)
    return Comparison(against, got["out"].shape[0], of, errors, tolerance)


def tolerance_of(backend: str) -> Tolerance:
    """What a backend's results may differ from the reference by, both rounded to bfloat16."""
    from ..testing.compare import CPU_BFLOAT16, Tolerance

    if backend in ("reference", "cpu"):
        return CPU_BFLOAT16
    # FP8 probabilities have a relative error of up to 2**-4 each, 3 % in root mean square; FP8
    # wgmma sums logits in 14 bits, and one of 14 was seen to be off by 0.034.
    return Tolerance(out=0.04, absolute=4e-2, relative=2e-3)


def sample(count: int, at_most: int) -> list[int]:
    """Evenly spread numbers below ``count``, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    return [round(i * (count - 1) / (at_most - 1)) for i in range(at_most)]


def only(call: Call, queries: Sequence[int]) -> Call:
    """The call reduced to some of its queries, without what the file expects of it."""
    import torch

    from ..callfile import Buffer

    rows = list(queries)
    s_q = call.tensors["q"].shape[0]
    tensors = {}
    for name, tensor in call.tensors.items():
        if name in ("q", "indices", "topk_length") or (
            name == "q_scale" and tensor.numel() > 1 and tensor.shape[0] == s_q
        ):
            tensors[name] = tensor[rows]
        elif name in ("kv", "q_scale", "kv_scale", "attn_sink"):
            tensors[name] = tensor
    arguments = {
        name: value
        for name, value in call.arguments.items()
        if name not in ("out", "max_logits", "lse")
    }
    out = call.arguments.get("out")
    if isinstance(out, Buffer):  # its dtype decides how the result is rounded
        shape = (len(rows), *out.shape[1:])
        arguments["out"] = Buffer(out.dtype, shape, torch.empty(shape, device="meta").stride())
    return replace(call, tensors=tensors, arguments=arguments)
