"""DOOR: trainer.sampling.command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.sampling.command.request import Request

__getattr__, __dir__ = open_door(__name__, __file__)
