"""Rows that are packed already (an engine scored them, say) as a token data set like any other."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.corpus import Tally
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.identity import check_identity
from pipeline.tokens.tokenizer import tokenizer_sha256
from pipeline.tokens.writer import PartWriter, write_record
from shards.base import publish_folder


def write_given_rows(
    blocks: Mapping[str, Iterable[np.ndarray]],
    row_length: int,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    corpus: Mapping[str, Any],
) -> TokenDataset:
    """Write ``out/tokens`` from rows, or open what is there if it came from the same corpus.

    Args:
        blocks: Split -> blocks of rows, [n, L] int32 each; read only if they are needed.
        row_length: L.
        tokenizer: Whose ids the rows hold.
        out: The run's folder.
        corpus: What the rows are, with a ``source``: their identity.

    Raises:
        UsageError: If ``out/tokens`` holds rows of another corpus.
    """
    identity = {
        "corpus": dict(corpus),
        "special_ids": {},
        "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)},
        "sources": {},
    }
    done, work = out / "tokens", out / ".tokens.partial"
    if done.exists():
        dataset = TokenDataset.open(done)
        check_identity(dataset.record["identity"], identity, done)
        return dataset
    shutil.rmtree(work, ignore_errors=True)
    parts = {}
    for split, rows in blocks.items():
        writer, closed = PartWriter(work / split, row_length), []
        for block in rows:
            writer.write(block)
            if writer.is_full:
                closed.append(writer.close())
        parts[split] = [part for part in [*closed, writer.close()] if part is not None]
    counts = {split: {"num_dropped_tokens": 0, **asdict(Tally())} for split in parts}
    border_ids = {"bos_id": tokenizer.bos_token_id, "eos_id": tokenizer.eos_token_id}
    settings = {**corpus, "row_length": row_length}
    write_record(work, parts, counts, identity, settings, tokenizer, border_ids)
    publish_folder(work, done)
    return TokenDataset.open(done)
