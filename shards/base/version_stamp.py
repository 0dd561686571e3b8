"""Which code made a file: package version and, from a checkout, the commit."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def code_version() -> str:
    """``0.1.0`` of an installed package, ``0.1.0+g1a2b3c4d5e6f`` in a checkout.

    ``.dirty`` behind it says that files under version control differ from the commit.
    """
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
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
