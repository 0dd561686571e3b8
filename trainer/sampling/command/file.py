"""Samples on disk: one JSON object per line, appended batch by batch, finished by a rename.

While a run is under way its lines stand in ``NAME.partial``; a torn last line (power cut, kill -9)
is dropped when the run resumes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shards.base import GdistillError, fsync_path, whole_lines, write_bytes_atomic


class SampleFile:
    """A file of samples that a run fills.

    Args:
        path: Where the finished file stands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")

    def finished_indices(self) -> set[int]:
        """Indices of the samples that are safely written; repairs a torn last line.

        Raises:
            GdistillError: When a line in the middle is not a sample, or one of its own.
        """
        if self.path.is_file():
            return {record["index"] for record in self.read()}
        return {record["index"] for record in self._records(whole_lines(self.partial))}

    def read(self) -> list[dict[str, Any]]:
        """The samples of the finished file."""
        return self._records(self.path.read_bytes().splitlines())

    def _records(self, lines: list[bytes]) -> list[dict[str, Any]]:
        records: dict[int, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
                index = record["index"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _damaged(where, error) from error
            if type(index) is not int or index in records:
                raise _damaged(where, f"index {index!r}, no number or a second time")
            records[index] = record
        return list(records.values())

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add samples; they survive a power cut when this returns.

        Raises:
            GdistillError: When they cannot be written; a run begun again goes on from there.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():  # a finished run that is asked for more samples
            os.replace(self.path, self.partial)
        lines = "".join(json.dumps(record) + "\n" for record in records)
        try:
            with open(self.partial, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise GdistillError(
                "samples cannot be written", where=self.partial, got=error.strerror
            ) from error

    def finish(self) -> None:
        """Sort the lines by index and give the file its name."""
        if self.path.is_file():
            return
        records = self._records(self.partial.read_bytes().splitlines())
        records.sort(key=lambda record: record["index"])
        lines = "".join(json.dumps(record) + "\n" for record in records)
        write_bytes_atomic(self.path, lines.encode())
        self.partial.unlink()
        fsync_path(self.path.parent)


def _damaged(where: str, got: object) -> GdistillError:
    remedy = "delete the file and sample again"
    return GdistillError("a sample line is damaged", where=where, got=got, remedy=remedy)
