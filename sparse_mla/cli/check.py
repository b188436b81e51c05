"""``sparse-mla check``: everything that is wrong with a captured call, without making it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .terminal import FAULT, CallFile, Json, describe, guarded, say, say_json, say_row

if TYPE_CHECKING:
    from ..callfile import Call
    from ..errors import SparseMLAError


def check(
    file: CallFile,
    as_json: Json = False,
) -> None:
    """List all that breaks the contract of a captured call.

    The call is not made, and every violation is listed, not the first one only. What only the
    data shows (indices out of range, lengths past topk, scales that are not positive, NaN in rows
    that are selected) is listed as notes: the operator masks or propagates it, as its contract
    says.

    Examples:
      sparse-mla check call.safetensors
      sparse-mla check call.safetensors --json

    Exit codes: 0 the contract is met, 1 it is broken, 2 usage or an unreadable file.
    """
    with guarded(as_json):
        from ..callfile import load_call

        call = load_call(file)
        found = violations(call)
        remarks = notes(call, sound=not found)
        if as_json:
            say_json(_as_data(file, call, found, remarks))
        else:
            _say(file, call, found, remarks)
        if found:
            raise typer.Exit(FAULT)


def violations(call: Call) -> list[SparseMLAError]:
    """All that breaks the contract of the call's operator, in the contract's order."""
    from .. import checks
    from ..callfile import STRICT

    strict = call.operator == STRICT
    find = checks.q8kv8_violations if strict else checks.prefill_violations
    return list(find(**call.keywords()))


def notes(call: Call, sound: bool) -> list[dict[str, str]]:
    """What the contract allows and a reader may want to know: text, and a record's id if any."""
    found = []
    recorded = call.metadata.get("device", "")
    if ", " in recorded:
        text = f"recorded with q on {recorded}; a file holds everything on the CPU"
        found.append({"id": "device-mismatch", "text": text})
    if sound:
        from ..debug import data_violations

        for fault in data_violations(problem(call)):
            found.append({"id": fault.id, "text": str(fault).partition("\n")[0]})
        found += [{"id": "", "text": text} for text in _counts(call)]
    return found


def problem(call: Call) -> Any:
    """The call as its backend would be handed it; its contract must be met."""
    from .. import checks
    from ..callfile import STRICT

    make = checks.check_q8kv8 if call.operator == STRICT else checks.check_prefill
    return make(**call.keywords())


def _counts(call: Call) -> list[str]:
    """Slots that select nothing, queries without any, and rows selected twice by a query."""
    import torch

    from .replay import slots, valid_slots

    valid = valid_slots(call)
    usable = torch.where(valid, slots(call), -1).sort(dim=1).values
    selected, total = int(valid.sum()), valid.numel()
    found = [f"{selected} of {total} slots select a row"] if selected != total else []
    empty = int((usable[:, -1] < 0).sum())
    if empty:
        found.append(f"{empty} of {len(usable)} queries select nothing: out 0, lse +inf")
    twice = (usable[:, 1:] == usable[:, :-1]) & (usable[:, 1:] >= 0)
    repeating = int(twice.any(dim=1).sum())
    if repeating:
        found.append(f"{repeating} of {len(usable)} queries select a row twice: it counts twice")
    return found


def _say(
    file: Path, call: Call, found: list[SparseMLAError], remarks: list[dict[str, str]]
) -> None:
    say(f"{file.name}: {call.operator}")
    for name, tensor in call.tensors.items():
        say_row(name, describe(tensor))
    for name, value in call.arguments.items():
        say_row(name, _argument(value))
    for number, fault in enumerate(found, 1):
        say(f"\n{number}. {fault}")
    for remark in remarks:
        say(f"\nnote: {remark['text']}")
    say(f"\n{_verdict(len(found))}")


def _verdict(count: int) -> str:
    if count == 0:
        return "The contract is met."
    return f"The contract is broken in {count} {'place' if count == 1 else 'places'}."


def _argument(value: Any) -> str:
    from ..callfile import Buffer

    if isinstance(value, Buffer):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"given as {dtype} {value.shape}, strides {value.stride}"
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def _as_data(
    file: Path, call: Call, found: list[SparseMLAError], remarks: list[dict[str, str]]
) -> dict[str, Any]:
    return {
        "ok": not found,
        "file": os.fspath(file),
        "operator": call.operator,
        "tensors": {
            name: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
            }
            for name, tensor in call.tensors.items()
        },
        "arguments": {name: _argument(value) for name, value in call.arguments.items()},
        "violations": [fault.to_dict() for fault in found],
        "notes": remarks,
        "metadata": call.metadata,
    }
