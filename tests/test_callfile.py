"""Call files: what is written comes back, and what somebody else wrote is never trusted."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from callfiles import FP8, same_bits, small_call

import sparse_mla.callfile
from sparse_mla.callfile import (
    GENERAL,
    STRICT,
    Buffer,
    Call,
    container,
    load_call,
    save_call,
    save_results,
    shown,
)
from sparse_mla.errors import ContractError, FileError

# A file written and read


def test_a_call_comes_back_bit_for_bit(tmp_path: Path) -> None:
    call = small_call()
    call.tensors["out"] = torch.randn(2, 64, 512).bfloat16()
    save_call(tmp_path / "call.safetensors", call)
    back = load_call(tmp_path / "call.safetensors")
    assert back.operator == STRICT
    assert back.arguments == call.arguments
    assert back.metadata == call.metadata
    assert back.tensors.keys() == call.tensors.keys()
    for name, tensor in call.tensors.items():
        assert same_bits(back.tensors[name], tensor), name
    assert list(back.expected) == ["out"]


def test_other_programs_read_it_as_plain_safetensors(tmp_path: Path) -> None:
    call = small_call()
    save_call(tmp_path / "call.safetensors", call)
    tensors = safetensors.torch.load_file(tmp_path / "call.safetensors")
    assert same_bits(tensors["kv"], call.tensors["kv"])
    with safetensors.safe_open(tmp_path / "call.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "sparse-mla-call"
    assert metadata["version"] == "1"
    assert metadata["operator"] == STRICT
    assert metadata["sm_scale"] == "0.1147213867929261"
    assert metadata["d_v"] == "512"
    assert metadata["model"] == "DeepSeek-V3.2"


@pytest.mark.parametrize("dtype", container.DTYPES.values(), ids=str)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    q = raw.view(dtype).reshape(1, -1, 2)
    written = [FP8, torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64]
    if dtype not in written and dtype not in safetensors.torch._TYPES.values():
        with pytest.raises(FileError, match=f"this safetensors does not hold {dtype}"):
            save_call(tmp_path / "call.safetensors", small_call(q=q))
        pytest.skip(f"safetensors {safetensors.__version__} does not hold {dtype}")
    save_call(tmp_path / "call.safetensors", small_call(q=q))
    assert same_bits(load_call(tmp_path / "call.safetensors").tensors["q"], q)


@pytest.mark.parametrize(
    "strided",
    [
        torch.arange(60.0).reshape(5, 12)[:, :8],
        torch.arange(60.0).reshape(5, 12).T,
        torch.arange(4, dtype=torch.int32).expand(3, 4),
        torch.arange(4.0)[:, None, None].expand(4, 2, 6),
        torch.arange(8.0)[::3],
    ],
    ids=["padded-rows", "transposed", "expanded", "expanded-inside", "steps"],
)
def test_strides_come_back(tmp_path: Path, strided: torch.Tensor) -> None:
    # Contiguity is part of the contract: a packed copy would replay to another answer.
    save_call(tmp_path / "call.safetensors", small_call(kv=strided))
    back = load_call(tmp_path / "call.safetensors").tensors["kv"]
    assert back.stride() == strided.stride()
    assert torch.equal(back, strided)


def test_elements_that_share_memory_come_back_packed(tmp_path: Path) -> None:
    windows = torch.arange(8.0).as_strided((5, 4), (1, 1))
    save_call(tmp_path / "call.safetensors", small_call(kv=windows))
    back = load_call(tmp_path / "call.safetensors").tensors["kv"]
    assert back.is_contiguous()
    assert torch.equal(back, windows)


def test_tensors_of_one_storage_are_all_written(tmp_path: Path) -> None:
    buffer = torch.randn(4, 1, 576).to(FP8)
    save_call(tmp_path / "call.safetensors", small_call(q=buffer[:2], kv=buffer))
    back = load_call(tmp_path / "call.safetensors").tensors
    assert same_bits(back["q"], buffer[:2])
    assert same_bits(back["kv"], buffer)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (3, "3"), (True, "true"), ("0.1", '"0.1"'), (float("inf"), "Infinity")],
)
def test_arguments_that_are_no_tensors(tmp_path: Path, value: Any, text: str) -> None:
    call = small_call()
    del call.tensors["q_scale"]
    call.arguments["q_scale"] = value
    save_call(tmp_path / "call.safetensors", call)
    with safetensors.safe_open(tmp_path / "call.safetensors", framework="pt") as file:
        assert file.metadata()["q_scale"] == text
    back = load_call(tmp_path / "call.safetensors").arguments["q_scale"]
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "NaN"])
def test_numbers_as_repr_writes_them(tmp_path: Path, text: str) -> None:
    path = container_file(tmp_path, metadata={"sm_scale": text})
    assert repr(load_call(path).arguments["sm_scale"]) == repr(float(text))


def test_an_argument_of_a_strange_type_breaks_the_contract_the_same_way(tmp_path: Path) -> None:
    call = small_call()
    del call.tensors["kv"]
    call.arguments["kv"] = [[1.0]]
    save_call(tmp_path / "call.safetensors", call)
    with pytest.raises(ContractError, match="kv must be a torch.Tensor, got list") as caught:
        load_call(tmp_path / "call.safetensors").run()
    assert caught.value.id == "not-a-tensor"


def test_outputs_the_caller_gave_are_made_anew(tmp_path: Path) -> None:
    call = small_call()
    call.arguments["out"] = Buffer(torch.float32, (2, 64, 512), (64 * 512, 512, 1))
    save_call(tmp_path / "call.safetensors", call)
    back = load_call(tmp_path / "call.safetensors")
    assert back.keywords()["out"].dtype == torch.float32
    with pytest.raises(ContractError) as caught:
        back.run()
    assert caught.value.id == "output-invalid"


def test_a_call_runs_again_to_the_same_bits() -> None:
    call = small_call()
    first, second = call.run(backend="reference"), call.run(backend="reference")
    assert first[0].shape == (2, 64, 512)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


def test_the_general_operator_runs_with_its_float_scales(tmp_path: Path) -> None:
    strict = small_call()
    tensors = {name: strict.tensors[name] for name in ("q", "kv", "indices")}
    call = Call(GENERAL, tensors, {"q_scale": 0.5, "kv_scale": 0.25, "sm_scale": 0.1})
    save_call(tmp_path / "call.safetensors", call)
    out, _, lse = load_call(tmp_path / "call.safetensors").run(backend="reference")
    del strict.tensors["attn_sink"], strict.tensors["topk_length"]
    strict.arguments["sm_scale"] = 0.1
    want_out, _, want_lse = strict.run(backend="reference")
    assert torch.equal(out, want_out)
    assert torch.equal(lse, want_lse)


def test_a_given_backend_is_the_one_that_runs() -> None:
    from sparse_mla import dispatch

    small_call().run(backend="reference")
    assert dispatch.last_backend() == "reference"
    small_call().run(backend="cpu")
    assert dispatch.last_backend() == "cpu"


# Files from elsewhere


def write_raw(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)
    return path


def header_of(**changes: Any) -> dict[str, Any]:
    """The header of a sound small call file, whose data is 12 bytes."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "sparse-mla-call", "version": "1", "operator": STRICT},
        "q": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
        "kv": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [4, 8]},
        "indices": {"dtype": "I32", "shape": [1], "data_offsets": [8, 12]},
    }
    header.update(changes)
    return {name: value for name, value in header.items() if value is not None}


def container_file(tmp_path: Path, metadata: dict[str, str] | None = None, **changes: Any) -> Path:
    header = header_of(**changes)
    header["__metadata__"] = {**header.get("__metadata__", {}), **(metadata or {})}
    data = bytes(max((e["data_offsets"][1] for n, e in header.items() if n[0] != "_"), default=0))
    return write_raw(tmp_path / "call.safetensors", json.dumps(header).encode(), data)


def declared(dtype: Any = "F8_E4M3", shape: Any = (2, 2), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SOUND = json.dumps(header_of()).encode()

HOSTILE: dict[str, tuple[bytes, bytes, int | None, str]] = {
    "truncated-data": (SOUND, bytes(11), None, "declares"),
    "trailing-bytes": (SOUND, bytes(13), None, "declares"),
    "truncated-header": (SOUND[:50], b"", len(SOUND), "its header should have"),
    "giant-header": (SOUND, bytes(12), 2**63, "should have 9223372036854775808 bytes"),
    "header-past-limit": (b" " * ((1 << 20) + 1), b"", None, "limit 1048576"),
    "pickle": (b"\x80\x04\x95\x10" * 20, b"", 0x1000, "its header should have"),
    "not-json": (b"{'q': 1}", b"", None, "not JSON"),
    "not-utf8": (b'{"__metadata__": {"model": "\xff\xfe"}}', b"", None, "not JSON in UTF-8"),
    "half-surrogate": (b'{"__metadata__": {"m": "\\ud800"}}', b"", None, "not JSON in UTF-8"),
    "nested": (b"[" * 100_000, b"", None, "not JSON"),
    "endless-integer": (b'{"q": ' + b"9" * 5000 + b"}", b"", None, "not JSON"),
    "nan": (b'{"q": NaN}', b"", None, "not JSON: NaN"),
    "list": (b"[]", b"", None, "not a JSON object"),
    "name-twice": (b'{"q": 1, "q": 2}', b"", None, "a name twice"),
    "metadata-list": (b'{"__metadata__": []}', b"", None, "metadata is not a map"),
    "metadata-number": (b'{"__metadata__": {"a": 1}}', b"", None, "metadata is not a map"),
}
ENTRIES: dict[str, tuple[Any, str]] = {
    "no-object": (7, "not declared by"),
    "further-key": ({**declared(), "x": 1}, "not declared by"),
    "no-shape": ({"dtype": "F32", "data_offsets": [0, 4]}, "not declared by"),
    "unknown-dtype": (declared("F99"), "unknown dtype F99"),
    "dtype-list": (declared(["F32"]), "unknown dtype"),
    "dtype-escapes": (declared("\x1b[2J\n"), r"unknown dtype '\x1b[2J\n'"),
    "negative": (declared(shape=[-2, -2]), "impossible shape"),
    "boolean": (declared(shape=[True, 4]), "impossible shape"),
    "fraction": (declared(shape=[4.0]), "impossible shape"),
    "no-list": (declared(shape="44"), "impossible shape"),
    "nine-dims": (declared(shape=[1] * 8 + [4]), "impossible shape"),
    "wide-empty": (declared(shape=[0, 2**40], offsets=[0, 0]), "impossible shape"),
    "astronomic-empty": (
        declared(shape=[0] + [2**31 - 1] * 7, offsets=[0, 0]),
        "impossible shape",
    ),
    "ten-gigabytes": (declared(shape=[10 << 30], offsets=[0, 10 << 30]), "impossible shape"),
    "ten-gigabytes-2d": (
        declared(shape=[10 << 10, 1 << 20], offsets=[0, 10 << 30]),
        "starts at byte",
    ),
    "shape-past-offsets": (declared(shape=[10 << 10, 1 << 20]), "needs 10737418240 bytes"),
    "overflow": (declared(shape=[2**30, 2**30, 2**4]), "impossible shape"),
    "overlapping": (declared(offsets=[2, 6]), "starts at byte"),
    "gap": (declared(offsets=[1, 5]), "starts at byte"),
    "backwards": (declared(offsets=[4, 0]), "its offsets span -4"),
    "three-offsets": (declared(offsets=[0, 4, 4]), "impossible shape or offsets"),
    "huge-offsets": (declared(offsets=[2**63, 2**63 + 4]), "impossible shape or offsets"),
}


def refused(path: Path | str, **options: Any) -> FileError:
    """The error of a file that must not be read; its first line is plain and short."""
    with pytest.raises(FileError) as caught:
        load_call(path, **options)
    first = str(caught.value).split("\n")[0]
    assert first.isprintable(), first
    assert len(first) < 1500
    return caught.value


@pytest.fixture
def no_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail when a tensor is read: what is wrong with a header is found before."""

    def boom(*_: Any) -> torch.Tensor:
        raise AssertionError("memory was taken for a tensor")

    monkeypatch.setattr(container, "tensor", boom)


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize(("header", "data", "length", "says"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_headers(
    tmp_path: Path, header: bytes, data: bytes, length: int | None, says: str
) -> None:
    fault = refused(write_raw(tmp_path / "call.safetensors", header, data, length))
    assert fault.id == "file-not-safetensors"
    assert says in str(fault)


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize(("entry", "says"), ENTRIES.values(), ids=ENTRIES)
def test_hostile_entries(tmp_path: Path, entry: Any, says: str) -> None:
    header = json.dumps(header_of(q=entry)).encode()
    fault = refused(write_raw(tmp_path / "call.safetensors", header, bytes(12)))
    assert fault.id == "file-not-safetensors"
    assert says in str(fault)


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize("size", [0, 1, 7])
def test_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "call.safetensors"
    path.write_bytes(bytes(size))
    fault = refused(path)
    assert fault.id == "file-not-safetensors"
    assert f"it has {size} bytes" in str(fault)


@pytest.mark.usefixtures("no_memory_taken")
def test_every_truncation_of_a_sound_file_is_refused(tmp_path: Path) -> None:
    whole = container_file(tmp_path).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert refused(path).id == "file-not-safetensors"


@pytest.mark.usefixtures("no_memory_taken")
def test_a_file_past_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "call.safetensors"
    header = header_of(q=declared(shape=[10 << 10, 1 << 20], offsets=[12, 12 + (10 << 30)]))
    header["kv"]["data_offsets"], header["indices"]["data_offsets"] = [0, 4], [4, 8]
    write_raw(path, json.dumps(header).encode())
    os.truncate(path, 10 << 30)  # sparse: it takes no room
    fault = refused(path)
    assert fault.id == "file-too-large"
    assert fault.context["bytes"] == 10 << 30


def test_the_limit_is_the_callers(tmp_path: Path) -> None:
    path = container_file(tmp_path)
    size = path.stat().st_size
    assert load_call(path, max_bytes=size).operator == STRICT
    assert refused(path, max_bytes=size - 1).id == "file-too-large"


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = container_file(tmp_path)
    checked = container.header

    def cut_after(*arguments: Any) -> Any:
        result = checked(*arguments)
        os.truncate(path, path.stat().st_size - 6)
        return result

    monkeypatch.setattr(container, "header", cut_after)
    monkeypatch.setattr(container, "opened", lambda path: path.open("rb", buffering=16))
    fault = refused(path)
    assert fault.id == "file-not-safetensors"
    assert "shorter" in str(fault)


def make_fifo(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def make_link(target: str) -> Callable[[Path], Path]:
    def make(tmp_path: Path) -> Path:
        (tmp_path / "link").symlink_to(target)
        return tmp_path / "link"

    return make


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda tmp_path: tmp_path, "Is a directory"),
        (lambda tmp_path: tmp_path / "nowhere", "No such file"),
        (lambda tmp_path: "nul\0.safetensors", "null"),
        (lambda tmp_path: "/dev/zero", "not a regular file"),
        (make_fifo, "not a regular file"),
        (make_link("/dev/zero"), "not a regular file"),
        (make_link("link"), "symbolic links"),
        (make_link("/"), "Is a directory"),
    ],
    ids=["directory", "missing", "nul", "device", "fifo", "to-device", "to-itself", "to-directory"],
)
def test_what_is_no_regular_file(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    fault = refused(make(tmp_path))
    assert fault.id == "file-unreadable"
    assert says in str(fault)


def test_a_link_to_a_call_file_is_followed(tmp_path: Path) -> None:
    container_file(tmp_path)
    assert load_call(make_link("call.safetensors")(tmp_path)).operator == STRICT


def test_a_name_with_escapes_is_shown_escaped(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31mred\nline\u202e"
    fault = refused(path)
    assert r"\x1b[31mred\nline\u202e" in str(fault)


NOT_CALLS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "no-metadata": ({"__metadata__": None}, {}, "has no format"),
    "another-format": ({}, {"format": "pt"}, "the format pt, not sparse-mla-call"),
    "a-later-version": ({}, {"version": "2"}, "the version 2, not 1"),
    "an-unknown-operator": ({}, {"operator": "os.system"}, "the operator os.system, not"),
    "operator-escapes": ({}, {"operator": "\x1b]0;x\x07"}, r"'\x1b]0;x\x07'"),
    "an-unknown-tensor": (
        {"topk_lenght": declared(offsets=[12, 16])},
        {},
        "no tensor topk_lenght",
    ),
    "twice": ({}, {"kv": "1"}, "kv is given twice"),
    "scalar-not-json": ({}, {"sm_scale": "0.1 " + "x"}, "sm_scale is not JSON"),
    "scalar-python": ({}, {"sm_scale": "__import__('os')"}, "sm_scale is not JSON"),
    "scalar-list": ({}, {"sm_scale": "[1]"}, "sm_scale is no scalar"),
    "type-is-code": ({}, {"q_scale": '{"type": "x\\n"}'}, "q_scale is no scalar"),
    "stride-not-sizes": ({}, {"stride.kv": '["a"]'}, "stride.kv is not a list of sizes"),
    "stride-too-few": ({}, {"stride.kv": "[1]"}, "1 strides for 2 dimensions"),
    "stride-negative": ({}, {"stride.kv": "[-1, 1]"}, "stride.kv is not a list of sizes"),
    "stride-overlap": ({}, {"stride.kv": "[1, 1]"}, "puts two elements in one place"),
    "stride-huge": ({}, {"stride.kv": "[10737418240, 1]"}, "ask for 10737418242 bytes"),
    "stride-astronomic": ({}, {"stride.kv": f"[{2**60}, 1]"}, "bytes of memory"),
    "buffer-no-object": ({}, {"buffer.out": "3"}, "buffer.out does not describe"),
    "buffer-dtype": (
        {},
        {"buffer.out": '{"dtype": "x", "shape": [], "stride": []}'},
        "unknown dtype",
    ),
    "buffer-astronomic": (
        {},
        {
            "buffer.out": json.dumps(
                {"dtype": "int8", "shape": [0] + [2**31 - 1] * 7, "stride": [0] * 8}
            )
        },
        "impossible shape",
    ),
    "buffer-huge": (
        {},
        {"buffer.out": '{"dtype": "int8", "shape": [99999, 99999], "stride": [99999, 1]}'},
        "bytes of memory",
    ),
    "d-v-of-the-general-operator": ({}, {"operator": GENERAL, "d_v": "128"}, "d_v=512"),
}


@pytest.mark.usefixtures("no_memory_taken")
@pytest.mark.parametrize(("changes", "metadata", "says"), NOT_CALLS.values(), ids=NOT_CALLS)
def test_sound_files_that_are_no_calls(
    tmp_path: Path, changes: dict[str, Any], metadata: dict[str, str], says: str
) -> None:
    fault = refused(container_file(tmp_path, metadata, **changes))
    assert fault.id == "file-not-a-call"
    assert says in str(fault)


@pytest.mark.parametrize("name", ["q", "kv", "indices"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    header = header_of(**{name: None})
    position = 0
    for entry in list(header.values())[1:]:
        entry["data_offsets"] = [position, position + 4]
        position += 4
    path = write_raw(tmp_path / "call.safetensors", json.dumps(header).encode(), bytes(position))
    fault = refused(path)
    assert fault.id == "file-tensor-missing"
    assert fault.context["name"] == name


def test_shown_is_one_short_printable_line() -> None:
    assert shown("plain text") == "plain text"
    assert shown("\x9b31m") == r"'\x9b31m'"
    assert len(shown("x" * 10**6)) < 1100


# Writing


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "call.safetensors"
    path.write_bytes(b"old")

    def full_disk(tensors: Any, filename: str, metadata: Any) -> None:
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    with pytest.raises(FileError, match="No space left on device") as caught:
        save_call(path, small_call())
    assert caught.value.id == "file-not-written"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["call.safetensors"]


@pytest.mark.parametrize("where", ["nowhere/call.safetensors", "."])
def test_a_place_that_takes_no_file(tmp_path: Path, where: str) -> None:
    with pytest.raises(FileError) as caught:
        save_call(tmp_path / where, small_call())
    assert caught.value.id == "file-not-written"
    assert os.listdir(tmp_path) == []


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    # A rename onto /dev/null would make it a file for everybody.
    fifo = make_fifo(tmp_path)
    with pytest.raises(FileError, match="not a regular file"):
        save_results(fifo, {"out": torch.zeros(1)}, {})
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_a_link_keeps_pointing_at_its_file(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    link = make_link("real")(tmp_path)
    save_call(link, small_call())
    assert link.is_symlink()
    assert load_call(tmp_path / "real").operator == STRICT


def test_a_written_file_has_the_users_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_call(tmp_path / "call.safetensors", small_call())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "call.safetensors").stat().st_mode) == 0o640


def test_the_public_names_are_there() -> None:
    for name in sparse_mla.callfile.__all__:
        assert getattr(sparse_mla.callfile, name) is not None
