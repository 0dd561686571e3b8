"""Names of files that others have chosen: accepted only if they stay where they are put."""

from __future__ import annotations

import posixpath
from pathlib import Path

from shards.base.errors import UsageError

MAX_PART_BYTES = 255


def safe_name(name: str) -> str:
    """``name`` itself, if it is a plain relative path with forward slashes.

    No root, no ``..``, no ``.``, no doubled or closing slash, no backslash, no control character:
    what is left means the same file below any folder, on any system.

    Raises:
        UsageError: For any other name.
    """
    plain = (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and posixpath.normpath(name) == name
        and not name.startswith(("/", "../"))
        and "\\" not in name
        and name.isprintable()
        and all(len(part.encode()) <= MAX_PART_BYTES for part in name.split("/"))
    )
    if not plain:
        raise UsageError("a file name leaves the store", where=repr(name)[:120])
    return name


def path_inside(folder: Path, name: str) -> Path:
    """``folder / name`` for writing: also no folder on the way is a link that leads elsewhere.

    Raises:
        UsageError: If the name, or the folder it lies in, leaves ``folder``.
    """
    path = folder / safe_name(name)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise UsageError("a file name leaves the store", where=path, got=path.parent.resolve())
    return path
