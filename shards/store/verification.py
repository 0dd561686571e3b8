"""A store's figures, and what is wrong with it: every byte hashed anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.atomic import FileRecord
from shards.errors import GdistillError
from shards.store.location import Location, open_location
from shards.store.manifest import COMPUTED_FILE, MANIFEST_FILE, Manifest, ShardRange, read_record, rewrite_remedy
from shards.store.store import ShardStore

Progress = Callable[[int], object]
UNFINISHED = "the shard is not finished"


@dataclass(frozen=True)
class Description:
    """A store's figures.

    Attributes:
        num_shards: Shards there will be, and of them
        num_finished: finished ones.
        num_tokens: Tokens in the finished shards.
        num_bytes: Bytes of all files of the store.
        shard_bytes: Bytes of the finished shards' files alone.
    """

    store: ShardStore
    num_shards: int
    num_finished: int
    num_tokens: int
    num_bytes: int
    shard_bytes: int

    @classmethod
    def of(cls, store: ShardStore) -> Description:
        """Measure a store, finished or not."""
        manifest, sizes = store.manifest, store.location.sizes()
        shards, left = manifest.all_shards(), set(store.unfinished())
        finished = [shard for shard in shards if shard not in left]
        files = (name for shard in finished for name in manifest.shard_files(shard).values())
        return cls(
            store,
            len(shards),
            len(finished),
            sum(shard.num_rows for shard in finished) * manifest.row_length,
            sum(sizes.values()),
            sum(sizes.get(name, 0) for name in files),
        )

    @property
    def bytes_per_token(self) -> float | None:
        """Of the finished shards, noise, tokens and log-probabilities together."""
        return self.shard_bytes / self.num_tokens if self.num_tokens else None

    @property
    def fp16_vector_bytes_per_token(self) -> int:
        """What a dense noise vector in half precision would take."""
        return 2 * self.store.manifest.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Figures and the manifest's words, JSON-ready."""
        manifest = self.store.manifest
        words = ("codec", "teacher", "tokenizer", "tokens", "splits", "vocab_size", "row_length")
        figures = ("num_shards", "num_tokens", "num_bytes", "bytes_per_token")
        return {
            "location": self.store.location.url,
            "manifest_sha256": manifest.sha256,
            **{name: value for name, value in manifest.to_json().items() if name in words},
            **{name: getattr(self, name) for name in figures},
            "num_finished_shards": self.num_finished,
            "fp16_vector_bytes_per_token": self.fp16_vector_bytes_per_token,
        }


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a store.

    Attributes:
        file: The file's name inside the store.
        what: What is wrong with it.
        remedy: What to do.
        shard: The shard to write again, if the file belongs to one.
    """

    file: str
    what: str
    remedy: str
    shard: ShardRange | None = None

    def __str__(self) -> str:
        place = f" of {self.shard}" if self.shard else ""
        return f"{self.file}{place}: {self.what}; {self.remedy}"


def verify(location: str | Path | Location, advance: Progress | None = None) -> list[Problem]:
    """Everything wrong with a store, found by hashing every byte of it; empty if it is sound.

    Args:
        location: A folder or URL.
        advance: Called with the bytes of every file there is, once it has been looked at.

    Raises:
        GdistillError: If the place cannot be read at all.
    """
    place = open_location(location)
    try:
        data = place.read(MANIFEST_FILE)
    except FileNotFoundError:
        return [Problem(MANIFEST_FILE, "missing", "restore it from a copy: there is no store here")]
    try:
        manifest = Manifest.from_bytes(data, f"{place.url}/{MANIFEST_FILE}")
    except GdistillError as error:
        return [Problem(MANIFEST_FILE, str(error), "nothing else was checked")]
    return list(_problems(place, manifest, advance or (lambda _: None)))


def _problems(place: Location, manifest: Manifest, advance: Progress) -> Iterator[Problem]:
    known = {MANIFEST_FILE, COMPUTED_FILE, *manifest.files}
    again = "run the command that wrote the store again: it writes this file anew"
    sizes = place.sizes()
    advance(sizes.get(MANIFEST_FILE, 0) + sizes.get(COMPUTED_FILE, 0))
    for name, record in manifest.files.items():
        what = _check(place, name, record)
        advance(sizes.get(name, 0))
        if what:
            yield Problem(name, what, again)
    for shard in manifest.all_shards():
        files = {shard.record_file, *manifest.shard_files(shard).values()}
        known |= files
        yield from _shard_problems(place, manifest, shard)
        advance(sum(sizes.get(name, 0) for name in files))
    for name in sorted(set(sizes) - known):
        advance(sizes[name])
        yield Problem(name, "not a file of this store", "remove it")


def _shard_problems(place: Location, manifest: Manifest, shard: ShardRange) -> Iterator[Problem]:
    again = rewrite_remedy(place.url)
    try:
        record = read_record(place, manifest, shard)
    except GdistillError as error:
        yield Problem(shard.record_file, str(error), again, shard)
        return
    if record is None:
        finish = "run the command that wrote the store again: it finishes it"
        yield Problem(shard.record_file, UNFINISHED, finish, shard)
        return
    for name, entry in record.files.items():
        what = _check(place, name, entry)
        if what:
            yield Problem(name, what, again, shard)


def _check(place: Location, name: str, expected: FileRecord) -> str:
    try:
        data = place.read(name)
    except FileNotFoundError:
        return "missing"
    except GdistillError as error:
        return str(error)
    if len(data) != expected.num_bytes:
        return f"{len(data)} bytes, expected {expected.num_bytes}"
    return "" if expected.matches(data) else "altered: its hash is not the recorded one"


def forget(location: str | Path | Location, problems: list[Problem]) -> list[ShardRange]:
    """Drop the ledger records of damaged shards, so that they count as unfinished.

    The command that wrote the store, run again, then writes them anew. Each shard is claimed and
    looked at again first: one that a process is writing, or has written meanwhile, is left alone.

    Returns:
        The shards that were forgotten.

    Raises:
        GdistillError: If the place cannot be written.
    """
    place = open_location(location)
    shards = sorted({p.shard for p in problems if p.shard}, key=lambda s: (s.split, s.index))
    if not shards:
        return []
    manifest = Manifest.from_bytes(place.read(MANIFEST_FILE), f"{place.url}/{MANIFEST_FILE}")
    return [shard for shard in shards if _forget(place, manifest, shard)]


def _forget(place: Location, manifest: Manifest, shard: ShardRange) -> bool:
    with place.claim(shard.claim_name, wait=False) as mine:
        problems = list(_shard_problems(place, manifest, shard)) if mine else []
        is_damaged = bool(problems) and problems[0].what != UNFINISHED
        if is_damaged:
            place.delete(shard.record_file)
        return is_damaged
