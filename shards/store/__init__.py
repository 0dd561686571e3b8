"""The store: what it is (manifest), what of it is done (ledger), its rows (shards, chunks).

In come arrays of whole shards, from any number of processes; out come checked rows. A shard counts
once the ledger names its files with size and hash, and what is read was checked against that.
The files are a Zarr v3 group that any Zarr reader opens: :mod:`shards.store.layout`, the bytes of a
shard: :mod:`shards.store.native`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.store.computation import COMPUTED_FILE, read_ways, record_ways
    from shards.store.layout import (
        RESOURCES,
        ZSTD_LEVEL,
        ShardRange,
        encode_shard,
        shard_file,
        shard_files,
        shard_ranges,
    )
    from shards.store.ledger import (
        LEDGER,
        ShardRecord,
        claim_name,
        read_record,
        record_file,
        rewrite_remedy,
    )
    from shards.store.manifest import MANIFEST_FILE, STORE_ARRAYS, Manifest
    from shards.store.reader import SplitReader
    from shards.store.store import ShardStore, find_store
    from shards.store.verification import Problem, forget, verify
    from shards.store.writer import ShardWriter

__getattr__, __dir__ = open_door(__name__, __file__)
