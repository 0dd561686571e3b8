"""All pending shards behind one progress bar, whoever computes them; what is left when stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pipeline.workers import Stopped, StopRequest, Worker
from shards.base import Bar, progress_bar
from shards.store import ShardRange, ShardWriter


@runtime_checkable
class Work(Protocol):
    """Computes and writes shards: an extractor, or a writer of an engine's scores."""

    writer: ShardWriter
    stop: StopRequest

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Every shard that no other process does; Stopped if the process was asked to end."""
        ...


def write_all(work: Work, pending: Sequence[ShardRange], worker: Worker, stage: str) -> None:
    """Do the pending shards; returns when all are done, whoever did them.

    Raises:
        Stopped: With what remains.
    """
    writer, manifest = work.writer, work.writer.manifest
    total = sum(manifest.splits.values()) * manifest.row_length
    left = sum(shard.num_rows for shard in pending) * manifest.row_length
    with (
        work.stop.listening(),
        progress_bar(stage, total, done=total - left, main_process=worker.is_main) as bar,
    ):
        try:
            work.run([*pending], worker, bar)
        except Stopped as error:
            raise Stopped(
                "stopped by SIGTERM",
                where=writer.location.url,
                got=f"{len(writer.all_pending())} shards still to do",
                remedy="run the same command again to finish",
            ) from error
