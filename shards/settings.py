"""Settings: declared once, in a frozen dataclass; read from TOML files and ``--set a.b=c``.

::

    @dataclass(frozen=True)
    class OptimizationConfig:
        learning_rate: float = setting(3e-4, "Peak learning rate.", within="(0, inf)")

        def __post_init__(self) -> None:
            check_bounds(self, "optimization")

The declaration is the default, the type and the bounds that a value must keep, the key of ``--set``
and of a config file, and the line that the command ``settings`` prints. Fields are scalars, tuples,
optional values or further dataclasses; a meaning may also stand in the docstring, under
``Attributes:``. Later sources win: defaults, then the preset or file, then the overrides.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from shards.console import command_app
from shards.errors import UsageError, did_you_mean

Config = TypeVar("Config")
WIDTH = 96


def setting(
    default: Any = MISSING, meaning: str = "", *, within: str = "", factory: Any = MISSING
) -> Any:
    """A field of a settings dataclass.

    Args:
        default: Its default; left out, the setting is required.
        meaning: What it decides, for people.
        within: Interval of its values, ``"(0, 1]"``; None passes where the type allows it.
        factory: In place of a default: a dataclass of further settings.
    """
    metadata = {"meaning": meaning, "within": within}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def check_bounds(config: Any, where: str = "") -> None:
    """Refuse a number outside the interval that its field declares.

    Raises:
        UsageError: Naming the setting, below ``where``.
    """
    for field in dataclasses.fields(config):
        interval, value = field.metadata.get("within"), getattr(config, field.name)
        if not interval or value is None:
            continue
        low, high = map(float, interval[1:-1].split(","))
        above = low < value or (interval[0] == "[" and low == value)
        below = value < high or (interval[-1] == "]" and high == value)
        if not (above and below):
            place = f"{where}.{field.name}" if where else field.name
            raise UsageError("out of range", where=place, got=value, expected=f"in {interval}")


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; a missing or malformed one is a :class:`UsageError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("cannot read the config file", where=path, got=error.strerror) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("the config file is not TOML", where=path, got=error) from error


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=value``; the value is read as TOML and, failing that, as a plain string."""
    key, separator, raw = text.partition("=")
    if not separator or not all(part.strip() for part in key.split(".")):
        raise UsageError("malformed override", where="--set", got=text, expected="key.path=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def nested(path: Iterable[str], value: Any) -> dict[str, Any]:
    """``["a", "b"]`` and 3 as ``{"a": {"b": 3}}``."""
    first, *rest = path
    return {first: nested(rest, value) if rest else value}


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings merged key by key; ``update`` wins."""
    result = dict(base)
    for key, value in update.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def resolve(
    config_class: type[Config], *sources: Mapping[str, Any], overrides: Iterable[str] = ()
) -> Config:
    """Build a config from mappings (later wins) and override strings.

    Raises:
        UsageError: For an unknown key (naming the nearest known one) or a value of another type.
    """
    values: dict[str, Any] = {}
    for source in sources:
        values = merge(values, source)
    for text in overrides:
        values = merge(values, nested(*parse_override(text)))
    return from_mapping(config_class, values)


def from_mapping(config_class: type[Config], values: Mapping[str, Any], where: str = "") -> Config:
    """Build one (nested) config dataclass from a mapping; see :func:`resolve` for the errors."""
    hints = get_type_hints(config_class)
    fields = dataclasses.fields(config_class)  # type: ignore[arg-type]
    known = {field.name for field in fields if field.init}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        place = f"{where}.{key}" if where else key
        if key not in known:
            hint = did_you_mean(key, known, f"known keys: {sorted(known)}")
            raise UsageError("unknown config key", where=place, remedy=hint)
        arguments[key] = _convert(hints[key], value, place)
    missing = [
        field.name
        for field in fields
        if field.init and _default(field) is MISSING and field.name not in arguments
    ]
    if missing:
        raise UsageError(
            "incomplete config",
            where=where or config_class.__name__,
            got=f"no {', '.join(missing)}",
        )
    return config_class(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        item = arguments[0] if arguments else Any
        return tuple(_convert(item, entry, where) for entry in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    expected = origin or hint
    wrong_bool = isinstance(value, bool) and hint is not bool
    if expected is Any or (
        isinstance(expected, type) and isinstance(value, expected) and not wrong_bool
    ):
        return value
    if origin is Literal:
        if any(value == known and type(value) is type(known) for known in arguments):
            return value
        expected = f"one of {arguments}"
        raise UsageError("unknown value", where=where, got=repr(value), expected=expected)
    name = getattr(hint, "__name__", str(hint))
    raise UsageError("wrong type in config", where=where, got=repr(value), expected=name)


def _convert_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None or (value == "none" and type(None) in options):
        return None
    last: UsageError | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return _convert(option, value, where)
        except UsageError as error:
            last = error
    raise last or UsageError("wrong type in config", where=where, got=repr(value))


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as JSON-ready nested dicts (paths as strings, tuples as lists)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, tuple | list):
            return [plain(entry) for entry in value]
        return str(value) if isinstance(value, Path) else value

    return plain(config)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; an empty one is a value."""
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        name, nested = f"{prefix}{key}", isinstance(entry, Mapping) and entry
        flat.update(flatten(nested, f"{name}.") if nested else {name: entry})
    return flat


@dataclass(frozen=True)
class Section:
    """Settings that belong together.

    Attributes:
        title: What they are of.
        target: ``module:Class`` of their dataclass, imported when it is asked for.
        prefix: What stands before their keys, ``corpus``.
        waits_for_torch: Whether its module does: then it is printed only where a word asks.
    """

    title: str
    target: str
    prefix: str = ""
    waits_for_torch: bool = False

    @property
    def config_class(self) -> type[Any]:
        """The dataclass."""
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


def settings_app(sections: Sequence[Section]) -> typer.Typer:
    """The command ``settings`` over these sections."""
    app = command_app()

    @app.command()
    def settings(
        part: Annotated[
            str, typer.Argument(help="Only keys and titles that contain this, packing say.")
        ] = "",
    ) -> None:
        """Print every setting of --set and --config with its default, type and meaning."""
        lines = table_lines(sections, part)
        if not lines:
            remedy = "leave the word out to see them all"
            raise UsageError("no setting is called that", got=part, remedy=remedy)
        typer.echo("\n".join(lines))

    return app


def table_lines(sections: Sequence[Section], part: str = "") -> list[str]:
    """What ``settings`` prints; without a word, sections that wait for torch are only named."""
    lines: list[str] = []
    for section in sections:
        if section.waits_for_torch and not part:
            continue
        rows = list(setting_lines(section.config_class, section.prefix))
        if part not in section.title:
            rows = [row for row in rows if part in row[0]]
        if rows:
            lines += [*([""] if lines else []), f"# {section.title}"]
            lines += [line for _, shown in rows for line in shown]
    words = [section.title.split()[-1] for section in sections if section.waits_for_torch]
    if words and not part:
        lines.append(f"# `settings WORD` prints more, WORD one of {', '.join(words)}")
    return lines


def setting_lines(config_class: type[Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Key of each setting and the lines that tell it; those of dataclasses in it included."""
    hints, meanings = get_type_hints(config_class), _docstring_meanings(config_class)
    for field in dataclasses.fields(config_class):
        key, hint = f"{prefix}.{field.name}" if prefix else field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from setting_lines(hint, key)  # type: ignore[arg-type]
            continue
        default, kind = _default(field), _kind(hint)
        within = field.metadata.get("within")
        kind = f"{kind} in {within}" if within else kind
        head = f"{key}    ({kind}, required)"
        if default is not MISSING:
            head = f"{key} = {_toml(default)}    ({kind})"
        meaning = field.metadata.get("meaning") or meanings.get(field.name, "")
        body = textwrap.wrap(meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield key, [head, *body]


def _docstring_meanings(config_class: type[Any]) -> dict[str, str]:
    """What docstrings say under ``Attributes:``, by name; ``a, b: text`` speaks of both."""
    meanings = {}
    for owner in reversed(config_class.__mro__):
        _, _, section = (inspect.cleandoc(owner.__doc__ or "")).partition("Attributes:\n")
        section = re.split(r"\n(?=\S)", section)[0]
        for entry in re.split(r"\n(?=    \S)", f"\n{section}"):
            names, colon, text = entry.partition(":")
            if colon:
                words = " ".join(text.replace("``", "").split())
                meanings |= {name.strip(): words for name in names.split(",")}
    return meanings


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is MISSING and field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _kind(hint: Any) -> str:
    """A type in words; choices are separated by ``|``."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " | ".join(map(_kind, arguments))
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if (origin or hint) is dict:
        return "table"
    return "none" if hint is type(None) else getattr(hint, "__name__", str(hint))


def _toml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str | Path) else str(value)
