"""DOOR: trainer.objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.objective.batch import Batch, BatchMaker, StoredRowNoise
    from trainer.objective.clipped_schedule import FULL, MAX_BATCHES, Clips, best_clips, candidates
    from trainer.objective.schedules import (
        SCHEDULES,
        Schedule,
        noise_level,
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
        schedule_of,
        stratified_times,
        substituted_log_probs,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
