"""DOOR: shards.store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.store.layout import (
        RESOURCES,
        ZSTD_LEVEL,
        ShardRange,
        encode_shard,
        shard_file,
        shard_files,
        shard_ranges,
    )
    from shards.store.ledger import ShardRecord, read_record, rewrite_remedy
    from shards.store.manifest import MANIFEST_FILE, STORE_ARRAYS, FileRecord, Manifest
    from shards.store.reader import SplitReader
    from shards.store.store import ShardStore
    from shards.store.verify import forget
    from shards.store.writer import ShardWriter

__getattr__, __dir__ = open_door(__name__, __file__)
