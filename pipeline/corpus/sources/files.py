"""Local files: patterns, plain or compressed bytes, and what identifies their content."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from pipeline.corpus.sources.protocol import Known
from shards.base import GdistillError, UsageError, sha256_file

BUFFER_BYTES = 1 << 20
COMPRESSION = {".gz": "gzip", ".zst": "zstd"}


def expand(pattern: str) -> list[Path]:
    """The files of a path or glob, sorted by name; at least one, none of them a directory."""
    if not pattern:
        raise UsageError("the corpus names no file", expected="text:PATH, jsonl:PATH#field, ...")
    pattern = os.path.expanduser(pattern)
    names = sorted(glob(pattern, recursive=True)) if has_magic(pattern) else [pattern]
    paths = [Path(name) for name in names]
    if has_magic(pattern):
        paths = [path for path in paths if not path.is_dir()]
    if not paths:
        raise UsageError("no file matches the corpus pattern", where=pattern)
    for path in paths:
        if path.is_dir():
            raise UsageError(
                "the corpus path is a directory",
                where=path,
                expected="a file or a glob",
                remedy=f"for all files in it: '{path}/*'",
            )
        if not path.exists():
            raise UsageError("no such corpus file", where=path)
    return paths


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The file's bytes, decompressed if it ends in ``.gz`` or ``.zst``.

    Frames that follow each other in one file are read as one text.

    Raises:
        GdistillError: For a file that cannot be read, or is damaged or cut short; names it.
    """
    try:
        with pa.input_stream(str(path), compression=COMPRESSION.get(path.suffix)) as file:
            yield io.BufferedReader(cast(io.RawIOBase, file), BUFFER_BYTES)
    except OSError as error:
        damaged = path.suffix in COMPRESSION
        what = "the compressed corpus file is damaged" if damaged else "cannot read the corpus file"
        raise GdistillError(what, where=path, got=error) from error


def file_identity(path: Path, known: Known) -> dict[str, Any]:
    """Path, size, modification time and sha256 of one file as stored."""
    if str(path) in known and looks_unchanged(known[str(path)]):
        return known[str(path)]
    before = path.stat()
    digest = sha256_file(path)
    return {
        "path": str(path),
        "num_bytes": before.st_size,
        "modified_ns": before.st_mtime_ns,
        "sha256": digest,
    }


def looks_unchanged(known: dict[str, Any]) -> bool:
    """Whether a file still has the size and modification time noted with its hash."""
    try:
        found = Path(known["path"]).stat()
    except OSError:
        return False
    return (found.st_size, found.st_mtime_ns) == (known["num_bytes"], known["modified_ns"])
