"""The records are complete, and the exceptions they build say what the contract says."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import re
import string
import traceback

import pytest
import torch
from error_samples import context, fields, first_line

from sparse_mla.errors import (
    RECORDS,
    BackendError,
    ContractError,
    ErrorRecord,
    FileError,
    SlowBackendWarning,
    SparseMLAError,
    error,
)
from sparse_mla.errors.record import fill
from sparse_mla.errors.records import FAMILIES, joined

# The first lines that the contract promises, literally; {} is a value.
CONTRACT = {
    "q-ndim": "q must have shape (s_q, h_q, d_qk), got {}",
    "kv-ndim": "kv must have shape (s_kv, h_kv, d_qk), got {}",
    "indices-ndim": "indices must have shape (s_q, h_kv, topk), got {}",
    "device-mismatch": "{} must be on q's device {}, got {}",
    "not-e4m3fn": "{} must be torch.float8_e4m3fn, got {}",
    "not-contiguous": "{} must be contiguous",
    "d-qk-mismatch": "kv d_qk must match q d_qk={}, got {}",
    "h-q-not-multiple-of-64": (
        "sparse_mla_q8kv8_prefill_fwd requires h_q padded to a positive multiple of 64, got {}"
    ),
    "h-kv-not-one": "sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got {}",
    "d-qk-unsupported": "sparse_mla_q8kv8_prefill_fwd supports d_qk=512/576, got {}",
    "indices-shape": "indices must have shape ({}, {}, topk), got {}",
    "indices-not-int32": "indices must be int32, got {}",
    "topk-not-multiple-of-128": (
        "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got {}"
    ),
    "topk-length-invalid": "topk_length must be int32 with shape ({},), got {}/{}",
    "d-v-unsupported": "sparse_mla_q8kv8_prefill_fwd only supports d_v=512, got {}",
    "attn-sink-invalid": "attn_sink must be float32 with shape ({},), got {}/{}",
    "scale-invalid": "{} must be a one-element float32 tensor on q's device, got {}",
    "output-invalid": "{} must have shape {} and dtype {}, got {}/{}",
    "outputs-overlap": "out, max_logits and lse must not overlap each other or an input",
    "sm-scale-invalid": "sm_scale must be a finite positive number, got {}",
}

MAY_BE_EMPTY = {"foreign", "needs", "reported_as"}


@pytest.mark.parametrize("id", CONTRACT)
def test_first_line_is_the_contracts(id: str) -> None:
    assert re.sub(r"\{\w+\}", "{}", RECORDS[id].message) == CONTRACT[id]
    assert RECORDS[id].exception is ContractError


@pytest.mark.parametrize(
    ("id", "values", "line"),
    [
        (
            "output-invalid",
            {
                "name": "lse",
                "shape": (4, 64),
                "dtype": torch.float32,
                "got_shape": (64, 4),
                "got_dtype": torch.float16,
            },
            "lse must have shape (4, 64) and dtype torch.float32, got (64, 4)/torch.float16",
        ),
        (
            "device-mismatch",
            {"name": "kv", "device": torch.device("cuda", 0), "got": torch.device("cpu")},
            "kv must be on q's device cuda:0, got cpu",
        ),
        (
            "indices-shape",
            {"s_q": 7, "h_kv": 1, "shape": torch.Size([3, 1, 128])},
            "indices must have shape (7, 1, topk), got (3, 1, 128)",
        ),
        (
            "d-qk-mismatch",
            {"d_qk": 576, "kv_d_qk": 512},
            "kv d_qk must match q d_qk=576, got 512",
        ),
        (
            "topk-length-invalid",
            {"s_q": 7, "shape": (3,), "dtype": torch.int64},
            "topk_length must be int32 with shape (7,), got (3,)/torch.int64",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_values_stand_in_their_places(id: str, values: dict[str, object], line: str) -> None:
    assert str(error(id, **values)).splitlines()[0] == line


def test_the_whole_text() -> None:
    assert str(error("h-kv-not-one", h_kv=8, shape=(4096, 8, 576))) == (
        "sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8\n"
        "  kv has shape (4096, 8, 576): MLA keeps one latent head that all query heads share.\n"
        "  Fix: pass the latent cache as (s_kv, 1, 576); "
        "a model with several KV heads (GQA) needs a GQA kernel.\n"
        "  More: sparse-mla explain h-kv-not-one"
    )


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_every_field_is_filled(record: ErrorRecord) -> None:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in MAY_BE_EMPTY or (field.name == "yours" and not fields(record.message)):
            continue
        assert value, field.name
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                assert text.strip(), field.name
    assert len(record.situations) >= 2
    assert record.since == "0.1.0"
    assert all(way.text.strip() for way in record.solutions)
    assert record.before != record.after
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", record.id)


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_texts_are_sentences_of_one_line(record: ErrorRecord) -> None:
    for text in (record.detail, record.fix, record.meaning, record.yours, *record.situations):
        assert "  " not in text
        assert "\n" not in text.replace("said:\n{log}", "")  # a compiler's log has lines
        assert not text or text.endswith((".", "?", ")", "}")), text
    assert "\n" not in record.message


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_templates_use_plain_fields(record: ErrorRecord) -> None:
    for template in (record.message, record.detail, record.fix, record.yours):
        for _, field, spec, conversion in string.Formatter().parse(template):
            assert field is None or field.isidentifier()
            assert not spec
            assert not conversion
    assert set(fields(record.yours)) <= set(fields(record.message))
    text = str(record.exception(record, context(record, 0)))
    assert "{" not in text
    assert "?" not in text


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_a_sentence_about_indices_is_in_the_plural(record: ErrorRecord) -> None:
    """After "your" a name is a noun; one sentence serves q and indices, so its verb has another
    subject."""
    for name in ("indices", "max_logits"):
        sentence = fill(record.yours, context(record, 0) | {"name": name})
        assert not re.search(rf"\byour {name} (is|has|was|\w+s)\b", sentence, re.IGNORECASE)


def test_related_records_name_each_other() -> None:
    pairs = {(id, other) for id, record in RECORDS.items() for other in record.related}
    assert {other for _, other in pairs} <= RECORDS.keys()
    assert not {(id, other) for id, other in pairs if id == other}
    assert {(other, id) for id, other in pairs} == pairs


def test_an_id_is_declared_once() -> None:
    assert sum(len(family.RECORDS) for family in FAMILIES) == len(RECORDS)
    record = RECORDS["q-ndim"]
    with pytest.raises(ValueError, match="two records have the id q-ndim"):
        joined([(record,), (record,)])


def test_messages_are_told_apart() -> None:
    messages = [record.message for record in RECORDS.values()]
    titles = [record.title for record in RECORDS.values()]
    assert len(set(messages)) == len(messages)
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize(
    ("kind", "base"),
    [(ContractError, ValueError), (BackendError, RuntimeError), (FileError, ValueError)],
)
def test_exception_types(kind: type[SparseMLAError], base: type[Exception]) -> None:
    assert issubclass(kind, base)
    assert issubclass(kind, SparseMLAError)
    assert any(record.exception is kind for record in RECORDS.values())


def test_the_slow_backend_warning_carries_the_id() -> None:
    assert issubclass(SlowBackendWarning, UserWarning)
    assert SlowBackendWarning.id in RECORDS


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_survives_pickle_and_copy(record: ErrorRecord) -> None:
    fault = error(record.id, **context(record, 1))
    for twin in (pickle.loads(pickle.dumps(fault)), copy.copy(fault), copy.deepcopy(fault)):
        assert type(twin) is type(fault)
        assert str(twin) == str(fault)
        assert twin.context == fault.context
        assert twin.id == record.id


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_to_dict_is_json(record: ErrorRecord) -> None:
    values = {**context(record, 2), "worst": float("nan"), "deep": ((1, float("inf")), None)}
    data = json.loads(json.dumps(error(record.id, **values).to_dict(), allow_nan=False))
    assert data["id"] == record.id
    assert data["type"] == record.exception.__name__
    assert data["message"] == first_line(record, values)
    assert data["context"]["worst"] == "nan"
    assert data["context"]["deep"] == [[1, "inf"], None]
    assert data["url"].endswith(f"/errors/{record.id}/")


def test_the_published_address_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = error("q-ndim", shape=(1, 2))
    assert fault.url == "https://sparse-mla.github.io/errors/q-ndim/"
    monkeypatch.setenv("SPARSE_MLA_DOCS_URL", "http://localhost:8000/")
    assert fault.url == "http://localhost:8000/errors/q-ndim/"


def test_context_never_holds_a_tensor() -> None:
    fault = error("scale-invalid", name="q_scale", what=torch.full((3,), 7.25))
    assert fault.context["what"] == "a tensor of shape (3,) and dtype torch.float32"
    assert "7.25" not in str(fault)
    nested = error("q-ndim", shape=(torch.ones(1), [torch.device("cpu")]))
    assert nested.context["shape"] == (
        "a tensor of shape (1,) and dtype torch.float32",
        ("cpu",),
    )


def test_a_forgotten_value_does_not_hide_the_error() -> None:
    text = str(error("h-kv-not-one", h_kv=8))
    assert text.startswith("sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8\n  kv has shape ?:")


def test_values_are_no_templates_and_no_terminal_commands() -> None:
    hostile = "{0.__class__} {shape!r} %s \x1b[2J\x1b]0;title\x07 \r\n\x9b31m \u202eevil"
    fault = error("file-unreadable", path=hostile, reason="x" * 100_000)
    text = str(fault)
    assert "{0.__class__} {shape!r} %s" in text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert len(text) < 20_000
    assert fault.context["path"] == hostile
    assert text.splitlines()[0].startswith("cannot read {0.__class__}")


def test_a_message_is_one_line_whatever_its_values() -> None:
    text = str(error("backend-refused", backend="sm90", reason="first\nsecond"))
    assert text.splitlines()[0] == "backend sm90 cannot run this problem: first second"


def test_an_object_without_text_is_no_failure() -> None:
    class Silent:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "Silent" in str(error("sm-scale-invalid", value=Silent()))


def test_tracebacks_show_the_name_to_import():
    shown = traceback.format_exception_only(error("h-kv-not-one", h_kv=8, shape=(9, 8, 576)))
    assert shown[0].startswith("sparse_mla.errors.ContractError: ")
