"""The project's commands, called in this process."""

from __future__ import annotations

import sys
from importlib import import_module

from tests.options_contract import scripts


def call(name: str, *words: object) -> int:
    """The exit code of a command of pyproject.toml."""
    main = import_module(scripts()[name]).main
    before, sys.argv = sys.argv, [name, *map(str, words)]
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    finally:
        sys.argv = before
    return 0
