"""Compiled kernels on disk, named by the hash of everything that made them.

No lock is ever taken: an entry is written to a temporary file of its own and renamed into place, so
a reader sees a whole entry or none, and a process that dies leaves nothing that another could wait
for. Processes that compile the same kernel at the same time each keep their own build, and the last
rename stays. The cache is a convenience: whatever is wrong with it is said once, as a
`KernelCacheWarning`, and the caller goes on with the kernel in memory.

A cubin is code that will run with this user's data. One is read only from a directory and a file
that belong to this user and that not everybody may write.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import SparseMLAError, error, warn

MAGIC = b"sparse-mla cubin 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
LENGTH_BYTES = 8
STALE_SECONDS = 3600.0
"""A temporary file older than this belongs to a process that died: no compile takes as long."""


class KernelCacheWarning(UserWarning):
    """The kernel cache could not be used as asked; ``id`` names the record that explains it."""

    def __init__(self, cause: SparseMLAError) -> None:
        self.cause = cause
        super().__init__(str(cause))

    @property
    def id(self) -> str:
        """The slug of the record, for ``sparse-mla explain``."""
        return self.cause.id


class _UntrustedError(Exception):
    """A directory or file that another user could have filled."""


_said: set[tuple[str, str]] = set()


def directory() -> Path | None:
    """Where cubins are kept: ``SPARSE_MLA_CACHE_DIR``, else ``sparse-mla`` in the user's cache
    directory; None for a user without a home.
    """
    chosen = os.environ.get("SPARSE_MLA_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification: a relative path is to be ignored.
    if base and os.path.isabs(base):
        return Path(base) / "sparse-mla"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "sparse-mla" if os.path.isabs(home) else None


def read(key: str) -> tuple[bytes, str] | None:
    """The cubin and the compiler's log stored under ``key``, or None when it has to be compiled."""
    path = directory()
    if path is None:
        return None
    name = f"{key}.cubin"
    try:
        with _opened(path) as folder:
            data = _read_file(name, folder)
    except _UntrustedError as refusal:
        _say(error("cache-untrusted", path=path, reason=refusal))
        return None
    except OSError:
        # Not there, unreadable, or stale on a network file system: compile; `write` says what is
        # wrong, if anything is.
        return None
    entry = _decode(key, data)
    if entry is None:
        _say(error("cache-corrupt", path=path / name, bytes=len(data)))
    return entry


def write(key: str, cubin: bytes, log: str) -> None:
    """Store a compiled kernel under ``key``; a cache that cannot be written is said once and is no
    failure.
    """
    path = directory()
    try:
        if path is None:
            raise FileNotFoundError("this user has no home directory")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opened(path) as folder:
            _remove_stale(folder)
            _write_file(f"{key}.cubin", _encode(key, cubin, log), folder)
    except _UntrustedError:
        # `read` has said it.
        return
    except OSError as failure:
        where = path or "~/.cache/sparse-mla"
        _say(error("cache-unwritable", path=where, reason=failure.strerror or str(failure)))


def _encode(key: str, cubin: bytes, log: str) -> bytes:
    """``MAGIC | sha256 of the rest | key | length of the log | log | cubin``."""
    text = log.encode()
    body = bytes.fromhex(key) + len(text).to_bytes(LENGTH_BYTES, "little") + text + cubin
    return MAGIC + hashlib.sha256(body).digest() + body


def _decode(key: str, data: bytes) -> tuple[bytes, str] | None:
    start = len(MAGIC) + DIGEST_BYTES
    digest, body = data[len(MAGIC) : start], data[start:]
    if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
        return None
    # An intact entry of another kernel, copied to this name.
    if body[:DIGEST_BYTES] != bytes.fromhex(key):
        return None
    text_start = DIGEST_BYTES + LENGTH_BYTES
    text_end = text_start + int.from_bytes(body[DIGEST_BYTES:text_start], "little")
    return body[text_end:], body[text_start:text_end].decode()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The cache directory, open and checked. Files are opened relative to it, so nobody can swap it
    in between.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(folder), "the directory")
        yield folder
    finally:
        os.close(folder)


def _check_owner(status: os.stat_result, what: str) -> None:
    user = os.geteuid()
    if status.st_uid != user:
        raise _UntrustedError(f"{what} belongs to user {status.st_uid}, not to user {user}")
    if status.st_mode & stat.S_IWOTH:
        raise _UntrustedError(f"{what} is writable by everybody")


def _read_file(name: str, folder: int) -> bytes:
    # Neither a link, which could lead anywhere, nor a pipe, which would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=folder), "rb") as file:
        _check_owner(os.fstat(file.fileno()), f"its file {name}")
        return file.read()


def _write_file(name: str, data: bytes, folder: int) -> None:
    temporary = f".{name[:16]}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _remove_stale(folder: int) -> None:
    """Remove what killed processes left. Names of temporary files are unique, so this is tidiness,
    not a need.
    """
    oldest = time.time() - STALE_SECONDS
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(".tmp"):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < oldest:
                    os.unlink(name, dir_fd=folder)


def _say(cause: SparseMLAError) -> None:
    """Warn, once in this process about one path."""
    what = (cause.id, str(cause.context["path"]))
    if what not in _said:
        _said.add(what)
        warn(KernelCacheWarning(cause))
