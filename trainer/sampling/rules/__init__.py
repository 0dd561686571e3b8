"""The rules that samplers are composed of.

In come log-probabilities and the names of samples; out go random draws (``draws``), the step in
which each position is revealed (``order``), its token (``token_rule``), the loop over forward
passes (``revealing``, and ``confidence``, where the student says which positions come first), and
when a sample has ended or must be drawn anew (``stopping``). Everything random is a pure function
of (seed, purpose, sample, position, attempt). ``sampler`` holds what all samplers are,
``noise_use`` how their noise reaches a student.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.rules.confidence import Confidence, ConfidenceOrder, SurestFirst
    from trainer.sampling.rules.draws import SampleKeys, position_chunks
    from trainer.sampling.rules.noise import noise_of_rows, sampling_noise
    from trainer.sampling.rules.noise_use import (
        STEPS_PER_ATTEMPT,
        NoiseUse,
        StepLevels,
        check_noise_settings,
        require_times,
    )
    from trainer.sampling.rules.order import (
        LAST_TIME,
        ancestral_order,
        ancestral_times,
        uniform_order,
    )
    from trainer.sampling.rules.revealing import Predict, inference, reveal
    from trainer.sampling.rules.sampler import (
        DiffusionSampler,
        NoisySampler,
        RedrawingSampler,
        Sampler,
        TokenSampler,
        check_rows,
        check_tokens,
        require_whole_row_student,
    )
    from trainer.sampling.rules.stopping import SampleResult, StopRule
    from trainer.sampling.rules.token_rule import (
        Decision,
        NucleusRule,
        TokenRule,
        check_positive,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
