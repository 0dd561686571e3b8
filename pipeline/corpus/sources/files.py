"""Local files: patterns, plain or compressed bytes, and what identifies their content."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob, has_magic
from pathlib import Path
from typing import Any, cast

import zstandard

from pipeline.corpus.sources.protocol import Known
from shards.base import GdistillError, UsageError, sha256_file

BUFFER_BYTES = 1 << 20


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

    A damaged or unreadable file is a :class:`GdistillError` that names it.
    """
    try:
        with cast(io.BufferedReader, open(path, "rb", buffering=BUFFER_BYTES)) as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield io.BufferedReader(cast(io.RawIOBase, unpacked), BUFFER_BYTES)
            elif path.suffix == ".zst":
                yield io.BufferedReader(_ZstdFrames(raw), BUFFER_BYTES)
            else:
                yield raw
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise GdistillError(
            "the compressed corpus file is damaged", where=path, got=error
        ) from error
    except OSError as error:
        raise GdistillError("cannot read the corpus file", where=path, got=error) from error


class _ZstdFrames(io.RawIOBase):
    """Decompressed bytes of consecutive zstd frames; a cut last frame is an error.

    The stream reader of ``zstandard`` takes a truncated file for a short one, without a word.
    """

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw, self._ready, self._frame = raw, b"", None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._frame.unused_data if self._frame and self._frame.eof else b""
            packed = packed or self._raw.read(1 << 16)
            if not packed:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last zstd frame is cut short")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(packed)
        taken = self._ready[: len(buffer)]
        buffer[: len(taken)] = taken
        self._ready = self._ready[len(taken) :]
        return len(taken)


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
