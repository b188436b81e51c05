"""Threads that each compute whole queries, with few OpenMP threads of their own.

A query is some forty operations. Splitting each over all cores costs a barrier an operation and
moves half of every buffer between the cores' caches; a query a core costs neither. How many OpenMP
threads a thread uses is, by the OpenMP standard, a setting of that thread alone, so that a worker
may choose its own. ``torch.set_num_threads`` would change the process's default as well, so the
runtime that torch loaded is asked directly. Where it is not found, or does not answer for torch,
there are no workers and the operations themselves use all cores.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

MOST_WORKERS = 8
"""Python takes part in every operation: more workers than this wait for each other."""

Run = Callable[[list[Callable[[], None]]], None]


def count() -> int:
    """How many workers a call is worth on this thread's cores; 1: none beside the caller."""
    threads = torch.get_num_threads()
    return min(threads, MOST_WORKERS) if threads > 1 and _set_own_threads() else 1


@contextmanager
def started(workers: int) -> Iterator[Run]:
    """A function that runs tasks, each on a worker, and returns when all are done.

    It raises what a task raised. With one worker tasks run here, in order.
    """
    if workers == 1:
        yield _run_here
        return
    own = max(1, torch.get_num_threads() // workers)
    with ThreadPoolExecutor(workers, "sparse-mla", _begin, (own,)) as pool:

        def run(tasks: list[Callable[[], None]]) -> None:
            for done in [pool.submit(task) for task in tasks]:
                done.result()

        yield run


def _run_here(tasks: list[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _begin(own: int) -> None:
    """Set this new thread's OpenMP threads, after torch has set them to the process's default."""
    torch.get_num_threads()
    set_own_threads = _set_own_threads()
    if set_own_threads is not None:
        set_own_threads(own)


@cache
def _set_own_threads() -> Callable[[int], None] | None:
    """The ``omp_set_num_threads`` that torch obeys, found by trying; ``None``: there is none."""
    for path in _openmp_libraries():
        try:
            found: Callable[[int], None] = ctypes.CDLL(path).omp_set_num_threads
        except (OSError, AttributeError):
            continue
        answers: list[int] = []
        for wanted in (1, 2):
            thread = threading.Thread(target=_try, args=(found, wanted, answers))
            thread.start()
            thread.join()
        if answers == [1, 2]:
            return found
    return None


def _try(set_threads: Callable[[int], None], wanted: int, answers: list[int]) -> None:
    torch.get_num_threads()
    set_threads(wanted)
    answers.append(torch.get_num_threads())


def _openmp_libraries() -> list[str]:
    """OpenMP runtimes that this process has loaded, torch's own first."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    lines = [line for line in maps.splitlines() if "omp" in line and ".so" in line]
    paths = {line.split(maxsplit=5)[5] for line in lines}
    names = ("libgomp", "libiomp", "libomp")
    found = [path for path in paths if Path(path).name.startswith(names)]
    return sorted(found, key=lambda path: ("torch" not in path, path))
