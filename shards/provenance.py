"""Which code made a file: package version and, from a checkout, the commit."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]


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
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


# Seeds derived by name, so that no two uses of one user seed share a random stream.


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that is a pure function of ``parts`` (for example seed, "mask", epoch, row).

    The parts are hashed with their types and lengths, so ("a", "bc") and ("ab", "c") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{type(part).__name__}:{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator seeded with :func:`derive_seed` of ``parts``."""
    import torch  # manifests derive seeds, and need no torch

    return torch.Generator(device=device).manual_seed(derive_seed(*parts))
