"""What a store is: everything that decides its content, in one sealed file, ``manifest.json``.

The manifest is the root of trust. It carries its own hash, the hash of every file written once
per store (Zarr metadata, resources, tokenizer and corpus files), and every ledger record names the
manifest it belongs to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from shards.base import (
    GdistillError,
    IntegrityError,
    UsageError,
    derive_seed,
    flatten,
    safe_name,
)
from shards.codec import ArraySpec
from shards.storage import FileRecord
from shards.store.sealed import digest, parse, seal, unseal

FORMAT_VERSION = 2
"""Since 2 the frozen draws of different splits have seeds of their own; 1 is still read."""
MANIFEST_FILE = "manifest.json"
STORE_ARRAYS = {"tokens": ArraySpec("int32"), "token_log_probs": ArraySpec("float32")}
"""Arrays of every store, beside the codec's own."""
RESERVED = {"ledger", "resources", "tokenizer", "corpus", "c"}
"""Folders of a store that are no split, and of an array."""
SIZES = ("vocab_size", "row_length", "rows_per_shard", "rows_per_chunk", "format_version")
MAPPINGS = ("codec", "arrays", "splits", "teacher", "tokenizer", "tokens", "versions", "files")
MAX_SIZE = 2**31 - 2
"""Token ids and the mask id, one past them, are int32."""
MAX_CHUNK_BYTES = 1 << 32
MAX_SHARDS = 1_000_000
"""Of a split: a shard is the unit of work, and its files and record are files of their own."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The identity of a store. All mappings hold plain JSON values.

    Attributes:
        codec: ``{"name": ..., "parameters": {...}}``; see :func:`shards.codec.make_codec`.
        arrays: The codec's own arrays (``tokens`` and ``token_log_probs`` are always there).
        vocab_size: V, the teacher's real tokens; the mask id is V.
        row_length: L, tokens per row.
        splits: Rows of each split.
        rows_per_shard: Rows of one Zarr shard: the unit of work, of atomicity and of resume.
        rows_per_chunk: Rows of one inner chunk: the unit of reading; divides rows_per_shard.
        teacher: id, weights_sha256, dtype, ...
        tokenizer: id, sha256, ...
        tokens: fingerprint of the token dataset, its corpus, ...
        seed: Seed of everything that extraction drew.
        versions: Package versions that decide the bytes.
        bos_id: Begin-of-sequence id, if there is one.
        eos_id: End-of-sequence id, if there is one.
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
        """Seed of the position keys of a split's frozen draws.

        In format 1 row r of every split had the same prior draw.
        """
        return self.seed if self.format_version == 1 else derive_seed(self.seed, "noise", split)

    @property
    def all_arrays(self) -> dict[str, ArraySpec]:
        """Every array of a split by name."""
        return {**STORE_ARRAYS, **self.arrays}

    @cached_property
    def sha256(self) -> str:
        """The seal of ``manifest.json``; names this store's identity."""
        return digest(self.to_json())

    def with_files(self, files: Mapping[str, FileRecord]) -> Manifest:
        """The same manifest with its list of files written once."""
        return replace(self, files=dict(files))

    def to_json(self) -> dict[str, Any]:
        """All fields as plain JSON values, the derived mask id included."""
        value = {f.name: getattr(self, f.name) for f in fields(self)}
        value["arrays"] = {
            name: {"dtype": spec.dtype, "trailing_shape": list(spec.trailing_shape)}
            for name, spec in self.arrays.items()
        }
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
            raise GdistillError(
                "the store has a newer format than this program reads",
                where=where,
                got=f"format_version {version}",
                expected=f"at most {FORMAT_VERSION}",
                remedy="upgrade gdistill",
            )
        value = unseal(data, where)
        try:
            manifest = cls._from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
            raise IntegrityError("malformed manifest", where=where, got=str(error)[:400]) from error
        if manifest.to_bytes() != data:
            raise IntegrityError("the manifest has fields unknown to its format", where=where)
        return manifest

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> Manifest:
        known = {f.name: value[f.name] for f in fields(cls)}
        known["arrays"] = {
            name: ArraySpec(spec["dtype"], tuple(spec["trailing_shape"]))
            for name, spec in value["arrays"].items()
        }
        known["files"] = {n: FileRecord.from_json(record) for n, record in value["files"].items()}
        return cls(**known)

    def identity(self) -> dict[str, Any]:
        """Every field under its dotted name (``teacher.weights_sha256``), codec first."""
        value = self.to_json()
        return flatten({f.name: value[f.name] for f in fields(self)})

    def difference(self, other: Manifest) -> tuple[str, Any, Any] | None:
        """The first identity field that differs with both values, or None; "absent" if missing."""
        mine, theirs = self.identity(), other.identity()
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            left, right = mine.get(name, "absent"), theirs.get(name, "absent")
            if left != right or type(left) is not type(right):
                return name, left, right
        return None


def _check(manifest: Manifest) -> None:
    """Refuse what no store of this project says.

    A store may come from anywhere. What is refused here cannot name a file outside the store, ask
    for more memory than a chunk may take, or count shards without end.

    Raises:
        UsageError: Names the field, what it holds and what it should.
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
    _check_codec(manifest.codec)
    for name in manifest.files:
        safe_name(name)
    _check_arrays(manifest)
    _check_splits(manifest)


def _check_codec(codec: Mapping[str, Any]) -> None:
    if not isinstance(codec.get("name"), str):
        raise UsageError("the manifest names no codec", where="codec.name")
    if not isinstance(codec.get("parameters"), Mapping):
        raise UsageError("the manifest has no parameters of the codec", where="codec.parameters")


def _check_arrays(manifest: Manifest) -> None:
    clash = sorted(set(manifest.arrays) & set(STORE_ARRAYS))
    if clash:
        raise UsageError("a codec array has the name of a store array", where=clash[0])
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
        if math.prod(rows) * dtype.itemsize > MAX_CHUNK_BYTES:
            raise UsageError(
                "a chunk is too large",
                where=f"arrays.{name}",
                got=f"{dtype.name} {rows}",
                expected=f"at most {MAX_CHUNK_BYTES} bytes",
                remedy="fewer rows_per_chunk, shorter rows or a smaller codec",
            )


def _check_splits(manifest: Manifest) -> None:
    if manifest.rows_per_shard % manifest.rows_per_chunk:
        raise UsageError(
            "rows_per_shard is not a multiple of rows_per_chunk",
            where="rows_per_shard",
            got=manifest.rows_per_shard,
            expected=f"a multiple of {manifest.rows_per_chunk}",
        )
    for split, rows in manifest.splits.items():
        _require_name("splits", split)
        _require_int(f"splits.{split}", rows, 0, MAX_SHARDS * manifest.rows_per_shard)


def _require_name(where: str, name: str) -> None:
    if not name or name in RESERVED or not all(c.isalnum() or c in "-_" for c in name):
        raise UsageError(
            f"bad name in {where}",
            where=_short(name),
            expected=f"letters, digits, - and _; none of {', '.join(sorted(RESERVED))}",
        )
    safe_name(name)


def _require_int(where: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise UsageError(
            "size out of range", where=where, got=_short(value), expected=f"{least} to {most}"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
