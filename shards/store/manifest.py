"""What a store is: everything that decides its content, in one sealed file, ``manifest.json``.

The manifest is the root of trust. It carries its own hash, the hash of every file written once
per store (Zarr metadata, resources, tokenizer and corpus files), and every ledger record names
the manifest it belongs to. The ledger has one sealed record per finished shard, written after the
shard's files: done means "in the ledger"; that a file exists says nothing.

A sealed file is indented JSON with sorted keys and a field ``sha256`` over the canonical form of
all other fields. It is accepted only if rendering what was parsed gives the same bytes again, so
a flipped bit is found even where JSON would not care (white space, a repeated key).
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from shards.atomic import FileRecord, canonical_json, sha256_hex
from shards.codec.protocol import ArraySpec
from shards.errors import GdistillError, IntegrityError, UsageError, safe_name
from shards.settings import derive_seed, flatten
from shards.store.location import Location

SEAL, MAX_DEPTH = "sha256", 32
LEDGER, COMPUTED_FILE, MANIFEST_FILE = "ledger", "computed.json", "manifest.json"
FORMAT_VERSION = 2
"""Since 2 the frozen draws of different splits have seeds of their own; 1 is still read."""
STORE_ARRAYS = {"tokens": ArraySpec("int32"), "token_log_probs": ArraySpec("float32")}
"""Arrays of every store, beside the codec's own."""
COUNTED = {"counted": ArraySpec("uint8")}
"""Of stores of conversations: 1 where a token is the assistant's, 0 where it has no noise."""
RESERVED = {"ledger", "resources", "tokenizer", "corpus", "c"}
"""Folders of a store that are no split, and of an array."""
SIZES = ("vocab_size", "row_length", "rows_per_shard", "rows_per_chunk", "format_version")
MAPPINGS = ("codec", "arrays", "splits", "teacher", "tokenizer", "tokens", "versions", "files")
MAX_SIZE = 2**31 - 2
"""Token ids and the mask id, one past them, are int32."""
MAX_CHUNK_BYTES = 1 << 32
"""Of all arrays together."""
MAX_SHARDS, MAX_SHARD_FILES = 1 << 18, 1 << 22
"""Of all splits: a shard is the unit of work, and its files and record are files of their own."""
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, UsageError)


def digest(value: Mapping[str, Any]) -> str:
    """The hex sha256 of a record's fields, the seal itself left out."""
    body = {key: entry for key, entry in value.items() if key != SEAL}
    return hashlib.sha256(canonical_json(body)).hexdigest()


def seal(value: Mapping[str, Any]) -> bytes:
    """The file's bytes: ``value`` with its seal."""
    record = {**value, SEAL: digest(value)}
    return json.dumps(record, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


def parse(data: bytes, where: object) -> dict[str, Any]:
    """The JSON object in ``data``, its seal not yet checked; IntegrityError if it is none of ours could write."""
    try:
        value = json.loads(data)
        level = [value]
        for _ in range(MAX_DEPTH):
            tables = [entry for entry in level if isinstance(entry, dict)]
            lists = [entry for entry in level if isinstance(entry, list)]
            level = [part for table in tables for part in (*table, *table.values())]
            level += [part for entries in lists for part in entries]
            for part in level:
                if isinstance(part, str):
                    part.encode()  # a ValueError for half of a surrogate
        if level:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")
    except (ValueError, RecursionError) as error:
        what, got, expected = "not a readable record", str(error)[:80], "a sealed JSON file"
        raise IntegrityError(what, where=where, got=got, expected=expected) from error
    if not isinstance(value, dict):
        raise IntegrityError("not a record", where=where, expected="a JSON object")
    return value


def unseal(data: bytes, where: object) -> dict[str, Any]:
    """The record in ``data`` with its seal; an IntegrityError if anything in it differs from what was sealed."""
    value, expected = parse(data, where), "unknown"
    try:
        expected = digest(value)
        intact = seal(value) == data
    except (ValueError, TypeError, RecursionError):  # NaN, or keys that do not sort
        intact = False
    if not intact:
        what, got = "the record was altered after it was written", str(value.get(SEAL))[:12]
        sealed, remedy = (f"sha256 {expected[:12]}", "restore it from a copy, or write the store again")
        raise IntegrityError(what, where=where, got=f"sha256 {got}", expected=sealed, remedy=remedy)
    return value


@dataclass(frozen=True)
class ShardRange:
    """Rows start..stop-1 of a split: what one process writes at once."""

    split: str
    index: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def record_file(self) -> str:
        """The name of the shard's ledger record."""
        return f"{LEDGER}/{self.split}/{self.index:06d}.json"

    @property
    def claim_name(self) -> str:
        """The name under which processes claim the shard."""
        return f"{self.split}-{self.index:06d}"

    def __str__(self) -> str:
        return f"{self.split} shard {self.index} (rows {self.start} to {self.stop - 1})"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The identity of a store. All mappings hold plain JSON values.

    Attributes:
        codec: ``{"name": ..., "parameters": {...}}``; see :func:`shards.codec.protocol.make_codec`.
        arrays: The codec's own arrays (``tokens`` and ``token_log_probs`` are always there).
        vocab_size: V, the teacher's real tokens; the mask id is V.
        row_length: L, tokens per row.
        splits: Rows of each split.
        rows_per_shard: Rows of one Zarr shard: the unit of work, of atomicity and of resume.
        rows_per_chunk: Rows of one inner chunk: the unit of reading; divides rows_per_shard.
        tokens: fingerprint of the token dataset, its corpus, ...
        seed: Of everything that extraction drew.
        versions: Of packages that decide the bytes.
        files: Size and hash of every file written once; filled in by the writer.
    """

    codec: Mapping[str, Any]
    arrays: Mapping[str, ArraySpec]
    vocab_size: int
    row_length: int
    splits: Mapping[str, int]
    rows_per_shard: int
    rows_per_chunk: int
    teacher: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    tokens: Mapping[str, Any]
    seed: int
    versions: Mapping[str, Any]
    bos_id: int | None = None
    eos_id: int | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        _check(self)

    @property
    def mask_id(self) -> int:
        """The student's mask token: one past the teacher's vocabulary."""
        return self.vocab_size

    def noise_seed(self, split: str) -> int:
        """Seed of a split's frozen draws; in format 1 row r of every split had the same."""
        return self.seed if self.format_version == 1 else derive_seed(self.seed, "noise", split)

    @property
    def all_arrays(self) -> dict[str, ArraySpec]:
        """Every array of a split by name."""
        return {**STORE_ARRAYS, **self.arrays}

    def num_shards(self, split: str) -> int:
        """Shards of a split, the last of which may be short."""
        return -(-self.splits[split] // self.rows_per_shard)

    def shard(self, split: str, index: int) -> ShardRange:
        """One shard of a split."""
        start = index * self.rows_per_shard
        return ShardRange(split, index, start, min(start + self.rows_per_shard, self.splits[split]))

    def shards(self, split: str) -> list[ShardRange]:
        """All shards of a split in order."""
        return [self.shard(split, index) for index in range(self.num_shards(split))]

    def all_shards(self) -> list[ShardRange]:
        """Those of every split."""
        return [shard for split in self.splits for shard in self.shards(split)]

    def shard_file(self, split: str, array: str, index: int) -> str:
        """The name of one shard's file."""
        zeros = ["0"] * (1 + len(self.all_arrays[array].trailing_shape))
        return "/".join([split, array, "c", str(index), *zeros])

    def shard_files(self, shard: ShardRange) -> dict[str, str]:
        """array name -> file name, for every array of a shard."""
        return {n: self.shard_file(shard.split, n, shard.index) for n in self.all_arrays}

    @cached_property
    def sha256(self) -> str:
        """The seal of ``manifest.json``; names this store's identity."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values, the derived mask id included."""
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        value["arrays"] = {name: vars(spec) for name, spec in self.arrays.items()}
        value["files"] = {name: record.to_json() for name, record in self.files.items()}
        value["mask_id"] = self.mask_id
        return json.loads(json.dumps(value, default=dict, sort_keys=True))

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``."""
        return seal(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes, where: object) -> Manifest:
        """Read ``manifest.json``.

        Raises:
            GdistillError: If a newer format wrote it.
            IntegrityError: If it was altered, or lacks a field.
        """
        version = parse(data, where).get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            what = "the store has a newer format than this program reads"
            got, remedy = f"format_version {version}", "upgrade gdistill"
            expected = f"at most {FORMAT_VERSION}"
            raise GdistillError(what, where=where, got=got, expected=expected, remedy=remedy)
        value = unseal(data, where)
        try:
            known = {f.name: value[f.name] for f in fields(cls)}
            known["arrays"] = {
                name: ArraySpec(spec["dtype"], tuple(spec["trailing_shape"])) for name, spec in value["arrays"].items()
            }
            known["files"] = _file_records(value["files"])
            manifest = cls(**known)
        except MALFORMED as error:
            raise IntegrityError("malformed manifest", where=where, got=str(error)[:400]) from error
        if manifest.to_bytes() != data:
            raise IntegrityError("the manifest has fields unknown to its format", where=where)
        return manifest

    def difference(self, other: Manifest) -> tuple[str, Any, Any] | None:
        """The first field that differs, by dotted name (``teacher.weights_sha256``), and both values."""
        mine, theirs = self._identity(), other._identity()
        for name in dict.fromkeys([*mine, *theirs]):
            left, right = mine.get(name, "absent"), theirs.get(name, "absent")
            if left != right or type(left) is not type(right):
                return name, left, right
        return None

    def _identity(self) -> dict[str, Any]:
        value = self.to_json()
        return flatten({f.name: value[f.name] for f in fields(self)})


def _file_records(values: Mapping[str, Any]) -> dict[str, FileRecord]:
    return {name: FileRecord.from_json(record) for name, record in values.items()}


def _check(manifest: Manifest) -> None:
    """Refuse what no store of this project says, naming the field: a store may come from anywhere.

    What passes names no file outside the store, and bounds memory and the number of shards.
    """
    for name in MAPPINGS:
        value = getattr(manifest, name)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise UsageError("not a table", where=name, got=_short(value))
    for name in SIZES:
        _require_int(name, getattr(manifest, name), 1, MAX_SIZE)
    _require_int("seed", manifest.seed, -(2**63), 2**64)
    for name in ("bos_id", "eos_id"):
        if getattr(manifest, name) is not None:
            _require_int(name, getattr(manifest, name), 0, manifest.vocab_size - 1)
    if not isinstance(manifest.codec.get("name"), str):
        raise UsageError("the manifest names no codec", where="codec.name")
    if not isinstance(manifest.codec.get("parameters"), Mapping):
        raise UsageError("the manifest has no parameters of the codec", where="codec.parameters")
    for name in manifest.files:
        safe_name(name)
    _check_arrays(manifest)
    _check_splits(manifest)


def _check_arrays(manifest: Manifest) -> None:
    clash = sorted(set(manifest.arrays) & set(STORE_ARRAYS))
    if clash:
        raise UsageError("a codec array has the name of a store array", where=clash[0])
    num_bytes = 0
    for name, spec in manifest.all_arrays.items():
        _require_name("arrays", name)
        for size in spec.trailing_shape:
            _require_int(f"arrays.{name}.trailing_shape", size, 1, MAX_SIZE)
        try:
            dtype = np.dtype(spec.dtype)
            known = dtype.kind in "biuf" and dtype.name == spec.dtype
        except TypeError:
            known = False
        if not known:
            raise UsageError("unknown dtype", where=f"arrays.{name}", got=_short(spec.dtype))
        rows = (manifest.rows_per_chunk, manifest.row_length, *spec.trailing_shape)
        num_bytes += math.prod(rows) * dtype.itemsize
    if num_bytes > MAX_CHUNK_BYTES:
        got, expected = f"{num_bytes} bytes", f"at most {MAX_CHUNK_BYTES} bytes"
        remedy = "fewer rows_per_chunk, shorter rows or a smaller codec"
        what = "a chunk is too large"
        raise UsageError(what, where="arrays", got=got, expected=expected, remedy=remedy)


def _check_splits(manifest: Manifest) -> None:
    per_shard, per_chunk = manifest.rows_per_shard, manifest.rows_per_chunk
    if per_shard % per_chunk:
        what = "rows_per_shard is not a multiple of rows_per_chunk"
        expected = f"a multiple of {per_chunk}"
        raise UsageError(what, where="rows_per_shard", got=per_shard, expected=expected)
    shards = 0
    for split, rows in manifest.splits.items():
        _require_name("splits", split)
        _require_int(f"splits.{split}", rows, 0, MAX_SHARDS * per_shard)
        shards += manifest.num_shards(split)
    most = min(MAX_SHARDS, MAX_SHARD_FILES // len(manifest.all_arrays))
    if shards > most or len(manifest.splits) > MAX_SHARDS:
        raise UsageError("too many shards", where="splits", got=shards, expected=f"at most {most}")


def _require_name(where: str, name: str) -> None:
    if not name or name in RESERVED or not all(c.isalnum() or c in "-_" for c in name):
        expected = f"letters, digits, - and _; none of {', '.join(sorted(RESERVED))}"
        raise UsageError(f"bad name in {where}", where=_short(name), expected=expected)
    safe_name(name)


def _require_int(where: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        got, expected = _short(value), f"{least} to {most}"
        raise UsageError("size out of range", where=where, got=got, expected=expected)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard consists of: size and hash of each file by name, the seal of its manifest.

    ``tails`` has the hash of each file's tail (:mod:`shards.store.layout`); empty in records written before tails.
    """

    shard: ShardRange
    manifest_sha256: str
    files: Mapping[str, FileRecord]
    tails: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the record's file."""
        files = {name: record.to_json() for name, record in self.files.items()}
        tails = {"tails": dict(self.tails)} if self.tails else {}
        own = {"manifest_sha256": self.manifest_sha256, "files": files}
        return seal({**vars(self.shard), **own, **tails})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> ShardRecord:
        """Read a record; IntegrityError if it was altered."""
        value = unseal(data, where)
        try:
            shard = ShardRange(value["split"], value["index"], value["start"], value["stop"])
            tails = {name: sha256_hex(tail) for name, tail in value.get("tails", {}).items()}
            return cls(shard, str(value["manifest_sha256"]), _file_records(value["files"]), tails)
        except MALFORMED as error:
            raise IntegrityError("malformed record", where=where, got=str(error)[:200]) from error


def rewrite_remedy(url: str) -> str:
    """How to get a damaged shard written anew: a writer trusts the ledger, so the record has to go first."""
    return (
        f"run `gdistill-shards verify {shlex.quote(url)} --forget`, then run the command that wrote"
        " the store again: it writes this shard anew and keeps the others"
    )


def read_record(location: Location, manifest: Manifest, shard: ShardRange) -> ShardRecord | None:
    """The record of a shard, an IntegrityError if it is not its own; None if the shard is not finished."""
    try:
        data = location.read(shard.record_file)
    except FileNotFoundError:
        return None
    where = f"{location.url}/{shard.record_file}"
    record, problem = ShardRecord.from_bytes(data, where), ""
    if record.shard != shard:
        problem = f"a record of {record.shard}"
    elif record.manifest_sha256 != manifest.sha256:
        problem = f"a record of another manifest ({record.manifest_sha256[:12]})"
    elif set(record.files) != set(manifest.shard_files(shard).values()):
        problem = f"files {sorted(record.files)}"
    elif record.tails and set(record.tails) != set(record.files):
        problem = f"tails of {sorted(record.tails)}"
    if problem:
        what, expected = "a ledger record that does not belong here", f"the record of {shard}"
        remedy = "run the command that wrote the store again: it writes this shard anew"
        raise IntegrityError(what, where=where, got=problem, expected=expected, remedy=remedy)
    return record


# How the numbers of a store were computed: recorded beside its identity, not in it.
#
# Another compute environment (device, kernels, threads, rows of a forward pass, versions) gives another
# last bit, which is no other content. ``computed.json`` lists them, the first writer's first.


def read_ways(place: Location) -> list[dict[str, Any]]:
    """The compute environments that wrote a store, if noted; an IntegrityError if the note cannot be read."""
    where = f"{place.url}/{COMPUTED_FILE}"
    try:
        ways = parse(place.read(COMPUTED_FILE), where).get("ways")
    except FileNotFoundError:
        return []
    plain = str | int | float | None
    if isinstance(ways, list) and all(
        isinstance(way, dict) and all(isinstance(entry, plain) for entry in way.values()) for way in ways
    ):
        return ways
    what, expected = "cannot read how the store was computed", "a list of flat records"
    remedy = "remove the file: it is no part of the store's identity"
    raise IntegrityError(what, where=where, got=_short(ways), expected=expected, remedy=remedy)


def record_ways(place: Location, ways: Iterable[Mapping[str, Any]]) -> None:
    """Add to the list what it lacks, flat JSON values by name; the order of what is there stays."""
    with place.claim("computed", wait=True):
        known = read_ways(place)
        all_ways = list(known)
        for way in map(dict, ways):
            if way not in all_ways:
                all_ways.append(way)
        if all_ways != known:
            text = json.dumps({"ways": all_ways}, indent=2, sort_keys=True)
            place.write(COMPUTED_FILE, text.encode() + b"\n")
