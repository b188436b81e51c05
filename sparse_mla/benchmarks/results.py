"""Results as JSON: written whole or not at all, read with a reason where they cannot be used."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from . import schema

SCHEMA = 1
"""``results.schema.json`` describes it."""
KEYS = ("schema", "machine", "settings", "ceilings", "peers", "prefill", "host", "memory",
        "accuracy")  # fmt: skip


class ResultsError(ValueError):
    """A results file that cannot be used; the text says why."""


def write(path: Path, results: dict[str, Any]) -> Path:
    """Write ``results``, into a directory under their own name; by rename, so never half of them.

    Returns:
        The file written.
    """
    file = path / file_name(results) if path.is_dir() else path
    text = json.dumps(results, indent=1, allow_nan=False)
    write_text(file, re.sub(r"\[\s+([-+.,\d\se]+?)\s+\]", _on_one_line, text) + "\n")
    return file


def _on_one_line(numbers: re.Match[str]) -> str:
    return "[" + " ".join(numbers[1].split()) + "]"


def write_text(file: Path, text: str) -> None:
    """Write a text by rename: on a fault nothing is left there."""
    scratch = file.with_name(f".{file.name}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def file_name(results: dict[str, Any]) -> str:
    """``2026-12-01-nvidia-h200.json``: the day and the card; ``cpu`` before a processor's name."""
    machine = results["machine"]
    name = machine["name"] if machine["device"] == "cuda" else f"cpu {machine['name']}"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"{machine['date'][:10]}-{slug}.json"


def source(results: dict[str, Any]) -> str:
    """What a picture of the results says that it was drawn from: their file and its contents."""
    contents = json.dumps(results, sort_keys=True).encode()
    return f"{file_name(results)} sha256 {hashlib.sha256(contents).hexdigest()}"


def load(file: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        ResultsError: it is no results file of this version.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise ResultsError(f"{file.name} is not JSON: {fault}") from None
    if not isinstance(found, dict):
        raise ResultsError(f"{file.name} holds a {type(found).__name__}, not an object")
    if found.get("schema") != SCHEMA:
        raise ResultsError(
            f"{file.name} has schema {found.get('schema')!r}, this version reads {SCHEMA}"
        )
    missing = [key for key in KEYS if key not in found]
    if missing:
        raise ResultsError(f"{file.name} lacks {', '.join(missing)}")
    difference = schema.first_fault(found)
    if difference is not None:
        raise ResultsError(f"{file.name}: {difference}")
    return found


def newest(directory: Path, device: str = "cuda") -> tuple[Path, dict[str, Any]]:
    """The latest results of a kind of device in ``directory``, by the date inside the file.

    Raises:
        ResultsError: there are none, or a file there cannot be used.
    """
    found = [(file, load(file)) for file in sorted(directory.glob("*.json"))]
    found = [entry for entry in found if entry[1]["machine"]["device"] == device]
    if not found:
        raise ResultsError(f"{directory} has no results of a {device} device")
    return max(found, key=lambda entry: str(entry[1]["machine"]["date"]))


def best_of_ours(results: dict[str, Any], entry: dict[str, Any]) -> str | None:
    """The name of our fastest backend with a right figure in one mood of a shape."""
    ours = [peer["name"] for peer in results["peers"] if peer["ours"]]
    right = [
        (entry["peers"][name]["median_ms"], name)
        for name in ours
        if name in entry["peers"] and is_right(entry["peers"][name])
    ]
    return min(right)[1] if right else None


def is_right(figure: dict[str, Any]) -> bool:
    """Whether a peer's entry holds a time whose outputs passed the comparison."""
    return "median_ms" in figure and figure["fault"] is None
