"""Rows of a corpus as text, to compare samples with: what MAUVE calls the reference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.tokens.dataset import RECORD, TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from shards.atomic import write_bytes_atomic
from shards.errors import UsageError
from shards.store.store import ShardStore

BLOCK_ROWS = 256


def write_references(source: str, out: Path, num: int | None, split: str) -> int:
    """Write the first rows of a split, one ``{"text": ...}`` a line; how many.

    A row's text leaves out a leading bos, as a sample's does, and keeps every other special token.

    Args:
        source: A run's folder, its ``tokens`` or a store (folder or URL).
        out: The ``.jsonl`` file.
        num: How many; None is all.
        split: ``train`` or ``validation``.

    Raises:
        UsageError: If there is no such source or split, or fewer rows than asked for.
    """
    if num is not None and num < 1:
        raise UsageError("out of range", where="--num", got=num, expected="1 or more")
    read, available, tokenizer, bos_id = _rows_of(source, split)
    if not available or (num or 0) > available:
        raise UsageError("too few rows", where=f"{source}: {split}", got=available, expected=num or "some")
    count, lines = num or available, []
    for start in range(0, count, BLOCK_ROWS):
        for row in read(start, min(start + BLOCK_ROWS, count)):
            kept = row[1:] if row[0] == bos_id else row
            text = tokenizer.decode(kept.tolist(), skip_special_tokens=False)
            lines.append(json.dumps({"text": text}, ensure_ascii=False))
    write_bytes_atomic(out, ("\n".join(lines) + "\n").encode())
    return count


Rows = tuple[Callable[[int, int], np.ndarray], int, PreTrainedTokenizerBase, int | None]


def _rows_of(source: str, split: str) -> Rows:
    """What reads rows [n, L] by number, how many there are, the tokenizer and its bos."""
    folders = [Path(source), Path(source) / "tokens"]
    folder = next((place for place in folders if (place / RECORD).is_file()), None)
    if folder is not None:
        dataset = TokenDataset.open(folder)
        rows, tokenizer = dataset.num_rows(split), load_tokenizer(dataset.tokenizer_path)
        return partial(dataset.read_rows, split), rows, tokenizer, dataset.bos_id
    store = ShardStore.find(source)
    if split not in store.manifest.splits:
        raise UsageError("unknown split", where=source, got=split, expected=", ".join(store.manifest.splits))
    reader = store.split(split, ["tokens"])
    with tempfile.TemporaryDirectory() as copy:
        store.copy_files("tokenizer", Path(copy))
        tokenizer = load_tokenizer(copy)

    def read(start: int, stop: int) -> np.ndarray:
        return reader.read_rows(start, stop)["tokens"]

    return read, reader.num_rows, tokenizer, store.manifest.bos_id
