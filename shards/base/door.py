"""Doors: a package's ``__init__`` names what others may use, and loads it on first use.

A door is a docstring and one block that a type checker reads and Python skips::

    if TYPE_CHECKING:
        from shards.noise.gumbel import posterior_arrivals

    __getattr__, __dir__ = open_door(__name__, __file__)

That block is also what this module reads, so every name is written once. ``from shards.noise import
posterior_arrivals`` then imports ``shards.noise.gumbel`` and nothing else of the room: a ``--help``
does not wait for torch because some file behind a door needs it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def door_names(file: str | Path) -> dict[str, tuple[str, str]]:
    """What a door offers: the name here, to the module it comes from and its name there."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    blocks = [
        node
        for node in tree.body
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in imports
        for alias in node.names
    }


def open_door(
    package: str, file: str | Path
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that loads its public names on first use.

    Args:
        package: The package's ``__name__``.
        file: The package's ``__file__``, whose ``if TYPE_CHECKING:`` block lists the names.
    """
    names = door_names(file)

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"{package!r} offers no {name!r}; it offers {sorted(names)}")
        module, original = names[name]
        value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(names)
