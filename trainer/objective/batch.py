"""What one training step sees: token rows, their teacher log-probabilities and their noise.

The noise of a row is decoded where the corruption has masked it and nowhere else: a batch carries
the stored arrays, and ``RowNoise.at(places)`` hands the masked positions to the codec.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from shards.codec.protocol import Codec
from shards.errors import UsageError
from shards.noise.kinds import Noise, Probabilities
from shards.noise.philox import PositionKeys
from shards.provenance import derive_seed
from shards.store.manifest import COUNTED
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch


@runtime_checkable
class RowNoise(Protocol):
    """The noise of a batch of rows, read at the masked positions only."""

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        """Noise of the masked positions in row-major order; column 0 is never masked."""
        ...

    def rows(self, part: slice) -> RowNoise:
        """The noise of some of the rows."""
        ...

    def to(self, device: torch.device) -> RowNoise:
        """The same noise, decoded on that device."""
        ...


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch.

    Attributes:
        tokens: [B, L] int64 clean rows.
        token_log_probs: [B, L] float32, log p of each token under the teacher, nats; column 0 is 0.
        row_ids: [B] int64, row index in the split.
        slots: [B] int64, index in the global batch.
        global_batch_size: Rows of the global batch.
        step: Optimizer step the batch belongs to.
        epoch: Pass over the split.
        seed: Run seed; with epoch and row id it keys times and masks.
        noise: Noise of the rows (and, from a store, the teacher's probabilities); None when
            neither is needed.
        counted: The tokens that are learnt, and alone have noise; None where all are.
    """

    tokens: Int[Tensor, "b l"]
    token_log_probs: Float[Tensor, "b l"]
    row_ids: Int[Tensor, "b"]
    slots: Int[Tensor, "b"]
    global_batch_size: int
    step: int
    epoch: int
    seed: int
    noise: RowNoise | None = None
    counted: Bool[Tensor, "b l"] | None = None

    @property
    def num_rows(self) -> int:
        """B."""
        return self.tokens.shape[0]

    @property
    def num_scored(self) -> int:
        """Tokens that a validation loss is the mean over: those that count, but for position 0."""
        if self.counted is None:
            return self.tokens[:, 1:].numel()
        return int(self.counted[:, 1:].sum())

    def distribution(self, where: Bool[Tensor, "b l"] | Places) -> Probabilities:
        """The teacher's stored probabilities at places other than column 0, row-major.

        Raises:
            UsageError: When the batch carries none, or its codec stores a draw instead.
        """
        if not isinstance(self.noise, StoredRowNoise):
            remedy = "read it from a store whose codec keeps the teacher's distribution"
            raise UsageError("the batch carries no teacher probabilities", remedy=remedy)
        return self.noise.distribution(where)

    def micro_batches(self, size: int | None) -> Iterator[Batch]:
        """The batch in parts of at most ``size`` rows; times and masks stay the same.

        Slots are strata of t, so a part of neighbours would be nearly clean or nearly all masked:
        every n-th row goes to the same one of n parts, and all are about equally much work.

        Args:
            size: Rows of a part; None keeps the batch whole.
        """
        if size is None or size >= self.num_rows:
            yield self
            return
        num_parts = -(-self.num_rows // size)
        for first in range(num_parts):
            yield self.rows(slice(first, None, num_parts))

    def rows(self, part: slice) -> Batch:
        """Some of the rows, with their times, masks and noise."""
        noise = None if self.noise is None else self.noise.rows(part)
        own = {name: getattr(self, name)[part] for name in BY_ROW}
        counted = None if self.counted is None else self.counted[part]
        return replace(self, noise=noise, counted=counted, **own)

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device, without waiting for it.

        Meant for micro-batches: arrays of a store with full noise take 50 KB and more per token.
        """
        if self.tokens.device == device:
            return self
        moved = {name: placed(getattr(self, name), device) for name in BY_ROW}
        noise = None if self.noise is None else self.noise.to(device)
        counted = None if self.counted is None else placed(self.counted, device)
        return replace(self, noise=noise, counted=counted, **moved)


BY_ROW = ("tokens", "token_log_probs", "row_ids", "slots")


@dataclass(frozen=True)
class StoredRowNoise:
    """The noise of B stored rows; nothing is decoded before :meth:`at`.

    Attributes:
        codec: Decodes the arrays.
        arrays: The codec's arrays, [B, L, *trailing].
        tokens: [B, L].
        token_log_probs: [B, L], nats.
        row_ids: [B].
        seed: Stream seed of the position keys.
        draw: Draw number of the position keys.
        resources: The store's resources, on the device that decodes.
    """

    codec: Codec
    arrays: dict[str, Tensor]
    tokens: Int[Tensor, "b l"]
    token_log_probs: Float[Tensor, "b l"]
    row_ids: Int[Tensor, "b"]
    seed: int
    draw: int
    resources: dict[str, Tensor]

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        """See :class:`RowNoise`."""
        places = Places.of(where)
        keys = PositionKeys(self.seed, self.row_ids[places.rows], places.positions, self.draw)
        return self.codec.decode(*self._read(places), keys, self.resources)

    def distribution(self, where: Bool[Tensor, "b l"] | Places) -> Probabilities:
        """See :meth:`Batch.distribution`."""
        return self.codec.distribution(*self._read(Places.of(where)), self.resources)

    def _read(self, places: Places) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        arrays = {name: places.read(array) for name, array in self.arrays.items()}
        return arrays, places.read(self.tokens), places.read(self.token_log_probs)

    def rows(self, part: slice) -> StoredRowNoise:
        """The noise of some of the rows."""
        arrays = {name: array[part] for name, array in self.arrays.items()}
        own = {name: getattr(self, name)[part] for name in BY_ROW[:3]}
        return replace(self, arrays=arrays, **own)

    def to(self, device: torch.device) -> StoredRowNoise:
        """The same rows, cut to the slots that they use."""
        arrays = {n: placed(array, device) for n, array in self.codec.cut(self.arrays).items()}
        own = {name: placed(getattr(self, name), device) for name in BY_ROW[:3]}
        return replace(self, arrays=arrays, **own)


def placed(array: Tensor, device: torch.device) -> Tensor:
    """A host's array on the device; the host goes on while it is copied."""
    if device.type == "cuda" and array.device.type == "cpu":
        return array.contiguous().pin_memory().to(device, non_blocking=True)
    return array.to(device)


@dataclass(frozen=True)
class BatchMaker:
    """Turns rows of one split into batches on the host; ``Batch.to`` takes parts to the device.

    A codec that stores the teacher's distribution gives a fresh draw at every visit, keyed by
    (seed, epoch, row, position); one that stores a draw is read with the keys it was written with.

    Attributes:
        store: Where the rows come from.
        split: Which of its splits.
        seed: Run seed.
        device: Where micro-batches will go.
        with_noise: Whether the student looks at noise, or at the teacher's probabilities.
        num_draws: Distinct draws of fresh noise, met in turn from epoch to epoch; None for ever
            new ones.
    """

    store: ShardStore
    split: str
    seed: int
    device: torch.device
    with_noise: bool
    num_draws: int | None = None

    @property
    def arrays(self) -> list[str]:
        """The store's arrays that these batches need."""
        arrays = self.store.manifest.arrays
        own = arrays if self.with_noise else COUNTED.keys() & arrays.keys()
        return ["tokens", "token_log_probs", *own]

    @cached_property
    def _resources(self) -> dict[str, Tensor]:
        wanted = self.store.codec.resource_names
        return {name: self.store.resources[name].to(self.device) for name in wanted}

    def __call__(self, rows: RowBatch, step: int) -> Batch:
        """The batch of optimiser step ``step``."""
        arrays = dict(rows.arrays)
        counted = arrays.pop("counted", None)
        batch = Batch(
            tokens=arrays.pop("tokens").long(),
            token_log_probs=arrays.pop("token_log_probs"),
            row_ids=rows.row_ids,
            slots=rows.slots,
            global_batch_size=rows.num_global_rows,
            step=step,
            epoch=rows.epoch,
            seed=self.seed,
            counted=None if counted is None else counted.bool(),
        )
        if not self.with_noise:
            return batch
        codec = self.store.codec
        seed, draw = self.store.manifest.noise_seed(self.split), 0
        if codec.is_fresh:
            seed = derive_seed(self.seed, "noise")
            draw = batch.epoch if self.num_draws is None else batch.epoch % self.num_draws
        own = batch.tokens, batch.token_log_probs, batch.row_ids
        return replace(batch, noise=StoredRowNoise(codec, arrays, *own, seed, draw, self._resources))


# Where a mask is true, listed once: a list of unknown length makes the host wait for the GPU.


@dataclass(frozen=True)
class Places:
    """n places of a [B, L] batch, row by row.

    Attributes:
        rows: [n] int64.
        positions: [n] int64.
    """

    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]

    @classmethod
    def of(cls, where: Bool[Tensor, "b l"] | Places) -> Places:
        """The places of a mask, which are counted (one wait on a GPU); of places, themselves."""
        return where if isinstance(where, Places) else cls(*where.nonzero(as_tuple=True))

    @property
    def index(self) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        """For ``index_put``."""
        return self.rows, self.positions

    def __len__(self) -> int:
        return self.rows.shape[0]

    def read(self, values: Shaped[Tensor, "b l *d"]) -> Shaped[Tensor, "n *d"]:
        """What stands there."""
        return values[self.rows, self.positions]

    def shifted(self, num_columns: int) -> Places:
        """The same places behind so many further columns."""
        return Places(self.rows, self.positions + num_columns)


# Micro-batches on their way to the device: the next one is copied while one is computed on.
#
# On a GPU the copies go from pinned memory on a stream of their own, so neither the host waits for
# them nor the kernels before them. At most two micro-batches are on the device. Elsewhere each is
# moved when its turn comes.


Coming = tuple[Batch, Any]
"""A part and the event of its copy."""


class CopiesAhead:
    """The parts of one batch after another, on a device.

    Args:
        device: Where they are computed on.
        size: Rows of a part; None keeps batches whole.
    """

    def __init__(self, device: torch.device, size: int | None) -> None:
        self.device, self.size = device, size
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._announced: tuple[Batch, Iterator[Batch], Coming] | None = None

    @property
    def looks_ahead(self) -> bool:
        """Whether there is something to gain by :meth:`announce`."""
        return self._stream is not None

    def announce(self, batch: Batch) -> None:
        """The batch whose parts will be asked for next: the first of them sets out now."""
        if self._stream is not None:
            parts = batch.micro_batches(self.size)
            self._announced = batch, parts, self._send(next(parts))

    def of(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """The parts of a batch on the device in turn, and whether each is the last."""
        if self._stream is None:
            parts = list(batch.micro_batches(self.size))
            for part in parts:
                yield part.to(self.device), part is parts[-1]
            return
        if self._announced is None or self._announced[0] is not batch:
            self.announce(batch)
        assert self._announced is not None
        _, parts, coming = self._announced
        self._announced = None
        for following in parts:
            sent = self._send(following)
            yield self._arrived(coming), False
            coming = sent
        yield self._arrived(coming), True

    def _send(self, part: Batch) -> Coming:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            return part.to(self.device), self._stream.record_event()

    def _arrived(self, coming: Coming) -> Batch:
        """The part, for the stream that computes: it waits for the copy, and the memory for it."""
        part, copied = coming
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for tensor in _tensors(part):
            tensor.record_stream(computing)
        return part


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors on a GPU within dataclasses and dictionaries."""
    if isinstance(value, Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
