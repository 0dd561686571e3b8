"""Stage 2 from an engine's scores: checked rows -> posterior arrays -> store, shard by shard.

The teacher's forward pass is somewhere else, so there is no pipeline to keep full here: a shard is
claimed, its rows are fetched (many requests at a time), encoded and written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.engine.scored import ScoredRow, same_length
from pipeline.tokens.dataset import TokenDataset
from pipeline.workers import StopRequest, Worker
from shards.codec.posterior import PosteriorCodec
from shards.console import Bar
from shards.errors import GdistillError
from shards.store.layout import ShardRange
from shards.store.writer import ShardWriter

POLL_SECONDS = 1.0
ROWS_AT_ONCE = 64
"""Rows fetched between two looks at whether the process was asked to stop."""

Fetch = Callable[[ShardRange, np.ndarray], Sequence[ScoredRow]]
"""Scores of some rows of a split, given their range and their token ids [n, L]."""


@dataclass
class ScoreWriter:
    """Writes every shard that no other process writes; see :meth:`run`.

    Attributes:
        fetch: Where scores come from.
        dataset: The rows of stage 1.
        codec: Keeps the likeliest tokens.
        writer: The store.
        resources: The store's resources, on the host.
        stop: Asked between requests.
    """

    fetch: Fetch
    dataset: TokenDataset
    codec: PosteriorCodec
    writer: ShardWriter
    resources: dict[str, torch.Tensor]
    stop: StopRequest
    num_extracted_tokens: int = 0
    seconds_waiting: float = field(default=0.0, init=False)

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Returns when all shards are done, whoever did them.

        Raises:
            Stopped: If the process was asked to end; finished shards are kept.
            GdistillError: For scores that cannot be used, or an engine that fails.
        """
        held = [shard for shard in worker.order(shards) if not self._write_free(shard, bar)]
        while held:
            bar.note(f"waiting for {held[0]}")
            self.stop.pause(POLL_SECONDS)
            self.seconds_waiting += POLL_SECONDS
            held = [shard for shard in held if not self._write_free(shard, bar)]

    def _write_free(self, shard: ShardRange, bar: Bar) -> bool:
        """Whether the shard is done now; a free one is done here."""
        self.stop.check()
        with self.writer.claim(shard) as mine:
            if not mine:
                return self.writer.is_done(shard)
            bar.note(str(shard))
            self.writer.write(shard, self._arrays(shard, bar))
        self.num_extracted_tokens += shard.num_rows * self.dataset.row_length
        return True

    def _arrays(self, shard: ShardRange, bar: Bar) -> dict[str, np.ndarray]:
        parts = []
        for start in range(shard.start, shard.stop, ROWS_AT_ONCE):
            self.stop.check()
            part = ShardRange(
                shard.split, shard.index, start, min(start + ROWS_AT_ONCE, shard.stop)
            )
            rows = self.dataset.read_rows(part.split, part.start, part.stop)
            parts.append(self._encode(part, rows, self.fetch(part, rows)))
            bar.advance(rows.size)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _encode(
        self, part: ShardRange, tokens: np.ndarray, rows: Sequence[ScoredRow]
    ) -> dict[str, np.ndarray]:
        if not np.array_equal(same_length(rows, tokens.shape[1], str(part)), tokens):
            raise GdistillError("the scores are of other rows", where=part)
        stacked = {
            name: np.stack([getattr(row, name)[1:] for row in rows])
            for name in ("token_ids", "token_log_probs", "top_ids", "top_log_probs")
        }
        flat = {name: torch.from_numpy(value).flatten(0, 1) for name, value in stacked.items()}
        encoded = self.codec.encode_likeliest(
            flat["top_ids"],
            flat["top_log_probs"],
            flat["token_ids"],
            flat["token_log_probs"],
            self.resources,
        )
        arrays = {"token_log_probs": flat["token_log_probs"], **encoded}
        shape = (len(rows), tokens.shape[1] - 1)
        return {
            "tokens": tokens,
            **{name: with_position_0(value.unflatten(0, shape)) for name, value in arrays.items()},
        }


def with_position_0(values: torch.Tensor) -> np.ndarray:
    """Arrays [B, L - 1, ...] of a codec as a store holds them, [B, L, ...], position 0 zero."""
    array = values.numpy()
    return np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)
