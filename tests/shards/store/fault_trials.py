"""Faults done for real on small stores: kills, flips, truncations, full disks, rival writers.

Each trial returns what happened as plain counts; the tests run a few of each, the benchmark
``benchmarks.faults`` the full numbers.
"""

from __future__ import annotations

import builtins
import io
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from shards.errors import GdistillError
from shards.store.store import ShardStore
from shards.store.verification import verify
from tests.shards.store_cases import (
    file_bytes,
    make_arrays,
    make_resources,
    open_writer,
    write_pending,
    write_store,
)

BIG = {"splits": {"train": 188, "validation": 21}}
"""24 + 3 shards: long enough a write to be killed in the middle."""

_context = get_context("forkserver")
_context.set_forkserver_preload(["tests.shards.store_cases", "tests.shards.store.fault_trials"])


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """A child process running ``target``."""
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def finish(processes: list[BaseProcess]) -> None:
    """Wait for children and insist that they succeeded."""
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"a writer ended with {process.exitcode}"


def write_worker(root: Path) -> None:
    """What each of several writers does."""
    write_pending(open_writer(root, **BIG))


def write_with(root: Path, num_workers: int) -> float:
    """Write or finish the big store; gives the seconds it took."""
    begin = time.monotonic()
    finish([start(write_worker, root) for _ in range(num_workers)])
    return time.monotonic() - begin


def kill_trial(
    root: Path, reference: dict[str, bytes], rng: np.random.Generator, seconds: float
) -> Counter[str]:
    """Kill -9 a three-process write at a random moment, look, resume, compare every byte.

    Half of the trials kill all three writers, half one of them.
    """
    writers = [start(write_worker, root) for _ in range(3)]
    time.sleep(rng.uniform(0, seconds))
    alive = sum(writer.is_alive() for writer in writers)
    for writer in writers[: rng.choice([1, 3])]:
        writer.kill()
    for writer in writers:
        writer.join()
    left = file_bytes(root) if root.exists() else {}
    outcome = Counter(kills=1, mid_write=alive > 0, mid_creation=bool(alive and not _ledger(left)))
    outcome["left_temporary_files"] = any(name.endswith(".tmp") for name in left)
    outcome["left_claims"] = any(name.startswith(".claims") for name in left)
    outcome["half_written_shards"] = _half_written(left)
    assert _reads_as(root, reference), "a killed store was read as something else"
    write_with(root, int(rng.integers(1, 4)))
    outcome["byte_identical"] = file_bytes(root) == reference
    shutil.rmtree(root)
    return outcome


def _ledger(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.startswith("ledger/") and name.endswith(".json")]


def _half_written(files: dict[str, bytes]) -> int:
    """Whether some shard has files but no ledger record."""
    done = {tuple(name.removesuffix(".json").split("/")[1:]) for name in _ledger(files)}
    parts = [name.split("/") for name in files if "/c/" in name and not name.endswith(".tmp")]
    return int(any((p[0], f"{int(p[3]):06d}") not in done for p in parts if p[0] != "resources"))


def _reads_as(root: Path, reference: dict[str, bytes]) -> bool:
    """Whether every ledgered shard of an unfinished store has the reference's bytes."""
    if not (root / "manifest.json").exists():
        return True
    store = ShardStore.open(root, allow_incomplete=True)
    pending = set(store.unfinished())
    writer = open_writer(root, **BIG)
    done = [s for split in store.manifest.splits for s in writer.shards(split) if s not in pending]
    readers = {split: store.split(split) for split in store.manifest.splits}
    for shard in done:
        rows = readers[shard.split].read_rows(shard.start, shard.stop)
        expected = make_arrays(store.manifest, shard)
        if any(not np.array_equal(rows[name], expected[name]) for name in expected):
            return False
    return True


class PowerCut:
    """Counts calls that change the file system and cuts the power at one of them.

    A write at which that happens is torn: half of it is there. So is, half, every file whose
    content was not synced since it was written, whatever its name by then.
    """

    def __init__(self, root: Path, after: int) -> None:
        self.root, self.left = root, after
        self.unsynced: set[int] = set()
        self._open, self._fsync = open, os.fsync

    def count(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.cut()

    def cut(self) -> None:
        for path in self.root.rglob("*"):
            if path.is_file() and path.stat().st_ino in self.unsynced:
                os.truncate(path, path.stat().st_size // 2)
        os._exit(9)

    def dying(self, call: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **keywords: object) -> object:
            self.count()
            return call(*arguments, **keywords)

        return wrapper

    def fsync(self, descriptor: int) -> None:
        self.count()
        self._fsync(descriptor)
        self.unsynced.discard(os.fstat(descriptor).st_ino)

    def open(self, file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        opened = self._open(file, mode, *arguments, **keywords)
        if not set(mode) & set("wxa+"):
            return opened
        self.unsynced.add(os.fstat(opened.fileno()).st_ino)
        write = opened.write
        torn = _Torn(opened)

        def counted(data: bytes) -> int:
            self.left -= 1
            if self.left < 0:
                write(data[: len(data) // 2])
                opened.flush()
                self.cut()
            return write(data)

        torn.write = counted
        return torn


class _Torn:
    """An open file whose ``write`` is another."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.write = file.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def crash_worker(root: Path, after: int) -> None:
    """Write the small store until the power goes at the ``after``-th change of the file system."""
    power = PowerCut(root, after)
    for name in ("replace", "open", "unlink", "rmdir", "mkdir"):
        setattr(os, name, power.dying(getattr(os, name)))
    os.fsync = power.fsync
    builtins.open = io.open = power.open
    write_store(root)


def crash_trial(root: Path, reference: dict[str, bytes], after: int) -> bool | None:
    """Cut the power at one exact point of a write, look, resume; None once past the end."""
    process = start(crash_worker, root, after)
    process.join()
    survived = process.exitcode == 0
    for name, data in file_bytes(root).items() if root.exists() else ():
        if not name.endswith(".tmp") and not name.startswith(".claims/"):
            assert data == reference[name], f"{name} was there and torn after operation {after}"
    write_store(root)
    identical = file_bytes(root) == reference
    shutil.rmtree(root)
    assert identical, f"dying at file operation {after} left a store that differs after resume"
    return None if survived else True


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


def read_everything(root: Path) -> dict[str, bytes]:
    """All that a reader can get out of a store, every part on its own; failures left out."""
    found: dict[str, bytes] = {}

    def attempt(name: str, read: Callable[[], bytes]) -> None:
        try:
            found[name] = read()
        except GdistillError as error:
            found[f"refused {name}"] = str(error).encode()

    try:
        store = ShardStore.open(root)
    except GdistillError as error:
        return {"refused store": str(error).encode()}
    attempt("manifest", lambda: store.manifest.to_bytes())
    for name in make_resources():
        attempt(f"resource {name}", lambda name=name: store.resources[name].numpy().tobytes())
    for name in store.manifest.files:
        attempt(f"file {name}", lambda name=name: store.file(name))
    for split in store.manifest.splits:
        try:
            reader = store.split(split)
        except GdistillError as error:
            found[f"refused {split}"] = str(error).encode()
            continue
        for index in range(reader.num_chunks):
            for array in store.manifest.all_arrays:
                attempt(
                    f"{split} chunk {index} {array}",
                    lambda r=reader, i=index, a=array: r.read_chunk(i)[a].tobytes(),
                )
    return found


def damage_trial(
    root: Path, name: str, data: bytes | None, truth: dict[str, bytes]
) -> Counter[str]:
    """Damage one file; count what verify and a reader make of it."""
    with damaged(root / name, data):
        problems = verify(root)
        found = read_everything(root)
    refused = [key for key in found if key.startswith("refused")]
    wrong = [key for key in found if key not in refused and found[key] != truth[key]]
    return Counter(
        trials=1,
        detected_by_verify=bool(problems),
        named_by_verify=any(problem.file == name for problem in problems),
        refused_by_reader=bool(refused),
        silently_wrong=len(wrong),
    )


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit inverted."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip_trials(root: Path, number: int, rng: np.random.Generator) -> Counter[str]:
    """Single-bit flips, half of them spread evenly over files and half over all bytes."""
    files, truth = file_bytes(root), read_everything(root)
    names = [name for name, data in files.items() if data]
    weights = np.array([len(files[name]) for name in names], float)
    total: Counter[str] = Counter()
    for trial in range(number):
        chances = weights / weights.sum() if trial % 2 else None
        name = names[rng.choice(len(names), p=chances)]
        data = flipped(files[name], int(rng.integers(8 * len(files[name]))))
        total += damage_trial(root, name, data, truth)
    return total


def full_disk_worker(root: Path, limit: int) -> None:
    """Write under a file size limit; leaves with 0 only if the failure was told properly."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write_pending(open_writer(root, **BIG))
    except GdistillError as error:
        assert "cannot write" in str(error) and "finished shards are kept" in str(error)
        return
    raise AssertionError("the limit was not reached")
