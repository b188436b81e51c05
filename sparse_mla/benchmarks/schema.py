"""What a results file has to hold: ``results.schema.json`` applied, with no package for it.

Of JSON Schema only the keywords that the file uses; a keyword that is not known here is an error,
so that none of them is passed over.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("results.schema.json")

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES = {"$schema", "$defs", "title", "description"}


@functools.cache
def schema() -> dict[str, Any]:
    """The schema of results files."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def first_fault(results: Any) -> str | None:
    """Where ``results`` first differ from the schema, and how; ``None``: nowhere."""
    return next(_faults(results, schema(), ""), None)


def _faults(value: Any, rules: Mapping[str, Any], where: str) -> Iterator[str]:
    here = where or "the file"
    for keyword, rule in rules.items():
        if keyword == "$ref":
            yield from _faults(value, schema()["$defs"][rule.rpartition("/")[2]], where)
        elif keyword == "allOf":
            for each in rule:
                yield from _faults(value, each, where)
        elif keyword == "oneOf":
            if sum(next(_faults(value, each, where), None) is None for each in rule) != 1:
                yield f"{here} fits not just one of {len(rule)} forms"
        elif keyword == "type":
            names = [rule] if isinstance(rule, str) else rule
            if not any(_is(value, name) for name in names):
                yield f"{here} is not {' or '.join(names)}"
                return  # the other rules are about that type
        elif keyword in _PARTS:
            yield from _PARTS[keyword](value, rule, rules, where)
        elif keyword in _SIMPLE:
            if not _SIMPLE[keyword](value, rule):
                yield f"{here} is {_short(value)}, against {keyword} {_short(rule)}"
        elif keyword not in _NOTES:
            raise NotImplementedError(f"{FILE.name} uses {keyword}")


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is(value, "number")


_SIMPLE: dict[str, Any] = {
    "const": lambda value, rule: value == rule and _is_bool(value) == _is_bool(rule),
    "enum": lambda value, rule: value in rule,
    "pattern": lambda value, rule: not isinstance(value, str) or re.search(rule, value),
    "minimum": lambda value, rule: not _is_number(value) or value >= rule,
    "exclusiveMinimum": lambda value, rule: not _is_number(value) or value > rule,
}


def _required(value: Any, rule: Any, rules: Any, where: str) -> Iterator[str]:
    missing = [name for name in rule if name not in value] if isinstance(value, dict) else []
    if missing:
        yield f"{where or 'the file'} lacks {', '.join(missing)}"


def _properties(value: Any, rule: Any, rules: Any, where: str) -> Iterator[str]:
    for name, each in rule.items():
        if isinstance(value, dict) and name in value:
            yield from _faults(value[name], each, f"{where}.{name}".lstrip("."))


def _additional(value: Any, rule: Any, rules: Any, where: str) -> Iterator[str]:
    known = rules.get("properties", {})
    for name in value if isinstance(value, dict) else ():
        if name not in known and rule is False:
            yield f"{where or 'the file'} has {_short(name)}, which is not known"
        elif name not in known:
            yield from _faults(value[name], rule, f"{where}.{name}".lstrip("."))


def _names(value: Any, rule: Any, rules: Any, where: str) -> Iterator[str]:
    for name in value if isinstance(value, dict) else ():
        yield from _faults(name, rule, f"a name in {where}")


def _items(value: Any, rule: Any, rules: Any, where: str) -> Iterator[str]:
    for number, item in enumerate(value if isinstance(value, list) else ()):
        yield from _faults(item, rule, f"{where}[{number}]")


_PARTS: dict[str, Any] = {
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "items": _items,
}
