"""Write a store, read it back, with our reader and with plain zarr."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from shards.codec.registry import make_codec
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store import store as reader
from shards.store.location import LocalLocation
from shards.store.manifest import read_record
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from tests.shards.store_cases import (
    FILES,
    LENGTH,
    VOCAB,
    file_bytes,
    make_arrays,
    make_manifest,
    make_resources,
    open_writer,
    write_pending,
    write_store,
)

NOISE = "levels"


def expected_rows(split: str) -> dict[str, np.ndarray]:
    manifest = make_manifest()
    parts = [make_arrays(manifest, shard) for shard in manifest.shards(split)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store")
    for split, num_rows in {"train": 28, "validation": 5}.items():
        reader, expected = store.split(split), expected_rows(split)
        assert (reader.num_rows, reader.rows_per_chunk) == (num_rows, 4)
        chunks = [reader.read_chunk(index) for index in range(reader.num_chunks)]
        for name, values in expected.items():
            got = np.concatenate([chunk[name] for chunk in chunks])
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize("window", [(0, 28), (3, 4), (3, 17), (27, 28), (8, 8), (28, 28)])
def test_row_windows_cross_chunks_and_shards(tmp_path: Path, window: tuple[int, int]) -> None:
    write_store(tmp_path / "store")
    rows = ShardStore.open(tmp_path / "store").split("train").read_rows(*window)
    for name, values in expected_rows("train").items():
        np.testing.assert_array_equal(rows[name], values[slice(*window)])


def test_any_zarr_reader_reads_the_store(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    group = zarr.open_group(tmp_path / "store", mode="r")
    array = group["train/entry_gumbels"]
    assert array.shape == (28, LENGTH, 3)
    assert array.shards == (8, LENGTH, 3) and array.chunks == (4, LENGTH, 3)
    assert array.metadata.dimension_names == ("row", "position", None)
    for name, values in expected_rows("train").items():
        np.testing.assert_array_equal(np.asarray(group[f"train/{name}"]), values)


def test_zero_chunks_are_stored(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "store")
    for split in writer.manifest.splits:
        for shard in writer.pending(split):
            arrays = make_arrays(writer.manifest, shard)
            writer.write(shard, {name: np.zeros_like(value) for name, value in arrays.items()})
    assert verify(tmp_path / "store") == []
    rows = ShardStore.open(tmp_path / "store").split("train").read_rows(0, 28)
    assert not any(value.any() for value in rows.values())


def test_resources_and_side_files(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store")
    assert set(store.resources) == set(make_resources())
    for name, value in make_resources().items():
        assert torch.equal(store.resources[name], torch.from_numpy(value))
    assert store.files("corpus") == {"maze.json": FILES["corpus/maze.json"]}
    paths = store.copy_files("tokenizer", tmp_path / "copy")
    assert paths[0].read_bytes() == FILES["tokenizer/tokenizer.json"]
    with pytest.raises(UsageError, match="no such file"):
        store.file("corpus/absent.json")


def test_an_empty_split_and_no_resources(tmp_path: Path) -> None:
    full = {"codec": {"name": "full", "parameters": {}}}
    full["arrays"] = make_codec("full").array_specs(VOCAB, None)
    manifest = make_manifest(splits={"train": 8, "validation": 0}, **full)
    write_pending(ShardWriter.create_or_resume(tmp_path / "store", manifest, {}))
    store = ShardStore.open(tmp_path / "store")
    assert store.resources == {} and store.split("validation").num_chunks == 0
    assert verify(tmp_path / "store") == []


def test_an_incomplete_store_is_refused_unless_asked(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "store")
    first, *_ = writer.pending("train")
    writer.write(first, make_arrays(writer.manifest, first))
    assert not writer.is_complete()
    with pytest.raises(IntegrityError, match=r"1 of 5 shards; the first missing is train shard 1"):
        ShardStore.open(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store", allow_incomplete=True)
    assert len(store.unfinished()) == 4
    assert store.split("train").read_chunk(1)["tokens"].shape == (4, LENGTH)
    with pytest.raises(IntegrityError, match=r"not finished.*train shard 1"):
        store.split("train").read_chunk(2)


def test_a_finished_store_has_nothing_pending_and_does_not_change(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    before = file_bytes(tmp_path / "store")
    writer = open_writer(tmp_path / "store")
    assert writer.is_complete() and writer.pending("train") == []
    shard = writer.manifest.shards("train")[0]
    arrays = make_arrays(writer.manifest, shard)
    arrays["token_gumbels"][:, 1:] += 1
    writer.write(shard, arrays)  # other values do not replace what is there
    with writer.claim(shard) as mine:
        assert not mine
    assert file_bytes(tmp_path / "store") == before


def test_no_store_and_unknown_split(tmp_path: Path) -> None:
    import shards

    write_store(tmp_path / "run/store")
    for place in (tmp_path / "run/store", tmp_path / "run", f"{tmp_path}/run/"):
        assert shards.open_store(place).split("validation").num_rows == 5
    for attempt in (shards.open_store, ShardStore.open):
        with pytest.raises(UsageError, match="no store there"):
            attempt(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="no such split"):
        shards.open_store(tmp_path / "run").split("test")


def test_foreign_folders_and_unknown_urls_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(GdistillError, match=r"no manifest.*thesis\.txt"):
        open_writer(tmp_path)
    assert set(file_bytes(tmp_path)) == {"thesis.txt"}
    with pytest.raises(UsageError, match="unknown kind of store location"):
        open_writer("nosuchscheme://bucket/store")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("token_gumbels"), "wrong arrays"),
        (lambda a: a.update(extra=a["token_gumbels"]), "wrong arrays"),
        (lambda a: a.update(entry_gumbels=a["entry_gumbels"].astype("float32")), "does not fit"),
        (lambda a: a.update(tokens=a["tokens"][:-1]), "does not fit"),
        (lambda a: a["tokens"].__setitem__((2, 3), VOCAB), "train row 10, position 3.*got 50"),
        (lambda a: a["tokens"].__setitem__((2, 3), -1), "train row 10, position 3"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), np.nan), "row 9, position 4.*got nan"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), -np.inf), "got -inf"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), 0.5), r"got 0\.5"),
        (lambda a: a["token_log_probs"].__setitem__((1, 0), -0.5), r"position 0.*got -0\.5"),
        (lambda a: a["entry_gumbels"].__setitem__((2, 3, 1), np.inf), "row 10, position 3.*inf"),
        (lambda a: a["entry_gumbels"].__setitem__((5, 4, 2), np.nan), "row 13, position 4.*nan"),
    ],
)
def test_arrays_that_cannot_be_right_are_refused(tmp_path: Path, change, message: str) -> None:
    writer = open_writer(tmp_path / "store")
    shard = writer.pending("train")[1]
    arrays = make_arrays(writer.manifest, shard)
    change(arrays)
    with pytest.raises(GdistillError, match=message):
        writer.write(shard, arrays)
    assert shard in writer.pending("train")


def test_a_shard_being_rewritten_is_in_no_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write_store(tmp_path / "store")
    shard = writer.manifest.shards("train")[1]
    (tmp_path / "store/train/token_gumbels/c/1/0").write_bytes(b"damaged")
    write, seen = LocalLocation.write, []

    def watched(place: LocalLocation, name: str, data: bytes) -> None:
        seen.append((name, read_record(place, writer.manifest, shard) is not None))
        write(place, name, data)

    monkeypatch.setattr(LocalLocation, "write", watched)
    write_pending(writer)
    assert [recorded for _, recorded in seen] == [False] * 7
    assert seen[-1][0] == "ledger/train/000001.json", "last"


def random_store(root: Path, seed: int, **changes: Any) -> ShardWriter:
    """A store of incompressible bytes: its files' sizes tell nothing."""
    codec = {"name": "quantized", "parameters": {"bits": 8}}
    specs = make_codec("quantized", bits=8).array_specs(VOCAB, None)
    manifest = make_manifest(codec=codec, arrays=specs, seed=seed, **changes)
    writer = ShardWriter.create_or_resume(root, manifest, make_resources())
    for shard in writer.pending("train"):
        arrays = make_arrays(manifest, shard)
        rng = np.random.default_rng([seed, shard.index])
        arrays[NOISE][:] = rng.integers(0, 256, arrays[NOISE].shape)
        writer.write(shard, arrays)
    return writer


def test_a_whole_file_of_another_shard_or_run_is_noticed_without_hashing(tmp_path: Path) -> None:
    splits = {"train": 24}
    random_store(tmp_path / "older", 1, splits=splits)
    writer = random_store(tmp_path / "store", 2, splits=splits)
    root = tmp_path / "store"
    name = f"train/{NOISE}/c/0/0/0"
    foreign = [root / f"train/{NOISE}/c/1/0/0", tmp_path / "older" / name]
    sound = (root / name).read_bytes()
    for path in foreign:
        assert len(path.read_bytes()) == len(sound)
        (root / name).write_bytes(path.read_bytes())
        assert [shard.index for shard in writer.pending("train")] == [0]
        assert not writer.is_complete()
        reader = ShardStore.open(root).split("train")
        with pytest.raises(IntegrityError, match=r"altered.*train shard 0.*another one than"):
            reader.read_chunk(0)
        reader.read_chunk(2)
        (root / name).write_bytes(sound)
    assert writer.is_complete()


def test_what_is_read_is_what_was_asked_for(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store")
    assert store.split("train", []).read_rows(0, 5) == {}
    assert set(store.split("train", ["tokens"]).read_chunk(0)) == {"tokens"}
    with pytest.raises(UsageError, match="no such array"):
        store.split("train", ["noise"])


def test_a_shard_counts_as_known_once_all_of_it_is(tmp_path: Path) -> None:
    """Another thread that finds it known reads its sizes and hashes at once."""
    write_store(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store")
    shard = store.manifest.shards("train")[0]
    record = read_record(store.location, store.manifest, shard)
    names = store.manifest.shard_files(shard)
    assert record is not None
    known, seen = reader._KnownFiles(1, [*names]), []

    class Watched(dict):
        def __getitem__(self, name: str) -> object:
            seen.append(0 in known)
            return super().__getitem__(name)

    known.add(replace(record, files=Watched(record.files), tails=Watched(record.tails)), names)
    assert len(seen) >= len(names) and not any(seen) and 0 in known
    assert all(known.record(0, array) == record.files[name] for array, name in names.items())
