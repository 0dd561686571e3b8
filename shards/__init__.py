"""Stores of Gumbel posteriors: noise, how it is kept, where, and how it is read.

base      errors, configs, atomic files, seeds: what every room stands on
noise     Gumbel noise given a token, in arrival times; keyed draws that need no state
codec     teacher output -> arrays per token -> noise
storage   names -> bytes, in a folder or at a URL; claims
store     manifest, ledger, shards: written by any number of processes, read with checks
stream    the order of an epoch: shuffled, resumable, the same for every world size
tools     what people do with stores; ``gdistill-shards`` is :mod:`shards.cli`

``shards.open_store(path_or_url)`` opens one for reading; its ``stream(batch_size=32, seed=0)``
is a torch ``IterableDataset``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.reading import open_store
    from shards.store import ShardStore

__getattr__, __dir__ = open_door(__name__, __file__)
