"""DOOR: trainer.sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.adaptive import AdaptiveConfig
    from trainer.sampling.ancestral import AncestralConfig
    from trainer.sampling.block import BlockConfig
    from trainer.sampling.block_state import BlockState
    from trainer.sampling.draws import SampleKeys
    from trainer.sampling.first_hitting import FirstHittingConfig, FixedCountConfig
    from trainer.sampling.generation import generate
    from trainer.sampling.noise import sampling_noise
    from trainer.sampling.registry import Sampler, make_sampler
    from trainer.sampling.result import SampleResult
    from trainer.sampling.reveal import inference
    from trainer.sampling.sequential import SequentialConfig
    from trainer.sampling.verifier import require_same_tokenizer
    from trainer.sampling.whole_row import NoiseUse, WholeRow, with_default_tau

__getattr__, __dir__ = open_door(__name__, __file__)
