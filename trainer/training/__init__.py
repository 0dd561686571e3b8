"""One training loop for all students, on one process or many.

In: a :class:`RunConfig` (composed from recipes, flags and overrides) and a finished store. Out:
``metrics.jsonl``, checkpoints that resume bit for bit, and the model folder. Every draw is keyed
by (seed, epoch, row), so nothing depends on the number of processes or on interruptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.training.construction import CONDITIONER_SETTINGS, build_student, student_class
    from trainer.training.loop import Trainer, train
    from trainer.training.memory_plan import MemoryPlan, plan_memory
    from trainer.training.optimization import (
        ExponentialMovingAverage,
        clip_gradients,
        make_optimizer,
    )
    from trainer.training.overhead import (
        Scale,
        cost_table,
        noise_cost,
        overhead_table,
        parse_vocab_sizes,
    )
    from trainer.training.parallel import leave
    from trainer.training.run_folder import RunStatus
    from trainer.training.settings import (
        OptimizationConfig,
        RunConfig,
        compose_run,
        layered,
        read_recipe,
        run_of,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
