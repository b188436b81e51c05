"""Whatever people paste, the record that explains it is found first."""

from __future__ import annotations

import json
import time

import pytest
from error_samples import context, fields, first_line, rich_frame, traceback_around

from sparse_mla.errors import RECORDS, ErrorRecord, error
from sparse_mla.errors.explain import explanation, find, record_dict, search, suggest
from sparse_mla.errors.match import clean

EACH = pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)


@EACH
@pytest.mark.parametrize("seed", range(3))
def test_a_message_with_other_numbers(record: ErrorRecord, seed: int) -> None:
    values = context(record, seed)
    match = find(first_line(record, values))[0]
    assert match.record.id == record.id
    assert match.values == {name: str(values[name]) for name in set(fields(record.message))}


@EACH
def test_a_message_in_60_lines_of_a_serving_log(record: ErrorRecord) -> None:
    values = context(record, 3)
    log = traceback_around(first_line(record, values))
    assert len(log.splitlines()) == 60
    match = find(log)[0]
    assert match.record.id == record.id
    assert match.values.items() >= {n: str(values[n]) for n in fields(record.message)}.items()


@EACH
@pytest.mark.parametrize(
    "prefix",
    [
        "[2026-12-01 12:00:00 TP0] ValueError: ",
        "[2026-12-01 12:00:00 DP0 TP7 EP7] Scheduler hit an exception: ValueError: ",
        "(EngineCore_0 pid=812) ERROR 12-01 12:00:00 [core.py:712] ValueError: ",
        "sparse_mla.errors.record.ContractError: ",
        "E   ",
        "\x1b[31m\x1b[1mValueError\x1b[0m: ",
    ],
    ids=["sglang", "sglang-dp", "vllm", "ours", "pytest", "coloured"],
)
def test_a_message_behind_a_prefix(record: ErrorRecord, prefix: str) -> None:
    values = context(record, 4)
    match = find(prefix + first_line(record, values))[0]
    assert match.record.id == record.id
    assert match.values == {name: str(values[name]) for name in set(fields(record.message))}


@EACH
def test_a_message_wrapped_in_a_frame(record: ErrorRecord) -> None:
    assert find(rich_frame(first_line(record, context(record, 5))))[0].record.id == record.id


@EACH
def test_the_whole_text_of_an_exception(record: ErrorRecord) -> None:
    values = context(record, 6)
    match = find(str(error(record.id, **values)))[0]
    assert match.record.id == record.id


@EACH
def test_a_text_escaped_for_json(record: ErrorRecord) -> None:
    values = context(record, 7)
    match = find(json.dumps({"level": "error", "message": str(error(record.id, **values))}))[0]
    assert match.record.id == record.id
    assert match.values.items() >= {n: str(values[n]) for n in fields(record.message)}.items()


@EACH
def test_an_id_and_a_title(record: ErrorRecord) -> None:
    assert find(f" {record.id}\n")[0].record.id == record.id
    assert find(record.title)[0].record.id == record.id


def test_values_of_the_message_and_of_the_lines_below_it() -> None:
    fault = error("h-kv-not-one", h_kv=8, shape=(4096, 8, 576))
    page = explanation(find(f"[TP0] ValueError: {fault}")[0])
    assert page["values"] == {"h_kv": "8", "shape": "(4096, 8, 576)"}
    assert page["yours"] == "Your kv has 8 KV heads."
    assert page["detail"].startswith("kv has shape (4096, 8, 576):")


@pytest.mark.parametrize(
    "id",
    ["cache-unwritable", "cache-untrusted", "dump-failed", "file-not-written", "file-unreadable"],
)
@pytest.mark.parametrize("path", ["/srv/my calls/of today", "call 17 (copy).safetensors"])
def test_a_path_with_spaces(id: str, path: str) -> None:
    values = {"path": path, "reason": "No such file or directory"}
    match = find(first_line(RECORDS[id], values))[0]
    assert (match.record.id, match.values) == (id, values)


def test_a_sentence_is_left_out_where_its_values_are_unknown() -> None:
    page = explanation(find("sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8")[0])
    assert page["yours"] == "Your kv has 8 KV heads."
    assert page["detail"] == ""
    assert explanation(find("h-kv-not-one")[0])["yours"] == ""


def test_of_several_errors_the_one_that_is_named_wins() -> None:
    log = "q must be contiguous\nkv must be contiguous\nindices must be int32, got torch.int64\n"
    found = [match.record.id for match in find(log)]
    assert sorted(found) == ["indices-not-int32", "not-contiguous"]
    assert find(log)[1].values == {"name": "kv"}
    assert find(log + "  More: sparse-mla explain not-contiguous")[0].record.id == "not-contiguous"


@pytest.mark.parametrize(
    ("text", "id", "values"),
    [
        (
            "tvm.error.InternalError: Check failed: (ok) is false: Unsupported sparse-MLA prefill"
            " configuration:\n  model=DSV4 num_heads=64 topk=192 page_block_size=64",
            "topk-not-multiple-of-128",
            {"topk": "192"},
        ),
        (
            "Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=16 topk=512",
            "h-q-not-multiple-of-64",
            {"h_q": "16"},
        ),
        ("ValueError: block_table must be a CUDA tensor", "device-mismatch", {}),
        ("RuntimeError: num_kv_heads must be 1, got 4", "h-kv-not-one", {"h_kv": "4"}),
        ("Assertion failed (prefill.cu:12): params.h_kv == 1", "h-kv-not-one", {}),
        (
            "Assertion failed (x.cu:12): params.topk % (2*B_TOPK) == 0",
            "topk-not-multiple-of-128",
            {},
        ),
        (
            "RuntimeError: topk_indices_offset must be a CUDA tensor",  # it was None
            "not-a-tensor",
            {"name": "topk_indices_offset"},
        ),
        (
            "RuntimeError: Expected all tensors to be on the same device, but found at least two"
            " devices, cuda:0 and cpu!",
            "device-mismatch",
            {},
        ),
        (
            "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig("
            "head_size=576, dtype=torch.bfloat16, use_mla=True, use_sparse=True)",
            "no-backend",
            {"device": "cuda"},
        ),
        (
            "ValueError: Selected backend AttentionBackendEnum.FLASHINFER_MLA is not valid for this"
            " configuration. Reason: ['sparse not supported', 'compute capability not supported']",
            "backend-refused",
            {"backend": "FLASHINFER_MLA"},
        ),
        (
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "illegal-memory-access",
            {},
        ),
        ("IndexError: indexing is out of bounds", "index-out-of-range", {}),
        ("FlashMLA: CUDA error: misaligned address", "illegal-memory-access", {}),
        (
            "kernel prefill could not be launched on cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS",
            "kernel-launch-failed",
            {"kernel": "prefill", "device": "cuda:0", "reason": "CUDA_ERROR_ILLEGAL_ADDRESS"},
        ),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
            "CUDA kernel errors might be asynchronously reported at some other API call",
            "gpu-unsupported",
            {},
        ),
        (
            "NVIDIA RTX PRO 6000 with CUDA capability sm_120 is not compatible with the current"
            " PyTorch installation.",
            "gpu-unsupported",
            {},
        ),
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 12040)."
            " Please update your GPU driver",
            "driver-too-old",
            {"version": "12040"},
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a"
            " total capacity of 79.11 GiB",
            "out-of-memory",
            {"size": "2.00 GiB"},
        ),
        ("AssertionError: NaN detected in the output of layer 3", "nan-in-output", {}),
        ("ValueError: NaN values in kv", "nan-in-input", {}),
        (
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            "nan-in-output",
            {},
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            "file-not-safetensors",
            {},
        ),
        ("ValueError: query and key must have the same dtype", "unquantised-kv-with-fp8-q", {}),
        (
            "TypeError: f() missing 2 required positional arguments: 'q_scale' and 'kv_scale'",
            "scale-invalid",
            {"name": "q_scale"},
        ),
        (
            "TypeError: f() missing 1 required positional argument: 'kv_scale'",
            "scale-invalid",
            {"name": "kv_scale"},
        ),
        (
            "TypeError: f() missing 3 required positional arguments: 'sm_scale', 'q_scale', and",
            "sm-scale-invalid",
            {},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_messages_of_other_projects(text: str, id: str, values: dict[str, str]) -> None:
    match = find(text)[0]
    assert match.record.id == id
    assert match.values.items() >= values.items()


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("max_logits, lse and out must not overlap each other or an input", "outputs-overlap"),
        ("indices must be of int32, got torch.int64", "indices-not-int32"),
        ("AssertionError: kv's d_qk must match q's d_qk=576, was 512", "d-qk-mismatch"),
    ],
)
def test_a_message_worded_a_little_differently(text: str, id: str) -> None:
    assert find(text)[0].record.id == id


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "hello world", "Traceback (most recent call last):", "KeyError: 'x'", "%s {}"],
)
def test_what_nothing_explains(text: str) -> None:
    assert find(text) == []


def test_the_nearest_ids_are_suggested() -> None:
    assert suggest("h-kv-no-one")[0].id == "h-kv-not-one"
    assert suggest("hkvnotone")[0].id == "h-kv-not-one"
    assert suggest("not contigous")[0].id == "not-contiguous"
    assert len(suggest("scale", most=3)) == 3


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ("tensor parallel 16 heads", "h-q-not-multiple-of-64"),
        ("GQA", "h-kv-not-one"),
        ("fnuz AMD", "not-e4m3fn"),
        ("torch.topk int64", "indices-not-int32"),
        ("short prompt topk", "topk-not-multiple-of-128"),
        ("v_head_dim", "d-v-unsupported"),
        ("scale.item()", "scale-invalid"),
        ("sliced cache stride", "not-contiguous"),
        ("contigous", "not-contiguous"),
        ("git lfs pointer", "file-not-safetensors"),
        ("slow", "slow-backend"),
        ("nan output", "nan-in-input"),
        ("sm_120", "backend-refused"),
    ],
)
def test_words_find_the_record_among_the_first(words: str, id: str) -> None:
    assert id in [match.record.id for match in search(words)[:2]]


def test_a_rare_word_says_more_than_common_ones() -> None:
    assert search("topk scale git")[0].record.id == "file-not-safetensors"


def test_search_ranks_and_gives_nothing_for_nonsense() -> None:
    scores = [match.score for match in search("topk length")]
    assert scores == sorted(scores, reverse=True)
    assert search("zzzzzzqqqq") == []
    assert search("") == []


@EACH
def test_the_title_is_found_by_its_words(record: ErrorRecord) -> None:
    assert record.id in [match.record.id for match in search(record.title)[:3]]


@EACH
def test_record_as_json(record: ErrorRecord) -> None:
    data = json.loads(json.dumps(record_dict(record)))
    assert data["schema_version"] == 1
    assert data["id"] == record.id
    assert data["type"] == record.type_name
    assert data["raised_here"] is not bool(record.reported_as)
    assert data["situations"] == list(record.situations)
    assert [way["text"] for way in data["solutions"]] == [way.text for way in record.solutions]


MESSAGE = "sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8"


@pytest.mark.parametrize(
    "text",
    [
        "a" * 5_000_000,
        "q must be contiguous\n" * 200_000,
        "sparse-mla explain " * 250_000,
        "sparse-mla explain " + "a-" * 2_000_000,
        "(" * 3_000_000,
        " must be , got " * 300_000,
        "indices must have shape (" * 200_000,
        "\n".join("kv must have shape " + "(1" * 900 for _ in range(3000)),
        "\n".join(
            "Unsupported sparse-MLA prefill configuration:" + " num_heads=64" * 150
            for _ in range(500)
        ),
        "\x1b]0;" * 1_000_000,
        "\n" * 5_000_000,
        "{0.__class__.__mro__}{}{{" * 100_000,
        "".join(
            sorted(
                "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got 0 \n"
                * 20_000
            )
        ),
    ],
    ids=range(13),
)
def test_megabytes_take_a_moment(text: str) -> None:
    start = time.monotonic()
    find(text)
    search(text)
    suggest(text)
    # About one second here; a pattern that backtracks takes minutes.
    assert time.monotonic() - start < 15


def test_a_message_at_the_end_of_megabytes() -> None:
    assert find("x y z\n" * 500_000 + MESSAGE)[0].values == {"h_kv": "8"}
    assert find(MESSAGE + "\n" + "x y z\n" * 500_000)[0].record.id == "h-kv-not-one"
    assert find("x" * 1_000_000 + MESSAGE + "y" * 1_000_000)[0].record.id == "h-kv-not-one"


def test_text_is_cut_to_a_size_in_its_middle() -> None:
    cut = clean("a" * 500_000 + "b" * 9_000_000 + "c" * 1_500_000)
    assert cut == "a" * 500_000 + "\n" + "c" * 1_500_000


def test_text_is_freed_of_what_a_terminal_obeys() -> None:
    dirty = "a\x1b[31mb\x1b]8;;http://x\x07c\x9b2Jd\x00e\u202ef\rg\th"
    assert clean(dirty) == "abc 2Jd e f\ng h"


def test_values_are_taken_literally() -> None:
    match = find("backend sm90 cannot run this problem: [bold]\x1b[5m{x}[/bold] \\1 \\g<0>")[0]
    page = explanation(match)
    assert match.record.id == "backend-refused"
    assert "\x1b" not in json.dumps(page["values"])
    assert "[bold]{x}[/bold] \\1 \\g<0>" in page["yours"]
