"""Attention implementations of ours for transformers' DeepSeek sparse attention models.

    import sparse_mla.integrations.transformers
    model.set_attn_implementation("sparse_mla")      # or attn_implementation="sparse_mla"

Importing this module registers two names:

    sparse_mla       unquantised latents, in the model's dtype
    sparse_mla_fp8   queries and latents quantised to FP8, one scale each a call

Either makes ``deepseek_v32`` and ``glm_moe_dsa`` models attend in the latent space: a token has one
row of 512 latent and 64 rotated columns that all heads share, ``kv_b_proj`` is applied to queries
and results, and no key or value of a head is ever expanded. The slots are the indexer's selection;
those that the mask forbids (padding, tokens to come, places of a static cache not filled yet) are
marked invalid, as the indexer does not do so.

``expand_kv`` of the two attention classes is wrapped for this; under any other implementation it
does what it did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from .. import quantize_fp8, sparse_mla_prefill

NAME = "sparse_mla"
"""Unquantised latents."""
NAME_FP8 = "sparse_mla_fp8"
"""Queries and latents in FP8."""

D_LATENT, D_ROPE = 512, 64
_ATTENTION_CLASSES = (DeepseekV32Attention, GlmMoeDsaAttention)

_Attended = tuple[torch.Tensor, None]


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> _Attended:
    """Attention over unquantised latents, as ``AttentionInterface`` calls it.

        q[t,h]     = [query_nope[t,h] @ K_up[h] | query_rope[t,h]]
        latent     = sparse_mla_prefill(q, [latents | rotated keys], indices where the mask allows)
        out[t,h]   = V_up[h] @ latent[t,h]

    with ``kv_b_proj.weight`` of a head being K_up (its first rows) and V_up (the others).

    Args:
        module: the attention module: ``kv_b_proj``, ``qk_nope_head_dim``, ``v_head_dim`` are used.
        query: [batch, heads, s_q, nope + 64], rotated.
        key: [batch, 1, s_kv, 512], the latents.
        value: [batch, 1, s_kv, 64], the rotated keys.
        attention_mask: [batch or 1, 1, s_q, s_kv], bool (True: attend) or added to the logits, then
            0 or the lowest number. Other biases cannot be told from 0 and are not applied.
        scaling: multiplies the logits.
        dropout: 0.
        indices: int32 [batch, s_q, topk], the indexer's selection.

    Returns:
        ``(out, None)``, out [batch, s_q, heads, v_head_dim] in the query's dtype.

    Raises:
        ValueError: not a call of a DeepSeek sparse attention model, or one with dropout.
        ContractError: among others where gradients are on (``no-backward``): use
            ``torch.no_grad()``.
    """
    return _attend(
        module, query, key, value, attention_mask, scaling, dropout, indices, quantised=False
    )


def attention_fp8(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> _Attended:
    """As :func:`attention`, with queries and latents in FP8: what the Hopper kernel runs."""
    return _attend(
        module, query, key, value, attention_mask, scaling, dropout, indices, quantised=True
    )


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    indices: torch.Tensor | None,
    *,
    quantised: bool,
) -> _Attended:
    _require_latents(module, key, value, dropout, indices)
    assert indices is not None
    batch, heads, s_q, _ = query.shape
    s_kv = key.shape[2]
    nope, v_head_dim = module.qk_nope_head_dim, module.v_head_dim
    up = _up_projection(module.kv_b_proj, query).view(heads, nope + v_head_dim, D_LATENT)

    absorbed = torch.einsum("bhsd,hdc->bshc", query[..., :nope], up[:, :nope])
    q = torch.cat([absorbed, query[..., nope:].transpose(1, 2)], dim=-1).flatten(0, 1)
    kv = torch.cat([key, value], dim=-1).view(batch * s_kv, D_LATENT + D_ROPE)
    slots = _valid_slots(indices, mask, s_kv)
    if quantised:
        (q, q_scale), (kv, kv_scale) = quantize_fp8(q), quantize_fp8(kv)
        latent = sparse_mla_prefill(q, kv, slots, scaling, q_scale, kv_scale)
    else:
        wide = torch.float32 if q.dtype != torch.bfloat16 else torch.bfloat16
        out = torch.empty(batch * s_q, heads, D_LATENT, dtype=wide, device=q.device)
        latent = sparse_mla_prefill(q, kv, slots, scaling, out=out)
    values = torch.einsum("thc,hdc->thd", latent.to(query.dtype), up[:, nope:])
    return values.view(batch, s_q, heads, v_head_dim), None


def _require_latents(
    module: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    indices: torch.Tensor | None,
) -> None:
    """Refuse what no DeepSeek sparse attention model hands over, with what it was."""
    name = type(module).__name__
    if indices is None:
        raise ValueError(
            f"{name} has no indexer: {NAME} runs the sparse attention of "
            "deepseek_v32 and glm_moe_dsa models"
        )
    rank = module.config.kv_lora_rank
    if (rank, module.qk_rope_head_dim) != (D_LATENT, D_ROPE):
        raise ValueError(
            f"{NAME} needs kv_lora_rank={D_LATENT} and qk_rope_head_dim={D_ROPE}, "
            f"{name} has {rank} and {module.qk_rope_head_dim}"
        )
    if key.shape[1] != 1 or key.shape[-1] != D_LATENT or value.shape[-1] != D_ROPE:
        raise ValueError(
            f"{NAME} needs latents of shape (batch, 1, s_kv, {D_LATENT}) and rotated keys "
            f"(batch, 1, s_kv, {D_ROPE}), got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if dropout:
        raise ValueError(f"{NAME} has no dropout, got {dropout}; call model.eval()")


def _up_projection(projection: Any, query: torch.Tensor) -> torch.Tensor:
    """``kv_b_proj`` as a matrix [heads * (nope + v), 512], as the query is: its dtype, its device.

    A plain linear layer holds it; of any other (quantised, with an adapter, its weights elsewhere)
    it is what the layer makes of the unit vectors.
    """
    if type(projection) is torch.nn.Linear:
        weight = projection.weight
        if (weight.dtype, weight.device) == (query.dtype, query.device):
            return weight
    units = torch.eye(D_LATENT, dtype=query.dtype, device=query.device)
    result: torch.Tensor = projection(units)
    return result.to(query.dtype).T.contiguous()


def _valid_slots(indices: torch.Tensor, mask: torch.Tensor | None, s_kv: int) -> torch.Tensor:
    """int32 [batch * s_q, topk]: rows of the flattened cache, -1 where the mask forbids."""
    batch, s_q, topk = indices.shape
    first = torch.arange(batch, dtype=torch.int32, device=indices.device) * s_kv
    slots = indices.to(torch.int32) + first[:, None, None]
    if mask is not None:
        allowed = mask[:, 0].expand(batch, -1, -1).gather(-1, indices.long())
        if allowed.dtype != torch.bool:
            allowed = allowed > torch.finfo(allowed.dtype).min / 2
        slots = torch.where(allowed, slots, -1)
    return slots.view(batch * s_q, topk)


def _latents_kept(expand_kv: Callable[..., Any]) -> Callable[..., Any]:
    """``expand_kv``, but under our implementations the latents and rotated keys as they come."""

    @functools.wraps(expand_kv)
    def wrapped(
        self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config._attn_implementation in (NAME, NAME_FP8):
            return kv_nope, k_rot
        expanded: tuple[torch.Tensor, torch.Tensor] = expand_kv(self, kv_nope, k_rot)
        return expanded

    return wrapped


def _register() -> None:
    for name, function in ((NAME, attention), (NAME_FP8, attention_fp8)):
        AttentionInterface.register(name, function)
        # eager's mask, so that the indexer scores, and breaks ties, as it does under eager.
        AttentionMaskInterface.register(name, eager_mask)
    for attention_class in _ATTENTION_CLASSES:
        if not hasattr(attention_class.expand_kv, "__wrapped__"):
            attention_class.expand_kv = _latents_kept(attention_class.expand_kv)


_register()
