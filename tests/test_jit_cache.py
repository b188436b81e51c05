"""The cache of compiled kernels: what it must survive, and what it must refuse."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sparse_mla import jit_cache
from sparse_mla.jit_cache import KernelCacheWarning

KEY = "5a" * 32
OTHER_KEY = "5b" * 32
CUBIN = bytes(range(256)) * 8
LOG = "ptxas info    : Used 10 registers"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty place for the cache, in a process that has not warned yet."""
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit_cache, "_said", set())
    return tmp_path / "cache"


def stored(cache: Path) -> Path:
    jit_cache.write(KEY, CUBIN, LOG)
    (path,) = cache.iterdir()
    return path


def warned(record_id: str, function, *arguments) -> object:
    """The function's result, having warned once, with this record."""
    with pytest.warns(KernelCacheWarning) as caught:
        result = function(*arguments)
    assert [warning.message.id for warning in caught] == [record_id]
    assert caught[0].filename == __file__  # the line that called us, however deep we are
    return result


def silent(function, *arguments) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*arguments)


def test_an_entry_comes_back(cache: Path) -> None:
    assert silent(jit_cache.read, KEY) is None
    silent(jit_cache.write, KEY, CUBIN, LOG)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)
    assert silent(jit_cache.read, OTHER_KEY) is None


def test_directory_and_file_are_private(cache: Path) -> None:
    old = os.umask(0)
    try:
        path = stored(cache)
    finally:
        os.umask(old)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPARSE_MLA_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"SPARSE_MLA_CACHE_DIR": "~/a", "HOME": "/c"}, "/c/a"),
        ({"SPARSE_MLA_CACHE_DIR": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/sparse-mla"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/sparse-mla"),
        ({"HOME": "/c"}, "/c/.cache/sparse-mla"),
    ],
    ids=["own-variable", "tilde", "xdg", "xdg-relative-is-ignored", "home"],
)
def test_where_the_cache_is(environment, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SPARSE_MLA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert jit_cache.directory() == Path(expected)


def test_user_without_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`expanduser` then gives "~" back: no directory of that name is made where we stand."""
    monkeypatch.delenv("SPARSE_MLA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert silent(jit_cache.read, KEY) is None
    warned("cache-unwritable", jit_cache.write, KEY, CUBIN, LOG)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 1, 18, 19, 50, 51, 83, 90, 91, 92, -1])
def test_truncated_entry(length: int, cache: Path) -> None:
    path = stored(cache)
    path.write_bytes(path.read_bytes()[:length])
    assert warned("cache-corrupt", jit_cache.read, KEY) is None
    silent(jit_cache.write, KEY, CUBIN, LOG)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)


@pytest.mark.parametrize("position", [0, 18, 19, 50, 51, 82, 83, 90, 91, 130, -1])
def test_one_altered_byte(position: int, cache: Path) -> None:
    path = stored(cache)
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert warned("cache-corrupt", jit_cache.read, KEY) is None


def test_one_byte_too_many(cache: Path) -> None:
    path = stored(cache)
    path.write_bytes(path.read_bytes() + b"\0")
    assert warned("cache-corrupt", jit_cache.read, KEY) is None


def test_intact_entry_of_another_kernel(cache: Path) -> None:
    stored(cache).rename(cache / f"{OTHER_KEY}.cubin")
    assert warned("cache-corrupt", jit_cache.read, OTHER_KEY) is None


def test_damage_is_said_once_for_a_file(cache: Path) -> None:
    stored(cache).write_bytes(b"")
    warned("cache-corrupt", jit_cache.read, KEY)
    assert silent(jit_cache.read, KEY) is None


def test_path_is_a_file(cache: Path) -> None:
    cache.write_text("not a directory")
    assert silent(jit_cache.read, KEY) is None
    warned("cache-unwritable", jit_cache.write, KEY, CUBIN, LOG)
    silent(jit_cache.write, OTHER_KEY, CUBIN, LOG)
    assert cache.read_text() == "not a directory"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("call", ["mkdir", "open", "replace"])
def test_write_that_fails(
    call: str, code: int, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read-only, foreign, full, or lost to another process on a network file system."""
    if call != "mkdir":
        cache.mkdir(mode=0o700)
    real_open = os.open

    def fail(path, *arguments, **options):
        if call == "open" and not str(path).endswith(".tmp"):
            return real_open(path, *arguments, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.warns(KernelCacheWarning, match=os.strerror(code)):
        jit_cache.write(KEY, CUBIN, LOG)
    silent(jit_cache.write, OTHER_KEY, CUBIN, LOG)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_read_that_fails_compiles_instead(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(cache)

    def stale(*arguments, **options):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "open", stale)
    assert silent(jit_cache.read, KEY) is None


def test_foreign_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(cache)
    before = path.read_bytes()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert warned("cache-untrusted", jit_cache.read, KEY) is None
    silent(jit_cache.write, KEY, b"other", LOG)
    assert silent(jit_cache.read, KEY) is None
    assert path.read_bytes() == before


def test_directory_that_everybody_may_write(cache: Path) -> None:
    stored(cache)
    cache.chmod(0o777)
    assert warned("cache-untrusted", jit_cache.read, KEY) is None
    silent(jit_cache.write, OTHER_KEY, CUBIN, LOG)
    assert len(list(cache.iterdir())) == 1
    cache.chmod(0o755)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)


def test_file_that_everybody_may_write(cache: Path) -> None:
    stored(cache).chmod(0o646)
    assert warned("cache-untrusted", jit_cache.read, KEY) is None
    silent(jit_cache.write, KEY, CUBIN, LOG)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)


def test_foreign_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file in a directory of ours, as it can be in one that a group writes."""
    path = stored(cache)
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if status.st_ino == path.stat().st_ino:
            fields = list(status)
            fields[4] = os.geteuid() + 1
            return os.stat_result(fields)
        return status

    monkeypatch.setattr(os, "fstat", fstat)
    assert warned("cache-untrusted", jit_cache.read, KEY) is None


def test_link_is_not_followed(cache: Path, tmp_path: Path) -> None:
    path = stored(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert silent(jit_cache.read, KEY) is None


@pytest.mark.timeout(10)
def test_pipe_does_not_hang(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    os.mkfifo(cache / f"{KEY}.cubin")
    assert warned("cache-corrupt", jit_cache.read, KEY) is None


def test_killed_process_leaves_nothing_to_wait_for(cache: Path) -> None:
    """Killed with its temporary file written and not yet renamed."""
    program = f"""
import os, signal
from sparse_mla import jit_cache
os.replace = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
jit_cache.write({KEY!r}, b"cubin", "log")
"""
    died = subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.endswith(".tmp")

    assert silent(jit_cache.read, KEY) is None
    silent(jit_cache.write, KEY, CUBIN, LOG)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)
    assert left.exists(), "its process might still be writing"

    os.utime(left, (0, 0))
    silent(jit_cache.write, OTHER_KEY, CUBIN, LOG)
    assert sorted(path.name for path in cache.iterdir()) == [
        f"{KEY}.cubin",
        f"{OTHER_KEY}.cubin",
    ]


def test_old_entries_are_kept(cache: Path) -> None:
    os.utime(stored(cache), (0, 0))
    jit_cache.write(OTHER_KEY, CUBIN, LOG)
    assert silent(jit_cache.read, KEY) == (CUBIN, LOG)


def test_warning_survives_a_process_boundary(cache: Path) -> None:
    stored(cache).write_bytes(b"")
    with pytest.warns(KernelCacheWarning) as caught:
        jit_cache.read(KEY)
    copy = pickle.loads(pickle.dumps(caught[0].message))
    assert copy.id == "cache-corrupt"
    assert str(copy) == str(caught[0].message)
    assert "More: sparse-mla explain cache-corrupt" in str(copy)
