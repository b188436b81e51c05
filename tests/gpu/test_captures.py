"""Captures on a GPU: whose time is recorded, CUDA graphs, replay elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from callfiles import same_bits, small_call

import sparse_mla
from sparse_mla.callfile import capture, dump, load_call


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_warned", set())


@pytest.mark.cuda_only
def test_the_time_of_a_call_on_a_gpu(tmp_path: Path) -> None:
    """The kernel's time, not that of its launch alone or of work queued before the call."""
    arguments = small_call().keywords("cuda") | {"topk_length": None}
    for name in ("q", "indices"):
        arguments[name] = arguments[name].repeat(4000, 1, 1)
    run = sparse_mla.sparse_mla_q8kv8_prefill_fwd
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first compiles
        start.record()
        run(**arguments)
        end.record()
        torch.cuda.synchronize()
    kernel = start.elapsed_time(end) / 1e3
    with capture(tmp_path) as log:
        torch.cuda._sleep(10**9)  # about half a second
        run(**arguments)
    recorded = load_call(log.files[0])
    assert recorded.metadata["device"] == "cuda:0"
    assert recorded.metadata["backend"] == "sm90"
    assert same_bits(recorded.tensors["q"], arguments["q"].cpu())
    assert 0.8 * kernel < float(recorded.metadata["seconds"]) < kernel + 0.1


@pytest.mark.cuda_only
def test_calls_in_a_cuda_graph_are_left_alone_and_it_says_so(tmp_path: Path) -> None:
    arguments = small_call().keywords("cuda")
    run = sparse_mla.sparse_mla_q8kv8_prefill_fwd
    want = run(**arguments)
    graph = torch.cuda.CUDAGraph()
    with capture(tmp_path) as log:
        with (
            pytest.warns(RuntimeWarning, match="inside CUDA graph capture"),
            torch.cuda.graph(graph),
        ):
            got = run(**arguments)
        graph.replay()
        torch.cuda.synchronize()
        assert log.files == []
        run(**arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert (log.seen, len(log.files)) == (2, 1)


@pytest.mark.cuda_only
def test_a_call_of_a_gpu_runs_again_on_a_cpu(tmp_path: Path) -> None:
    with capture(tmp_path) as log:
        want = sparse_mla.sparse_mla_q8kv8_prefill_fwd(**small_call().keywords("cuda"))
    call = load_call(log.files[0])
    assert call.metadata["backend"] == "sm90"
    for backend in ("cpu", "reference"):
        out, _, lse = call.run(backend=backend)
        assert (out.float() - want[0].cpu().float()).norm() < 0.04 * out.float().norm()
        assert torch.allclose(lse, want[2].cpu(), atol=4e-2)
    again = call.run(device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
