"""``hf:NAME[:CONFIG]``: a data set of the hub, or a folder that ``datasets`` loads; ``maze``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.corpus.sources import Known, RawDocument, Source, file_identity
from pipeline.maze import NUM_DOCUMENTS, MazeLayout, draw_documents, load_maze
from shards.errors import GdistillError, UsageError, did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset
else:
    Dataset = Any

BATCH_ROWS = 256


@dataclass(frozen=True)
class HubDataset(Source):
    """One split of one data set; memory-mapped by ``datasets``, no repository code is run."""

    name: str
    config: str | None
    split: str
    field: str
    revision: str | None

    @cached_property
    def _rows(self) -> Dataset:
        import datasets  # late: other corpora need not wait for it

        where = f"hf:{self.name}" + (f":{self.config}" if self.config else "")
        name = os.path.expanduser(self.name)
        if (os.path.isabs(name) or self.name.startswith(".")) and not os.path.isdir(name):
            raise UsageError("no such folder of a data set", where=where)
        try:
            rows = datasets.load_dataset(
                name, self.config, split=self.split, revision=self.revision
            )
        except ValueError as error:  # an unknown configuration or split, which it lists
            raise UsageError("cannot load the data set", where=where, got=error) from error
        except Exception as error:
            raise GdistillError(
                "cannot load the data set",
                where=where,
                got=f"{type(error).__name__}: {error}",
                remedy="is the name right and the hub (or its cache) within reach?",
            ) from error
        return self._with_field(rows, where)

    def _with_field(self, rows: Dataset, where: str) -> Dataset:
        names = rows.column_names
        if self.field not in names:
            raise UsageError(
                f"no field {self.field!r}",
                where=where,
                got=f"fields {names}",
                remedy=did_you_mean(self.field, names),
            )
        kind = getattr(rows.features[self.field], "dtype", "")
        if kind not in ("string", "large_string"):
            raise UsageError(f"field {self.field!r} holds no text", where=where, got=kind)
        return rows.select_columns([self.field])

    def count(self) -> int:
        return len(self._rows)

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        for begin in range(start, stop, BATCH_ROWS):
            batch = self._rows[begin : min(begin + BATCH_ROWS, stop)][self.field]
            for row, value in enumerate(batch, begin):
                yield RawDocument(value or "", f"hf:{self.name}", row)

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        rows, folder = self._rows, Path(os.path.expanduser(self.name))
        facts = {"config": self.config, "split": self.split, "num_rows": len(rows)}
        if folder.is_dir():  # where it lies says nothing: its files do
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            parts = {path: path.relative_to(folder).parts for path in files}
            kept = [path for path in files if not any(p.startswith(".") for p in parts[path])]
            return [facts, *(file_identity(path, known) for path in kept)]
        facts |= {"name": self.name, "revision": self.revision, "fingerprint": rows._fingerprint}
        return [facts]


@dataclass(frozen=True)
class MazePaths(Source):
    """``num_documents`` paths of a maze, drawn uniformly with replacement; see `pipeline.maze`."""

    maze: MazeLayout
    num_documents: int
    seed: int
    split: str

    @classmethod
    def of(cls, layout: str, seed: int, split: str) -> MazePaths:
        """The documents of a split of a layout."""
        return cls(load_maze(layout), NUM_DOCUMENTS[split], seed, split)

    @cached_property
    def _documents(self) -> list[str]:
        return draw_documents(self.maze, self.num_documents, self.seed, self.split)

    def count(self) -> int:
        return self.num_documents

    def documents(self, start: int, stop: int) -> Iterator[RawDocument]:
        for index, document in enumerate(self._documents[start:stop], start):
            yield RawDocument(document, f"maze:{self.maze.name}", index)

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        return [{**self.maze.artifact(), "seed": self.seed, "num_documents": self.num_documents}]
