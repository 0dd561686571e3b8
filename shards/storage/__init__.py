"""Names -> bytes: a folder or a URL, seen as the few operations that a store needs.

In come a path or URL, names, bytes and what is recorded of them (size, sha256); out go whole files,
written atomically, and claims that at most one process holds. A URL is read through a local cache
of checked copies. Nothing here knows what a shard is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.storage.file_record import FileRecord, sha256_hex
    from shards.storage.local import file_claim
    from shards.storage.location import Location, as_location, open_location

__getattr__, __dir__ = open_door(__name__, __file__)
