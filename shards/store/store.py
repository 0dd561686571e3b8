"""A store on disk or at a URL: what it is (manifest), how to decode it (codec), its rows (splits).

with any number of processes:
    writer = ShardWriter.create_or_resume(location, manifest, resources, files)
    for shard in writer.pending("train"):
        with writer.claim(shard) as mine:
            if mine:
                writer.write(shard, compute(shard))
then:
    store = ShardStore.open(location)
    store.split("train").read_chunk(0)

Any process may write any shard. A shard's files are encoded in memory, put atomically one by one, and only then named
in the ledger; whatever kills the process in between, the shard is simply not done. Given the same inputs the bytes of
a store depend on nothing else: not on time, process count, order or interruptions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shards.atomic import FileRecord, write_bytes_atomic
from shards.codec.protocol import Codec, make_codec
from shards.errors import GdistillError, IntegrityError, UsageError, path_inside
from shards.store.layout import (
    RESOURCES,
    DamagedShard,
    NativeShards,
    check_arrays,
    check_values,
    encode_shard,
    native_array,
    read_array,
    static_files,
)
from shards.store.location import Location, open_location
from shards.store.manifest import (
    COUNTED,
    LEDGER,
    MANIFEST_FILE,
    Manifest,
    ShardRange,
    ShardRecord,
    read_record,
    rewrite_remedy,
)

Opened = TypeVar("Opened", bound="ShardStore")


class ShardStore:
    """A store open for reading; see :meth:`open`."""

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self.location, self.manifest = location, manifest

    @classmethod
    def open(cls: type[Opened], location: str | Path | Location, *, allow_incomplete: bool = False) -> Opened:
        """Open a store (folder or URL): its manifest is checked, and that every shard is in the ledger.

        Raises:
            UsageError: If no store is there.
            GdistillError: If a newer format wrote it.
            IntegrityError: If the manifest was altered, or shards are missing.
        """
        place = open_location(location)
        where = f"{place.url}/{MANIFEST_FILE}"
        try:
            manifest = Manifest.from_bytes(place.read(MANIFEST_FILE), where)
        except FileNotFoundError as error:
            what, remedy = "no store there", "check the path"
            raise UsageError(what, where=place.url, expected=MANIFEST_FILE, remedy=remedy) from error
        store = cls(place, manifest)
        _require_codecs_arrays(manifest, store.codec, where)
        missing = [] if allow_incomplete else store.unfinished()
        if missing:
            total = len(manifest.all_shards())
            what, remedy = "the store is not complete", "run the extraction again to finish it"
            got = f"{total - len(missing)} of {total} shards; the first missing is {missing[0]}"
            raise IntegrityError(what, where=place.url, got=got, remedy=remedy)
        return store

    @classmethod
    def find(cls: type[Opened], place: str | Path, *, allow_incomplete: bool = False) -> Opened:
        """The store at a path or URL, or the one that a run there has written beside its tokens.

        ``find(place).split("train").read_rows(0, 8)`` gives arrays by name, [8, L, ...]. Errors as of :meth:`open`.
        """
        candidates = (str(place), f"{str(place).rstrip('/')}/store")
        there = (name for name in candidates if open_location(name).size(MANIFEST_FILE) is not None)
        return cls.open(next(there, str(place)), allow_incomplete=allow_incomplete)

    def unfinished(self) -> list[ShardRange]:
        """Shards without a ledger record."""
        recorded = self.location.sizes(LEDGER)
        return [s for s in self.manifest.all_shards() if s.record_file not in recorded]

    @cached_property
    def codec(self) -> Codec:
        """The codec that decodes this store."""
        return make_codec(self.manifest.codec["name"], **self.manifest.codec["parameters"])

    @cached_property
    def resources(self) -> dict[str, Tensor]:
        """The arrays kept once per store, on the CPU; an IntegrityError for one missing, altered or of another kind."""
        return {name: torch.from_numpy(self._resource(name)) for name in _resources(self.manifest)}

    def _resource(self, name: str) -> np.ndarray:
        folder, files = f"{RESOURCES}/{name}", self.manifest.files
        metadata, where = self.file(f"{folder}/zarr.json"), f"{self.location.url}/{folder}"
        num_bytes = sum(files[file].num_bytes for file in files if file.startswith(f"{folder}/c/"))
        # The shape of one that a codec of ours reads; None for one of another package.
        vocab_size, hidden = self.manifest.vocab_size, self.manifest.arrays.get("hidden")
        width = hidden.trailing_shape if hidden is not None else ()
        shape: tuple[int, ...] | None = None
        if name in ("unigram_log_probs", "lm_head_bias"):
            shape = (vocab_size,)
        elif name == "lm_head" and width:
            shape = (vocab_size, *width)
        try:
            values = read_array(metadata, lambda key: self.file(f"{folder}/c/{key}"), shape, num_bytes)
        except DamagedShard as error:
            raise IntegrityError("a resource cannot be read", where=where, got=error) from error
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise IntegrityError("a resource holds numbers that are not finite", where=where)
        return values

    def split(self, name: str, arrays: Collection[str] | None = None) -> SplitReader:
        """The rows of one split; ``arrays`` narrows what is read. A UsageError for an unknown split or array."""
        unknown = sorted(set(arrays or ()) - set(self.manifest.all_arrays))
        if unknown:
            known = f"some of {sorted(self.manifest.all_arrays)}"
            raise UsageError("the store has no such array", where=unknown[0], expected=known)
        if name not in self.manifest.splits:
            known = f"one of {sorted(self.manifest.splits)}"
            raise UsageError("no such split", where=name, expected=known)
        return SplitReader(self.location, self.manifest, name, arrays, self.codec.check_ids)

    def file(self, name: str) -> bytes:
        """The content of one file written once, checked against the manifest."""
        where = f"{self.location.url}/{name}"
        if name not in self.manifest.files:
            raise UsageError("the store has no such file", where=where)
        expected, size = self.manifest.files[name], self.location.size(name)
        if size is None:
            raise IntegrityError("a file of the store is missing", where=where)
        if size != expected.num_bytes or not expected.matches(data := self.location.read(name)):
            raise IntegrityError("a file of the store was altered", where=where)
        return data

    def files(self, folder: str) -> dict[str, bytes]:
        """All side files of a folder (``tokenizer``, ``corpus``): name inside it -> content."""
        prefix = folder.rstrip("/") + "/"
        names = [name for name in self.manifest.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.file(name) for name in names}

    def copy_files(self, folder: str, destination: Path) -> list[Path]:
        """Write the side files of a folder below ``destination``; a UsageError for a name that leads out of it."""
        paths = []
        for name, data in self.files(folder).items():
            path = path_inside(destination, name)
            write_bytes_atomic(path, data)
            paths.append(path)
        return paths


def _resources(manifest: Manifest) -> list[str]:
    """Names of the arrays kept once."""
    parts = (name.split("/") for name in manifest.files)
    return [part[1] for part in parts if part[0] == RESOURCES and part[2:] == ["zarr.json"]]


def _require_codecs_arrays(manifest: Manifest, codec: Codec, where: str) -> None:
    """Refuse a store whose arrays or resources are not those of its codec at this V."""
    if "/" in codec.name:
        return  # of another package, which alone knows
    hidden = manifest.arrays.get("hidden")
    width = hidden.trailing_shape[0] if hidden is not None and hidden.trailing_shape else None
    try:
        expected = codec.array_specs(manifest.vocab_size, width)
    except UsageError as error:
        what = "parameters of a codec that cannot be"
        raise IntegrityError(what, where=where, got=error) from error
    expected |= {name: spec for name, spec in COUNTED.items() if name in manifest.arrays}
    for name in sorted({*expected, *manifest.arrays}):
        wanted, got = expected.get(name, "none"), manifest.arrays.get(name, "none")
        if wanted != got:
            what, place = f"the arrays are not those of the codec {codec.name}", f"{where}: {name}"
            raise IntegrityError(what, where=place, got=got, expected=wanted)
    optional = {"lm_head_bias"}  # early stores of a teacher without one have none
    missing = {*codec.resource_names} - {*_resources(manifest)} - optional
    if missing:
        raise IntegrityError("a resource is missing", where=where, got=", ".join(sorted(missing)))


class SplitReader:
    """The rows of one split: never a fill value, never an altered byte.

    Before a shard is read, its ledger record must be there and sound. Its files must have the recorded size and the
    recorded tail, which names every chunk by its checksum: a whole file of another shard, or of an older run, is
    refused when it is first met. (Shards of versions before tails are hashed whole then.) Every inner chunk has its
    crc32c, and a remote file is hashed when it is copied into the cache. What a chunk says must be possible: tokens
    below V, finite numbers, ids below V.

    ``arrays`` narrows what is read (None reads every array); the last chunk may be short.

    Raises:
        IntegrityError: If an array's metadata are missing, altered, or of another kind than this project writes.
    """

    def __init__(
        self,
        location: Location,
        manifest: Manifest,
        split: str,
        arrays: Collection[str] | None,
        check_ids: Callable[[Mapping[str, np.ndarray], int], str],
    ) -> None:
        self._given = location, manifest, split, arrays, check_ids
        self.location, self.manifest, self.split, self._check_ids = location, manifest, split, check_ids
        self.num_rows = manifest.splits[split]
        self.rows_per_chunk = manifest.rows_per_chunk
        self.num_chunks = -(-self.num_rows // self.rows_per_chunk)
        names = list(dict.fromkeys(manifest.all_arrays if arrays is None else arrays))
        self._files: dict[int, dict[str, tuple[int, bytes, bytes]]] = {}  # of shards met: 300 bytes a file
        self._arrays = {name: self._open(name) for name in names}

    def __reduce__(self) -> tuple[type[SplitReader], tuple[object, ...]]:
        return SplitReader, self._given  # opened anew by a DataLoader's worker that is not forked

    @property
    def fingerprint(self) -> str:
        """Names the store's content and the split; what a data order belongs to."""
        return f"store {self.manifest.sha256[:16]}, split {self.split}"

    @property
    def chunk_bytes(self) -> int:
        """Decoded bytes of a whole chunk of the store's arrays, whether they are read or not."""
        sizes = (
            math.prod(spec.trailing_shape) * np.dtype(spec.dtype).itemsize for spec in self.manifest.all_arrays.values()
        )
        return self.rows_per_chunk * self.manifest.row_length * sum(sizes)

    def _open(self, name: str) -> NativeShards:
        metadata = f"{self.split}/{name}/zarr.json"
        where = f"{self.location.url}/{metadata}"
        try:
            data = self.location.read(metadata)
        except FileNotFoundError as error:
            raise IntegrityError("array metadata is missing", where=where) from error
        expected = self.manifest.files.get(metadata)
        if expected is None or not expected.matches(data):
            raise IntegrityError("array metadata was altered", where=where)
        array = native_array(self.manifest, name)
        if not array.fits(data, self.num_rows):
            expected = "what the manifest says, cut and coded as this project does it"
            raise IntegrityError("array metadata of another kind", where=where, expected=expected)

        def read_range(shard: int, start: int, length: int) -> bytes:
            file, record, _ = self._file(shard, name)
            descriptor = self.location.open_file(file, record)
            try:
                if (size := os.fstat(descriptor).st_size) != record.num_bytes:
                    raise DamagedShard(f"{size} bytes, expected {record.num_bytes}")
                return os.pread(descriptor, length, start)
            finally:
                os.close(descriptor)

        return NativeShards(
            array,
            read_range,
            lambda shard: self._file(shard, name)[1].num_bytes,
            lambda shard: self._file(shard, name)[2],
        )

    def _file(self, shard: int, name: str) -> tuple[str, FileRecord, str | None]:
        """Name, size and hash of a shard's file, and the hash of its tail if the ledger has it."""
        names = self.manifest.shard_files(self.manifest.shard(self.split, shard))
        if shard not in self._files:
            record, tails = (found := self._read_record(shard)).files, found.tails
            self._files[shard] = {
                array: (record[file].num_bytes, bytes.fromhex(record[file].sha256), bytes.fromhex(tails.get(file, "")))
                for array, file in names.items()
            }
        num_bytes, sha256, tail = self._files[shard][name]
        return names[name], FileRecord(num_bytes, sha256.hex()), tail.hex() or None

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        """The rows of one inner chunk by array, [rows, L, *trailing]; an IntegrityError if it is not as written."""
        if not 0 <= index < self.num_chunks:
            raise IndexError(f"chunk {index} of {self.num_chunks}")
        start = index * self.rows_per_chunk
        num_rows = min(self.rows_per_chunk, self.num_rows - start)
        shard = self.manifest.shard(self.split, start // self.manifest.rows_per_shard)
        rows = {name: self._read(shard, name, index)[:num_rows] for name in self._arrays}
        place = ShardRange(self.split, shard.index, start, start + num_rows)
        try:
            check_values(self.manifest, place, rows)
            problem: object = self._check_ids(rows, self.manifest.vocab_size)
        except GdistillError as error:
            problem = error
        if problem:
            what, where = "the store holds what no teacher said", f"{self.location.url}: {shard}"
            remedy = "write the store again, or get it from its source"
            raise IntegrityError(what, where=where, got=problem, remedy=remedy)
        return rows

    def read_rows(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows start..stop-1, whatever chunks they lie in."""
        if not 0 <= start < stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.num_rows}")
        first = start // self.rows_per_chunk
        parts = [self.read_chunk(i) for i in range(first, -(-stop // self.rows_per_chunk))]
        offset = first * self.rows_per_chunk
        window = slice(start - offset, stop - offset)
        return {name: np.concatenate([part[name] for part in parts])[window] for name in parts[0]}

    def _read_record(self, index: int) -> ShardRecord:
        """A shard's ledger record; refuses a shard that is unfinished."""
        shard = self.manifest.shard(self.split, index)
        record = read_record(self.location, self.manifest, shard)
        if record is None:
            what, where = "the shard is not finished", f"{self.location.url}: {shard}"
            remedy = "run the command that wrote the store again: it finishes it"
            raise IntegrityError(what, where=where, remedy=remedy)
        for name in () if record.tails else self._arrays:
            # Of a version before tails: nothing else tells one file from another.
            file = self.manifest.shard_file(self.split, name, index)
            expected = record.files[file]
            with (
                self._explained(shard, name, expected),
                os.fdopen(self.location.open_file(file, expected), "rb") as whole,
            ):
                if not expected.matches(whole.read()):
                    raise DamagedShard("the file is another one than the ledger names")
        return record

    def _read(self, shard: ShardRange, name: str, index: int) -> np.ndarray:
        """A chunk; where a disk has spoilt the copy of a remote file, from a new copy."""
        _, record, _ = self._file(shard.index, name)
        with self._explained(shard, name, record):
            try:
                return self._arrays[name].read_chunk(index)
            except DamagedShard:
                if not self.location.discard_altered_copy(record):
                    raise
                return self._arrays[name].read_chunk(index)

    @contextmanager
    def _explained(self, shard: ShardRange, name: str, record: FileRecord) -> Iterator[None]:
        """What is wrong with a shard's file, told by its size first."""
        try:
            yield
        except (DamagedShard, OSError, ValueError) as error:
            file = self.manifest.shard_file(self.split, name, shard.index)
            expected, size = record.num_bytes, self.location.size(file)
            what, got = "a shard file was altered", str(error)
            if size is None:
                what, got = "a shard file is missing", "no file"
            elif size != expected:
                what, got = "a shard file is truncated", f"{size} bytes"
            where, wanted = f"{self.location.url}/{file}: {shard}", f"{expected} bytes"
            wanted, remedy = "" if size == expected else wanted, rewrite_remedy(self.location.url)
            raise IntegrityError(what, where=where, got=got, expected=wanted, remedy=remedy) from error


# Writing: metadata once, then whole shards.


class ShardWriter:
    """A store open for writing; see :meth:`create_or_resume`."""

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self.location, self.manifest = location, manifest
        self._held: set[ShardRange] = set()

    @classmethod
    def create_or_resume(
        cls,
        location: str | Path | Location,
        manifest: Manifest,
        resources: Mapping[str, np.ndarray],
        files: Mapping[str, bytes] | None = None,
    ) -> ShardWriter:
        """Create a store, or take up one of the same identity. Several processes may start at once.

        Args:
            location: A folder or URL.
            manifest: The identity; its ``files`` are filled in here.
            resources: Arrays kept once per store.
            files: Side files by name (``tokenizer/tokenizer.json``).

        Raises:
            UsageError: If a store of another identity is there; names the first differing field.
        """
        place = open_location(location)
        content = static_files(manifest, resources)
        clash = sorted(set(content) & set(files or {}))
        if clash:
            raise UsageError("a side file has the name of a store file", where=clash[0])
        content.update(files or {})
        records = {name: FileRecord.of(content[name]) for name in sorted(content)}
        manifest = replace(manifest, files=records)
        with place.claim("create", wait=True):
            _create(place, manifest, content)
        writer = cls(place, manifest)
        writer._release_dead_claims()
        return writer

    def _release_dead_claims(self) -> None:
        """Remove claims of finished shards, left by a writer that was killed before it released them.

        Taking another one, however briefly, could make a living writer skip a shard that is still to be done.
        """
        left = set(self.location.claims())
        for split in self.manifest.splits if left else ():
            for shard in self.manifest.shards(split):
                if shard.claim_name in left and self.is_done(shard):
                    with self.location.claim(shard.claim_name, wait=False):
                        pass  # taking a dead claim and letting go removes it

    def pending(self, split: str) -> list[ShardRange]:
        """Shards not in the ledger, or whose files are not those that it names, in order."""
        sizes = self.location.sizes(split)
        return [shard for shard in self.manifest.shards(split) if not self.is_done(shard, sizes)]

    def all_pending(self) -> list[ShardRange]:
        """The pending shards of every split."""
        return [shard for split in self.manifest.splits for shard in self.pending(split)]

    def is_done(self, shard: ShardRange, sizes: Mapping[str, int] | None = None) -> bool:
        """Whether the ledger has the shard and its files are there: sizes and, locally, tails.

        ``sizes`` are bytes of the split's files by name, where known.
        """
        try:
            record = read_record(self.location, self.manifest, shard)
        except IntegrityError:  # a damaged record vouches for nothing: write the shard again
            return False
        if record is None:
            return False
        known = sizes or {}
        for name, entry in record.files.items():
            # A listing may be older than the record.
            if known.get(name) != entry.num_bytes != self.location.size(name):
                return False
        # Whether they are the very files that the ledger names, where looking is cheap.
        for array, name in self.manifest.shard_files(shard).items():
            if name in record.tails:
                native = native_array(self.manifest, array)
                start = record.files[name].num_bytes - native.tail_bytes
                tail = self.location.peek(name, start, native.tail_bytes)
                if tail is not None and native.tail_sha256(tail) != record.tails[name]:
                    return False
            elif self.location.peek(name, 0, 1) is not None and not record.files[name].matches(
                self.location.read(name)  # written before there were tails
            ):
                return False
        return True

    def is_complete(self) -> bool:
        """Whether every shard of every split is done."""
        return not self.all_pending()

    @contextmanager
    def claim(self, shard: ShardRange) -> Iterator[bool]:
        """Reserve a shard; gives False if another process holds it or has finished it: then skip it."""
        with self.location.claim(shard.claim_name, wait=False) as mine:
            if not mine or self.is_done(shard):
                yield False
                return
            self._held.add(shard)
            try:
                yield True
            finally:
                self._held.discard(shard)

    def write(self, shard: ShardRange, arrays: Mapping[str, np.ndarray]) -> None:
        """Write one whole shard; does nothing if another process finished it meanwhile.

        Args:
            shard: One of :meth:`pending`.
            arrays: ``tokens`` [rows, L] int32, ``token_log_probs`` [rows, L] float32 and the
                codec's arrays [rows, L, *trailing], of the manifest's dtypes. Position 0 has no
                teacher distribution and is zero but in ``tokens``.

        Raises:
            UsageError: If an array is missing, unknown, or of another dtype or shape.
            GdistillError: If a value cannot be right (names row and position), or storage fails.
        """
        check_arrays(self.manifest, shard, arrays)
        encoded = encode_shard(self.manifest, shard, arrays)
        if shard in self._held:
            self._put(shard, encoded)
            return
        with self.location.claim(shard.claim_name, wait=True):
            if not self.is_done(shard):
                self._put(shard, encoded)

    def _put(self, shard: ShardRange, encoded: Mapping[str, bytes]) -> None:
        """Files first, then the record: a shard half written is none."""
        files = {name: FileRecord.of(data) for name, data in encoded.items()}
        tails = {
            file: native_array(self.manifest, array).tail_sha256(encoded[file])
            for array, file in self.manifest.shard_files(shard).items()
        }
        record = ShardRecord(shard, self.manifest.sha256, files, tails)
        self.location.delete(shard.record_file)
        for name, data in (*encoded.items(), (shard.record_file, record.to_bytes())):
            self.location.discard_leftovers(name)
            self.location.write(name, data)


def _create(place: Location, manifest: Manifest, content: Mapping[str, bytes]) -> None:
    """Write the manifest first, then every static file that is absent or altered."""
    where = f"{place.url}/{MANIFEST_FILE}"
    try:
        difference = Manifest.from_bytes(place.read(MANIFEST_FILE), where).difference(manifest)
        if difference:
            name, old, new = difference
            what, where = "the store there was begun with other inputs", f"{place.url}: {name}"
            remedy = "use the same inputs to resume, or another output folder"
            raise UsageError(what, where=where, got=repr(new), expected=repr(old), remedy=remedy)
    except FileNotFoundError:
        # A folder with foreign files is not ours to fill.
        foreign = sorted(name for name in place.sizes() if not name.endswith(".tmp"))
        if foreign:
            what, got = "the output folder holds files but no manifest", foreign[0]
            expected = "an empty or absent folder, or a store"
            raise GdistillError(what, where=place.url, got=got, expected=expected) from None
        place.discard_leftovers(MANIFEST_FILE)
        place.write(MANIFEST_FILE, manifest.to_bytes())
    for name, data in content.items():
        try:
            intact = place.read(name) == data
        except FileNotFoundError:
            intact = False
        if not intact:
            place.discard_leftovers(name)
            place.write(name, data)
