"""The command ``settings``: every setting with its default, type, bounds and meaning."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from shards.console import command_app
from shards.errors import UsageError
from shards.settings import default_of

WIDTH = 96


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
        part: Annotated[str, typer.Argument(help="Only keys and titles that contain this, packing say.")] = "",
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
        default, kind = default_of(field), _kind(hint)
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
    return f'"{value}"' if isinstance(value, str) else str(value)
