"""The authors' released checkpoints, read without running anything they name.

In: a Lightning checkpoint. Out: a model folder in Hugging Face layout, weight by weight, or an
error that lists what is missing, unexpected or of another shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.importing.lightning import import_checkpoint, our_parameters

__getattr__, __dir__ = open_door(__name__, __file__)
