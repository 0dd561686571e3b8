"""The project's commands, called in this process, or in one of ``python -m tests.commands``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def scripts() -> dict[str, str]:
    """Command -> its module, from pyproject.toml."""
    found = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    return {name: target.partition(":")[0] for name, target in found.items()}


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


def python(
    *words: object, path: object = PROJECT.parent, cwd: Path | None = None, told: str = ""
) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that looks first into ``path``, a folder or several with colons."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(path)
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environment, cwd=cwd, input=told, capture_output=True, text=True)


def main() -> None:
    """Call the commands that stand on the standard input, as JSON, a line each, until one fails."""
    for line in sys.stdin:
        if code := call(*json.loads(line)):
            sys.exit(code)


if __name__ == "__main__":
    main()
