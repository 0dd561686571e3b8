"""Samplers that go from left to right as far as a second model, the verifier, agrees.

In come a student, which drafts many tokens in one pass, and a causal language model of the same
tokenizer, which reads the draft in one pass (``verifier``). ``adaptive`` (APD) mixes the two
models; ``coupled`` keeps exactly what the verifier would have drawn from the same noise. Out go
samples with the passes of both models and how much of each draft was kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.verified.adaptive import AdaptiveConfig
    from trainer.sampling.verified.coupled import CoupledConfig
    from trainer.sampling.verified.medusa import MedusaConfig
    from trainer.sampling.verified.rows import gumbel_scores, require_whole_noise
    from trainer.sampling.verified.slots import DrafterSampler
    from trainer.sampling.verified.verifier import Verifier, load_verifier, require_same_tokenizer

__getattr__, __dir__ = open_door(__name__, __file__)
