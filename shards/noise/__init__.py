"""Gumbel noise xi, kept as arrival times F = exp(-xi): what it is, and where it comes from.

In come keys (seed, row, position, draw) and, for the posterior, tokens with the teacher's
probabilities; out comes a ``Noise``: n positions x V entries, read in tiles and never held whole,
which embeds itself: ``noise.softmax_embed(weight)``.

gumbel.py says what the posterior is; philox and keyed_exponentials draw without state;
probabilities holds the teacher's side; kinds puts them together; order_statistics draws the k
largest of V without the V; embedding is softmax(xi) W (tile_weights its kernel); keyed_race draws
tokens; couplings and token_tree compare other ways to make a token from noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.noise.couplings import (
        gumbel_same_token,
        intervals,
        inverse_cdf,
        total_variation,
        uniform_same_token,
    )
    from shards.noise.embedding import (
        TILES,
        Tiles,
        Transform,
        Weighting,
        add_product,
        even_width,
        product_dtype,
        tile_shape,
    )
    from shards.noise.gumbel import add_wait_, arrivals_from_gumbel, gumbel_argmax
    from shards.noise.keyed_exponentials import NoiseKernel, noise_kernel, use_noise_kernel
    from shards.noise.keyed_race import (
        draws_kernel,
        race,
        race_of_logits,
        race_of_probs,
        uniforms,
    )
    from shards.noise.kinds import (
        KeyedPosterior,
        KeyedPrior,
        Noise,
        PriorNoise,
        ShiftedNoise,
        SparseNoise,
        TiledNoise,
        TokenNoise,
        dense_arrivals,
    )
    from shards.noise.order_statistics import TopPrior
    from shards.noise.philox import PositionKeys, keyed_bits, philox4x32, stream_bits
    from shards.noise.positions import Index
    from shards.noise.probabilities import (
        DenseProbabilities,
        Entries,
        HeadAndTail,
        HeadLogits,
        Probabilities,
    )
    from shards.noise.tile_weights import OpenTile, conditioner_kernel
    from shards.noise.token_tree import TokenTree, along_widest, balanced_tree, huffman_tree

__getattr__, __dir__ = open_door(__name__, __file__)
