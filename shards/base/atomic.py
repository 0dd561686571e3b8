"""Files that are either absent or whole: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any


def fsync_path(path: Path) -> None:
    """Make a file's content, or the renames inside a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Create a folder and those above it that are missing; each survives a power cut.

    A folder's name lies in its parent, so it is the parent of each created one that is synced.
    """
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a parent that may be written to but not read
        fsync_path(folder.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that ``path`` never holds a part of it, whatever kills the process.

    The temporary name is one that no other process has, on any machine that shares the folder: with
    a fixed one, two that wrote the same file would write into each other's. A killed process leaves
    it behind, ``.NAME.<32 hex digits>.tmp``: never read; see :func:`discard_leftovers`.
    """
    make_folders(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file that only grows; nothing is written through a link in its place.

    A folder from elsewhere may hold a link under the file's name, or a pipe that nobody reads.
    """

    def open_itself(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    make_folders(path.parent)
    with open(path, "a", encoding="utf-8", opener=open_itself) as file:
        file.write(line + "\n")


def publish_folder(work: Path, final: Path) -> None:
    """Rename a finished folder, with everything in it on disk before its name is.

    A folder of that name goes first: at any time ``final`` is the old one, absent, or whole.

    Libraries that write into it (``save_pretrained``) leave their files to the page cache.
    """
    for path in sorted(work.rglob("*"), reverse=True):  # files before the folders that name them
        fsync_path(path)
    fsync_path(work)
    if final.exists():
        shutil.rmtree(final)
    os.replace(work, final)
    fsync_path(final.parent)


def discard_leftovers(path: Path) -> None:
    """Remove what killed writers left of ``path``; only for who alone may write it now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 32}.tmp"):
        left.unlink(missing_ok=True)


def canonical_json(value: Any) -> bytes:
    """The one byte string for a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def write_json_atomic(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON with sorted keys, atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
    write_bytes_atomic(path, text.encode() + b"\n")


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is appended to; none without one. A torn last line is cut off."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_bytes_atomic(path, whole)
    return whole.splitlines()


def sha256_file(path: Path) -> str:
    """The hex sha256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
