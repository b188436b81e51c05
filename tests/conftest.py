"""What every test gets: a clean environment, reproducible properties, a reason for skipping."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import settings

# Examples run as long as they need on a shared machine; in CI they are the same ones each time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


CHROMIUM = "/usr/bin/chromium"
CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SPARSE_MLA_ variable of the developer's shell must not change what a test means."""
    for name in [name for name in os.environ if name.startswith("SPARSE_MLA_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    """What a test draws does not depend on the tests before it."""
    torch = sys.modules.get("torch")  # tests of the command line's start do without it
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module's kernels are compiled into a cache of its own, empty at first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, from pip")
    if not shutil.which(CHROMIUM):
        pytest.skip(f"needs {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield chromium
        chromium.close()


@lru_cache(maxsize=1)
def _why_no_hopper() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (9.0): {name} is {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is no Hopper GPU, and say why."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_hopper() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
