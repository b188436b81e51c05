"""The runner: its statistics, what it times, how it judges, and why a peer did not run."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import results, row

from sparse_mla.benchmarks import ceilings, inputs, machine, memory, runner, timing
from sparse_mla.benchmarks import peers as peers_room
from sparse_mla.benchmarks.peers import Outputs, everything
from sparse_mla.benchmarks.peers.flash_mla import FlashMLA, dequantised
from sparse_mla.benchmarks.peers.ours import Ours
from sparse_mla.benchmarks.peers.padded import Padded
from sparse_mla.benchmarks.peers.sglang import SGLang
from sparse_mla.benchmarks.peers.torch_bmm import GatherBmm
from sparse_mla.benchmarks.shapes import REGISTRY, Shape
from sparse_mla.integrations.sglang import MODULES
from sparse_mla.testing import expected, make_problem

CPU = torch.device("cpu")
TINY = Shape("v32", 8, 5, 200, 8, 576, 128, "topk")


@pytest.fixture
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)


def schema() -> Any:
    text = resources.files("sparse_mla.benchmarks").joinpath("results.schema.json").read_text()
    return json.loads(text)


@pytest.mark.usefixtures("small_ceilings")
def test_a_cpu_run_from_end_to_end() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, from pip")
    lines: list[str] = []
    settings = runner.Settings(rounds=2)
    names = ["cpu", "torch-gather-bmm", "reference", "flash-mla-bf16"]
    found = runner.run(CPU, [TINY], names, settings, lines.append, ["sparse-mla", "bench"])
    jsonschema.validate(found, schema())
    json.dumps(found, allow_nan=False)
    (row,) = found["prefill"]
    entry = row["moods"]["sustained"]
    assert set(row["moods"]) == {"sustained"}  # a CPU has no other
    assert set(entry["peers"]) == {"cpu", "torch-gather-bmm", "reference"}
    for figure in entry["peers"].values():
        assert figure["fault"] is None
        assert figure["runs"] == 2 * (entry["rounds"] // 2)
        operations = 2 * 8 * 5 * 128 * (576 + 512)
        assert figure["tflops"] == pytest.approx(operations / figure["median_ms"] / 1e9)
    reasons = {peer["name"]: peer["reason"] for peer in found["peers"]}
    assert reasons["flash-mla-bf16"] == "computes on cuda, this run is on cpu"
    assert reasons["cpu"] is None
    assert lines[0] == "peers: cpu, reference, torch-gather-bmm"
    assert lines[1].startswith("ceilings, sustained: float32 matmul ")
    assert [line.partition(":")[0] for line in lines[2:]] == [row["id"]]
    assert all(len(line) <= 120 for line in lines)


def test_progress_is_one_short_line_a_step() -> None:
    """What the table says too is left to it: the other mood, and why a peer did not run."""
    assert runner.text(row(800.0)) == "sm90 800 TFLOPS, flash-mla-bf16 400 TFLOPS"
    found = row(800.0)
    found["refused"] = {"sglang-q8kv8": "takes heads in multiples of 64"}
    found["moods"]["burst"]["peers"]["sm90"]["fault"] = "lse of query 3 is off"
    assert runner.text(found) == "sm90 WRONG, flash-mla-bf16 400 TFLOPS"
    assert runner.text({**found, "moods": {}}) == "nothing runs it"


def test_rates_in_progress_have_the_tables_units() -> None:
    of_mood = {"bf16_matmul": {"tflops": 0.0912}, "copy": {"tb_per_s": 0.0192}}
    assert ceilings.text(of_mood) == "bf16 matmul 91 GFLOP/s, copy 19.2 GB/s"
    of_mood = {"fp8_matmul": {"tflops": 1526.0}, "copy": {"tb_per_s": 4.274}}
    assert ceilings.text(of_mood) == "fp8 matmul 1,526 TFLOPS, copy 4.27 TB/s"


@pytest.mark.usefixtures("small_ceilings")
def test_a_wrong_output_of_any_round_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    honest = GatherBmm.prepare

    def last_one_wrong(self: GatherBmm, given: Any, buffers: int) -> Any:
        call = honest(self, given, buffers)

        def made() -> Outputs:
            outputs = call()
            calls.append(outputs)
            if len(calls) == 1 + 4:  # one to warm up, four rounds
                outputs.out[4, 7, 500] += 1.0
            return outputs

        return made

    monkeypatch.setattr(GatherBmm, "prepare", last_one_wrong)
    found = runner.run(CPU, [TINY], ["torch-gather-bmm"], runner.Settings(rounds=4))
    figure = found["prefill"][0]["moods"]["sustained"]["peers"]["torch-gather-bmm"]
    assert "out column 500 of query 4, head 7" in figure["fault"]


def test_peers_with_rounds_of_their_own_change_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock stored is that beside the figures of ours; each group follows its own work."""
    groups: list[tuple[int, list[str]]] = []

    class Clock(timing.GpuClock):
        def settle(self, calls: Any) -> None:
            pass

        def times(self, calls: Any, mood: timing.Mood, untimed: Any = ()) -> list[float]:
            groups.append((len(calls), [name for name in warm if warm[name] in untimed]))
            self.sm_mhz = 1000.0 * len(groups)
            return [float(call() is None) for call in calls]

    monkeypatch.setattr(machine, "card", lambda device, busy: {"asked": str(busy is not None)})
    monkeypatch.setattr(runner, "_companions", lambda *_: {})
    workload = inputs.make(TINY, CPU)
    peers: list[peers_room.Peer] = [Ours("cpu"), GatherBmm()]
    warm, _ = runner._warmed(workload, peers)
    wants = [runner._wanted(each) for each in workload.sets]
    settings, limits = runner.Settings(rounds=5), results()["ceilings"]["sustained"]
    entry = runner._timed(workload, peers, warm, wants, Clock(CPU), "sustained", settings, limits)
    assert groups == [(5, ["cpu"]), (3, ["torch-gather-bmm"])]
    assert entry["sm_mhz"] == 1000.0
    alone = runner._timed(
        workload, peers[1:], warm, wants, Clock(CPU), "sustained", settings, limits
    )
    assert groups[2:] == [(3, ["torch-gather-bmm"])]
    assert alone["sm_mhz"] == 3000.0


def tiny_outputs() -> tuple[Any, Outputs, list[int], Any]:
    given = inputs.make(TINY, CPU).sets[0]
    queries, want = runner._wanted(given)
    outputs = Outputs(
        torch.empty(5, 8, 512, dtype=torch.bfloat16), torch.empty(5, 8), torch.empty(5, 8)
    )
    for part, wanted in zip(outputs, want, strict=True):
        assert part is not None
        part[queries] = wanted.to(part.dtype)
    return runner.make_problem(given, outputs), outputs, queries, want  # type: ignore[arg-type]


def test_outputs_are_judged_with_and_without_statistics() -> None:
    problem, outputs, queries, want = tiny_outputs()
    assert queries == [0, 1, 2, 3, 4]
    tolerance = GatherBmm.tolerance
    for given in (outputs, outputs._replace(max_logits=None, lse=None)):
        assert runner.compare_outputs(problem, given, tolerance, queries, want) < 0.003
    lse = outputs.lse.clone()
    lse[2, 1] += 1
    with pytest.raises(AssertionError, match="lse of query 2, head 1"):
        runner.compare_outputs(problem, outputs._replace(lse=lse), tolerance, queries, want)
    unwritten = outputs.out.clone()
    unwritten[0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="not finite or was not written"):
        runner.compare_outputs(problem, outputs._replace(out=unwritten), tolerance, queries, want)


def test_ours_must_have_the_same_bits_in_every_round() -> None:
    _, outputs, _, _ = tiny_outputs()
    runner._same_bits(3, outputs, Outputs(*(part.clone() for part in outputs)))
    other = outputs._replace(max_logits=outputs.max_logits + 1e-6)
    with pytest.raises(AssertionError, match="max_logits of round 3 has other bits"):
        runner._same_bits(3, other, outputs)


def test_a_peer_that_raises_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: GatherBmm, given: Any, buffers: int) -> Any:
        raise RuntimeError("no kernel image\nand more")

    monkeypatch.setattr(GatherBmm, "prepare", fails)
    workload = inputs.make(TINY, CPU)
    calls, refused = runner._warmed(workload, [Ours("cpu"), GatherBmm()])
    assert set(calls) == {"cpu"}
    assert refused == {"torch-gather-bmm": "failed: RuntimeError: no kernel image"}


def test_a_backend_that_another_one_stood_in_for_is_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "reference")
    strict = replace(TINY, h_q=64)
    calls, refused = runner._warmed(inputs.make(strict, CPU), [Ours("cpu")])
    assert calls == {}
    assert refused == {"cpu": "the call was run by reference"}


def test_each_peer_says_why_it_cannot_run_here() -> None:
    for peer in everything().values():
        reason = peer.unavailable(CPU)
        assert (reason is None) == (
            peer.name in ("cpu", "reference", "strict-padded", "torch-gather-bmm")
        ), reason
    assert not everything()["cpu"].on_request
    assert everything()["reference"].on_request


def hopper(monkeypatch: pytest.MonkeyPatch, **module: Any) -> FlashMLA:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "flash_mla", types.SimpleNamespace(**module))
    return FlashMLA()


def test_flash_mla_says_what_its_module_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    operator = {"flash_mla_sparse_fwd": print}
    assert "no flash_mla_sparse_fwd" in str(hopper(monkeypatch).unavailable(cuda))
    assert "sgl-flash-mla" in str(hopper(monkeypatch, **operator).unavailable(cuda))
    peer = hopper(monkeypatch, **operator, has_legacy=lambda: True)
    assert peer.unavailable(cuda) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "(10, 0)" in str(peer.unavailable(cuda))
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert "cannot import flash_mla" in str(peer.unavailable(cuda))


def test_flash_mla_gets_the_same_values_padded_to_its_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}

    def operator(q: Any, kv: Any, indices: Any, sm_scale: float, **keywords: Any) -> Any:
        seen.update(q=q, kv=kv, indices=indices, sm_scale=sm_scale, **keywords)
        rows = torch.zeros(*q.shape[:2], 512, dtype=torch.bfloat16)
        return rows, torch.zeros(q.shape[:2]), torch.zeros(q.shape[:2])

    peer = hopper(monkeypatch, flash_mla_sparse_fwd=operator, has_legacy=lambda: True)
    given = inputs.make(TINY, CPU).sets[0]
    outputs = peer.prepare(given, 1)()
    assert outputs.out.shape == (5, 8, 512)
    assert outputs.lse.shape == (5, 8)
    assert seen["use_legacy"] is True
    assert seen["q"].shape == (5, 64, 576)
    assert torch.equal(seen["q"][:, :8].float(), given.q.float() * given.q_scale)
    assert not seen["q"][:, 8:].any()
    assert torch.equal(seen["kv"].float(), given.kv.float() * given.kv_scale)
    many = replace(given, q=given.q.repeat(1, 20, 1))
    assert peer.refusal(many) == "takes 64 or 128 heads, got 160"
    assert dequantised(given.q, given.q_scale).dtype == torch.bfloat16


def test_few_heads_are_padded_for_the_strict_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees 64 heads; what it gives for those there are is right, and they alone are kept."""
    seen: list[Any] = []
    strict = Ours._strict
    monkeypatch.setattr(Ours, "_strict", lambda *a: (seen.append(a[1].q), strict(*a))[1])
    peer, given = Padded(), inputs.make(TINY, CPU).sets[0]
    assert peer.on_request
    assert not peer.ours
    assert peer.refusal(given) is None
    outputs = peer.prepare(given, 1)()
    assert [tuple(q.shape) for q in seen] == [(5, 64, 576)]
    assert not seen[0][:, 8:].view(torch.uint8).any()
    assert outputs.out.shape == (5, 8, 512)
    queries = list(range(5))
    want = expected(make_problem(given), queries)
    empty = torch.empty(0)
    problem = make_problem(given, (empty, empty, empty))
    runner.compare_outputs(problem, outputs, peer.tolerance, queries, want)
    assert peer.refusal(replace(given, q=seen[0])) == "there is nothing to pad: 64 heads"
    fewer = replace(given, indices=given.indices[..., :100])
    assert peer.refusal(fewer) == "takes topk in multiples of 128, got 100"


def test_sglang_is_never_measured_against_our_own_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparse_mla.integrations import sglang

    cuda = torch.device("cuda")
    assert "No module named 'sglang'" in str(SGLang().unavailable(cuda))
    monkeypatch.setattr(sglang, "installed", lambda: object())
    assert "uninstall()" in str(SGLang().unavailable(cuda))


def test_sglangs_operator_is_called_where_a_release_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def operator(*arguments: Any) -> Any:
        return arguments[:3]

    for name in ("sglang", "sglang.jit_kernel"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    older = types.ModuleType(MODULES[-1])
    older.sparse_mla_q8kv8_prefill_fwd = operator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULES[-1], older)
    peer, given = SGLang(), inputs.make(TINY, CPU).sets[0]
    assert peer.unavailable(torch.device("cuda")) is None
    assert "multiples of 64" in str(peer.refusal(given))
    assert peer.prepare(given, 1)().out is given.q


def test_the_kernel_is_asked_for_only_where_a_backend_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparse_mla.backends import cpu

    given = inputs.make(TINY, CPU).sets[0]
    assert Ours("cpu").kernel(given) is None
    monkeypatch.setattr(cpu, "plan", lambda problem: (problem.h_q, "more"), raising=False)
    assert Ours("cpu").kernel(given) == "8; more"


def test_every_call_has_a_buffer_of_its_own() -> None:
    call = Ours("cpu").prepare(inputs.make(TINY, CPU).sets[0], 2)
    first, second, third = call(), call(), call()
    assert first.out.data_ptr() != second.out.data_ptr()
    assert first.out.data_ptr() == third.out.data_ptr()


def test_a_fault_is_one_line() -> None:
    assert peers_room.reason(ValueError("a\nb")) == "ValueError: a"
    assert peers_room.reason(KeyError()) == "KeyError"


def test_the_card_as_nvidia_smi_gives_it() -> None:
    line = "NVIDIA H200, 580.159.04, 1755 MHz, 1980 MHz, 3201 MHz, 691.30 W, 700.00 W, 61, 0x4\n"
    card = machine.parse_card(line, 0)
    assert card["clocks.sm"] == "1755 MHz"
    assert card["power.draw"] == "691.30 W"
    assert machine.parse_card("No devices were found", 6) == {"unknown": "No devices were found"}
    assert machine.parse_card("", 0) == {"unknown": ""}


def test_what_other_programs_use_is_what_is_left_of_all(tmp_path: Path) -> None:
    """In hundredths of a second: user, nice, system, idle, waiting, two interrupts, stolen."""
    stat = tmp_path / "stat"
    stat.write_text("cpu  4000000 100 200 9000 500 10 20 70 3 4\ncpu0 1 2 3\n")
    mine = os.times()
    per_second = os.sysconf("SC_CLK_TCK")
    found = machine.others_seconds(stat)
    assert found == pytest.approx(4000400 / per_second - mine.user - mine.system, abs=0.5)
    for text in ("", "cpu 1 2", "cpu a b c d e"):
        stat.write_text(text)
        assert machine.others_seconds(stat) is None
    assert machine.others_seconds(tmp_path / "nothing") is None


@pytest.mark.usefixtures("small_ceilings")
def test_a_cpu_run_says_what_share_of_the_cores_others_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, cores = iter([100.0, 130.0]), 4
    at = iter([10.0, 40.0])
    monkeypatch.setattr(machine, "others_seconds", lambda: next(seconds))
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(perf_counter=lambda: next(at)))
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    found = runner.run(CPU, [TINY], ["torch-gather-bmm"], runner.Settings(rounds=2))
    assert found["machine"]["others_share"] == 0.25


def test_the_command_names_no_folder() -> None:
    argv = ["/home/u/venv/bin/sparse-mla", "bench", "-o", "/home/u/r.json", "--shapes", "v32-*"]
    assert machine.command(argv) == "sparse-mla bench -o r.json --shapes 'v32-*'"
    assert machine.command(["-c", "bench"]) == "sparse-mla bench"


def test_a_copy_without_history_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_COMMIT", "0123abc")
    assert machine.describe(CPU, ["sparse-mla"])["commit"] == "0123abc"


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    found = memory.measure("v32-tp8-q16-kv4k-uniform")
    assert found["id"] == "v32-tp8-q16-kv4k-uniform"
    assert 0 <= found.get("extra_mib", 0) < 400
    assert "reason" in memory.measure("nothing-of-this-name")


def test_the_registrys_cpu_shapes_are_small_enough() -> None:
    assert REGISTRY[memory.SHAPE].s_q == 4096
