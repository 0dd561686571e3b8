"""How the numbers of a store were computed: recorded beside its identity, not in it.

Bits of a float result belong to one way of computing: the device, the kernels that its CPU chooses,
threads, rows of a forward pass, library versions. Another way gives another last bit, which is no
other content. So ``computed.json`` lists the ways, the first writer's first, and nothing that reads
or resumes a store asks for more than that the list can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from shards.base import IntegrityError
from shards.storage import Location

COMPUTED_FILE = "computed.json"
Way = Mapping[str, Any]
"""Flat JSON values by name."""


def read_ways(place: Location) -> list[dict[str, Any]]:
    """The ways of computing that wrote a store, the first writer's first; empty if none is told.

    Raises:
        IntegrityError: If the record cannot be read.
    """
    try:
        ways = json.loads(place.read(COMPUTED_FILE))["ways"]
        return [dict(way) for way in ways]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(
            "cannot read how the store was computed",
            where=f"{place.url}/{COMPUTED_FILE}",
            got=error,
            remedy="remove the file: it is no part of the store's identity",
        ) from error


def record_ways(place: Location, ways: Iterable[Way]) -> None:
    """Add to the list what it lacks; the order of what is there stays."""
    ways = [dict(way) for way in ways]
    with place.claim("computed", wait=True):
        known = read_ways(place)
        new = [way for at, way in enumerate(ways) if way not in known and way not in ways[:at]]
        if new:
            text = json.dumps({"ways": [*known, *new]}, indent=2, sort_keys=True)
            place.write(COMPUTED_FILE, text.encode() + b"\n")
