"""Sampling: from a student, its noise and rows with masked positions to finished rows.

A sampler is a frozen dataclass of settings with one method, ``sample``: ``ancestral``,
``first_hitting``, ``fixed_count`` and ``confidence`` fill whole rows (``whole_row``), ``block``
goes block by block, ``sequential`` token by token, ``apd`` and ``coupled`` as far as a verifier
agrees (``verified``). What they are composed of stands in ``rules``; what ``gdistill-sample`` adds,
in ``command``. In come students and their noise; out go ``SampleResult`` records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.ancestral import AncestralConfig
    from trainer.sampling.block import BlockConfig
    from trainer.sampling.block_state import BlockState
    from trainer.sampling.first_hitting import FirstHittingConfig, FixedCountConfig
    from trainer.sampling.generation import generate
    from trainer.sampling.registry import SAMPLERS, make_sampler, sampler_class
    from trainer.sampling.rules import NoiseUse, Sampler, sampling_noise
    from trainer.sampling.sequential import SequentialConfig
    from trainer.sampling.surest_first import ConfidenceConfig
    from trainer.sampling.verified import (
        AdaptiveConfig,
        CoupledConfig,
        DrafterSampler,
        MedusaConfig,
    )
    from trainer.sampling.whole_row import WholeRow

__getattr__, __dir__ = open_door(__name__, __file__)
