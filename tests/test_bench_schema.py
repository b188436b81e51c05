"""Results files are checked against their schema as the package jsonschema would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from bench_results import results

from sparse_mla.benchmarks import schema

WRONG = (None, True, -1, 0, 0.5, 7, "x", [], {}, [None], {"x": None})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in ``value``; of a list, the first element."""
    yield path
    if isinstance(value, dict):
        for name, each in value.items():
            yield from places(each, (*path, name))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(found: Any, path: tuple[Any, ...], to: Any = ...) -> Any:
    """A copy with another value at ``path``, or none there."""
    if not path:
        return to
    found = copy.copy(found)
    first, *rest = path
    if rest:
        found[first] = changed(found[first], tuple(rest), to)
    elif to is ...:
        del found[first]
    else:
        found[first] = to
    return found


def test_whole_results_have_no_fault() -> None:
    assert schema.first_fault(results()) is None


def test_every_change_is_judged_as_by_jsonschema() -> None:
    """Each value replaced by eleven others, or left out; none of them raises."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, from pip")
    validator = jsonschema.Draft202012Validator(schema.schema())
    whole, judged = results(), {True: 0, False: 0}
    for path in places(whole):
        for to in (*WRONG, *([...] if path else [])):
            found = changed(whole, path, to)
            valid = validator.is_valid(found)
            assert (schema.first_fault(found) is None) == valid, (path, to)
            judged[valid] += 1
    assert min(judged.values()) > 100


def test_a_keyword_that_is_not_known_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "schema", lambda: {"maxLength": 3})
    with pytest.raises(NotImplementedError, match="uses maxLength"):
        schema.first_fault(results())
