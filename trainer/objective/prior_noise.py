"""Masked positions whose noise knows nothing of their token, as a sampler's does not.

Where rows are filled in any order, what is known behind a position was drawn before its own token
was. In a corpus the two agree, for both follow from one text; in a sample they need not. A student
that only ever saw noise that explains the text trusts it over what it reads. With some positions
under prior noise it must ask how well the two agree.
"""

from __future__ import annotations

from dataclasses import replace

from shards.base import UsageError
from shards.noise import KeyedPosterior, Noise
from trainer.objective.batch import Batch
from trainer.objective.places import Places
from trainer.objective.substitution import row_uniforms


def partly_prior(noise: Noise, batch: Batch, places: Places, share: float) -> Noise:
    """The noise of n masked positions, prior noise at each with probability ``share``.

    Which ones, is a function of (seed, epoch, row, position).

    Args:
        noise: Posterior noise of the places.
        batch: Gives the names of the draws.
        places: Where the n positions stand in the batch.
        share: In [0, 1].

    Raises:
        UsageError: Where a store keeps a draw of the noise instead of the distribution.
    """
    if not isinstance(noise, KeyedPosterior):
        raise UsageError(
            "noise that was drawn when the store was written cannot be drawn again",
            where="model.prior_noise_share",
            got=share,
            remedy="extract with the codec posterior or hidden, or leave it out",
        )
    uniforms = row_uniforms("prior noise", batch, 0, batch.tokens.shape[1])
    return replace(noise, is_prior=places.read(uniforms.to(noise.device)) < share)
