"""Where the CPU backend's softmaxes lie, and where the centres of their logits should have been.

In bfloat16 a logit is off by up to 2**-8 of its distance from the centre, so the centre belongs
where the tokens are that ``out`` comes from. Often that is at the maximum. Not where few tokens
with values near zero, attention sinks, take the weight: ``out`` then comes from the bulk far below.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

NEAR = 2.0
"""The most that a head's maximum may lie away from its centre and be rounded to bfloat16."""

BELOW = 7.5
"""How far below its centre the logarithm of a head's mean weight may lie, outliers apart."""

ABOVE_MEAN = 3.5
"""Where a centre belongs: this far above that logarithm, or at the maximum if that is lower."""


class Stats(NamedTuple):
    """What is known of each softmax, float32 [n, h_q]; logits are relative to their centre."""

    top: torch.Tensor  # largest logit
    largest: torch.Tensor  # largest p: 1 / sum_j exp(logit - top)
    total: torch.Tensor  # sum of the rounded p, without row_scale
    exact: torch.Tensor  # sum of the p of logits computed one by one; -1: they were too many
    centre: torch.Tensor

    def lse(self) -> torch.Tensor:
        """``lse`` in natural units."""
        return (self.top - self.largest.log()).add_(self.centre)

    def bulk(self, log_others: torch.Tensor) -> torch.Tensor:
        """Logarithm of the mean of exp(logit) over all slots but the outliers.

        Outliers are the logits computed one by one, or the largest if there are none: what they
        leave may be all that ``out`` consists of, their values being zero. Infinite for one slot.
        """
        outliers = torch.maximum(self.largest, self.exact)
        rest = (1 - outliers).clamp_(min=1e-7).div_(self.largest).log_()
        return rest.add_(self.top).sub_(log_others)

    def target(self, bulk: torch.Tensor) -> torch.Tensor:
        """Where the centre should have been: at the maximum, unless the bulk is far below it.

        By Markov's inequality few logits lie more than 1 above it: 1 in 90, and outliers.
        """
        # Very far from the centre, rounding leaves nothing but the maximum to go by.
        bulk = torch.where(self.top.abs() > 100, math.inf, bulk)
        return torch.minimum(self.top, bulk + ABOVE_MEAN)

    def near(self) -> torch.Tensor:
        """How far from its centre the maximum may be rounded, by 2**-8 of that, at most."""
        return (self.top + self.centre).abs_().mul_(0.5).add_(1.0).clamp_(max=NEAR)
