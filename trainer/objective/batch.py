"""What one training step sees: token rows, their teacher log-probabilities and their noise.

The noise of a row is decoded where the corruption has masked it and nowhere else: a batch carries
the stored arrays, and ``noise.at(places)`` hands the masked positions to the codec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from shards.codec.protocol import Codec
from shards.noise.embedding import Noise
from shards.noise.gumbel import Probabilities
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed
from shards.store.manifest import COUNTED
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch

This = TypeVar("This", bound="OfRows")


class OfRows:
    """A frozen dataclass whose tensors, in dictionaries too, have one entry a row; ``shared`` fields have none."""

    shared: ClassVar[tuple[str, ...]] = ()

    def rows(self: This, part: slice) -> This:
        """The same of some of the rows."""
        return self.changed(lambda array: array[part])

    def changed(self: This, change: Callable[[Tensor], Tensor]) -> This:
        """All tensors changed alike."""

        def apply(value: Any) -> Any:
            if isinstance(value, OfRows):
                return value.changed(change)
            if isinstance(value, dict):
                return {name: change(array) for name, array in value.items()}
            return change(value) if isinstance(value, Tensor) else value

        this: Any = self
        names = [field.name for field in fields(this) if field.name not in self.shared]
        return replace(this, **{name: apply(getattr(this, name)) for name in names})


@runtime_checkable
class BatchNoise(Protocol):
    """The noise of a batch of rows (:class:`OfRows`), read at the masked positions only."""

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        """Noise of the masked positions, row-major; column 0 is never masked."""
        ...


@dataclass(frozen=True)
class Batch(OfRows):
    """This rank's share of one global batch.

    Attributes:
        tokens: [B, L] int64 clean rows.
        token_log_probs: [B, L] float32, log p of each token under the teacher, nats; column 0 is 0.
        row_ids: [B] int64, row index in the split.
        slots: [B] int64, index in the global batch.
        global_batch_size: Rows of the global batch.
        epoch: Pass over the split.
        seed: Run seed; with epoch and row id it keys times and masks.
        noise: Noise of the rows, or what their teacher said; None when neither is needed.
        counted: The tokens that are learnt, and alone have noise; None where all are.
    """

    tokens: Int[Tensor, "b l"]
    token_log_probs: Float[Tensor, "b l"]
    row_ids: Int[Tensor, "b"]
    slots: Int[Tensor, "b"]
    global_batch_size: int
    epoch: int
    seed: int
    noise: BatchNoise | None = None
    counted: Bool[Tensor, "b l"] | None = None

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_scored(self) -> int:
        """Tokens that a validation loss is the mean over: those that count, but for position 0."""
        return self.tokens[:, 1:].numel() if self.counted is None else int(self.counted[:, 1:].sum())

    def micro_batches(self, size: int | None) -> list[Batch]:
        """Parts of at most ``size`` rows (None: whole); times and masks stay the same.

        Slots are strata of t: a part of neighbours would be nearly clean or nearly all masked, so
        every n-th row goes to the same one of n parts.
        """
        num_parts = max(1, -(-self.num_rows // (size or max(1, self.num_rows))))
        return [self.rows(slice(first, None, num_parts)) for first in range(num_parts)]

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device, without waiting for it.

        Meant for micro-batches: arrays of a store with full noise take 50 KB and more per token.
        """
        if self.tokens.device == device:
            return self
        noise = self.noise.cut() if isinstance(self.noise, StoredRowNoise) else self.noise
        return replace(self, noise=noise).changed(lambda array: placed(array, device))


@dataclass(frozen=True)
class StoredRowNoise(OfRows):
    """The noise of B stored rows; nothing is decoded before :meth:`at`.

    Attributes:
        arrays: The codec's, [B, L, *trailing].
        seed: Stream seed of the position keys, as is ``draw`` their draw number.
        resources: The store's, on the device that decodes.
    """

    shared: ClassVar[tuple[str, ...]] = ("codec", "resources")
    codec: Codec
    arrays: dict[str, Tensor]
    tokens: Int[Tensor, "b l"]
    token_log_probs: Float[Tensor, "b l"]
    row_ids: Int[Tensor, "b"]
    seed: int
    draw: int
    resources: dict[str, Tensor]

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        places = Places.of(where)
        keys = PositionKeys(self.seed, self.row_ids[places.rows], places.positions, self.draw)
        return self.codec.decode(*self._read(places), keys, self.resources)

    def distribution(self, where: Bool[Tensor, "b l"] | Places) -> Probabilities:
        """The teacher's stored probabilities at places other than column 0, row-major."""
        return self.codec.distribution(*self._read(Places.of(where)), self.resources)

    def _read(self, places: Places) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        arrays = {name: places.read(array) for name, array in self.arrays.items()}
        return arrays, places.read(self.tokens), places.read(self.token_log_probs)

    def cut(self) -> StoredRowNoise:
        """The same without the slots that none of these rows uses."""
        return replace(self, arrays=dict(self.codec.cut(self.arrays)))


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
        device: Where micro-batches will go.
        with_noise: Whether the student reads noise, or the teacher's probabilities.
        num_draws: Distinct draws of fresh noise, in turn from epoch to epoch; None for ever new ones.
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
        return ["tokens", "token_log_probs", *(arrays if self.with_noise else COUNTED.keys() & arrays.keys())]

    @cached_property
    def _resources(self) -> dict[str, Tensor]:
        wanted = self.store.codec.resource_names
        return {name: self.store.resources[name].to(self.device) for name in wanted}

    def __call__(self, rows: RowBatch) -> Batch:
        arrays, codec, noise = dict(rows.arrays), self.store.codec, None
        tokens, log_probs = arrays.pop("tokens").long(), arrays.pop("token_log_probs")
        counted = arrays.pop("counted", None)
        if self.with_noise:
            seed, draw = self.store.manifest.noise_seed(self.split), 0
            if codec.is_fresh:
                seed = derive_seed(self.seed, "noise")
                draw = rows.epoch if self.num_draws is None else rows.epoch % self.num_draws
            noise = StoredRowNoise(codec, arrays, tokens, log_probs, rows.row_ids, seed, draw, self._resources)
        counted = None if counted is None else counted.bool()
        names = rows.row_ids, rows.slots, rows.num_global_rows, rows.epoch, self.seed
        return Batch(tokens, log_probs, *names, noise, counted)


@dataclass(frozen=True)
class Places:
    """n places of a [B, L] batch, row by row, int64: where a mask is true, listed once."""

    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]

    @classmethod
    def of(cls, where: Bool[Tensor, "b l"] | Places) -> Places:
        """The places of a mask, which are counted (a GPU is waited for); of places, themselves."""
        return where if isinstance(where, Places) else cls(*where.nonzero(as_tuple=True))

    @property
    def index(self) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        return self.rows, self.positions

    def __len__(self) -> int:
        return self.rows.shape[0]

    def read(self, values: Shaped[Tensor, "b l *d"]) -> Shaped[Tensor, "n *d"]:
        return values[self.rows, self.positions]

    def shifted(self, num_columns: int) -> Places:
        """The same places behind so many further columns."""
        return Places(self.rows, self.positions + num_columns)


def all_but_first(tokens: Int[Tensor, "b l"]) -> Places:
    """Every place of a batch but those of column 0, listed without asking a mask."""
    rows, length = tokens.shape
    index = torch.arange(rows * (length - 1), device=tokens.device)
    return Places(index // (length - 1), index % (length - 1) + 1)
