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
import hashlib
import subprocess
import tomllib
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeVar, Union, get_args, get_origin, get_type_hints

from shards.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config")
ROOT = Path(__file__).resolve().parents[1]


def setting(default: Any = MISSING, meaning: str = "", *, within: str = "", factory: Any = MISSING) -> Any:
    """A field of a settings dataclass, required without a default.

    Args:
        meaning: What it decides, for people.
        within: Interval of its values, ``"(0, 1]"``; None passes where the type allows it.
        factory: In place of a default: a dataclass of further settings.
    """
    metadata = {"meaning": meaning, "within": within}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def check_bounds(config: Any, where: str = "") -> None:
    """Refuse a number outside the interval that its field declares; the UsageError names it below ``where``."""
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


def resolve(config_class: type[Config], *sources: Mapping[str, Any], overrides: Iterable[str] = ()) -> Config:
    """Build a config from mappings (later wins) and overrides; a UsageError for an unknown key or another type."""
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
    required = [f.name for f in fields if f.init and default_of(f) is MISSING]
    missing = [name for name in required if name not in arguments]
    if missing:
        got = f"no {', '.join(missing)}"
        raise UsageError("incomplete config", where=where or config_class.__name__, got=got)
    return config_class(**arguments)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None or (value == "none" and type(None) in arguments):
            return None
        *others, last = (each for each in arguments if each is not type(None))
        for option in others:
            with suppress(UsageError):
                return _convert(option, value, where)
        return _convert(last, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        item = arguments[0] if arguments else Any
        return tuple(_convert(item, entry, where) for entry in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = origin or hint
    fits = isinstance(expected, type) and isinstance(value, expected)
    if expected is Any or (fits and (hint is bool or not isinstance(value, bool))):
        return value
    if origin is Literal:
        if any(value == known and type(value) is type(known) for known in arguments):
            return value
        expected = f"one of {arguments}"
        raise UsageError("unknown value", where=where, got=repr(value), expected=expected)
    name = getattr(hint, "__name__", str(hint))
    raise UsageError("wrong type in config", where=where, got=repr(value), expected=name)


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as JSON-ready nested dicts (tuples as lists)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {str(key): plain(entry) for key, entry in value.items()}
        return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value

    return plain(config)


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; an empty one is a value."""
    flat: dict[str, Any] = {}
    for key, entry in value.items():
        name, nested = f"{prefix}{key}", isinstance(entry, Mapping) and entry
        flat.update(flatten(nested, f"{name}.") if nested else {name: entry})
    return flat


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a setting; MISSING where it is required."""
    if field.default is MISSING and field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


@cache
def code_version() -> str:
    """``0.1.0`` of an installed package, ``0.1.0+g1a2b3c4d5e6f`` in a checkout, with ``.dirty`` if files differ."""
    try:
        release = version("gdistill")
    except PackageNotFoundError:
        release = "0"
    if not (ROOT / ".git").exists():  # never that of a repository which holds site-packages
        return release
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return release
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{release}+g{commit}" + (".dirty" if changed else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def derive_seed(*parts: SupportsIndex | str) -> int:
    """A 63-bit seed that is a pure function of ``parts`` (for example seed, "mask", epoch, row).

    The parts are hashed with their kinds and lengths, so ("a", "bc") and ("ab", "c") differ, and 1 and "1".
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'str' if isinstance(part, str) else 'int'}:{part}".encode()  # numpy's integers too
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator seeded with :func:`derive_seed` of ``parts``."""
    import torch  # manifests derive seeds, and need no torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
