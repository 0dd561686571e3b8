"""DOOR: trainer.training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.training.ema import ExponentialMovingAverage
    from trainer.training.identity import flatten
    from trainer.training.interruption import exclusive
    from trainer.training.loop import train
    from trainer.training.optimization import clip_gradients, make_optimizer
    from trainer.training.parallel import leave
    from trainer.training.settings import OptimizationConfig, compose_run, read_recipe

__getattr__, __dir__ = open_door(__name__, __file__)
