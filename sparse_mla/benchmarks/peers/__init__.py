"""What is compared, one file a peer: ours on each backend, other projects' operators, plain torch.

A peer says why it cannot run here (``unavailable``) or cannot take a shape (``refusal``), and makes
a call out of a set of inputs (``prepare``). Conversions that the peer needs (bfloat16 copies,
padded heads) are made there, once, and are not timed; a peer's answers are compared with the
reference as ours are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...testing import Inputs, Tolerance


class Outputs(NamedTuple):
    """What a call gives; the statistics are ``None`` where the peer has none."""

    out: torch.Tensor  # bfloat16 [s_q, h_q, 512]
    max_logits: torch.Tensor | None  # float32 [s_q, h_q], natural units
    lse: torch.Tensor | None  # float32 [s_q, h_q], natural log


class Peer:
    """One thing that computes sparse MLA prefill; a subclass a peer."""

    name: str
    what: str
    """One line: what it is and in which precision."""
    ours = False
    slow = False
    """On a GPU has few rounds, apart, as a call takes many times the others'."""
    on_request = False
    """Runs only where it is asked for by name."""
    tolerance: Tolerance
    """What its answers may differ from float64 by, on inputs of ``inputs.make``."""

    def unavailable(self, device: torch.device) -> str | None:
        """Why it runs nothing on this device; ``None``: it does."""
        return None

    def refusal(self, inputs: Inputs) -> str | None:
        """Why it does not take inputs of these sizes; ``None``: it does."""
        return None

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """A call on these inputs; so many calls in a row leave each other's outputs alone."""
        raise NotImplementedError

    def kernel(self, inputs: Inputs) -> str | None:
        """Which kernel runs it, where that can be told."""
        return None


def everything() -> dict[str, Peer]:
    """Every peer by name: ours first, the fastest first."""
    from .flash_mla import FlashMLA
    from .ours import backends
    from .padded import Padded
    from .sglang import SGLang
    from .torch_bmm import GatherBmm

    peers: list[Peer] = [*backends(), Padded(), FlashMLA(), SGLang(), GatherBmm()]
    return {peer.name: peer for peer in peers}


def reason(fault: BaseException) -> str:
    """A fault in one line."""
    text = str(fault).strip().partition("\n")[0]
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def describe(peer: Peer, device: torch.device) -> dict[str, Any]:
    """The peer as data, with why it cannot run here."""
    return {
        "name": peer.name,
        "what": peer.what,
        "ours": peer.ours,
        "reason": peer.unavailable(device),
    }
