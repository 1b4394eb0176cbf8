"""The fields of objects of JSON by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def walk_fields(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield the dotted name of each value that is no object and no list, the value, and whether it stands in a list."""
    for name, each in value.items():
        yield from _walk(each, f"{path}.{name}" if path else name, in_list=False)


def _walk(value: Any, path: str, *, in_list: bool) -> Iterator[tuple[str, Any, bool]]:
    if isinstance(value, dict):
        yield from walk_fields(value, path)
    elif isinstance(value, list):
        for each in value:
            yield from _walk(each, path, in_list=True)
    else:
        yield path, value, in_list


def json_text(value: Any) -> str:
    """A category as its key is made of it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
