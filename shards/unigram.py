"""The unigram of a store's own tokens, for stores that were written without one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int32

from shards.store import ShardStore

UNIGRAM_TOKENS = 1 << 26
UNIGRAM_SMOOTHING = 0.5


def count_unigram(store: ShardStore) -> Float[np.ndarray, "v"]:
    """Log-probability of each token in the store's training rows; [V] float32, nats.

    (count + 1/2) / (N + V/2), as extraction counts the corpus: no token is impossible. The first
    token of a row is left out: no teacher scores it.
    """
    vocab_size = store.manifest.vocab_size
    counts = np.zeros(vocab_size, np.int64)
    for tokens in _counted_rows(store):
        counts += np.bincount(tokens[:, 1:].reshape(-1), minlength=vocab_size)
    smooth = counts + UNIGRAM_SMOOTHING
    return np.log(smooth / smooth.sum()).astype(np.float32)


def _counted_rows(store: ShardStore) -> Iterator[Int32[np.ndarray, "rows length"]]:
    """Training rows, or those of the last split that has any: up to 2^26 tokens, spread evenly."""
    manifest = store.manifest
    names = ["train", *reversed([*manifest.splits])]
    filled = [name for name in names if manifest.splits.get(name)]
    if not filled:
        return
    reader, block = store.split(filled[0], ["tokens"]), manifest.rows_per_shard
    starts = np.arange(0, reader.num_rows, block)
    most = max(1, UNIGRAM_TOKENS // (block * manifest.row_length))
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    for start in starts.tolist():
        yield reader.read_rows(start, min(start + block, reader.num_rows))["tokens"]
