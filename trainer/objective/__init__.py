"""What a student is asked: rows become batches, batches are corrupted, times weigh the loss.

In: rows of a store (``shards.stream``). Out: :class:`Batch` with its noise, :class:`Corruption`
(times, masks, loss weights) keyed by (seed, epoch, row), noise schedules, and the search for the
clips of t whose loss varies least. Pure functions of what they are given; no module, no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.objective.batch import Batch, BatchMaker, StoredRowNoise, placed
    from trainer.objective.clipped_schedule import FULL, MAX_BATCHES, Clips, best_clips, candidates
    from trainer.objective.copies import CopiesAhead
    from trainer.objective.distillation import Distillation
    from trainer.objective.places import Places
    from trainer.objective.prior_noise import partly_prior
    from trainer.objective.schedules import (
        SCHEDULES,
        Schedule,
        masking_sigma,
        rate_noise,
        total_noise,
    )
    from trainer.objective.substitution import (
        MASK_LOGIT_OFFSET,
        Corruption,
        corrupt,
        corruption_from_uniforms,
        masked_log_probs,
        require_reachable,
        row_uniforms,
        schedule_of,
        stratified_times,
        substituted_log_probs,
    )
    from trainer.objective.through_time import Denoise, EarlierSteps, SelfDistillation

__getattr__, __dir__ = open_door(__name__, __file__)
