"""Small stores that the tests of this folder write and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shards.codec.registry import make_codec
from shards.store.manifest import Manifest, ShardRange
from shards.store.writer import ShardWriter

VOCAB, LENGTH, KEPT = 50, 6, 3
FILES = {"tokenizer/tokenizer.json": b'{"a": 1}', "corpus/maze.json": b"[1, 2]"}


def make_manifest(**changes: Any) -> Manifest:
    """A manifest of 2 splits: 4 shards (the last one short) and 1 shard."""
    fields: dict[str, Any] = {
        "codec": {"name": "topk", "parameters": {"num_entries": KEPT}},
        "arrays": make_codec("topk", num_entries=KEPT).array_specs(VOCAB, None),
        "vocab_size": VOCAB,
        "row_length": LENGTH,
        "splits": {"train": 28, "validation": 5},
        "rows_per_shard": 8,
        "rows_per_chunk": 4,
        "teacher": {"id": "tiny", "weights_sha256": "ab" * 32, "dtype": "float32"},
        "tokenizer": {"id": "tiny", "sha256": "cd" * 32},
        "tokens": {"fingerprint": "ef" * 32, "corpus": {"name": "text"}},
        "seed": 7,
        "versions": {"gdistill": "0.1.0"},
        "bos_id": 0,
    }
    return Manifest(**{**fields, **changes})


def make_resources() -> dict[str, np.ndarray]:
    """A vector and a matrix kept once per store."""
    rng = np.random.default_rng(3)
    return {
        "unigram_log_probs": rng.normal(size=VOCAB).astype(np.float32),
        "lm_head": rng.normal(size=(VOCAB, 4)).astype(np.float16),
    }


def make_arrays(manifest: Manifest, shard: ShardRange) -> dict[str, np.ndarray]:
    """The content of a shard: a pure function of split and rows."""
    split = sorted(manifest.splits).index(shard.split)
    shape = (shard.num_rows, manifest.row_length)
    rng = np.random.default_rng([split, shard.start])
    arrays = {
        "tokens": rng.integers(0, manifest.vocab_size, shape).astype(np.int32),
        "token_log_probs": -rng.exponential(size=shape).astype(np.float32),
    }
    for name, spec in sorted(manifest.arrays.items()):  # a manifest read back has them sorted
        size = (*shape, *spec.trailing_shape)
        arrays[name] = rng.integers(1, manifest.vocab_size // KEPT, size).astype(spec.dtype)
    for name, values in arrays.items():
        if name != "tokens":
            values[:, 0] = 0
    return arrays


def open_writer(location: Any, **changes: Any) -> ShardWriter:
    """Create or resume the small store."""
    manifest = make_manifest(**changes)
    return ShardWriter.create_or_resume(location, manifest, make_resources(), FILES)


def write_store(location: Any, **changes: Any) -> ShardWriter:
    """The small store, finished."""
    writer = open_writer(location, **changes)
    write_pending(writer)
    return writer


def write_pending(writer: ShardWriter) -> None:
    """Write whatever is not done."""
    for split in writer.manifest.splits:
        for shard in writer.pending(split):
            with writer.claim(shard) as mine:
                if mine:
                    writer.write(shard, make_arrays(writer.manifest, shard))


def file_bytes(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }
