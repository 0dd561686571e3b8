"""The door for people with a trainer of their own: ``shards.open_store(path_or_url)``."""

from __future__ import annotations

from pathlib import Path

from shards.store.store import ShardStore, find_store
from shards.stream.dataset import RowStream
from shards.stream.order import WINDOW_BYTES


class OpenStore(ShardStore):
    """A store open for reading, whose rows also come as a stream of batches."""

    def stream(
        self,
        *,
        batch_size: int,
        seed: int,
        split: str = "train",
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        window_bytes: int = WINDOW_BYTES,
        num_threads: int = 0,
    ) -> RowStream:
        """Batches of a split's rows; see :class:`shards.stream.RowStream`."""
        return RowStream(
            self.split(split),
            self.codec,
            lambda: self.resources,
            self.manifest.noise_seed(split),
            batch_size=batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            window_bytes=window_bytes,
            num_threads=num_threads,
        )


def open_store(place: str | Path, *, allow_incomplete: bool = False) -> OpenStore:
    """The store at a path or URL, or in the folder of a run that wrote one.

    ``open_store(place).split("train").read_rows(0, 8)`` gives arrays by name, [8, L, ...].

    Raises:
        UsageError: If no store is there.
        GdistillError: If a newer format wrote it.
        IntegrityError: If the manifest was altered, or shards are missing and
            ``allow_incomplete`` is off.
    """
    return OpenStore.open(find_store(place), allow_incomplete=allow_incomplete)
