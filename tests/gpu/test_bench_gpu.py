"""The benchmark's runner on a GPU: both moods, rotated sets, every output judged."""

from __future__ import annotations

import pytest
import torch

from sparse_mla.benchmarks import accuracy, ceilings, runner
from sparse_mla.benchmarks.shapes import REGISTRY

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("id", ["v32-tp1-q128-kv4k-topk", "v32-tp8-q1-kv4k-uniform"])
def test_a_run_on_a_gpu(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL, "cuda", 1024)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cuda", 1 << 24)
    monkeypatch.setattr(ceilings, "SUSTAINED_MS", 4.0)  # of so small a matmul: hundreds of calls
    settings = runner.Settings(rounds=9, host=False)
    device = torch.device("cuda", torch.cuda.current_device())
    found = runner.run(device, [REGISTRY[id]], ["sm90", "torch-gather-bmm"], settings)
    (row,) = found["prefill"]
    assert set(row["moods"]) == set(found["ceilings"]) == {"burst", "sustained"}
    assert row["input_sets"] >= 2
    assert row["l2_overwritten"] == (row["touched_bytes"] < 2 * found["machine"]["l2_bytes"])
    for entry in row["moods"].values():
        assert entry["card"]["name"] == found["machine"]["name"]
        assert 100 < entry["sm_mhz"] < 3000
        assert entry["peers"]["sm90"]["runs"] == 9
        for figure in entry["peers"].values():
            assert figure["fault"] is None
            assert figure["min_ms"] > 0
    for name, entries in found["ceilings"].items():
        assert "fp8_matmul" in entries
        for entry in entries.values():
            assert 100 < entry["sm_mhz"] < 3000
            assert (entry["runs"] > 9) == (name == "sustained")


def test_a_scale_a_token_keeps_what_one_scale_loses_to_outliers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accuracy, "KINDS", {})
    monkeypatch.setattr(accuracy, "OUTLIER_FACTORS", accuracy.OUTLIER_FACTORS[-1:])
    found = accuracy.measure(torch.device("cuda"), ["sm90"], queries=1)
    methods = found["scales"][-1]["methods"]
    assert methods["sm90, kv_scale per tensor"]["kernels"] == ["prefill-h64-d576"]
    assert methods["sm90, kv_scale per token"]["kernels"] == ["prefill-h64-d576-kv-scales"]
    one, each = (methods[f"sm90, kv_scale per {per}"]["median"] for per in ("tensor", "token"))
    assert one > 2 * each
    # And no more is lost than by these scales in float64.
    assert each < 1.1 * methods["reference, kv_scale per token"]["median"]
