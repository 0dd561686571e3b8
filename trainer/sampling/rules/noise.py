"""The Gumbel noise of samples, found again from (seed, sample index) by whoever needs it."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from shards.base import derive_seed
from shards.codec import Codec
from shards.noise import KeyedPrior, PositionKeys, PriorNoise
from trainer.students import Student


def sampling_noise(
    seed: int,
    sample_ids: Int[Tensor, "b"],
    row_length: int,
    vocab_size: int,
    *,
    codec: Codec | None = None,
    draw: int = 0,
) -> PriorNoise:
    """Noise of B * row_length positions, sample by sample; position 0 is there but never read.

    A pure function of its arguments: evaluation regenerates a sample's noise from the run's seed
    and the sample's index.

    Args:
        seed: The user's sampling seed.
        sample_ids: [B] int64, index of each sample in the run.
        row_length: Positions per sample.
        vocab_size: V.
        codec: The codec of the store that the student was trained on: it truncates this noise as
            it truncates what it stores. None for a student that takes it whole.
        draw: Which draw: 0, or the attempt's number where a sample is drawn anew.
    """
    positions = torch.arange(row_length, device=sample_ids.device).repeat(len(sample_ids))
    rows = sample_ids.repeat_interleave(row_length)
    keys = PositionKeys(derive_seed(seed, "sampling noise"), rows, positions, draw)
    return KeyedPrior(keys, vocab_size) if codec is None else codec.prior(keys, vocab_size)


def noise_of_rows(
    student: Student, seed: int, sample_ids: Int[Tensor, "b"], row_length: int
) -> PriorNoise | None:
    """``sampling_noise`` as the student reads it; None for one without conditioning."""
    if not student.is_conditioned:
        return None
    size = student.config.vocab_size
    return sampling_noise(seed, sample_ids, row_length, size, codec=student.codec)
