"""The cache of compiled kernels."""

from __future__ import annotations

from ..record import BackendError, ErrorRecord, Solution
from ._programs import GENERAL, KERNEL, STRICT

SINCE = "0.1.0"
OPERATORS = (STRICT, GENERAL)

_WARN = (
    KERNEL
    + """\
import warnings
from sparse_mla.jit_cache import KernelCacheWarning


def compile_strictly():
    with use_cache, warnings.catch_warnings():
        warnings.simplefilter("error")  # make the warning an exception
        try:
            compile_variant(variant)
        except KernelCacheWarning as warning:
            raise warning.cause


"""
)

RECORDS: tuple[ErrorRecord, ...] = (
    ErrorRecord(
        id="cache-unwritable",
        exception=BackendError,
        title="Compiled kernels cannot be kept",
        message="the kernel cache cannot be written at {path}: {reason}",
        detail=(
            "The kernels are compiled again, about a second each, in every process that uses "
            "them. Results are the same."
        ),
        fix="set SPARSE_MLA_CACHE_DIR to a directory of your own that can be written.",
        yours="The kernel cache at {path} could not be written: {reason}.",
        meaning=(
            "A warning, not a failure, given once in a process. Compiled kernels are kept on "
            "disk so that only the first process pays for compiling. They could not be "
            "written."
        ),
        trigger="a directory cannot be made, or a file in it cannot be written or renamed.",
        situations=(
            "The home directory is read-only or missing, as in many containers.",
            "The disk is full, or a quota is used up.",
            "SPARSE_MLA_CACHE_DIR names a file.",
        ),
        solutions=(
            Solution(
                "Choose another directory.", "export SPARSE_MLA_CACHE_DIR=/scratch/$USER/sparse-mla"
            ),
            Solution(
                "Silence the warning where compiling each time is fine.",
                (
                    "warnings.filterwarnings('ignore', "
                    "category=sparse_mla.jit_cache.KernelCacheWarning)"
                ),
            ),
        ),
        before=_WARN
        + """\
cache.write_text("a file, not a directory")
compile_strictly()
""",
        after=_WARN
        + """\
compile_strictly()  # makes the directory
""",
        related=("cache-untrusted", "cache-corrupt"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "Read-only file system",
            "Permission denied: ~/.cache",
            "No space left on device",
        ),
        needs=("nvrtc",),
    ),
    ErrorRecord(
        id="cache-untrusted",
        exception=BackendError,
        title="Another user could have filled the kernel cache",
        message="the kernel cache at {path} is not used: {reason}",
        detail=(
            "A cached kernel is code that runs with your data, so it is read only from what "
            "belongs to you and what others cannot write."
        ),
        fix="set SPARSE_MLA_CACHE_DIR to a directory of your own, or run chmod o-w on this one.",
        yours="The kernel cache at {path} was left alone: {reason}.",
        meaning=(
            "A warning, not a failure, given once in a process. The cache's directory or one "
            "of its files belongs to another user or may be written by everybody, so somebody"
            " else could have put a kernel there. Nothing is read from it and nothing is "
            "written to it; kernels are compiled in memory."
        ),
        trigger=(
            "the owner of the directory or file is not the effective user, or its mode lets "
            "everybody write."
        ),
        situations=(
            "SPARSE_MLA_CACHE_DIR is a shared directory, such as /tmp.",
            (
                "A container runs as root with a user's home directory mounted, or the other way "
                "round."
            ),
        ),
        solutions=(
            Solution(
                "Choose a directory of your own.",
                "export SPARSE_MLA_CACHE_DIR=$HOME/.cache/sparse-mla",
            ),
            Solution("Take the permission away.", "chmod o-w DIRECTORY"),
        ),
        before=_WARN
        + """\
cache.mkdir()
cache.chmod(0o777)
compile_strictly()
""",
        after=_WARN
        + """\
cache.mkdir()
cache.chmod(0o700)
compile_strictly()
""",
        related=("cache-unwritable", "cache-corrupt"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=(
            "shared /tmp",
            "umask",
            "world writable",
            "another user",
            "root owned cache",
            "docker user",
        ),
        needs=("nvrtc",),
    ),
    ErrorRecord(
        id="cache-corrupt",
        exception=BackendError,
        title="A cached kernel was damaged and is compiled again",
        message="the cached kernel {path} is damaged and is compiled again",
        detail="Its {bytes} bytes do not have the hash that was stored with them.",
        fix="nothing, unless it comes back: then check the disk, or delete the directory.",
        yours="The cached kernel {path} was damaged.",
        meaning=(
            "A warning, not a failure, given once for a file. Each cached kernel is stored "
            "with a hash, which is checked before it is loaded. This one was cut short or "
            "changed, so it was not loaded; it is compiled again and replaced."
        ),
        trigger="the stored hash does not match the contents of a file in the cache.",
        situations=(
            (
                "The machine lost power or the disk filled up while files were being written or "
                "copied."
            ),
            "The cache was copied from another machine and the copy is not complete.",
        ),
        solutions=(
            Solution("Leave it: the file is replaced."),
            Solution("Delete the cache; it is built again.", "rm -r ~/.cache/sparse-mla"),
        ),
        before=_WARN
        + """\
compile_strictly()
(file,) = cache.iterdir()
file.write_bytes(file.read_bytes()[:-1])
compile_strictly()
""",
        after=_WARN
        + """\
compile_strictly()
compile_strictly()  # from the cache
""",
        related=("cache-unwritable", "cache-untrusted"),
        operators=OPERATORS,
        since=SINCE,
        symptoms=("truncated cubin", "disk full", "checksum", "power loss", "compiled again"),
        needs=("nvrtc",),
    ),
)
