"""DOOR: trainer.importing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.importing.library_bars import without_library_bars
    from trainer.importing.lightning import import_checkpoint, our_parameters

__getattr__, __dir__ = open_door(__name__, __file__)
