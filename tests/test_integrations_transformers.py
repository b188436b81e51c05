"""Tiny random models of transformers, with our attention against their own eager one."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

from sparse_mla import ContractError, dispatch

transformers = pytest.importorskip("transformers", reason="needs the extra [transformers]")
if not hasattr(transformers, "DeepseekV32Config"):
    pytest.skip("this transformers has no deepseek_v32", allow_module_level=True)

ours = pytest.importorskip("sparse_mla.integrations.transformers")

VOCABULARY = 97
TOPK = 12  # below most lengths here, so that the selection matters
FLOAT32_ROUNDING = 5e-6  # of the largest logit; it lands between 5e-7 and 2e-6

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 64,
    "v_head_dim": 40,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": TOPK,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # peaked attention: a wrong selection or scale shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
FAMILIES = {
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {"indexer_types": ["full", "shared", "full"]},
    ),
}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


def built(family: str = "deepseek_v32", **changes: Any) -> Any:
    config_name, model_name, own = FAMILIES[family]
    config = getattr(transformers, config_name)(**(GEOMETRY | own | changes))
    torch.manual_seed(5)
    return getattr(transformers, model_name)(config).float().eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def cache_keyword(model: Any, cache: Any) -> dict[str, Any]:
    """transformers 5.17 calls the argument past_key_values, later versions cache."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    return output["cache"] if "cache" in output else output["past_key_values"]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@torch.no_grad()
def under(model: Any, name: str, ids: torch.Tensor, **given: Any) -> torch.Tensor:
    model.set_attn_implementation(name)
    return model(ids, **given).logits


def test_prefill_gives_eagers_logits(model: Any) -> None:
    ids = tokens(2, 40)
    want = under(model, "eager", ids)
    got = under(model, "sparse_mla", ids)
    assert dispatch.last_backend() == "cpu"
    assert distance(got, want) < FLOAT32_ROUNDING


def test_heads_are_never_expanded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("sparse_mla")
    ran = []
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda *_: ran.append("kv_b_proj"))
    with torch.no_grad():
        output = model(tokens(1, 30), use_cache=True)
    assert ran == []
    keys = cache_of(output).layers[0].keys
    values = cache_of(output).layers[0].values
    assert keys.shape[1:] == (1, 30, 512)
    assert values.shape[1:] == (1, 30, 64)


def test_generation_gives_eagers_tokens(model: Any) -> None:
    ids = tokens(1, 20)
    generated = {}
    for name in ("eager", "sparse_mla"):
        model.set_attn_implementation(name)
        generated[name] = model.generate(ids, max_new_tokens=24, do_sample=False)
    assert generated["eager"].shape == (1, 44)
    assert torch.equal(generated["sparse_mla"], generated["eager"])


@torch.no_grad()
def in_chunks(model: Any, name: str, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    model.set_attn_implementation(name)
    cache = cache_keyword(model, transformers.DynamicCache(config=model.config))
    parts = [model(chunk, use_cache=True, **cache).logits for chunk in ids.split(sizes, dim=1)]
    return torch.cat(parts, dim=1)


def test_chunks_with_a_cache_then_decode_steps(model: Any) -> None:
    """Against eager in the same chunks: cut otherwise, the indexer breaks ties otherwise."""
    ids, sizes = tokens(2, 33), [17, 11, 1, 1, 1, 1, 1]
    want = in_chunks(model, "eager", ids, sizes)
    assert distance(in_chunks(model, "sparse_mla", ids, sizes), want) < FLOAT32_ROUNDING


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch(model: Any, side: str) -> None:
    ids, mask = tokens(3, 30), torch.ones(3, 30, dtype=torch.int64)
    for row, missing in enumerate((0, 9, 25)):  # 25 leaves fewer tokens than topk
        if missing:
            padding = slice(0, missing) if side == "left" else slice(30 - missing, 30)
            ids[row, padding], mask[row, padding] = 0, 0
    want = under(model, "eager", ids, attention_mask=mask)
    got = under(model, "sparse_mla", ids, attention_mask=mask)
    real = mask.bool()
    assert distance(got[real], want[real]) < FLOAT32_ROUNDING


def test_padding_does_not_change_what_a_sequence_says(model: Any) -> None:
    ids = tokens(1, 18)
    alone = under(model, "sparse_mla", ids)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.int64), ids], dim=1)
    mask = (padded != 0).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    got = under(model, "sparse_mla", padded, attention_mask=mask, position_ids=positions)
    assert distance(got[:, 7:], alone) < FLOAT32_ROUNDING


@pytest.mark.parametrize("beams", [1, 3])
def test_padded_generation_gives_eagers_tokens(model: Any, beams: int) -> None:
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    ids[1, :13], mask[1, :13] = 0, 0
    generated = {}
    for name in ("eager", "sparse_mla"):
        model.set_attn_implementation(name)
        generated[name] = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, do_sample=False, num_beams=beams
        )
    assert torch.equal(generated["sparse_mla"], generated["eager"])


def test_a_static_cache_with_places_not_filled_yet(model: Any) -> None:
    ids = tokens(1, 20)
    generated = {}
    for name in ("eager", "sparse_mla"):
        model.set_attn_implementation(name)
        generated[name] = model.generate(
            ids, max_new_tokens=8, do_sample=False, cache_implementation="static",
            disable_compile=True,
        )  # fmt: skip
    assert torch.equal(generated["sparse_mla"], generated["eager"])


def test_guessed_tokens_that_are_taken_back(model: Any) -> None:
    """Several tokens a step, and a cache that is cut again where a guess was wrong."""
    ids = tokens(1, 12).repeat(1, 2)
    generated = {}
    for name in ("eager", "sparse_mla"):
        model.set_attn_implementation(name)
        generated[name] = model.generate(
            ids, max_new_tokens=14, do_sample=False, prompt_lookup_num_tokens=3
        )
    assert torch.equal(generated["sparse_mla"], generated["eager"])


@pytest.mark.parametrize("kind", ["added", "-inf", "bool"])
def test_a_mask_of_ones_own(model: Any, kind: str) -> None:
    ids = tokens(1, 20)
    allowed = torch.ones(20, 20, dtype=torch.bool).tril()
    allowed[15:, 3:6] = False
    lowest = float("-inf") if kind == "-inf" else torch.finfo(torch.float32).min
    added = torch.zeros(1, 1, 20, 20).masked_fill(~allowed, lowest)
    want = under(model, "eager", ids, attention_mask=added)
    mask = allowed[None, None] if kind == "bool" else added  # eager would add True as 1
    got = under(model, "sparse_mla", ids, attention_mask=mask)
    assert distance(got, want) < FLOAT32_ROUNDING


def test_compiled_in_one_graph(model: Any) -> None:
    ids = tokens(1, 20)
    want = under(model, "eager", ids)
    model.set_attn_implementation("sparse_mla")
    with torch.no_grad():
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False)
    assert dispatch.last_backend() == "cpu"
    assert distance(got.logits, want) < FLOAT32_ROUNDING


def test_tokens_to_come_are_not_attended(model: Any) -> None:
    """The indexer fills the first rows up with them: only the mask tells."""
    ids = tokens(1, 30)
    changed = ids.clone()
    changed[0, 5:] = tokens(25, seed=2)
    first = under(model, "sparse_mla", ids)[:, :5]
    assert torch.equal(first.argmax(-1), under(model, "sparse_mla", changed)[:, :5].argmax(-1))
    assert distance(under(model, "sparse_mla", changed)[:, :5], first) < FLOAT32_ROUNDING


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_fp8_costs(family: str) -> None:
    """The figures of docs/guides/transformers.md, with every key selected.

    Where the indexer has to choose, a logit that is off by a little makes another layer choose
    another key, and what follows compares two different models.
    """
    model, ids = built(family, initializer_range=0.05, index_topk=64), tokens(2, 40)
    first: list[torch.Tensor] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: first.append(args[-1][0]))
    want = under(model, "eager", ids)
    error = relative_l2(under(model, "sparse_mla_fp8", ids), want)
    layer = relative_l2(first[1], first[0])
    assert 0.015 < layer.median() < 0.04
    assert layer.max() < 0.06
    assert 0.015 < error.median() < 0.05
    assert error.max() < 0.09


def test_bfloat16_is_as_near_as_eager_bfloat16() -> None:
    ids = tokens(1, 40)
    exact = under(built(), "eager", ids)
    model = built().to(torch.bfloat16)
    eager = under(model, "eager", ids).float()
    got = under(model, "sparse_mla", ids)
    assert got.dtype == torch.bfloat16

    def error(logits: torch.Tensor) -> torch.Tensor:
        return (logits - exact).norm(dim=-1).median()

    assert error(got.float()) < 2 * error(eager)


def test_chosen_when_the_model_is_built() -> None:
    ids = tokens(1, 20)
    got = built(attn_implementation="sparse_mla")
    assert got.config._attn_implementation == "sparse_mla"
    with torch.no_grad():
        assert distance(got(ids).logits, under(built(), "eager", ids)) < FLOAT32_ROUNDING


def test_a_linear_layer_of_another_class_is_asked_for_its_matrix() -> None:
    """A quantised layer or an adapter: its weight alone is not what it computes."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.5

    model, ids = built(), tokens(1, 20)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Adapted
    want = under(model, "eager", ids)
    assert distance(under(model, "sparse_mla", ids), want) < FLOAT32_ROUNDING


def test_weights_kept_elsewhere_are_asked_for(model: Any) -> None:
    """Offloaded: only ``forward`` brings them, and the attribute is a meta tensor meanwhile."""
    ids = tokens(1, 20)
    want = under(model, "eager", ids)
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        kept = projection.weight.data
        projection.weight = torch.nn.Parameter(kept.to("meta"), requires_grad=False)
        projection.forward = functools.partial(torch.nn.functional.linear, weight=kept)
    assert distance(under(model, "sparse_mla", ids), want) < FLOAT32_ROUNDING


def test_weights_in_fp8_are_asked_for() -> None:
    class Quantised(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.bfloat16
            return torch.nn.functional.linear(x, self.weight.to(x.dtype) * 0.25)

    model, ids = built().to(torch.bfloat16), tokens(1, 20)
    for layer in model.model.layers:
        projection = layer.self_attn.kv_b_proj
        projection.__class__ = Quantised
        stored = (projection.weight.data * 4).to(torch.float8_e4m3fn)
        projection.weight = torch.nn.Parameter(stored, requires_grad=False)
    want, got = (under(model, name, ids).float() for name in ("eager", "sparse_mla"))
    assert relative_l2(got, want).median() < 0.02  # both round to bfloat16 at every step


def test_eager_and_sdpa_stay_what_they_were(model: Any) -> None:
    ids = tokens(1, 20)
    before = under(model, "eager", ids)
    under(model, "sparse_mla", ids)
    assert torch.equal(under(model, "eager", ids), before)
    assert distance(under(model, "sdpa", ids), before) < FLOAT32_ROUNDING


@pytest.mark.parametrize("order", [("eager", "sparse_mla"), ("sparse_mla", "eager")])
@torch.no_grad()
def test_a_cache_begun_under_the_other(model: Any, order: tuple[str, str]) -> None:
    """What the guide says of it, by version: 5.17 caches expanded keys under eager."""
    ids = tokens(1, 20)
    cache = cache_keyword(model, transformers.DynamicCache(config=model.config))
    model.set_attn_implementation(order[0])
    model(ids[:, :12], use_cache=True, **cache)
    model.set_attn_implementation(order[1])
    if "cache" in cache:
        got = model(ids[:, 12:], use_cache=True, **cache).logits
        assert distance(got, under(model, "eager", ids)[:, 12:]) < FLOAT32_ROUNDING
    else:
        with pytest.raises(RuntimeError, match="Sizes of tensors must match except in dimension 2"):
            model(ids[:, 12:], use_cache=True, **cache)


def test_registering_twice_wraps_once() -> None:
    attention = transformers.models.deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention
    before = attention.expand_kv
    ours._register()
    assert attention.expand_kv is before


def test_gradients_are_refused_by_name() -> None:
    model = built(attn_implementation="sparse_mla")
    with pytest.raises(ContractError) as caught:
        model(tokens(1, 4))
    assert caught.value.id == "no-backward"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 448}, "kv_lora_rank=512 and qk_rope_head_dim=64, .* has 448 and 64"),
        ({"attention_dropout": 0.1}, r"has no dropout, got 0.1; call model.eval\(\)"),
    ],
    ids=["rank", "dropout"],
)
@torch.no_grad()
def test_a_model_that_it_cannot_run_is_refused(changes: dict[str, Any], words: str) -> None:
    model = built(attn_implementation="sparse_mla", **changes)
    model.train("attention_dropout" in changes)
    with pytest.raises(ValueError, match=words):
        model(tokens(1, 4))


@torch.no_grad()
def test_a_model_without_an_indexer_is_refused() -> None:
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, attn_implementation="sparse_mla",
    )  # fmt: skip
    with pytest.raises(ValueError, match="LlamaAttention has no indexer"):
        transformers.LlamaModel(config)(torch.tensor([[1, 2]]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_runs_the_hopper_kernel(family: str) -> None:
    model = built(family, initializer_range=0.05, index_topk=64).cuda()
    ids = tokens(2, 40).cuda()
    want = under(model, "eager", ids)
    error = relative_l2(under(model, "sparse_mla_fp8", ids), want)
    assert dispatch.last_backend() == "sm90"
    assert error.median() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_decode_steps_and_padding_run_the_hopper_kernel(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(family, initializer_range=0.05, index_topk=64).cuda()
    ids, mask = tokens(2, 33).cuda(), torch.ones(2, 33, dtype=torch.int64).cuda()
    mask[1, :9] = 0
    sizes = [17, 11, 1, 1, 1, 1, 1]
    chunks = in_chunks(model, "eager", ids, sizes)
    padded = under(model, "eager", ids, attention_mask=mask)
    ran: list[str] = []
    monkeypatch.setattr(dispatch, "ran", ran.append)
    error = relative_l2(in_chunks(model, "sparse_mla_fp8", ids, sizes), chunks)
    assert error.median() < 0.05
    error = relative_l2(under(model, "sparse_mla_fp8", ids, attention_mask=mask), padded)
    assert error[mask.bool()].median() < 0.05
    assert ran == ["sm90"] * 3 * (len(sizes) + 1)


@pytest.mark.gpu
def test_unquantised_on_a_gpu() -> None:
    model, ids = built().cuda(), tokens(2, 40).cuda()
    want = under(model, "eager", ids)
    assert distance(under(model, "sparse_mla", ids), want) < FLOAT32_ROUNDING
