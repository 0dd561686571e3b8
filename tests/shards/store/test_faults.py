"""Kills, power cuts, full disks, rival writers and damage, done for real on small stores."""

from __future__ import annotations

import builtins
import io
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store.manifest import FORMAT_VERSION, seal
from shards.store.store import ShardStore, ShardWriter
from shards.store.verification import forget, verify
from tests.shards import store_cases as cases


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
    cases.write_store(root)


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
        for name in cases.make_resources():
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


BIG = {"splits": {"train": 188, "validation": 21}}
"""24 + 3 shards: long enough a write to be killed in the middle."""

_context = get_context("forkserver")
_context.set_forkserver_preload([__name__])


def start(target: Callable[..., None], *arguments: object) -> BaseProcess:
    """A child process running ``target``."""
    process = _context.Process(target=target, args=arguments)
    process.start()
    return process


def exit_codes(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def write_worker(root: Path, changes: dict[str, Any]) -> None:
    """What each of several writers does."""
    cases.write_pending(cases.open_writer(root, **changes))


def write_big(root: Path, num_workers: int) -> float:
    """Write or finish the big store; gives the seconds it took."""
    begin = time.monotonic()
    assert not any(exit_codes([start(write_worker, root, BIG) for _ in range(num_workers)]))
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The big store as one undisturbed writer leaves it."""
    root = tmp_path_factory.mktemp("reference") / "store"
    write_big(root, 1)
    return cases.file_bytes(root)


def test_several_and_killed_writers_write_the_bytes_of_one(tmp_path: Path, reference: dict[str, bytes]) -> None:
    root = tmp_path / "store"
    seconds = write_big(root, 3)
    assert cases.file_bytes(root) == reference
    assert verify(root) == []
    for seed in (0, 2):  # all three killed, one of three killed
        shutil.rmtree(root)
        rng = np.random.default_rng(seed)
        writers = [start(write_worker, root, BIG) for _ in range(3)]
        time.sleep(rng.uniform(0, seconds))
        for writer in writers[: rng.choice([1, 3])]:
            writer.kill()
        exit_codes(writers)
        if (root / "manifest.json").exists():
            store = ShardStore.open(root, allow_incomplete=True)
            for shard in set(store.manifest.all_shards()) - set(store.unfinished()):
                rows = store.split(shard.split).read_rows(shard.start, shard.stop)
                for name, values in cases.make_arrays(store.manifest, shard).items():
                    np.testing.assert_array_equal(rows[name], values, f"{name} of {shard}")
        write_big(root, int(rng.integers(1, 4)))
        assert cases.file_bytes(root) == reference


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 20, 47, 91, 132, 170, 213, 251, 302])
def test_dying_at_a_file_operation_loses_nothing(tmp_path: Path, sound: Path, after: int) -> None:
    root, reference = tmp_path / "store", cases.file_bytes(sound)
    assert exit_codes([start(write_until_the_power_goes, root, after)]) == [9]
    for name, data in cases.file_bytes(root).items():
        if not name.endswith(".tmp") and not name.startswith(".claims/"):
            assert data == reference[name], f"{name} was there and torn"
    cases.write_store(root)
    assert cases.file_bytes(root) == reference


def full_disk_worker(root: Path, limit: int) -> None:
    """Write under a file size limit; leaves with 0 only if the failure was told properly."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(GdistillError, match=r"cannot write.*finished shards are kept"):
        write_worker(root, BIG)


def test_a_full_disk_is_one_clear_error_and_keeps_what_is_done(tmp_path: Path, reference: dict[str, bytes]) -> None:
    root, largest = tmp_path / "store", max(len(data) for data in reference.values())
    assert exit_codes([start(full_disk_worker, root, largest - 1)]) == [0]
    left = cases.file_bytes(root)
    assert not [name for name in left if name.endswith(".tmp")]
    assert all(reference[name] == data for name, data in left.items())
    write_big(root, 1)
    assert cases.file_bytes(root) == reference


def test_a_damaged_shard_is_written_again_and_the_others_are_kept(store: Path) -> None:
    reference = cases.file_bytes(store)
    (store / "train/entry_gap_byte0/c/1/0/0").unlink()
    (store / "train/tokens/c/2/0").write_bytes(b"")
    (store / "ledger/validation/000000.json").write_bytes(b"{}")
    (store / "train/token_gumbels/zarr.json").write_bytes(b"{}")
    (store / "tokenizer/tokenizer.json").unlink()
    writer = cases.open_writer(store)
    pending = [f"{shard.split} {shard.index}" for shard in writer.all_pending()]
    assert pending == ["train 1", "train 2", "validation 0"]
    cases.write_pending(writer)
    assert cases.file_bytes(store) == reference


TEACHER = {"id": "tiny", "weights_sha256": "ab" * 32, "dtype": "float32"}
CHANGES: list[tuple[dict, str]] = [
    ({"seed": 8}, "seed.*got 8.*expected 7"),
    ({"teacher": {**TEACHER, "weights_sha256": "00"}}, "teacher.weights"),
    ({"teacher": {**TEACHER, "dtype": "bf16"}}, "teacher.dtype"),
    ({"tokenizer": {"id": "tiny", "sha256": "00"}}, "tokenizer.sha256"),
    ({"tokens": {"fingerprint": "00", "corpus": {}}}, "tokens"),
    ({"codec": {"name": "topk", "parameters": {"num_entries": 4}}}, "parameters.num_entries"),
    ({"codec": {"name": "topk", "parameters": {"num_entries": 3.0}}}, r"num_entries.*got 3\.0.*expected 3"),
    ({"versions": {"gdistill": "0.2.0"}}, r"versions\.gdistill.*0\.2\.0.*0\.1\.0"),
    ({"versions": {"gdistill": "0.1.0", "torch": "2"}}, "versions.torch.*expected 'absent'"),
    ({"rows_per_chunk": 2}, "rows_per_chunk"),
    ({"splits": {"train": 29, "validation": 5}}, "splits.train"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_resuming_with_other_inputs_names_the_field_and_both_values(sound: Path, change: dict, message: str) -> None:
    before = cases.file_bytes(sound)
    with pytest.raises(UsageError, match=message):
        cases.open_writer(sound, **change)
    assert cases.file_bytes(sound) == before


def test_resuming_with_another_resource_or_side_file_is_refused(sound: Path) -> None:
    resources = {**cases.make_resources(), "lm_head": cases.make_resources()["lm_head"] + 1}
    with pytest.raises(UsageError, match=r"files\.resources/lm_head"):
        ShardWriter.create_or_resume(sound, cases.make_manifest(), resources, cases.FILES)
    other = {**cases.FILES, "corpus/maze.json": b"[]"}
    with pytest.raises(UsageError, match=r"files\.corpus/maze\.json"):
        ShardWriter.create_or_resume(sound, cases.make_manifest(), cases.make_resources(), other)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller store; whoever damages it mends it."""
    path = tmp_path_factory.mktemp("integrity") / "store"
    cases.write_store(path, splits={"train": 12, "validation": 4})
    return path


@pytest.fixture(scope="module")
def truth(root: Path) -> dict[str, bytes]:
    assert verify(root) == []
    found, refused = read_everything(root)
    assert refused == []
    return found


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "empty": lambda data: b"",
    "cut by one": lambda data: data[:-1],
    "halved": lambda data: data[: len(data) // 2],
    "grown by one": lambda data: data + b"\0",
    **{f"bit {part} of 4": lambda data, part=part: cases.flipped(data, 2 * len(data) * part + 3) for part in range(4)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_file_may_be_missing_of_another_length_or_altered_in_a_bit(
    root: Path, truth: dict[str, bytes], damage: str
) -> None:
    """verify names it, a reader refuses, and no part is read wrongly."""
    for name, data in cases.file_bytes(root).items():
        with damaged(root / name, DAMAGES[damage](data)):
            problems = {problem.file: str(problem) for problem in verify(root)}
            assert name in problems, f"{name}: not named"
            is_gone = (name, damage) == ("manifest.json", "missing")
            assert ("there is no store here" in problems[name]) == is_gone
            found, refused = read_everything(root)
        assert refused, f"{name}: read as if it were sound"
        wrong = [part for part, content in found.items() if content != truth[part]]
        assert not wrong, f"{name}: {wrong} are read wrongly"


def test_every_field_of_the_manifest_is_sealed_and_of_the_metadata_hashed(root: Path) -> None:
    metadata = root / "train/tokens/zarr.json"
    renamed, told = metadata.read_bytes().replace(b"position", b"pozition"), "metadata was altered"
    with damaged(metadata, renamed), pytest.raises(IntegrityError, match=told):
        ShardStore.open(root).split("train")
    whole = json.loads((root / "manifest.json").read_bytes())
    for field, value in whole.items():
        edited = whole | {field: value + 1 if isinstance(value, int) else "edited"}
        text = json.dumps(edited, indent=2, sort_keys=True).encode() + b"\n"
        with damaged(root / "manifest.json", text):
            with pytest.raises(GdistillError, match=r"manifest\.json"):
                ShardStore.open(root)
            assert [problem.file for problem in verify(root)] == ["manifest.json"]


def test_a_manifest_edited_and_sealed_again_does_not_fit_the_ledger(root: Path) -> None:
    fields = json.loads((root / "manifest.json").read_bytes())
    del fields["sha256"]
    fields["teacher"]["id"] = "another"
    with damaged(root / "manifest.json", seal(fields)):
        with pytest.raises(IntegrityError, match="another manifest"):
            ShardStore.open(root).split("train").read_chunk(0)
        assert len(verify(root)) == 3


def test_a_newer_format_is_refused_by_reader_writer_and_verify(root: Path) -> None:
    newer = {"format_version": FORMAT_VERSION + 1, "something_new": {"a": 1}}
    value = json.loads((root / "manifest.json").read_bytes()) | newer
    with damaged(root / "manifest.json", json.dumps(value).encode()):
        for attempt in (ShardStore.open, cases.open_writer):
            with pytest.raises(GdistillError, match=r"newer format.*upgrade"):
                attempt(root)
        assert "newer format" in str(verify(root)[0])


def test_strangers_are_reported_and_harmless(store: Path) -> None:
    stranger, before = store / "train/tokens/c/9/0", read_everything(store)
    stranger.parent.mkdir()
    stranger.write_bytes(b"x")
    (store / "computed.json").write_bytes(b"{}")
    looked_at: list[int] = []
    (problem,) = verify(store, looked_at.append)
    assert sum(looked_at) == sum(map(len, cases.file_bytes(store).values()))
    assert problem.file == "train/tokens/c/9/0" and "not a file of this store" in str(problem)
    assert read_everything(store) == before


def test_a_shard_written_anew_or_at_work_is_not_forgotten(store: Path) -> None:
    path = store / "train/token_gumbels/c/2/0"
    sound = path.read_bytes()
    path.write_bytes(cases.flipped(sound, 77))
    problems = verify(store)
    with cases.open_writer(store).location.claim("train-000002", wait=False):
        assert forget(store, problems) == []
    path.write_bytes(sound)
    assert forget(store, problems) == [] and verify(store) == []
