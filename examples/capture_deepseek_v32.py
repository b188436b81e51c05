"""Capture one sparse MLA prefill call from transformers' ``deepseek_v32`` model class.

    pip install -e . "transformers>=5.17"
    python examples/capture_deepseek_v32.py

A model with DeepSeek-V3.2's attention geometry (128 heads, 512 latent + 64 rope columns, an indexer
of 64 heads of 128 that selects 2,048 keys) and random weights reads the first chapter of "Alice's
Adventures in Wonderland". From its second layer the script takes what a serving engine would hand
to the operator:

    q        queries of some tokens, absorbed into the latent space by kv_b_proj  [s_q, 128, 576]
    kv       every token's latent row: 512 after kv_a_layernorm | 64 rotated      [s_kv, 1, 576]
    indices  the keys that the model's own indexer selected for those tokens      [s_q, 1, 2048]

Before anything is written, attention over the captured tensors is compared with the output of the
model's own eager attention: the capture is refused when they differ by more than float32 rounding.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from transformers import DeepseekV32Config, DeepseekV32Model, DynamicCache
from transformers.models.deepseek_v32 import modeling_deepseek_v32

from sparse_mla import quantize_fp8
from sparse_mla.backends import reference
from sparse_mla.callfile import STRICT, Call, save_call
from sparse_mla.testing import Inputs, expected, make_problem

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
INITIALIZER_RANGE = 0.03  # logits of standard deviation about 1; 0.02 leaves them flat
EARLY_QUERIES = (
    511,
    1499,
)  # they see fewer keys than topk, so that the rest of their slots is masked
LAST_QUERIES = 4
CHUNK = 256  # queries a forward pass: eager attention keeps [128, CHUNK, s_kv] several times over
FLOAT32_ROUNDING = 5e-6  # relative L2 of the worst row; eager float32 attention lands near 5e-7

# A word or a part of one, at most five letters, with the space before it; anything else one by one.
TOKEN = re.compile(r" ?[A-Za-z]{1,5}|.", re.DOTALL)

Attended = tuple[torch.Tensor, torch.Tensor]
"""Eager attention's output [1, chunk, h_q, 128] and its weights."""


@dataclass
class Recorder:
    """What one layer computed, chunk after chunk of the passage."""

    layer: int
    latents: list[torch.Tensor] = field(default_factory=list)  # [chunk, 512] after kv_a_layernorm
    queries: list[torch.Tensor] = field(default_factory=list)  # [chunk, h_q, 192], rope applied
    selected: list[torch.Tensor] = field(default_factory=list)  # [chunk, <= topk] by the indexer
    outputs: list[torch.Tensor] = field(default_factory=list)  # [chunk, h_q, 128], eager
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

    def around(self, eager: Callable[..., Attended]) -> Callable[..., Attended]:
        """The model's eager attention, its arguments and result recorded."""

        def recorded(
            module: torch.nn.Module,
            query: torch.Tensor,  # [1, h_q, chunk, 192]
            key: torch.Tensor,  # [1, h_q, tokens so far, 192]
            value: torch.Tensor,
            attention_mask: torch.Tensor,
            scaling: float,
            **kwargs: object,
        ) -> Attended:
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
    """Let the model read the passage in chunks, as a serving engine does, and record one layer."""
    recorder = Recorder(layer)
    recorder.watch(model)
    eager = modeling_deepseek_v32.eager_attention_forward
    # transformers 5.17 calls the argument past_key_values, later versions cache.
    named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    cache = {named: DynamicCache(config=model.config)}
    with patch.object(modeling_deepseek_v32, "eager_attention_forward", recorder.around(eager)):
        for chunk in ids.split(CHUNK):
            model(chunk[None], use_cache=True, **cache)
    return recorder


@torch.no_grad()
def capture(model: DeepseekV32Model, recorder: Recorder, positions: list[int]) -> Capture:
    """The operator's arguments for the queries at ``positions``."""
    attention = model.layers[recorder.layer].self_attn
    nope = attention.qk_nope_head_dim
    up = attention.kv_b_proj.weight.view(attention.num_heads, nope + attention.v_head_dim, -1)
    key_up, value_up = up[:, :nope], up[:, nope:]

    # q_nope . (key_up @ latent) = (q_nope @ key_up) . latent: the query moves, not the rows.
    query = torch.cat(recorder.queries)[positions]
    absorbed = torch.einsum("thd,hdc->thc", query[..., :nope], key_up)
    q = torch.cat([absorbed, query[..., nope:]], dim=-1)
    kv = torch.cat([torch.cat(recorder.latents), recorder.rotated_keys], dim=-1)

    # Near the beginning there are fewer keys than topk, and the indexer returns that many.
    topk = model.config.index_topk
    indices = torch.full((len(positions), topk), -1, dtype=torch.int32)
    by_query = [row for rows in recorder.selected for row in rows]
    for t, position in enumerate(positions):
        row = by_query[position]
        indices[t, : row.numel()] = torch.where(row <= position, row, -1)
    output = torch.cat(recorder.outputs)[positions]
    return Capture(q, kv, indices, recorder.scaling, positions, value_up, output)


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Of each (query, head)."""
    got, want = got.double(), want.double()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


@torch.no_grad()
def logit_spread(captured: Capture) -> float:
    """Standard deviation of a row's valid logits, averaged over queries and heads."""
    rows = [
        (q @ captured.kv[index[index >= 0]].T * captured.sm_scale).std(dim=-1)
        for q, index in zip(captured.q, captured.indices, strict=True)
    ]
    return float(torch.stack(rows).mean())


@torch.no_grad()
def check_faithful(captured: Capture) -> torch.Tensor:
    """The float64 result over the float32 capture; raises unless it is what the model computed."""
    exact = expected(make_problem(unquantised(captured))).out
    error = relative_l2(to_values(exact, captured), captured.model_output).max()
    print(f"captured float32 call against the model's eager attention: relative L2 {error:.2e}")
    if not error <= FLOAT32_ROUNDING:
        raise SystemExit(f"not what the model computed: the limit is {FLOAT32_ROUNDING:.0e}")
    return exact


def unquantised(captured: Capture) -> Inputs:
    """The call as the model would make it without FP8."""
    indices = captured.indices[:, None]
    return Inputs(captured.q, captured.kv[:, None], indices, captured.sm_scale, None, None)


def to_values(latent: torch.Tensor, captured: Capture) -> torch.Tensor:
    """From the latent space back to each head's 128 value columns, as ``o_proj`` takes them."""
    return torch.einsum("thc,hdc->thd", latent, captured.value_up.double())


@torch.no_grad()
def quantised_call(
    captured: Capture, exact: torch.Tensor
) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """The FP8 call and its results by the reference; prints what FP8 costs here."""
    q, q_scale = quantize_fp8(captured.q)
    kv, kv_scale = quantize_fp8(captured.kv[:, None])
    indices = captured.indices[:, None]
    inputs = Inputs(q, kv, indices, captured.sm_scale, q_scale, kv_scale)
    problem = make_problem(inputs)
    reference.run(problem)

    for name, error in (
        ("latent out", relative_l2(problem.out, exact)),
        (
            "as values",
            relative_l2(to_values(problem.out.double(), captured), captured.model_output),
        ),
    ):
        print(f"FP8 call, {name}: relative L2 {error.median():.2e} median, {error.max():.2e} worst")
    return inputs, {"out": problem.out, "max_logits": problem.max_logits, "lse": problem.lse}


def describe(args: argparse.Namespace, vocab_size: int, captured: Capture) -> dict[str, str]:
    """Where the call comes from, for the file's metadata."""
    return {
        "model": "transformers DeepseekV32Model, random weights",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "layer": f"{LAYER} of 0..{LAYERS - 1}",
        "seed": str(args.seed),
        "initializer_range": str(INITIALIZER_RANGE),
        "source": SOURCE,
        "tokenizer": "matches of token_pattern (re.DOTALL), numbered as they first appear",
        "token_pattern": TOKEN.pattern,
        "vocab_size": str(vocab_size),
        "query_positions": " ".join(map(str, captured.positions)),
        "created_by": f"python examples/capture_deepseek_v32.py --seed {args.seed}",
    }


def main() -> None:
    """Capture, check, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="file to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the weights (%(default)s)")
    args = parser.parse_args()

    ids, vocab_size = tokenise(TEXT.read_text(encoding="utf-8"))
    s_kv = len(ids)
    model = build_model(vocab_size, args.seed)
    recorder = read_passage(model, ids, LAYER)
    captured = capture(model, recorder, [*EARLY_QUERIES, *range(s_kv - LAST_QUERIES, s_kv)])
    print(f"standard deviation of the selected logits: {logit_spread(captured):.2f}")
    exact = check_faithful(captured)
    inputs, results = quantised_call(captured, exact)

    tensors = {name: value for name, value in vars(inputs).items() if torch.is_tensor(value)}
    arguments = {"sm_scale": captured.sm_scale, "d_v": 512}
    metadata = describe(args, vocab_size, captured)
    save_call(args.output, Call(STRICT, {**tensors, **results}, arguments, metadata))
    print(f"wrote {args.output.name}, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
