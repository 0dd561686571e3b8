"""The unigram of a corpus: how often each token is met, smoothed so that none is impossible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int32

from shards.store.store import ShardStore

UNIGRAM_TOKENS = 1 << 26
UNIGRAM_SMOOTHING = 0.5

ReadRows = Callable[[int, int], Int32[np.ndarray, "rows length"]]


def unigram_log_probs(
    read_rows: ReadRows, num_rows: int, row_length: int, vocab_size: int, block: int
) -> Float[np.ndarray, "v"]:
    """Log-probability of each token in the rows; [V] float32, nats.

    (count + 1/2) / (N + V/2): additive smoothing (Krichevsky and Trofimov, 1981). At most 2^26
    tokens are counted, in blocks spread evenly over the rows; the first token of a row is left
    out, as no teacher scores it.

    Args:
        read_rows: (start, stop) -> token rows.
        num_rows: Rows there are.
        row_length: Tokens of a row.
        vocab_size: V.
        block: Rows to read at a time.
    """
    starts = np.arange(0, num_rows, block)
    most = max(1, UNIGRAM_TOKENS // (block * row_length))
    if len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
    counts = np.zeros(vocab_size, np.int64)
    for start in starts.tolist():
        tokens = read_rows(start, min(start + block, num_rows))
        counts += np.bincount(tokens[:, 1:].reshape(-1), minlength=vocab_size)
    smooth = counts + UNIGRAM_SMOOTHING
    return np.log(smooth / smooth.sum()).astype(np.float32)


def count_unigram(store: ShardStore) -> Float[np.ndarray, "v"]:
    """The unigram of a store's training rows, or of the last split that has any."""
    manifest = store.manifest
    names = ["train", *reversed([*manifest.splits])]
    split = next((name for name in names if manifest.splits.get(name)), "train")
    reader = store.split(split, ["tokens"])
    return unigram_log_probs(
        lambda start, stop: reader.read_rows(start, stop)["tokens"],
        reader.num_rows,
        manifest.row_length,
        manifest.vocab_size,
        manifest.rows_per_shard,
    )
