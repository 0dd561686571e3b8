"""The samplers by name; each is imported where it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shards.errors import UsageError, did_you_mean
from shards.settings import from_mapping

if TYPE_CHECKING:
    from trainer.sampling.fill import Sampler

SAMPLERS = {
    "ancestral": "trainer.sampling.fill:AncestralSampler",
    "first_hitting": "trainer.sampling.orders:FirstHittingSampler",
    "fixed_count": "trainer.sampling.orders:FixedCountSampler",
    "confidence": "trainer.sampling.orders:ConfidenceSampler",
    "block": "trainer.sampling.block:BlockSampler",
    "sequential": "trainer.sampling.block:SequentialSampler",
    "apd": "trainer.sampling.adaptive:AdaptiveSampler",
    "coupled": "trainer.sampling.coupled:CoupledSampler",
    "medusa": "trainer.sampling.own_backbone:MedusaSampler",
    "drafter": "trainer.sampling.own_backbone:DrafterSampler",
}


def make_sampler(name: str, **settings: Any) -> Sampler:
    """The sampler of that name with these settings: ``make_sampler("ancestral", nfe=16, nucleus_p=0.9)``.

    Raises:
        UsageError: For an unknown name or setting (naming the nearest known one), or a bad value.
    """
    name = name.replace("-", "_")
    if name not in SAMPLERS:
        known, hint = f"one of {sorted(SAMPLERS)}", did_you_mean(name, SAMPLERS)
        raise UsageError("unknown sampler", where=name, expected=known, remedy=hint)
    module, _, found = SAMPLERS[name].partition(":")
    return from_mapping(getattr(import_module(module), found), settings, where=name)
