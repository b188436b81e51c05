"""Who may import whom, read from the source; what ``import sparse_mla`` costs and leaves out."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import sparse_mla

ROOT = Path(sparse_mla.__file__).parent
PACKAGE = "sparse_mla"

# A room is a module or a folder of sparse_mla; these modules are parts of the room they serve.
PART_OF = {"violations": "checks", "jit_cache": "jit", "jit_driver": "jit", "__main__": "cli"}

# The rooms that a room may import, itself apart.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "params": set(),
    "kv_cache": set(),
    "environment": set(),
    "version": set(),
    "quantize": {"errors", "params", "kv_cache"},
    "merge": {"errors", "params", "kv_cache"},
    "checks": {"errors", "params", "kv_cache", "environment"},
    "jit": {"errors", "environment", "version"},
    "callfile": {"errors", "params", "environment", "version"},
    "debug": {"errors", "params", "environment"},
    "backends": {"params", "errors", "quantize", "kv_cache", "merge", "jit", "environment"},
    "dispatch": {"params", "errors", "environment"},
    "prepared": {"checks", "dispatch", "params", "environment"},
    "ops": {
        "checks",
        "dispatch",
        "prepared",
        "params",
        "debug",
        "callfile",
        "errors",
        "environment",
        "quantize",
        "merge",
    },
    "interface": {
        "ops",
        "prepared",
        "checks",
        "dispatch",
        "params",
        "quantize",
        "merge",
        "errors",
    },
    "integrations": {"", "callfile"},  # the public package, as anyone would
    "": {"interface", "ops", "quantize", "merge", "kv_cache", "errors", "version"},
}
ANYTHING = {"testing", "benchmarks", "cli"}

# Among those that may import anything, who may be imported by whom.
ONLY_BY = {"cli": {"cli"}, "benchmarks": {"benchmarks", "cli"}}

# Inside functions only, so that `import sparse_mla` does not do it.
MAY_IMPORT_LATE: dict[str, set[str]] = {
    "dispatch": {"backends"},
    "callfile": {"checks", "dispatch", "interface"},  # a call read from a file can be run
}

# Packages that a room alone may name, wherever in the file.
ONLY_IN = {
    "cuda": {"jit", "backends", "cli"},
    "triton": {"backends", "cli"},
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"benchmarks", "cli"},
    "safetensors": {"callfile"},
    "jinja2": {"errors"},
    "starlette": {"errors"},
    "uvicorn": {"cli"},
    "transformers": {"integrations"},
    "sglang": {"integrations", "benchmarks"},
    "flash_mla": {"benchmarks"},
}

# An import whose name is put together from parts that the source does not show.
UNREADABLE = {"callfile/call.py"}


@dataclass(frozen=True)
class Import:
    """One import statement, or one call of ``import_module``."""

    file: str  # below sparse_mla
    line: int
    target: str  # full dotted name
    late: bool  # within a function, or for the type checker alone

    @property
    def room(self) -> str:
        return room_of(f"{PACKAGE}.{self.file.removesuffix('.py').replace('/', '.')}")

    def __str__(self) -> str:
        return f"{PACKAGE}/{self.file}:{self.line} imports {self.target}"


def room_of(dotted: str) -> str:
    """The room of a full dotted name within sparse_mla; "" for the package itself."""
    parts = dotted.split(".")[1:]
    if not parts or parts == ["__init__"]:
        return ""
    return PART_OF.get(parts[0], parts[0])


def imports_of(source: str, file: str) -> Iterator[Import]:
    """Every import in ``source``, its name made full; ``file`` is the path below sparse_mla."""
    parent = ".".join([PACKAGE, *Path(file).parent.parts])

    def full(name: str, level: int) -> str:
        if not level:
            return name
        base = parent.split(".")[: len(parent.split(".")) - (level - 1)]
        return ".".join([*base, name]).rstrip(".")

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, late)
        elif isinstance(node, ast.ImportFrom):
            base = full(node.module or "", node.level)
            for alias in node.names:
                yield Import(file, node.lineno, f"{base}.{alias.name}", late)
        elif isinstance(node, ast.Call) and name_of(node.func) in ("import_module", "__import__"):
            text, complete = leading_text(node.args[0])
            dots = len(text) - len(text.lstrip("."))
            target = full(text.lstrip("."), dots) if text else ""
            yield Import(file, node.lineno, target if complete else target + "*", late)
        inner = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and name_of(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from walk(child, True)
            for child in node.orelse:
                yield from walk(child, late)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    yield from walk(ast.parse(source), False)


def name_of(node: ast.AST) -> str:
    """The last part of ``a.b.c``."""
    return getattr(node, "attr", getattr(node, "id", ""))


def leading_text(node: ast.AST) -> tuple[str, bool]:
    """The text at the start of a string or f-string, and whether that is all of it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value, True
    if isinstance(node, ast.JoinedStr) and node.values:
        return leading_text(node.values[0])[0], False
    return "", False


def all_imports() -> list[Import]:
    return [
        found
        for path in sorted(ROOT.rglob("*.py"))
        for found in imports_of(path.read_text(), path.relative_to(ROOT).as_posix())
    ]


def complaint(found: Import) -> str | None:
    """What is wrong with an import, or ``None``."""
    top = found.target.rstrip("*").split(".")[0]
    if not top:
        return None if found.file in UNREADABLE else f"{found}: nobody can read what that is"
    if top != PACKAGE:
        if top in ONLY_IN and found.room not in ONLY_IN[top]:
            return f"{found}: only {sorted(ONLY_IN[top]) or 'examples and tests'} may"
        return None
    return complaint_within(found)


def complaint_within(found: Import) -> str | None:
    room, dotted = found.room, found.target.rstrip("*")
    target = room_of(dotted)
    name = dotted.partition(".")[2]
    if not ((ROOT / name).exists() or (ROOT / f"{name}.py").exists() or "." in name):
        target = ""  # a name of the package itself: `from sparse_mla import sparse_mla_prefill`
    if room in ANYTHING:
        who = ONLY_BY.get(target, {room})
        return None if room in who else f"{found}: only {sorted(who)} and tests import {target}"
    if room not in MAY_IMPORT:
        return f"{found}: the room {room!r} has no row in MAY_IMPORT"
    if target == room:
        return complaint_among_backends(found) if room == "backends" else None
    allowed = MAY_IMPORT[room] | (MAY_IMPORT_LATE.get(room, set()) if found.late else set())
    if target not in allowed:
        return f"{found}: {room or 'the package'} may import {sorted(allowed)}"
    if found.file == "backends/reference.py" and target == "jit":
        return f"{found}: the reference imports no kernel"
    return None


def complaint_among_backends(found: Import) -> str | None:
    """A backend imports its own parts (``sm90``: ``sm90_plan``) and what they share, no other."""
    parts = found.target.rstrip("*").split(".")[2:]
    own = Path(found.file).stem
    backends = {"reference", "cpu", "portable", "sm90"}
    others = {part for part in parts[:1] if part.split("_")[0] in backends - {own.split("_")[0]}}
    return f"{found}: a backend never imports another" if others else None


def test_every_import_is_allowed():
    found = all_imports()
    assert len(found) > 50
    complaints = [text for text in map(complaint, found) if text]
    assert not complaints, "\n".join(complaints)


def test_every_room_has_a_row():
    rooms = {
        room_of(f"{PACKAGE}.{path.relative_to(ROOT).parts[0].removesuffix('.py')}")
        for path in ROOT.rglob("*.py")
    }
    assert rooms - set(MAY_IMPORT) - ANYTHING == set()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("errors/record.py", "from ..params import D_V"),
        ("errors/record.py", "def f():\n    import sparse_mla.checks"),
        ("params.py", "from . import errors"),
        ("quantize.py", "from .checks import check"),
        ("backends/cpu.py", "from .reference import run"),
        ("backends/cpu.py", "from . import sm90"),
        ("backends/sm90_plan.py", "from .cpu import run"),
        ("backends/cpu.py", "def f():\n    from sparse_mla.backends import reference"),
        ("backends/reference.py", "from ..jit import compile_kernel"),
        ("backends/cpu.py", "from ..dispatch import run"),
        ("dispatch.py", "from .backends import cpu"),
        ("callfile/call.py", "from ..interface import sparse_mla_prefill"),
        ("checks.py", "from .testing import cases"),
        ("ops.py", "def f():\n    from .cli import main"),
        ("testing/cases.py", "from ..cli import main"),
        ("interface.py", "import importlib\nimportlib.import_module('sparse_mla.backends.cpu')"),
        ("checks.py", "from importlib import import_module\nimport_module(f'.testing.{x}', p)"),
        ("checks.py", "import importlib\nimportlib.import_module(name)"),
        ("checks.py", "def f():\n    import triton.language as tl"),
        ("errors/explain.py", "def f():\n    from rich.console import Console"),
        ("checks.py", "def f():\n    import jinja2"),
        ("interface.py", "if TYPE_CHECKING:\n    from transformers import PreTrainedModel"),
        ("params.py", "if TYPE_CHECKING:\n    from .checks import Call"),
        ("ops.py", "from . import backends"),
        ("newcomer.py", "from .params import D_V"),
        ("integrations/sglang.py", "from ..checks import check_q8kv8"),
        ("integrations/sglang.py", "def f():\n    from ..interface import sparse_mla_prefill"),
        ("interface.py", "def f():\n    from .integrations import transformers"),
        ("callfile/dump.py", "from ..integrations import capture"),
        ("testing/cases.py", "from ..benchmarks import shapes"),
        ("dispatch.py", "def f():\n    from .benchmarks import runner"),
        ("benchmarks/runner.py", "from ..cli.terminal import say"),
        ("backends/sm90.py", "def f():\n    import flash_mla"),
    ],
)
def test_the_rule_sees_a_forbidden_import(file: str, source: str):
    assert [text for text in map(complaint, imports_of(source, file)) if text]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("dispatch.py", "def f(name):\n    importlib.import_module(f'.backends.{name}', p)"),
        ("backends/sm90.py", "from . import sm90_plan\nfrom .. import jit_cache\nimport cuda.core"),
        ("cli/demo.py", "from ..testing import cases\nimport rich.table\nfrom .. import dispatch"),
        ("testing/cases.py", "from sparse_mla import sparse_mla_prefill"),
        ("benchmarks/runner.py", "from ..testing import compare\nfrom .. import dispatch"),
        ("cli/bench.py", "def f():\n    from ..benchmarks import runner"),
        ("errors/records/data.py", "from ..record import ErrorRecord\nfrom . import dispatch"),
        ("integrations/sglang.py", "from .. import sparse_mla_prefill\nfrom .. import callfile"),
        ("integrations/transformers.py", "import transformers\nfrom ..callfile import Call"),
    ],
)
def test_the_rule_leaves_an_allowed_import_alone(file: str, source: str):
    assert [text for text in map(complaint, imports_of(source, file)) if text] == []


def run_fresh(program: str) -> dict[str, object]:
    """What ``program`` prints as JSON, in a Python that has imported nothing yet."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result


IMPORT_PROGRAM = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import sparse_mla
seconds = time.perf_counter() - start
print(json.dumps({
    "seconds": seconds,
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def test_import_takes_less_than_0_3_s_beyond_torch():
    seconds = [run_fresh(IMPORT_PROGRAM)["seconds"] for _ in range(3)]
    assert statistics.median(seconds) < 0.3, seconds


def test_import_loads_nothing_that_a_call_may_not_need():
    result = run_fresh(IMPORT_PROGRAM)
    new = {name.split(".")[0] for name in result["new"]}
    assert not new & {"triton", "cuda", "typer", "rich", "matplotlib", "safetensors"}
    assert not new & {"jinja2", "starlette", "uvicorn"}
    assert not new & {"transformers", "numpy", "hypothesis", "pytest"}
    late = (f"{PACKAGE}.backends.", f"{PACKAGE}.cli", f"{PACKAGE}.testing", f"{PACKAGE}.jit",
            f"{PACKAGE}.benchmarks")  # fmt: skip
    assert [name for name in result["new"] if name.startswith(late)] == []
    assert result["cuda"] is False
