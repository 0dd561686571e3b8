"""The ledger: one sealed record per finished shard, written after the shard's files.

Done means "in the ledger"; that a file exists says nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shards.atomic import FileRecord, sha256_hex
from shards.errors import IntegrityError, UsageError
from shards.store.layout import ShardRange, shard_files
from shards.store.location import Location
from shards.store.manifest import Manifest, seal, unseal

LEDGER = "ledger"


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard consists of.

    Attributes:
        shard: Its rows.
        manifest_sha256: The seal of the manifest it was written under.
        files: File name -> size and hash.
        tails: File name -> hash of its tail, see :mod:`shards.store.layout`; empty in records
            written before tails.
    """

    shard: ShardRange
    manifest_sha256: str
    files: Mapping[str, FileRecord]
    tails: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the record's file."""
        return seal(
            {
                "split": self.shard.split,
                "index": self.shard.index,
                "start": self.shard.start,
                "stop": self.shard.stop,
                "manifest_sha256": self.manifest_sha256,
                "files": {name: record.to_json() for name, record in self.files.items()},
                **({"tails": dict(self.tails)} if self.tails else {}),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> ShardRecord:
        """Read a record; IntegrityError if it was altered."""
        value: dict[str, Any] = unseal(data, where)
        try:
            shard = ShardRange(value["split"], value["index"], value["start"], value["stop"])
            files = {name: FileRecord.from_json(entry) for name, entry in value["files"].items()}
            tails = {name: sha256_hex(tail) for name, tail in value.get("tails", {}).items()}
            record = cls(shard, value["manifest_sha256"], files, tails)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise IntegrityError("malformed record", where=where, got=str(error)[:200]) from error
        return record


def record_file(shard: ShardRange) -> str:
    """The name of a shard's ledger record."""
    return f"{LEDGER}/{shard.split}/{shard.index:06d}.json"


def claim_name(shard: ShardRange) -> str:
    """The name under which processes claim a shard."""
    return f"{shard.split}-{shard.index:06d}"


def rewrite_remedy(url: str) -> str:
    """How to get a damaged shard of the store at ``url`` written anew.

    A writer trusts the ledger, sizes and tails, so the record has to go first.
    """
    return (
        f"run `gdistill-shards verify {shlex.quote(url)} --forget`, then run the command that wrote"
        " the store again: it writes this shard anew and keeps the others"
    )


def read_record(location: Location, manifest: Manifest, shard: ShardRange) -> ShardRecord | None:
    """The checked record of a shard, None if the shard is not finished.

    Raises:
        IntegrityError: If the record was altered or belongs to another store or shard.
    """
    name = record_file(shard)
    try:
        data = location.read(name)
    except FileNotFoundError:
        return None
    where = f"{location.url}/{name}"
    record = ShardRecord.from_bytes(data, where)
    problem = _mismatch(record, manifest, shard)
    if problem:
        raise IntegrityError(
            "a ledger record that does not belong here",
            where=where,
            got=problem,
            expected=f"the record of {shard}",
            remedy="run the command that wrote the store again: it writes this shard anew",
        )
    return record


def _mismatch(record: ShardRecord, manifest: Manifest, shard: ShardRange) -> str:
    if record.shard != shard:
        return f"a record of {record.shard}"
    if record.manifest_sha256 != manifest.sha256:
        return f"a record of another manifest ({record.manifest_sha256[:12]})"
    if set(record.files) != set(shard_files(manifest, shard).values()):
        return f"files {sorted(record.files)}"
    if record.tails and set(record.tails) != set(record.files):
        return f"tails of {sorted(record.tails)}"
    return ""
