"""One store from several that hold shards of the same extraction."""

from __future__ import annotations

from collections.abc import Sequence

from shards.console import Bar
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.layout import ShardRange, shard_ranges
from shards.ledger import ShardRecord, read_record, record_file
from shards.location import Location, as_location
from shards.manifest import MANIFEST_FILE, Manifest
from shards.store import ShardStore


def merge(stores: Sequence[ShardStore], out: str | Location, bar: Bar) -> list[ShardRange]:
    """Copy every finished shard, byte for byte and checked, into one store.

    Returns:
        The shards that none of the stores has finished.

    Raises:
        UsageError: If the stores, or what lies at ``out``, are not of one identity: names the first
            field that differs.
        IntegrityError: If a file to copy is damaged.
    """
    first = stores[0]
    for other in stores[1:]:
        _require_same(first.manifest, other.manifest, other.location.url)
    place = as_location(out)
    _begin(first, place)
    missing = []
    for split in first.manifest.splits:
        for shard in shard_ranges(first.manifest, split):
            if read_record(place, first.manifest, shard) is None and not _copy(
                stores, place, shard
            ):
                missing.append(shard)
            bar.advance(shard.num_rows * first.manifest.row_length)
    return missing


def _require_same(ours: Manifest, theirs: Manifest, where: str) -> None:
    difference = ours.difference(theirs)
    if difference:
        name, expected, got = difference
        raise UsageError(
            "the stores are not parts of one extraction",
            where=f"{where}: {name}",
            got=repr(got),
            expected=repr(expected),
            remedy="merge stores that were written by the same command",
        )


def _begin(source: ShardStore, place: Location) -> None:
    """The manifest and the files written once."""
    try:
        found = Manifest.from_bytes(place.read(MANIFEST_FILE), f"{place.url}/{MANIFEST_FILE}")
    except FileNotFoundError:
        foreign = sorted(name for name in place.sizes() if not name.endswith(".tmp"))
        if foreign:
            raise UsageError(
                "the output folder holds files but no manifest", where=place.url, got=foreign[0]
            ) from None
        place.write(MANIFEST_FILE, source.manifest.to_bytes())
    else:
        _require_same(source.manifest, found, place.url)
    for name in source.manifest.files:
        place.write(name, source.file(name))


def _copy(stores: Sequence[ShardStore], place: Location, shard: ShardRange) -> bool:
    """Copy a shard from the first store that has it whole; False if none has finished it."""
    damage: GdistillError | None = None
    for store in stores:
        try:
            record = read_record(store.location, store.manifest, shard)
            if record is None:
                continue
            for name, data in _files(store, record).items():
                place.write(name, data)
        except IntegrityError as error:  # another store may have it whole
            damage = error
            continue
        place.write(record_file(shard), record.to_bytes())
        return True
    if damage:
        raise damage
    return False


def _files(store: ShardStore, record: ShardRecord) -> dict[str, bytes]:
    """All files of a shard, every one checked before the first is written."""
    files = {}
    for name, entry in record.files.items():
        try:
            files[name] = store.location.read(name)
        except FileNotFoundError as error:
            raise IntegrityError(
                "a shard file is missing", where=f"{store.location.url}/{name}: {record.shard}"
            ) from error
        if not entry.matches(files[name]):
            raise IntegrityError(
                "a shard file was altered",
                where=f"{store.location.url}/{name}: {record.shard}",
                remedy="see gdistill-shards verify",
            )
    return files
