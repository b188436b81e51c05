"""The regression gate on literal figures: what falls, what holds, what cannot be compared."""

from __future__ import annotations

import pytest
from bench_results import OURS, PEER, results, row

from sparse_mla.benchmarks.gate import as_data, judge, other_machine

ID = "v32-tp1-q4096-kv32k-uniform"


def test_what_holds() -> None:
    verdict = judge(results(), results(row(tflops=770.0)))  # 3.75% less
    assert verdict.ok
    assert (len(verdict.held), verdict.fell, verdict.lost, verdict.not_compared) == (2, [], [], [])


def test_what_fell_is_named_worst_first() -> None:
    now = results()
    now["prefill"][0]["moods"]["burst"]["peers"][OURS]["of_roofline"] = 0.40
    now["prefill"][0]["moods"]["sustained"]["peers"][OURS]["of_roofline"] = 0.45
    verdict = judge(results(), now)
    assert not verdict.ok
    assert [str(entry) for entry in verdict.fell] == [
        f"{ID}, burst, sm90: 50.0% of the roofline then, 40.0% now (-20.0%)",
        f"{ID}, sustained, sm90: 50.0% of the roofline then, 45.0% now (-10.0%)",
    ]
    assert judge(results(), now, tolerance=0.25).ok
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
    now["prefill"][0]["moods"].pop("burst")
    verdict = judge(two, now, left_out=["v32-tp1-q4096-kv8k-uniform"])
    assert verdict.ok
    assert verdict.not_compared == [
        "v32-tp1-q4096-kv8k-uniform: not among --shapes",
        f"{ID}, burst, sm90: this run has no mood burst",
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
