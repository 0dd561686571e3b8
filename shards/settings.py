"""Frozen dataclasses from TOML files, named presets and ``--set a.b=c`` overrides.

A config is a frozen dataclass whose fields are scalars, tuples, optional values or further
dataclasses; it validates itself in ``__post_init__`` by raising :class:`UsageError`.
Later sources win: defaults, then the preset or file, then the overrides.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from shards.console import command_app
from shards.errors import UsageError, did_you_mean

Config = TypeVar("Config")


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
    config_class: type[Config],
    *sources: Mapping[str, Any],
    overrides: Iterable[str] = (),
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
    missing = [field.name for field in fields if _is_missing(field, arguments)]
    if missing:
        raise UsageError(
            "incomplete config",
            where=where or config_class.__name__,
            got=f"no {', '.join(missing)}",
        )
    return config_class(**arguments)


def _is_missing(field: dataclasses.Field[Any], given: Mapping[str, Any]) -> bool:
    no_default = field.default is field.default_factory is dataclasses.MISSING
    return field.init and no_default and field.name not in given


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
    if str(origin).endswith("Literal"):
        if any(value == known and type(value) is type(known) for known in arguments):
            return value
        raise UsageError(
            "unknown value", where=where, got=repr(value), expected=f"one of {arguments}"
        )
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


# Every setting of a command with its type, default and meaning, read from the source.
#
# A command's settings are frozen dataclasses beside their owners, and many of those files wait for
# torch. Their fields and the ``Attributes:`` of their docstrings are therefore read from the syntax
# tree, and asking what can be set costs nothing.


WIDTH = 96
REQUIRED = "required"


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        key: As ``--set`` takes it, ``corpus.packing``.
        kind: Its type; choices are separated by ``|``.
        default: As TOML would write it, ``none``, or ``required``.
        meaning: The docstring's words; empty if it has none.
    """

    key: str
    kind: str
    default: str
    meaning: str

    def lines(self) -> list[str]:
        """For people: key, default and type, and below them the meaning."""
        head = self.key if self.default == REQUIRED else f"{self.key} = {self.default}"
        note = f"{self.kind}, required" if self.default == REQUIRED else self.kind
        body = textwrap.wrap(self.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
        return [f"{head}    ({note})", *body]


@dataclass(frozen=True)
class Section:
    """Settings that belong together.

    Attributes:
        title: What they are of.
        target: ``module:Class`` of their dataclass.
        prefix: What stands before their keys, ``corpus``.
    """

    title: str
    target: str
    prefix: str = ""


def settings_of(target: str, prefix: str = "") -> list[Setting]:
    """The settings of a dataclass, those of dataclasses in it included, inherited ones first.

    Args:
        target: ``module:Class``; the module is read, not imported.
        prefix: What stands before the keys.
    """
    module, _, name = target.partition(":")
    found = {setting.key: setting for setting in _of_class(_Source.of(module), name, prefix)}
    return list(found.values())


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
    """What ``settings`` prints."""
    lines: list[str] = []
    for section in sections:
        settings = settings_of(section.target, section.prefix)
        if part not in section.title:
            settings = [setting for setting in settings if part in setting.key]
        if settings:
            lines += [""] if lines else []
            lines.append(f"# {section.title}")
            lines += [line for setting in settings for line in setting.lines()]
    return lines


@dataclass(frozen=True)
class _Source:
    """One module's syntax tree and the names that it defines or imports."""

    module: str
    names: dict[str, ast.stmt]

    @staticmethod
    @cache
    def of(module: str) -> _Source:
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.origin:
            raise ModuleNotFoundError(module)
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        return _Source(module, dict(_bindings(tree.body)))

    def find(self, name: str) -> tuple[_Source, ast.stmt] | None:
        """Where a name is defined, through imports and doors of this project; else None."""
        node = self.names.get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (self, node)
        module = node.module or ""
        if not any(module == top or module.startswith(f"{top}.") for top in _packages()):
            return None
        original = next(a.name for a in node.names if (a.asname or a.name) == name)
        return _Source.of(module).find(original)


@cache
def _packages() -> tuple[str, ...]:
    """The packages beside this one: other libraries' names are left as they are written."""
    root = Path(__file__).resolve().parents[1]
    return tuple(path.parent.name for path in root.glob("*/__init__.py"))


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        elif isinstance(node, ast.If):  # the block of a door
            yield from _bindings(node.body)


def _of_class(source: _Source, name: str, prefix: str) -> Iterator[Setting]:
    source, node = source.find(name) or (source, None)
    if not isinstance(node, ast.ClassDef):
        return
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from _of_class(source, base.id, prefix)
    meanings = _meanings(ast.get_docstring(node) or "")
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        kind = ast.unparse(field.annotation)
        if kind.startswith("ClassVar"):
            continue
        key = f"{prefix}.{field.target.id}" if prefix else field.target.id
        nested = list(_of_class(source, kind, key))
        if nested:
            yield from nested
            continue
        meaning = meanings.get(field.target.id, "")
        yield Setting(key, _kind(source, field.annotation), _default(source, field.value), meaning)


def _meanings(docstring: str) -> dict[str, str]:
    """The ``Attributes:`` of a docstring, by name; ``a, b: text`` speaks of both."""
    _, _, section = docstring.partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    meanings = {}
    for entry in re.split(r"\n(?=    \S)", f"\n{section}"):
        names, colon, text = entry.partition(":")
        if colon:
            words = " ".join(text.replace("``", "").split())
            meanings |= {name.strip(): words for name in names.split(",")}
    return meanings


def _kind(source: _Source, node: ast.expr) -> str:
    """An annotation in words: choices spelled out, aliases of this project resolved."""
    if isinstance(node, ast.BinOp):  # X | Y
        return f"{_kind(source, node.left)} | {_kind(source, node.right)}"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return " | ".join(str(ast.literal_eval(item)) for item in items)
    if isinstance(node, ast.Name):
        place = source.find(node.id)
        if place is not None and isinstance(place[1], ast.Assign):
            return _kind(place[0], place[1].value)
    return ast.unparse(node).replace("None", "none")


def _default(source: _Source, node: ast.expr | None) -> str:
    if node is None:
        return REQUIRED
    if isinstance(node, ast.Name):
        place = source.find(node.id)
        if place is not None and isinstance(place[1], ast.Assign):
            return _default(place[0], place[1].value)
    if isinstance(node, ast.BinOp):  # 1 / 64, 1 << 20: this project's own arithmetic
        return str(eval(ast.unparse(node), {"__builtins__": {}}))
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        value = list(value)
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).replace("'", '"') if isinstance(value, list) else str(value)
