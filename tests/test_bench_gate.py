"""The regression gate on literal figures: what falls, what holds, what cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest
from bench_results import OURS, PEER, figure, results, row

from sparse_mla.benchmarks.gate import as_data, judge, other_machine
from sparse_mla.benchmarks.shapes import REGISTRY

ID = "v32-tp1-q4096-kv32k-uniform"

TWO_RUNS = """
v32-tp1-q4096-kv8k-uniform 0.6615 2.3247 0.6624 2.3114 0.6299 2.5185 0.7010 2.5261
v32-tp1-q4096-kv32k-uniform 0.6554 2.3463 0.6589 2.3236 0.6128 2.5888 0.6783 2.6106
v32-tp1-q4096-kv128k-uniform 0.6325 2.4315 0.6341 2.4146 0.5710 2.7783 0.6419 2.7585
v32-tp1-q4096-kv512k-uniform 0.6197 2.4817 0.6226 2.4591 0.5775 2.7473 0.6333 2.7961
v32-tp1-q4096-kv32k-topk 0.6582 2.3362 0.6614 2.3149 0.6422 2.4704 0.6855 2.5831
v32-tp1-q4096-kv32k-window 0.6654 2.3110 0.6619 2.3132 0.6298 2.5191 0.7061 2.5079
v32-tp1-q4096-kv32k-sink-recent 0.6577 2.3381 0.6600 2.3199 0.6187 2.5644 0.6912 2.5619
v32-tp2-q4096-kv32k-uniform 0.9421 1.1996 0.9514 1.1882 0.8873 1.2738 0.8677 1.3032
v32-tp4-q4096-kv32k-uniform 1.0284 1.0989 1.0733 1.0532 0.9905 1.1411 1.0181 1.1107
v32-tp8-q4096-kv32k-uniform 1.2927 0.8743 1.3746 0.8224 1.2625 0.8952 1.3415 0.8429
v32-tp1-q128-kv32k-uniform 0.5943 0.0809 0.5873 0.0815 0.6140 0.0808 0.6603 0.0838
v32-tp1-q1024-kv32k-uniform 0.6437 0.5972 0.6439 0.5944 0.6119 0.6482 0.6755 0.6554
glm5-tp1-q1024-kv32k-uniform 0.9314 0.3033 0.9326 0.3031 0.8607 0.3283 0.8786 0.3218
glm5-tp8-q4096-kv32k-uniform 1.4995 0.7537 1.6125 0.7011 1.4771 0.7652 1.5833 0.7142
v4flash-tp1-q4096-kv32k-uniform 0.7329 0.3427 0.7316 0.3434 0.6766 0.3712 0.6838 0.3675
v4pro-tp1-q4096-kv32k-uniform 0.6268 1.1545 0.6241 1.1545 0.6081 1.2278 0.6607 1.2612
v32-tp1-q1-kv32k-uniform 0.0263 0.0143 0.0273 0.0137 0.0273 0.0142 0.0316 0.0137
v32-tp1-q64-kv32k-uniform 0.5363 0.0448 0.5342 0.0448 0.5549 0.0447 0.6176 0.0448
v32-tp8-q1-kv32k-uniform 0.0220 0.0126 0.0223 0.0124 0.0221 0.0125 0.0222 0.0124
v32-tp8-q16-kv32k-uniform 0.1596 0.0277 0.2434 0.0181 0.1556 0.0284 0.2478 0.0178
v32-tp8-q64-kv32k-uniform 0.6515 0.0271 0.6699 0.0264 0.6497 0.0272 0.6500 0.0272
"""
"""Shares of the roofline and ms of two runs on one H200 on 2026-12-01: in bursts at commit a8c7206
and dcebb78, then sustained. Between them kernels for few heads became faster, nothing slower; the
sustained FP8 matmul was 1,473 TFLOPS and 1,319, each the median of an unsteady sample."""


def run_of(number: int) -> dict[str, Any]:
    """The first or the second of ``TWO_RUNS``."""
    found = results()
    found["prefill"] = []
    for line in TWO_RUNS.split("\n")[1:-1]:
        id, *texts = line.split()
        numbers = [float(text) for text in texts]
        made = row(**vars(REGISTRY[id]))
        for mood, place in (("burst", 2 * number), ("sustained", 4 + 2 * number)):
            share, milliseconds = numbers[place : place + 2]
            entry = figure(of_roofline=share, median_ms=milliseconds)
            made["moods"][mood]["peers"] = {OURS: entry}
        found["prefill"].append(made)
    return found


def test_two_runs_of_one_card_differ_where_a_kernel_does() -> None:
    """Whichever of the two comes first: no figure falls whose time has not grown as much."""
    earlier, later = run_of(0), run_of(1)
    forward, back = judge(earlier, later), judge(later, earlier)
    assert forward.ok
    assert forward.mood == "burst"
    assert forward.compared == back.compared == 21
    assert forward.noted == []
    assert [(entry.what, round(entry.change, 2)) for entry in back.fell] == [
        ("v32-tp8-q16-kv32k-uniform, burst, sm90", -0.34),
        ("glm5-tp8-q4096-kv32k-uniform, burst, sm90", -0.07),
        ("v32-tp8-q4096-kv32k-uniform, burst, sm90", -0.06),
    ]
    for then, now in zip(later["prefill"], earlier["prefill"], strict=True):
        before, after = (made["moods"]["burst"]["peers"][OURS]["median_ms"] for made in (then, now))
        named = any(entry.what.startswith(then["id"] + ",") for entry in back.fell)
        assert named == (after / before > 1.05)
    assert len(back.noted) == 15  # of a higher ceiling, most of them in the same time


def test_sustained_figures_that_fell_are_noted_and_do_not_decide() -> None:
    now = results()
    now["prefill"][0]["moods"]["sustained"]["peers"][OURS]["of_roofline"] = 0.25
    verdict = judge(results(), now)
    assert verdict.ok
    assert [entry.what for entry in verdict.noted] == [f"{ID}, sustained, sm90"]
    data = as_data(verdict)
    assert (data["ok"], data["mood"], len(data["noted"])) == (True, "burst", 1)


def test_sustained_figures_decide_where_there_are_no_bursts() -> None:
    """As on a CPU."""
    before, now = results(), results(row(tflops=700.0))
    for found in (before, now):
        found["prefill"][0]["moods"].pop("burst")
    verdict = judge(before, now)
    assert [entry.what for entry in verdict.fell] == [f"{ID}, sustained, sm90"]
    assert (verdict.mood, verdict.noted) == ("sustained", [])


def test_what_holds() -> None:
    verdict = judge(results(), results(row(tflops=770.0)))  # 3.75% less
    assert verdict.ok
    assert (len(verdict.held), verdict.fell, verdict.lost, verdict.not_compared) == (1, [], [], [])


def test_what_fell_is_named_worst_first() -> None:
    before, now = results(row(s_kv=8192), row()), results(row(s_kv=8192), row())
    for made, share in zip(now["prefill"], (0.45, 0.40), strict=True):
        made["moods"]["burst"]["peers"][OURS]["of_roofline"] = share
    verdict = judge(before, now)
    assert not verdict.ok
    assert [str(entry) for entry in verdict.fell] == [
        f"{ID}, burst, sm90: 50.0% of the roofline then, 40.0% now (-20.0%)",
        "v32-tp1-q4096-kv8k-uniform, burst, sm90: 50.0% of the roofline then, 45.0% now (-10.0%)",
    ]
    assert judge(before, now, tolerance=0.25).ok
    assert as_data(verdict)["fell"][0]["change"] == pytest.approx(-0.2)


def test_shares_are_compared_and_not_times() -> None:
    now = results()
    for entry in now["prefill"][0]["moods"].values():  # half as fast, on half as fast a machine
        figure = entry["peers"][OURS]
        figure["tflops"] /= 2
        figure["median_ms"] *= 2
    assert judge(results(), now).ok


def test_a_figure_that_is_gone_is_lost() -> None:
    wrong = results()
    wrong["prefill"][0]["moods"]["burst"]["peers"][OURS]["fault"] = "out column 3 of query 0"
    del wrong["prefill"][0]["moods"]["sustained"]["peers"][OURS]
    wrong["prefill"][0]["refused"][OURS] = "kv_scale has shape (3,)"
    verdict = judge(results(), wrong)
    assert not verdict.ok
    assert verdict.lost == [
        f"{ID}, burst, sm90: wrong: out column 3 of query 0",
        f"{ID}, sustained, sm90: kv_scale has shape (3,)",
    ]


def test_peers_are_not_judged() -> None:
    now = results()
    for entry in now["prefill"][0]["moods"].values():
        del entry["peers"][PEER]
    assert judge(results(), now).ok


def test_what_cannot_be_compared_is_said() -> None:
    two = results(row(), row(s_kv=8192))
    now = results()
    now["prefill"][0]["moods"].pop("sustained")
    verdict = judge(two, now, left_out=["v32-tp1-q4096-kv8k-uniform"])
    assert verdict.ok
    assert verdict.not_compared == [
        "v32-tp1-q4096-kv8k-uniform: not among --shapes",
        f"{ID}, sustained, sm90: this run has no mood sustained",
    ]
    missing = judge(two, results())
    assert missing.not_compared == [
        f"v32-tp1-q4096-kv8k-uniform, {mood}, sm90: this version has no such shape"
        for mood in ("burst", "sustained")
    ]


def test_another_card_is_not_compared() -> None:
    now = results()
    now["machine"]["name"] = "NVIDIA H100"
    verdict = judge(results(), now)
    assert not verdict.ok
    assert verdict.compared == 0
    assert (
        "the file is of NVIDIA H200 (cuda), this run is on NVIDIA H100" in verdict.not_compared[0]
    )
    assert other_machine(results(), "NVIDIA H200", "cuda") is None


def test_without_a_ceiling_there_is_nothing_to_compare() -> None:
    before, now = results(), results()
    for entry in before["prefill"][0]["moods"].values():
        entry["peers"][OURS]["of_roofline"] = None
    assert len(judge(before, now).not_compared) == 2
    assert len(judge(now, before).not_compared) == 2
