"""``hf:NAME[:CONFIG]``: a data set of the Hugging Face hub, or a folder ``datasets`` loads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import datasets

from pipeline.corpus.sources.protocol import Known, RawDocument
from shards.base import GdistillError, UsageError

BATCH_ROWS = 256


@dataclass(frozen=True)
class HubDataset:
    """One split of one data set; memory-mapped by ``datasets``, no repository code is run."""

    name: str
    config: str | None
    split: str
    field: str
    revision: str | None

    @cached_property
    def _rows(self) -> datasets.Dataset:
        where = f"hf:{self.name}" + (f":{self.config}" if self.config else "")
        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision
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

    def _with_field(self, rows: datasets.Dataset, where: str) -> datasets.Dataset:
        names = rows.column_names
        if self.field not in names:
            near = difflib.get_close_matches(self.field, names, n=1)
            raise UsageError(
                f"no field {self.field!r}",
                where=where,
                got=f"fields {names}",
                remedy=f"did you mean {near[0]!r}?" if near else "",
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

    def text(self, decoded: str, raw: RawDocument) -> str:
        return decoded

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: row {raw.offset}, byte {byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        rows = self._rows
        return [
            {
                "name": self.name,
                "config": self.config,
                "split": self.split,
                "revision": self.revision,
                "num_rows": len(rows),
                "sha256": rows._fingerprint,
            }
        ]
