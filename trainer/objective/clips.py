"""Search for the clips of t whose loss varies least (BD3-LM, section 5: var_min)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from shards.errors import GdistillError
from trainer.objective.corruption import FULL, Clips

MAX_BATCHES = 100


def candidates() -> tuple[Clips, ...]:
    """(1e-3, 1) and, for each width w = 0.5, ..., 0.9, (max(i, 1e-3), i + w), i = 0, 0.05, ..."""
    clips = [FULL]
    for width in (50, 60, 70, 80, 90):
        clips += [(max(i / 100, 1e-3), (i + width) / 100) for i in range(0, 101 - width, 5)]
    return tuple(clips)


def clip_variance(block_nlls: Sequence[Float[Tensor, "_ blocks"]]) -> float:
    """Sum over validation batches of the variance of a batch's block-mean NLLs.

    Each entry is one *global* batch, gathered over ranks, so the result does not depend on how
    many there are. The variance is the unbiased one over all B * nb blocks; NaN
    when a batch has a single block.
    """
    if any(nlls.numel() < 2 for nlls in block_nlls):
        return math.nan
    return float(sum(nlls.double().var() for nlls in block_nlls))


def best_clips(block_nlls: Mapping[Clips, Sequence[Float[Tensor, "_ blocks"]]]) -> Clips:
    """The clips with the smallest :func:`clip_variance`; the earlier candidate wins a tie.

    Raises:
        GdistillError: When no candidate has a finite variance.
    """
    variances = {clips: clip_variance(values) for clips, values in block_nlls.items()}
    finite = {clips: value for clips, value in variances.items() if math.isfinite(value)}
    if finite:
        return min(finite, key=finite.__getitem__)
    what, got = "the clipped-schedule search saw no finite variance", f"{len(variances)} candidates"
    remedy = "validate on more than one block and check the validation loss"
    raise GdistillError(what, where="search_schedule", got=got, remedy=remedy)
