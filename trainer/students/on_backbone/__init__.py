"""Students that stand on a frozen causal language model of transformers, their teacher.

In come a backbone (folder or hub id) and shards that this very model has scored. Out come students
whose parameters, checkpoints and folders hold what is trained alone; the backbone they name by id
and by the hash of its weights, and another one is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.students.on_backbone.backbone import FrozenBackbone, load_backbone
    from trainer.students.on_backbone.medusa import Medusa, MedusaConfig
    from trainer.students.on_backbone.student import BackboneStudent

__getattr__, __dir__ = open_door(__name__, __file__)
