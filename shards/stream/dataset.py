"""Rows for a training loop of one's own: a torch ``IterableDataset`` over a split of a store.

rows = shards.open_store("out/owt/store").stream(batch_size=32, seed=0)
for batch in DataLoader(rows, batch_size=None, num_workers=2):
    noise = rows.noise(batch, mask)
    state = rows.state_dict(batch)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from shards.errors import UsageError
from shards.noise.embedding import Noise
from shards.noise.gumbel import Probabilities
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed
from shards.store.store import ShardStore
from shards.stream.stream import PLACE_FIELDS, WINDOW_BYTES, ShardStream

Batch = dict[str, Tensor]
PLACE = "place"

MOST_WORKERS = 1024


class RowStream(IterableDataset[Batch]):
    """Batches of rows in a shuffled, resumable order, for any number of DataLoader workers.

    An item is one rank's part of a global batch: every array of the store, [b, L, ...] by name, ``row_ids`` [b] int64,
    and ``place`` [5] int64, which counts what came before. Give it to a DataLoader with ``batch_size=None``: workers
    take turns, and what they read ahead is not counted, because every batch carries the place after it.

    Every worker decodes all chunks, as a chunk has rows in many batches: ``num_threads`` without
    workers reads ahead at less cost, and workers pay where the batch is worked on afterwards.

    One ``for`` loop is one epoch, and the next loop is the next epoch, with workers or without. A
    loop that was left early goes on in the same epoch only without workers; with them, call
    ``load_state_dict(state_dict(batch))`` of the last batch first.

    Args:
        store, split: What to read.
        batch_size: Rows of a global batch, over all ranks.
        seed: Of the order, and of fresh noise.
        rank, world_size: This process among those that share each batch.
        shuffle: False keeps the stored order.
        window_bytes: Decoded chunks that shuffling may keep open.
        num_threads: Threads that read ahead in each process that reads.

    Raises:
        UsageError: If sizes do not fit each other or the split.
    """

    def __init__(
        self,
        store: ShardStore,
        split: str = "train",
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        window_bytes: int = WINDOW_BYTES,
        num_threads: int = 0,
    ) -> None:
        self._store, self._codec = store, store.codec
        self._noise_seed = store.manifest.noise_seed(split)
        if store.codec.is_fresh:
            self._noise_seed = derive_seed(seed, "noise", split)
        self._stream = ShardStream(
            store.split(split),
            seed=seed,
            global_batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            window_bytes=window_bytes,
            num_workers=num_threads,
        )
        # In shared memory, as workers are copies of this object, made anew for every loop or kept:
        # the place at which this process is, and the loops that each worker has begun from there.
        self._place = torch.tensor(self._fields()).share_memory_()
        self._begun = torch.zeros(MOST_WORKERS, dtype=torch.int64).share_memory_()

    def _fields(self) -> list[int]:
        state = self._stream.state_dict()
        return [state[field] for field in PLACE_FIELDS]

    def __len__(self) -> int:
        """Global batches of a whole epoch."""
        return len(self._stream)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is not None:
            place = dict(zip(PLACE_FIELDS, self._place.tolist(), strict=True))
            self._stream.load_state_dict({**self._stream.state_dict(), **place})
        begun = self._begun[worker.id] if worker is not None else self._begun.max()
        for _ in range(int(begun)):
            self._stream.skip_epoch()
        if worker is None:
            self._begun.zero_()
        else:
            self._begun[worker.id] += 1
        for index, rows in enumerate(self._stream):
            if worker is None:
                self._place.copy_(torch.tensor(self._fields()))
            if worker is None or index % worker.num_workers == worker.id:
                place = torch.tensor([*self._fields(), rows.epoch])
                yield {**rows.arrays, "row_ids": rows.row_ids, PLACE: place}

    def state_dict(self, batch: Batch | None = None) -> dict[str, Any]:
        """The place after a batch; by default after the last one that this object handed out.

        Raises:
            UsageError: Without a batch where DataLoader workers read, who run ahead.
        """
        state = self._stream.state_dict()
        if batch is not None:
            values = batch[PLACE].tolist()[: len(PLACE_FIELDS)]
            return {**state, **dict(zip(PLACE_FIELDS, values, strict=True))}
        if bool(self._begun.any()) and get_worker_info() is None:
            what = "workers read ahead of the loop"
            expected = "the last batch that the loop has used"
            remedy = "call state_dict(batch)"
            raise UsageError(what, where="state_dict", got="no batch", expected=expected, remedy=remedy)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the place of a state; for loops that begin from now on.

        Raises:
            GdistillError: If the state belongs to another store, split or seed.
        """
        self._stream.load_state_dict(state)
        self._begun.zero_()
        self._place.copy_(torch.tensor(self._fields()))

    def noise(self, batch: Batch, mask: Bool[Tensor, "b l"]) -> Noise:
        """The noise of the masked positions, row-major; column 0 has none and may not be masked."""
        rows, positions = mask.nonzero(as_tuple=True)
        draw = int(batch[PLACE][-1]) if self._codec.is_fresh else 0
        keys = PositionKeys(self._noise_seed, batch["row_ids"][rows], positions, draw)
        stored = self._stored(batch, rows, positions)
        return self._codec.decode(*stored, keys, self._store.resources)

    def distribution(self, batch: Batch, mask: Bool[Tensor, "b l"]) -> Probabilities:
        """The teacher's distribution at the masked positions, for distillation losses.

        Raises:
            UsageError: If the store holds one draw of the noise and no distribution.
        """
        stored = self._stored(batch, *mask.nonzero(as_tuple=True))
        return self._codec.distribution(*stored, self._store.resources)

    def _stored(
        self, batch: Batch, rows: Int[Tensor, "n"], positions: Int[Tensor, "n"]
    ) -> tuple[Batch, Int[Tensor, "n"], Tensor]:
        if bool((positions == 0).any()):
            raise UsageError("position 0 has no noise", where="mask", expected="mask[:, 0] False")
        known = {"tokens", "token_log_probs", "counted", "row_ids", PLACE}
        arrays = {name: a[rows, positions] for name, a in batch.items() if name not in known}
        tokens = batch["tokens"][rows, positions].long()
        return arrays, tokens, batch["token_log_probs"][rows, positions]


class OpenStore(ShardStore):
    """A store open for reading, whose rows also come as a stream of batches."""

    def stream(self, split: str = "train", **options: Any) -> RowStream:
        """Batches of a split's rows; options as of :class:`RowStream`."""
        return RowStream(self, split, **options)


open_store = OpenStore.find
