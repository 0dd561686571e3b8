"""Writing a store: metadata once, whole shards by any number of processes, resumable.

Any process may write any shard. A shard's files are encoded in memory, put atomically one by one, and only then named
in the ledger; whatever kills the process in between, the shard is simply not done. Given the same inputs the bytes of
a store depend on nothing else: not on time, process count, order or interruptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from shards.atomic import FileRecord
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store.layout import check_arrays, encode_shard, native_array, static_files
from shards.store.location import Location, open_location
from shards.store.manifest import MANIFEST_FILE, Manifest, ShardRange, ShardRecord, read_record


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
