"""The rows of a store in training order: shuffled, resumable, the same for every world size.

In comes a split of a store (anything that reads chunks); out come ``RowBatch`` records, one per
global batch and rank. order.py decides which row stands where, prefetch.py reads ahead on threads,
stream.py counts what was handed out, which is all the state there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.stream.dataset import RowStream
    from shards.stream.order import (
        WINDOW_BYTES,
        LaneOrder,
        WholeOrder,
        lanes_for,
        window_bytes_of,
    )
    from shards.stream.stream import RowBatch, ShardStream

__getattr__, __dir__ = open_door(__name__, __file__)
