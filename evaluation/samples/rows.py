"""Rows of real text as token ids: a split of a store, or of a token dataset before extraction."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from jaxtyping import Int

from shards.base import GdistillError, UsageError
from shards.store import MANIFEST_FILE, ShardStore

TOKENS_FILE = "tokens.json"


@dataclass(frozen=True)
class DataRows:
    """Rows of one split.

    Attributes:
        rows: Token ids.
        name: Which rows these are, for people.
        fingerprint: Identifies the token dataset they come from.
        vocab_size: V, entries of the tokenizer.
        tokenizer: What the data remember of it; None where nothing.
        bos_id: Token at the start of a row of the ``bos`` conventions; None without one.
        eos_id: End of text; None without one.
    """

    rows: Int[np.ndarray, "n l"]
    name: str
    fingerprint: str
    vocab_size: int
    tokenizer: Any = None
    bos_id: int | None = None
    eos_id: int | None = None


def read_data_rows(place: Path, split: str = "validation", max_rows: int | None = None) -> DataRows:
    """The first rows of a split.

    Args:
        place: A store, a folder ``tokens`` of stage 1, or a run folder that holds either.
        split: Its name.
        max_rows: At most so many rows; all unless told.

    Raises:
        UsageError: When there are no such data, no such split, or no row in it.
        GdistillError: When the data are damaged.
    """
    for candidate in (place, place / "store", place / "tokens"):
        if (candidate / MANIFEST_FILE).is_file():
            return _of_store(candidate, split, max_rows)
        if (candidate / TOKENS_FILE).is_file():
            return _of_tokens(candidate, split, max_rows)
    raise UsageError(
        "no data there",
        where=place,
        got=f"neither {MANIFEST_FILE} nor {TOKENS_FILE}",
        expected="a store or a folder tokens/ of gdistill-extract",
        remedy="check the path",
    )


def _of_store(place: Path, split: str, max_rows: int | None) -> DataRows:
    store = ShardStore.open(place)
    manifest = store.manifest
    num_rows = _num_rows(place, split, dict(manifest.splits), max_rows)
    rows = store.split(split, ["tokens"]).read_rows(0, num_rows)["tokens"]
    return DataRows(
        rows.astype(np.int64),
        _told(place, split, rows),
        str(manifest.tokens.get("fingerprint", "")),
        manifest.vocab_size,
        manifest.tokenizer,
        manifest.bos_id,
        manifest.eos_id,
    )


def _of_tokens(place: Path, split: str, max_rows: int | None) -> DataRows:
    file = place / TOKENS_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        parts = {
            name: [dict(part) for part in value["parts"]]
            for name, value in record["splits"].items()
        }
        counts = {
            name: sum(int(part["num_rows"]) for part in value) for name, value in parts.items()
        }
        num_rows = _num_rows(place, split, counts, max_rows)
        files = [place / split / Path(part["name"]).name for part in parts[split]]
        rows = _read_parts(files, record["row_length"], num_rows)
        return DataRows(
            rows,
            _told(place.parent, split, rows),
            record["fingerprint"],
            record["vocab_size"],
            record["tokenizer"],
            record["bos_id"],
            record["eos_id"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GdistillError(
            "damaged token dataset", where=file, got=error, remedy="run stage 1 again"
        ) from error


def _read_parts(files: list[Path], row_length: int, num_rows: int) -> Int[np.ndarray, "n l"]:
    blocks, missing = [], num_rows
    for file in files:
        if missing == 0:
            break
        column = pq.read_table(file, columns=["input_ids"])["input_ids"].combine_chunks()
        block = np.asarray(column.flatten()).reshape(-1, row_length)[:missing]
        blocks.append(block.astype(np.int64))
        missing -= len(block)
    if missing:
        raise ValueError(f"{missing} rows fewer than tokens.json tells of")
    return np.concatenate(blocks)


def _told(place: Path, split: str, rows: np.ndarray) -> str:
    return f"{split} split of {place.resolve().name}, {len(rows)} rows of {rows.shape[1]} tokens"


def _num_rows(place: Path, split: str, counts: dict[str, int], max_rows: int | None) -> int:
    if split not in counts:
        raise UsageError("no such split", where=place, got=split, expected=" or ".join(counts))
    if counts[split] == 0:
        raise UsageError(
            "the split is empty: there is nothing to measure",
            where=f"{place}, {split}",
            got="0 rows",
            remedy="extract with --set corpus.validation_fraction=0.05, or name another split",
        )
    return counts[split] if max_rows is None else min(counts[split], max_rows)
