"""Faults done for real on small stores: damage, and power cuts in the middle of a write."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shards.errors import GdistillError
from shards.store.store import ShardStore
from shards.store.verification import verify
from tests.shards.store_cases import make_resources, write_store


class PowerCut:
    """Counts calls that change the file system and cuts the power at one of them.

    A write at which that happens is torn: half of it is there. So is, half, every file whose
    content was not synced since it was written, whatever its name by then.
    """

    def __init__(self, root: Path, after: int) -> None:
        self.root, self.left = root, after
        self.unsynced: set[int] = set()
        self._open, self._fsync = open, os.fsync

    def is_now(self) -> bool:
        """Whether the call that asks is the one."""
        self.left -= 1
        return self.left < 0

    def cut(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self.unsynced:
                os.truncate(path, path.stat().st_size // 2)
        os._exit(9)

    def dying(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **keywords: object) -> object:
            if self.is_now():
                self.cut()
            return call(*arguments, **keywords)

        return wrapper

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        self.unsynced.discard(os.fstat(descriptor).st_ino)

    def open(self, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if not set(mode) & set("wxa+"):
            return self._open(file, mode, *arguments, **keywords)
        opened = Torn(file, mode)
        opened.power = self
        self.unsynced.add(os.fstat(opened.fileno()).st_ino)
        return opened


class Torn(io.FileIO):
    """An open file at whose ``write`` the power may go."""

    power: PowerCut

    def write(self, data: Any) -> int:
        if self.power.is_now():
            super().write(data[: len(data) // 2])
            self.power.cut()
        return super().write(data)


def write_until_the_power_goes(root: Path, after: int) -> None:
    """Write the small store until the ``after``-th change of the file system."""
    power = PowerCut(root, after)
    for name in ("replace", "open", "unlink", "rmdir", "mkdir"):
        setattr(os, name, power.dying(getattr(os, name)))
    os.fsync = power.dying(power.fsync)
    builtins.open = io.open = power.open
    write_store(root)


@contextmanager
def damaged(path: Path, data: bytes | None) -> Iterator[None]:
    """The file with other content (None: gone) while the context lasts."""
    original = path.read_bytes()
    try:
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        yield
    finally:
        path.write_bytes(original)


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit inverted."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def read_everything(root: Path) -> tuple[dict[str, bytes], list[str]]:
    """All that a reader can get out of a store, every part on its own; the parts it refuses."""
    found: dict[str, bytes] = {}
    refused: list[str] = []

    @contextmanager
    def part(name: str) -> Iterator[None]:
        try:
            yield
        except GdistillError:
            refused.append(name)

    with part("store"):
        store = ShardStore.open(root)
        found["manifest"] = store.manifest.to_bytes()
        for name in make_resources():
            with part(name):
                found[f"resource {name}"] = store.resources[name].numpy().tobytes()
        for name in store.manifest.files:
            with part(name):
                found[name] = store.file(name)
        for split in store.manifest.splits:
            with part(split):
                reader = store.split(split)
                for index in range(reader.num_chunks):
                    with part(f"{split} chunk {index}"):
                        arrays = reader.read_chunk(index).values()
                        found[f"{split} {index}"] = b"".join(rows.tobytes() for rows in arrays)
    return found, refused


def check_damage(root: Path, name: str, data: bytes | None, truth: dict[str, bytes]) -> None:
    """Damage one file: verify names it, a reader refuses, and no part is read wrongly."""
    with damaged(root / name, data):
        assert name in [problem.file for problem in verify(root)], f"{name}: not named"
        found, refused = read_everything(root)
    assert refused, f"{name}: read as if it were sound"
    wrong = [part for part, content in found.items() if content != truth[part]]
    assert not wrong, f"{name}: {wrong} are read wrongly"
