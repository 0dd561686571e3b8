"""``hf:NAME[:CONFIG]``: a data set of the Hugging Face hub, or a folder ``datasets`` loads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeline.corpus.files import Known, RawDocument, Source, file_identity
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

    def place(self, raw: RawDocument, byte: int) -> str:
        return f"{raw.origin}: row {raw.offset}, byte {byte}"

    def identity(self, known: Known = MappingProxyType({})) -> list[dict[str, Any]]:
        rows, folder = self._rows, Path(os.path.expanduser(self.name))
        facts = {"config": self.config, "split": self.split, "num_rows": len(rows)}
        if folder.is_dir():  # where it lies says nothing: its files do
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            kept = [path for path in files if not _is_hidden(path.relative_to(folder))]
            return [facts, *(file_identity(path, known) for path in kept)]
        facts |= {"name": self.name, "revision": self.revision, "fingerprint": rows._fingerprint}
        return [facts]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
