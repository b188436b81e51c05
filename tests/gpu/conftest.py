"""Everything here needs a Hopper GPU, and says so by the marker ``gpu``.

``SPARSE_MLA_TEST_DEVICE=cpu python -m pytest tests/gpu`` tries the tests' own logic without one: on
CPU tensors and the ``cpu`` backend, without what only CUDA has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hopper import ON_GPU, wide

from sparse_mla import prepared

HERE = Path(__file__).parent

OF_ANY_KERNEL = {
    f"test_sm90_{name}"
    for name in ("async", "cases", "contract", "determinism", "general", "sinks_scales", "sizes")
}
"""What is tested there holds for every kernel. Their problems are small, and the plan gives nearly
all of them to the kernels for few heads; so each test also runs with the kernel for 64."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            if ON_GPU:
                item.add_marker(pytest.mark.gpu)
            elif item.get_closest_marker("cuda_only"):
                item.add_marker(pytest.mark.skip(reason="tests what only CUDA has"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if ON_GPU and metafunc.module.__name__ in OF_ANY_KERNEL:
        metafunc.parametrize("_kernels", ["plan", "64-heads"], indirect=True)


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which kernels run: those of the plan, or the one for 64 heads."""
    if getattr(request, "param", "plan") == "plan":
        yield
    else:
        with wide():
            yield


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    """No call is like one of an earlier test."""
    prepared.forget()


@pytest.fixture(autouse=True)
def _sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: arithmetic close enough for the limits of the kernel."""
    if not ON_GPU:
        monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "float32")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: tests what has no counterpart on CPU tensors")
