"""The list of commands, options and config keys with their defaults, as people may rely on it.

    python -m tests.options_contract          # writes tests/options.txt anew

``tests/test_options.py`` compares the two, so that every change of the contract is a line in a diff
that somebody reads.
"""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperGroup

from shards.errors import UsageError

REPOSITORY = Path(__file__).resolve().parent.parent
CONTRACT = REPOSITORY / "tests" / "options.txt"


def scripts() -> dict[str, str]:
    """Command -> module of its Typer ``app``, from pyproject.toml."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    found = tomllib.loads(text)["project"]["scripts"]
    return {name: target.partition(":")[0] for name, target in found.items()}


def command_lines(name: str, command: Any) -> Iterator[str]:
    """A Typer command with its parameters, then its sub-commands."""
    subcommands = command.commands if isinstance(command, TyperGroup) else {}
    parameters = [one for one in command.params if one.name != "help"]
    if parameters or not subcommands:
        yield name
    arguments = [one for one in parameters if isinstance(one, TyperArgument)]
    options = sorted((one for one in parameters if one not in arguments), key=lambda one: one.opts)
    for parameter in [*arguments, *options]:
        words = "/".join([*parameter.opts, *parameter.secondary_opts])
        words = words.upper() if parameter in arguments else words
        kind = _type_name(parameter.type_descriptor.annotation)
        default = "required" if parameter.required else f"= {_plain(parameter.default)}"
        yield f"  {words}  {kind}  {default}"
    for sub in sorted(subcommands):
        yield from command_lines(f"{name} {sub}", subcommands[sub])


def key_lines(config: type[Any], prefix: str = "") -> Iterator[str]:
    """Every field of a config dataclass, nested ones by dotted name."""
    hints = typing.get_type_hints(config)
    for entry in dataclasses.fields(config):
        if not entry.init:
            continue
        hint = hints[entry.name]
        nested = _dataclass_of(hint)
        if nested is not None:
            yield from key_lines(nested, f"{prefix}{entry.name}.")
            continue
        yield f"  {prefix}{entry.name}  {_type_name(hint)}  {_default(entry)}"


def _dataclass_of(hint: Any) -> type[Any] | None:
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    found = [option for option in options if dataclasses.is_dataclass(option)]
    return typing.cast("type[Any]", found[0]) if found else None


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return str(hint).replace("typing.", "").replace("collections.abc.", "").replace(" ", "")


def _default(entry: dataclasses.Field[Any]) -> str:
    if entry.default is not dataclasses.MISSING:
        return f"= {_plain(entry.default)}"
    if entry.default_factory is not dataclasses.MISSING:
        return f"= {_plain(entry.default_factory())}"
    return "required"


def _plain(value: Any) -> str:
    if isinstance(value, Path):
        return value.as_posix()
    return "none" if value is None else repr(value)


def config_roots() -> Iterator[tuple[str, type[Any]]]:
    """What ``--set`` and TOML files reach, by the command that takes it."""
    from evaluation.maze.walk import WalkConfig
    from pipeline.corpus.config import CorpusConfig
    from pipeline.settings import ExtractSettings
    from shards.codec.registry import CODECS
    from trainer.sampling.registry import SAMPLERS
    from trainer.training.settings import RunConfig

    yield "gdistill-extract --set", ExtractSettings
    yield "gdistill-extract --set corpus.*", CorpusConfig
    for name, codec in sorted(CODECS.items()):
        yield f"gdistill-extract --set codec.* ({name})", codec
    yield "gdistill-train run --set", RunConfig
    for name, sampler in sorted(SAMPLERS.items()):
        yield f"gdistill-sample --set ({name})", sampler
    yield "python -m evaluation.maze.walk --config", WalkConfig


def contract() -> str:
    """The whole list."""
    lines: list[str] = []
    for name, module in sorted(scripts().items()):
        try:
            found = vars(importlib.import_module(module))
        except UsageError:  # an extra that is not installed
            found = {}
        apps = {key: value for key, value in found.items() if isinstance(value, typer.Typer)}
        lines += [] if apps else [name]  # lm-evaluation-harness has options of its own
        for key, app in sorted(apps.items()):
            sub = key.removesuffix("app").strip("_")
            lines += command_lines(f"{name} {sub}".strip(), typer.main.get_command(app))
    for title, config in config_roots():
        lines += ["", title, *sorted(key_lines(config))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CONTRACT.write_text(contract(), encoding="utf-8")
