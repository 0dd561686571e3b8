"""DOOR: shards.noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.noise.entries import Entries
    from shards.noise.gumbel import (
        add_wait_,
        arrivals_from_gumbel,
        gumbel_argmax,
        gumbel_from_arrivals,
        posterior_gumbels_from_draws,
    )
    from shards.noise.keyed_exponentials import NoiseKernel, noise_kernel, use_noise_kernel
    from shards.noise.kinds import (
        DenseNoise,
        KeyedPosterior,
        KeyedPrior,
        Noise,
        ShiftedNoise,
        SparseNoise,
        dense_arrivals,
        place_tokens,
    )
    from shards.noise.order_statistics import first_arrivals_of
    from shards.noise.philox import keyed_bits, stream_bits
    from shards.noise.position_keys import Index, PositionKeys
    from shards.noise.probabilities import (
        DenseProbabilities,
        HeadAndTail,
        HeadLogits,
        Probabilities,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
