"""The Gumbel noise of samples, found again from (seed, sample index) by whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.base import derive_seed
from shards.codec import Codec
from shards.noise import KeyedPrior, Noise, PositionKeys


@runtime_checkable
class NoisePrior(Protocol):
    """A codec whose stored noise is truncated offers a prior that is truncated alike."""

    def prior(self, keys: PositionKeys, vocab_size: int) -> Noise:
        """Prior noise as a student trained on this codec has learnt to read it."""
        ...


@dataclass(frozen=True)
class SamplingNoise:
    """Prior noise of the samples' positions, with further independent draws.

    Attributes:
        keys: Seed, sample ids as rows, positions and draw.
        vocab_size: V.
        codec: The codec the student was trained on, if it truncates noise; else None.
    """

    keys: PositionKeys
    vocab_size: int
    codec: Codec | None = None

    @cached_property
    def base(self) -> Noise:
        """The noise itself."""
        if isinstance(self.codec, NoisePrior):
            return self.codec.prior(self.keys, self.vocab_size)
        return KeyedPrior(self.keys, self.vocab_size)

    @property
    def num_positions(self) -> int:
        return self.base.num_positions

    @property
    def device(self) -> torch.device:
        return self.base.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.base.tile(start, stop)

    def select(self, index: Int[Tensor, "m"] | Bool[Tensor, "n"] | slice) -> SamplingNoise:
        return replace(self, keys=self.keys.select(index))

    def to(self, device: torch.device | str) -> SamplingNoise:
        return replace(self, keys=self.keys.to(device))

    def redrawn(self, draw: int) -> SamplingNoise:
        """The ``draw``-th draw after this one, of the same positions."""
        return replace(self, keys=replace(self.keys, draw=self.keys.draw + draw))


def sampling_noise(
    seed: int,
    sample_ids: Int[Tensor, "b"],
    row_length: int,
    vocab_size: int,
    *,
    codec: Codec | None = None,
    draw: int = 0,
) -> SamplingNoise:
    """Noise of B * row_length positions, sample by sample; position 0 is there but never read.

    A pure function of its arguments: evaluation regenerates a sample's noise from the run's seed
    and the sample's index.

    Args:
        seed: The user's sampling seed.
        sample_ids: [B] int64, index of each sample in the run.
        row_length: Positions per sample.
        vocab_size: V.
        codec: The codec of the store that the student was trained on.
        draw: Which draw: 0, or the attempt's number where a sample is drawn anew.
    """
    positions = torch.arange(row_length, device=sample_ids.device).repeat(len(sample_ids))
    rows = sample_ids.repeat_interleave(row_length)
    keys = PositionKeys(derive_seed(seed, "sampling noise"), rows, positions, draw)
    return SamplingNoise(keys, vocab_size, codec)
