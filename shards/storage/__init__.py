"""DOOR: shards.storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from shards.storage.claims import file_claim
    from shards.storage.location import Location, as_location, open_location

__getattr__, __dir__ = open_door(__name__, __file__)
