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
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from shards.atomic import write_bytes_atomic
from shards.codec.protocol import Codec
from shards.codec.registry import make_codec
from shards.errors import IntegrityError, UsageError, path_inside
from shards.store.layout import RESOURCES, DamagedShard, ShardRange, read_array, shard_ranges
from shards.store.ledger import LEDGER, record_file
from shards.store.location import Location, as_location, open_location
from shards.store.manifest import MANIFEST_FILE, Manifest
from shards.store.reader import SplitReader

Opened = TypeVar("Opened", bound="ShardStore")


def find_store(place: str | Path) -> str:
    """The store at a place, or the one that a run there has written beside its tokens."""
    inside = f"{str(place).rstrip('/')}/store"
    for candidate in (str(place), inside):
        if open_location(candidate).size(MANIFEST_FILE) is not None:
            return candidate
    return str(place)


class ShardStore:
    """A store open for reading; see :meth:`open`."""

    def __init__(self, location: Location, manifest: Manifest) -> None:
        self.location, self.manifest = location, manifest

    @classmethod
    def open(
        cls: type[Opened], location: str | Path | Location, *, allow_incomplete: bool = False
    ) -> Opened:
        """Open a store and check its manifest and that every shard is in the ledger.

        Args:
            location: A folder or URL.
            allow_incomplete: Accept a store whose extraction has not finished.

        Raises:
            UsageError: If no store is there.
            GdistillError: If a newer format wrote it.
            IntegrityError: If the manifest was altered, or shards are missing.
        """
        place = as_location(location)
        where = f"{place.url}/{MANIFEST_FILE}"
        try:
            manifest = Manifest.from_bytes(place.read(MANIFEST_FILE), where)
        except FileNotFoundError as error:
            raise UsageError(
                "no store there", where=place.url, expected=MANIFEST_FILE, remedy="check the path"
            ) from error
        store = cls(place, manifest)
        _require_codecs_arrays(manifest, store.codec, where)
        if not allow_incomplete:
            store._require_complete()
        return store

    def unfinished(self) -> list[ShardRange]:
        """Shards without a ledger record."""
        recorded = self.location.sizes(LEDGER)
        return [
            shard
            for split in self.manifest.splits
            for shard in shard_ranges(self.manifest, split)
            if record_file(shard) not in recorded
        ]

    def _require_complete(self) -> None:
        missing = self.unfinished()
        if missing:
            total = sum(len(shard_ranges(self.manifest, s)) for s in self.manifest.splits)
            raise IntegrityError(
                "the store is not complete",
                where=self.location.url,
                got=f"{total - len(missing)} of {total} shards; the first missing is {missing[0]}",
                remedy="run the extraction again to finish it",
            )

    @cached_property
    def codec(self) -> Codec:
        """The codec that decodes this store."""
        return make_codec(self.manifest.codec["name"], **self.manifest.codec["parameters"])

    @cached_property
    def resources(self) -> dict[str, Tensor]:
        """The arrays kept once per store, on the CPU.

        Raises:
            IntegrityError: If one is missing, altered or of another kind than this project writes.
        """
        return {name: torch.from_numpy(self._resource(name)) for name in _resources(self.manifest)}

    def _resource(self, name: str) -> np.ndarray:
        folder = f"{RESOURCES}/{name}"
        metadata, files = self.file(f"{folder}/zarr.json"), self.manifest.files
        num_bytes = sum(files[file].num_bytes for file in files if file.startswith(f"{folder}/c/"))
        expected = resource_shape(name, self.manifest)
        try:
            values = read_array(
                metadata, lambda key: self.file(f"{folder}/c/{key}"), expected, num_bytes
            )
        except DamagedShard as error:
            raise IntegrityError(
                "a resource cannot be read", where=f"{self.location.url}/{folder}", got=error
            ) from error
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            where = f"{self.location.url}/{folder}"
            raise IntegrityError("a resource holds numbers that are not finite", where=where)
        return values

    def split(self, name: str, arrays: Collection[str] | None = None) -> SplitReader:
        """The rows of one split; ``arrays`` narrows what is read (a plain student needs no noise).

        Raises:
            UsageError: For an unknown split or array.
        """
        unknown = sorted(set(arrays or ()) - set(self.manifest.all_arrays))
        if unknown:
            known = f"some of {sorted(self.manifest.all_arrays)}"
            raise UsageError("the store has no such array", where=unknown[0], expected=known)
        if name not in self.manifest.splits:
            raise UsageError(
                "no such split", where=name, expected=f"one of {sorted(self.manifest.splits)}"
            )
        return SplitReader(self.location, self.manifest, name, arrays, self.codec.check_ids)

    def file(self, name: str) -> bytes:
        """The content of one file written once, checked against the manifest."""
        where = f"{self.location.url}/{name}"
        if name not in self.manifest.files:
            raise UsageError("the store has no such file", where=where)
        expected = self.manifest.files[name]
        size = self.location.size(name)
        if size is None:
            raise IntegrityError("a file of the store is missing", where=where)
        data = self.location.read(name) if size == expected.num_bytes else b""
        if not expected.matches(data):
            raise IntegrityError("a file of the store was altered", where=where)
        return data

    def files(self, folder: str) -> dict[str, bytes]:
        """All side files of a folder (``tokenizer``, ``corpus``): name inside it -> content."""
        prefix = folder.rstrip("/") + "/"
        names = [name for name in self.manifest.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.file(name) for name in names}

    def copy_files(self, folder: str, destination: Path) -> list[Path]:
        """Write the side files of a folder below ``destination``; empty if there are none.

        Raises:
            UsageError: If a name, or a link in the destination, leads out of it.
        """
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


def resource_shape(name: str, manifest: Manifest) -> tuple[int, ...] | None:
    """The shape of a resource that a codec of ours reads; None for one of another package."""
    hidden = manifest.arrays.get("hidden")
    width = hidden.trailing_shape if hidden is not None else ()
    return {
        "unigram_log_probs": (manifest.vocab_size,),
        "lm_head": (manifest.vocab_size, *width) if width else None,
        "lm_head_bias": (manifest.vocab_size,),
    }.get(name)


def _require_codecs_arrays(manifest: Manifest, codec: Codec, where: str) -> None:
    """Refuse a store whose arrays or resources are not those of its codec at this V."""
    if "/" in codec.name:
        return  # of another package, which alone knows
    hidden = manifest.arrays.get("hidden")
    width = hidden.trailing_shape[0] if hidden is not None and hidden.trailing_shape else None
    try:
        expected = codec.array_specs(manifest.vocab_size, width)
    except UsageError as error:
        raise IntegrityError(
            "parameters of a codec that cannot be", where=where, got=error
        ) from error
    for name in sorted({*expected, *manifest.arrays}):
        if expected.get(name) != manifest.arrays.get(name):
            raise IntegrityError(
                f"the arrays are not those of the codec {codec.name}",
                where=f"{where}: {name}",
                got=manifest.arrays.get(name, "none"),
                expected=expected.get(name, "none"),
            )
    optional = {"lm_head_bias"}  # early stores of a teacher without one have none
    missing = {*codec.resource_names} - {*_resources(manifest)} - optional
    if missing:
        raise IntegrityError("a resource is missing", where=where, got=", ".join(sorted(missing)))
