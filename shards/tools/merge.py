"""One store from several that hold shards of the same extraction."""

from __future__ import annotations

from collections.abc import Sequence

from shards.base import Bar, GdistillError, IntegrityError, UsageError
from shards.storage import Location
from shards.store import (
    Manifest,
    ShardRange,
    ShardRecord,
    ShardStore,
    ShardWriter,
    read_record,
    rewrite_remedy,
)


def merge(
    stores: Sequence[ShardStore], out: str | Location, bar: Bar
) -> tuple[ShardWriter, list[ShardRange]]:
    """Copy every finished shard, byte for byte and checked, into one store; resumable.

    What ``out`` has already is taken up as any writer does it: a shard is done if the ledger has
    it and its files are there with their sizes, and one that another process holds is left to it.

    Returns:
        The store at ``out``, and the shards pending there that none of the stores has finished.

    Raises:
        UsageError: If the stores, or what lies at ``out``, are not of one identity: names the first
            field that differs.
        IntegrityError: If a file to copy is damaged in every store that has it.
    """
    first = stores[0]
    for other in stores[1:]:
        _require_same(first.manifest, other)
    content = {name: first.file(name) for name in first.manifest.files}
    writer = ShardWriter.create_copy(out, first.manifest, content)
    missing = []
    for split in first.manifest.splits:
        pending = set(writer.pending(split))
        for shard in writer.shards(split):
            if shard in pending and not _fill(writer, stores, shard):
                missing.append(shard)
            bar.advance(shard.num_rows * first.manifest.row_length)
    return writer, missing


def _require_same(ours: Manifest, other: ShardStore) -> None:
    difference = ours.difference(other.manifest)
    if difference:
        name, expected, got = difference
        raise UsageError(
            "the stores are not parts of one extraction",
            where=f"{other.location.url}: {name}",
            got=repr(got),
            expected=repr(expected),
            remedy="merge stores that were written by the same command",
        )


def _fill(writer: ShardWriter, stores: Sequence[ShardStore], shard: ShardRange) -> bool:
    """Copy a shard from the first store that has it whole; False if none has finished it."""
    with writer.claim(shard) as mine:
        if not mine:  # another process is at it, or was a moment ago
            return True
        damage: GdistillError | None = None
        for store in stores:
            try:
                record = read_record(store.location, store.manifest, shard)
                if record is not None:
                    writer.write_copy(record, _files(store, record))
                    return True
            except IntegrityError as error:  # another store may have it whole
                damage = error
        if damage:
            raise damage
        return False


def _files(store: ShardStore, record: ShardRecord) -> dict[str, bytes]:
    """All files of a shard, every one checked before the first is written."""
    files = {}
    for name, entry in record.files.items():
        where = f"{store.location.url}/{name}: {record.shard}"
        remedy = rewrite_remedy(store.location.url)
        try:
            files[name] = store.location.read(name)
        except FileNotFoundError as error:
            raise IntegrityError("a shard file is missing", where=where, remedy=remedy) from error
        if not entry.matches(files[name]):
            raise IntegrityError("a shard file was altered", where=where, remedy=remedy)
    return files
