"""Samplers: from a student, its noise and rows with masked positions to finished rows.

Each is a frozen dataclass of settings with one method::

    config = make_sampler("ancestral", nfe=16, nucleus_p=0.9)
    noise = sampling_noise(seed, sample_ids, row_length, vocab_size, codec=student.codec)
    result = config.sample(student, tokens, sample_ids, noise, seed)

All randomness is named by (seed, sample id, position), so samples depend neither on the batch they
are drawn in nor on their order, and samplers that differ in one setting share their draws.
"""

from __future__ import annotations

from typing import Any

from shards.base import UsageError, did_you_mean, from_mapping
from trainer.sampling.ancestral import AncestralConfig
from trainer.sampling.block import BlockConfig
from trainer.sampling.first_hitting import FirstHittingConfig, FixedCountConfig
from trainer.sampling.rules import Sampler
from trainer.sampling.sequential import SequentialConfig
from trainer.sampling.surest_first import ConfidenceConfig
from trainer.sampling.verified import (
    AdaptiveConfig,
    CoupledConfig,
    DrafterSampler,
    MedusaConfig,
)

SAMPLERS: dict[str, type[Sampler]] = {
    "ancestral": AncestralConfig,
    "first_hitting": FirstHittingConfig,
    "fixed_count": FixedCountConfig,
    "confidence": ConfidenceConfig,
    "block": BlockConfig,
    "sequential": SequentialConfig,
    "apd": AdaptiveConfig,
    "coupled": CoupledConfig,
    "medusa": MedusaConfig,
    "drafter": DrafterSampler,
}


def sampler_class(name: str) -> type[Sampler]:
    """The settings of the sampler of that name.

    Raises:
        UsageError: For an unknown name, naming the nearest known one.
    """
    name = name.replace("-", "_")
    if name not in SAMPLERS:
        known, hint = f"one of {sorted(SAMPLERS)}", did_you_mean(name, SAMPLERS)
        raise UsageError("unknown sampler", where=name, expected=known, remedy=hint)
    return SAMPLERS[name]


def make_sampler(name: str, **settings: Any) -> Sampler:
    """The sampler of that name.

    Raises:
        UsageError: For an unknown name or setting (naming the nearest known one), or a bad value.
    """
    return from_mapping(sampler_class(name), settings, where=name)
