"""Every setting of a config, once with another value: one question for all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shards.errors import UsageError

EXAMPLES: dict[type, Any] = {bool: True, int: 3, float: 0.5, str: "other", tuple: (), dict: {}}


def changed(config: Any, values: Mapping[str, Any] | None = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, the config with that one setting changed); None where it refuses the change.

    Args:
        config: A settings dataclass.
        values: The other value of some settings, where any other of their type makes no sense.
        prefix: Of the names.
    """
    values, hints = values or {}, get_type_hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            for inner, other in changed(value, values, f"{name}."):
                yield inner, other and _replaced(config, field.name, other)
        else:
            within = field.metadata.get("within", "")
            other = values[name] if name in values else _other(hints[field.name], value, within)
            yield name, _replaced(config, field.name, other)


def _replaced(config: Any, name: str, value: Any) -> Any:
    try:
        return dataclasses.replace(config, **{name: value})
    except UsageError:
        return None


def _other(hint: Any, value: Any, within: str) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [known for kind in kinds if get_origin(kind) is Literal for known in get_args(kind)]
    if literals:
        return next(known for known in literals if known != value)
    if value is None:
        first = next(kind for kind in kinds if kind is not type(None))
        return EXAMPLES.get(get_origin(first) or first, "other")
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        high = float(within[1:-1].split(",")[1]) if within else float("inf")
        return value / 2 if value else min(0.5, high / 2)
    return (*value, 1) if isinstance(value, tuple) else f"{value}x"
