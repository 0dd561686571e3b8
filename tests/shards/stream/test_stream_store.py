"""ShardStream over stores on disk."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shards.errors import GdistillError, IntegrityError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.shards.store_cases import write_store

ROWS = 203


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stream") / "store"
    write_store(path, splits={"train": ROWS, "validation": 5})
    return path


@pytest.mark.parametrize("num_workers", [0, 3])
def test_batches_hold_the_rows_of_the_store(location: Path, num_workers: int) -> None:
    split = ShardStore.open(location).split("train")
    stored = split.read_rows(0, ROWS)
    for batch in ShardStream(split, seed=1, global_batch_size=16, num_workers=num_workers):
        for name, array in batch.arrays.items():
            assert torch.equal(array, torch.from_numpy(stored[name][batch.row_ids.numpy()]))


def test_only_the_arrays_asked_for_are_read(location: Path) -> None:
    split = ShardStore.open(location).split("validation", ["tokens"])
    batches = list(ShardStream(split, seed=1, global_batch_size=4, shuffle=False))
    assert [set(batch.arrays) for batch in batches] == [{"tokens"}] * 2
    assert batches[-1].arrays["tokens"].shape[0] == 1


def test_the_state_of_another_store_is_refused(location: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "other", splits={"train": ROWS, "validation": 5}, seed=8)
    mine = ShardStream(ShardStore.open(location).split("train"), seed=1, global_batch_size=16)
    other = ShardStore.open(tmp_path / "other")
    theirs = ShardStream(other.split("train"), seed=1, global_batch_size=16)
    with pytest.raises(GdistillError, match=other.manifest.sha256[:16]):
        mine.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lost_shard_stops_the_stream(location: Path, tmp_path: Path, num_workers: int) -> None:
    write_store(tmp_path / "store")
    (tmp_path / "store/train/entry_gumbels/c/1/0/0").unlink()
    split = ShardStore.open(tmp_path / "store").split("train")
    with pytest.raises(IntegrityError, match=r"train/entry_gumbels/c/1/0/0.*train shard 1"):
        list(ShardStream(split, seed=1, global_batch_size=4, num_workers=num_workers))


CONSUMER = """
import sys, threading
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
split = ShardStore.open(sys.argv[1]).split("train")
stream = ShardStream(split, seed=1, global_batch_size=2, num_workers=3)
batches = iter(stream)
next(batches)
print(sum(thread.name.startswith("shard-reader") for thread in threading.enumerate()), flush=True)
while True:
    for batch in batches:
        pass
    batches = iter(stream)
"""


def test_kill_leaves_nothing_behind(location: Path) -> None:
    before = {str(path) for path in location.rglob("*")}
    process = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, str(location)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    num_readers = int(process.stdout.readline())
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert num_readers >= 1 and not children.strip()  # it was at work, with threads only
    assert "/dev/shm" not in maps
    assert {str(path) for path in location.rglob("*")} == before
