"""DOOR: shards.stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.stream.order import Shuffle, ShuffledOrder
    from shards.stream.stream import RowBatch, ShardStream

__getattr__, __dir__ = open_door(__name__, __file__)
