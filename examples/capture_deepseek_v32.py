"""Capture one sparse MLA prefill call from transformers' ``deepseek_v32`` model class.

    pip install torch "transformers>=5.17" safetensors
    python examples/capture_deepseek_v32.py

A model with DeepSeek-V3.2's attention geometry (128 heads, 512 latent + 64 rope columns, an indexer of 64
heads of 128 that selects 2,048 keys) and random weights reads the first chapter of "Alice's Adventures in
Wonderland". From its second layer the script takes what a serving engine would hand to the operator:

    q        the queries of some tokens, absorbed into the latent space through kv_b_proj   [s_q, 128, 576]
    kv       the latent row of every token: 512 after kv_a_layernorm | 64 rotated           [s_kv, 1, 576]
    indices  the keys that the model's own indexer selected for those tokens                [s_q, 1, 2048]

Before anything is written, attention over the captured tensors is compared with the output of the
model's own eager attention: the capture is refused when they differ by more than float32 rounding.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers import DeepseekV32Config, DeepseekV32Model, DynamicCache
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from sparse_mla import quantize_fp8
from sparse_mla.callfile import Call, save_call
from sparse_mla.testing import EXACT, Inputs, compare, expected, make_problem

HERE = Path(__file__).resolve().parent
TEXT = HERE / "alice_chapter_1.txt"
OUTPUT = HERE / "deepseek_v32_call.safetensors"
SOURCE = (
    "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I; public domain, "
    "text of the Millennium Fulcrum Edition 2.9 (Project Gutenberg ebook 11)"
)

SEED = 20261201
LAYERS = 2
LAYER = 1  # the second layer: its input already mixes tokens, unlike the first one's embeddings
INITIALIZER_RANGE = 0.04  # logits of standard deviation about 1; the default 0.02 leaves them flat
EARLY_QUERIES = (511, 1499)  # they see fewer keys than topk, so that the rest of their slots is masked
LAST_QUERIES = 4
CHUNK = 256  # queries a forward pass: eager attention keeps [128, CHUNK, s_kv] several times over
FLOAT32_ROUNDING = 1e-5  # relative L2 of the worst row; eager float32 attention lands near 1e-6

# A word or a part of one, at most five letters, with the space before it; anything else one by one.
TOKEN = re.compile(r" ?[A-Za-z]{1,5}|.", re.DOTALL)


@dataclass
class Recorder:
    """What one layer computed, chunk after chunk of the passage."""

    layer: int
    latents: list[torch.Tensor] = field(default_factory=list)  # [chunk, 512] after kv_a_layernorm
    queries: list[torch.Tensor] = field(default_factory=list)  # [chunk, h_q, 192], rope applied
    selected: list[torch.Tensor] = field(default_factory=list)  # [chunk, <= topk] by the indexer
    outputs: list[torch.Tensor] = field(default_factory=list)  # [chunk, h_q, 128] of eager attention
    rotated_keys: torch.Tensor | None = None  # [s_kv, 64], rope applied, one for all heads
    scaling: float = 0.0

    def watch(self, model: DeepseekV32Model) -> None:
        """Record the layer's latents and selections whenever it runs."""
        attention = model.layers[self.layer].self_attn
        attention.kv_a_layernorm.register_forward_hook(
            lambda module, args, result: self.latents.append(result[0])
        )
        attention.indexer.register_forward_hook(
            lambda module, args, result: self.selected.append(result[0])
        )

    def around(self, eager):
        """The model's eager attention, its arguments and result recorded."""

        def recorded(module, query, key, value, attention_mask, scaling, **kwargs):
            result = eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
            if module.layer_idx == self.layer:
                self.queries.append(query[0].transpose(0, 1))
                self.outputs.append(result[0][0])
                self.rotated_keys = key[0, 0, :, module.qk_nope_head_dim :]
                self.scaling = float(scaling)
            return result

        return recorded


@dataclass(frozen=True)
class Capture:
    """One call in float32 and, for its check, what the model made of it."""

    q: torch.Tensor  # float32 [s_q, h_q, 576]
    kv: torch.Tensor  # float32 [s_kv, 576]
    indices: torch.Tensor  # int32 [s_q, topk], -1 where the key comes after the query
    sm_scale: float
    positions: list[int]  # of the queries in the passage
    value_up: torch.Tensor  # float32 [h_q, 128, 512]: kv_b_proj's part from latent to value
    model_output: torch.Tensor  # float32 [s_q, h_q, 128] of the model's eager attention


def tokenise(text: str) -> tuple[torch.Tensor, int]:
    """Token ids in order of first appearance, and the size of the vocabulary."""
    vocabulary: dict[str, int] = {}
    ids = [vocabulary.setdefault(piece, len(vocabulary)) for piece in TOKEN.findall(text)]
    return torch.tensor(ids), len(vocabulary)


def build_model(vocab_size: int, seed: int) -> DeepseekV32Model:
    """DeepSeek-V3.2's attention with random weights between a small embedding and small MLPs."""
    config = DeepseekV32Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=2048,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    return DeepseekV32Model(config).to(torch.float32).eval()


@torch.no_grad()
def read_passage(model: DeepseekV32Model, ids: torch.Tensor, layer: int) -> Recorder:
    """Let the model read the passage in chunks, as a serving engine prefills, and record one layer."""
    recorder = Recorder(layer)
    recorder.watch(model)
    eager = modeling_deepseek_v32.eager_attention_forward
    cache = DynamicCache(config=model.config)
    with patch.object(
        modeling_deepseek_v32, "eager_attention_forward", recorder.around(eager)
    ):
        for chunk in ids.split(CHUNK):
            model(chunk[None], past_key_values=cache, use_cache=True)
    return recorder


@torch.no_grad()
def capture(model: DeepseekV32Model, recorder: Recorder, positions: list[int]) -> Capture:
    """The operator's arguments for the queries at ``positions``."""
    attention = model.layers[recorder.layer].self_attn
    nope = attention.qk_nope_head_dim
    up = attention.kv_b_proj.weight.view(attention.num_heads, nope + attention.v_head_dim, -1)
    key_up, value_up = up[:, :nope], up[:, nope:]

    # q_nope . (key_up @ latent) = (q_nope @ key_up) . latent: the query moves, the latent rows stay.
    query = torch.cat(recorder.queries)[positions]
    absorbed = torch.einsum("thd,hdc->thc", query[..., :nope], key_up)
    q = torch.cat([absorbed, query[..., nope:]], dim=-1)
    kv = torch.cat([torch.cat(recorder.latents), recorder.rotated_keys], dim=-1)

    # A chunk near the beginning sees fewer keys than topk, and the indexer returns as many as there are.
    topk = model.config.index_topk
    indices = torch.full((len(positions), topk), -1, dtype=torch.int32)
    by_query = [row for rows in recorder.selected for row in rows]
    for t, position in enumerate(positions):
        row = by_query[position]
        indices[t, : row.numel()] = torch.where(row <= position, row, -1)
    output = torch.cat(recorder.outputs)[positions]
    return Capture(q, kv, indices, recorder.scaling, positions, value_up, output)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst (query, head)."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def verify(captured: Capture) -> str:
    """Raise unless attention over the captured float32 tensors is what the model computed."""
    exact = expected(
        make_problem(
            Inputs(captured.q, captured.kv[:, None], captured.indices[:, None], captured.sm_scale, None, None)
        )
    )
    values = torch.einsum("thc,hdc->thd", exact.out, captured.value_up.double())
    error = relative_l2(values, captured.model_output)
    if not error <= FLOAT32_ROUNDING:
        raise SystemExit(f"the capture is not what the model computed: relative L2 {error:.3g}")
    return f"{error:.3g}"
