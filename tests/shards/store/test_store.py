"""Write a store, read it back, with our reader and with plain zarr."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import shards
from shards.codec.protocol import ArraySpec, make_codec
from shards.errors import GdistillError, IntegrityError, UsageError
from shards.store.location import LocalLocation
from shards.store.manifest import COMPUTED_FILE, read_record, read_ways, record_ways
from shards.store.store import ShardStore, ShardWriter
from shards.store.verification import verify
from tests.shards import store_cases as cases

WINDOWS = [(0, 28), (3, 4), (3, 17), (27, 28)]


def test_rows_come_back_as_written_from_our_reader_and_from_any_of_zarr(sound: Path) -> None:
    store, group = ShardStore.open(sound), zarr.open_group(sound, mode="r")
    for split, num_rows in {"train": 28, "validation": 5}.items():
        rows = store.split(split)
        assert (rows.num_rows, rows.rows_per_chunk) == (num_rows, 4)
        chunks = [rows.read_chunk(index) for index in range(rows.num_chunks)]
        parts = [cases.make_arrays(store.manifest, shard) for shard in store.manifest.shards(split)]
        for name in parts[0]:
            values = np.concatenate([part[name] for part in parts])
            got = np.concatenate([chunk[name] for chunk in chunks])
            assert got.dtype == values.dtype
            np.testing.assert_array_equal(got, values)
            np.testing.assert_array_equal(np.asarray(group[f"{split}/{name}"]), values)
            for window in WINDOWS if split == "train" else ():  # across chunks and shards
                np.testing.assert_array_equal(rows.read_rows(*window)[name], values[slice(*window)])
    assert group.attrs["gdistill"] == {"format": "gdistill", "format_version": 2, "manifest": "manifest.json"}
    tail = (sound / "train/tokens/c/3/0").read_bytes()[-44:]
    assert any(tail[:4]) and tail[4:8] == bytes(4), "an absent chunk's checksum is 0"
    array = group["train/entry_gumbels"]
    assert array.shape == (28, cases.LENGTH, 3)
    assert array.shards == (8, cases.LENGTH, 3) and array.chunks == (4, cases.LENGTH, 3)
    assert array.metadata.dimension_names == ("row", "position", None)
    assert group["resources/lm_head"].chunks == (cases.VOCAB, 4)


def test_what_is_read_is_what_was_asked_for(sound: Path, tmp_path: Path) -> None:
    store = ShardStore.open(sound)
    assert store.split("train", []).read_rows(0, 5) == {}
    narrow = store.split("train", ["tokens"])
    assert set(narrow.read_chunk(0)) == {"tokens"}
    assert narrow.chunk_bytes == 4 * cases.LENGTH * 25, "of every array: what is read does not move the rows"
    held = set(os.listdir("/proc/self/fd"))
    narrow.read_rows(0, 28)
    assert set(os.listdir("/proc/self/fd")) <= held, "every file is closed"
    assert set(store.resources) == set(cases.make_resources())
    for name, value in cases.make_resources().items():
        assert torch.equal(store.resources[name], torch.from_numpy(value))
    assert store.files("corpus") == {"maze.json": cases.FILES["corpus/maze.json"]}
    paths = store.copy_files("tokenizer", tmp_path / "copy")
    assert paths[0].read_bytes() == cases.FILES["tokenizer/tokenizer.json"]
    with pytest.raises(UsageError, match="no such array"):
        store.split("train", ["noise"])
    with pytest.raises(UsageError, match="no such split"):
        store.split("test")
    with pytest.raises(UsageError, match="no such file"):
        store.file("corpus/absent.json")
    rows = store.split("validation")
    for window in ((0, 6), (2, 2), (-1, 3)):
        with pytest.raises(IndexError):
            rows.read_rows(*window)
    for chunk in (-1, 2):
        with pytest.raises(IndexError):
            rows.read_chunk(chunk)


def test_splits_without_rows_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.store.manifest.MAX_SHARDS", 4)
    cases.make_manifest(splits=dict.fromkeys("stuv", 0))
    with pytest.raises(UsageError, match="too many shards"):
        cases.make_manifest(splits=dict.fromkeys("stuvw", 0))


def test_a_large_resource_is_kept_in_chunks_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = np.arange(cases.VOCAB * 4, dtype=np.float32).reshape(cases.VOCAB, 4)
    resources = {**cases.make_resources(), "lm_head": value}
    with monkeypatch.context() as patch:
        patch.setattr("shards.store.layout.MAX_RESOURCE_CHUNK_BYTES", 7 * 4 * 4)
        manifest = cases.make_manifest()
        cases.write_pending(ShardWriter.create_or_resume(tmp_path, manifest, resources))
        store = ShardStore.open(tmp_path)
        assert len([name for name in store.manifest.files if "lm_head/c/" in name]) == 8
        np.testing.assert_array_equal(store.resources["lm_head"].numpy(), value)
    assert torch.equal(ShardStore.open(tmp_path).resources["lm_head"], torch.from_numpy(value))


def test_a_store_is_found_at_its_folder_and_run(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cases.write_store("memory://run/store")
    for place in (store, tmp_path, f"{tmp_path}/", "~/store", f"local://{store}", "memory://run/"):
        assert shards.open_store(place).split("validation").num_rows == 5
    shutil.copytree(store, store / "store")
    assert ShardStore.find(store).location.url == str(store), "the place itself comes first"
    for attempt in (shards.open_store, ShardStore.open):
        with pytest.raises(UsageError, match="no store there"):
            attempt(tmp_path / "elsewhere")
    assert not hasattr(shards, "nothing")


def test_foreign_folders_and_unknown_urls_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(GdistillError, match=r"no manifest.*thesis\.txt"):
        cases.open_writer(tmp_path)
    assert set(cases.file_bytes(tmp_path)) == {"thesis.txt"}
    with pytest.raises(UsageError, match="unknown kind of store location"):
        cases.open_writer("nosuchscheme://bucket/store")
    for name in ("ledger", "resources", "tokenizer", "corpus", "c", "", "a b", "a/b", "a.b"):
        with pytest.raises(UsageError, match="bad name in splits"):
            cases.make_manifest(splits={name: 4})
    with pytest.raises(UsageError, match="name of a store array"):
        cases.make_manifest(arrays={"tokens": ArraySpec("int32")})
    clash = {"train/tokens/zarr.json": b"mine"}
    with pytest.raises(UsageError, match="name of a store file"):
        ShardWriter.create_or_resume(tmp_path / "store", cases.make_manifest(), {}, clash)


def test_a_store_may_hold_nothing_but_zeros_an_empty_split_and_no_resources(tmp_path: Path) -> None:
    full = {"codec": {"name": "full", "parameters": {}}}
    full["arrays"] = make_codec("full").array_specs(cases.VOCAB, None)
    edge = {"seed": -(2**63), "eos_id": cases.VOCAB - 1}
    manifest = cases.make_manifest(splits={"train": 8, "validation": 0}, **full, **edge)
    empty = ShardWriter.create_or_resume(tmp_path / "empty", manifest, {}, {"corpus/none": b""})
    for writer in (empty, cases.open_writer(tmp_path / "small", seed=2**64)):
        for shard in writer.all_pending():
            arrays = cases.make_arrays(writer.manifest, shard)
            writer.write(shard, {name: np.zeros_like(value) for name, value in arrays.items()})
        assert verify(writer.location) == []
        rows = ShardStore.open(writer.location).split("train")
        assert not any(value.any() for value in rows.read_rows(0, rows.num_rows).values())
    store = ShardStore.open(tmp_path / "empty")
    assert store.resources == {} and store.split("validation").num_chunks == 0 and store.file("corpus/none") == b""


def test_an_incomplete_store_is_refused_unless_asked(tmp_path: Path) -> None:
    writer = cases.open_writer(tmp_path / "store")
    first, *_ = writer.pending("train")
    arrays = cases.make_arrays(writer.manifest, first)
    arrays["token_log_probs"][5, 3] = 5e-4  # a probability of 1, rounded
    writer.write(first, arrays)
    assert not writer.is_complete()
    with pytest.raises(IntegrityError, match=r"1 of 5 shards; the first missing is train shard 1"):
        ShardStore.open(tmp_path / "store")
    store = ShardStore.open(tmp_path / "store", allow_incomplete=True)
    assert len(store.unfinished()) == 4
    np.testing.assert_array_equal(store.split("train").read_chunk(1)["token_log_probs"], arrays["token_log_probs"][4:])
    with pytest.raises(IntegrityError, match=r"not finished.*train shard 1"):
        store.split("train").read_chunk(2)
    # What a killed writer held: another may be at the second by now.
    (tmp_path / "store/.claims").mkdir()
    for shard in (0, 1):
        (tmp_path / f"store/.claims/train-{shard:06d}").touch()
    assert cases.open_writer(tmp_path / "store").location.claims() == ["train-000001"]


def test_who_writes_waits_for_who_writes_the_same(tmp_path: Path) -> None:
    """For no longer here than a writer would take that does not wait."""
    place, root = LocalLocation(tmp_path), tmp_path / "store"
    ways = [{"device": name, "kernels": None} for name in ("gpu", "cpu")]
    with ThreadPoolExecutor(2) as pool:
        with place.claim("computed", wait=False), LocalLocation(root).claim("create", wait=False):
            other = pool.submit(record_ways, place, [ways[1], ways[0], ways[1]])
            creator = pool.submit(cases.open_writer, root)
            wait([other, creator], timeout=0.3)
            place.write(COMPUTED_FILE, json.dumps({"ways": ways[:1]}).encode())
            assert LocalLocation(root).sizes() == {}
        writer, _ = creator.result(), other.result()
        shard, *_ = writer.pending("train")
        with writer.location.claim(shard.claim_name, wait=False):
            other = pool.submit(writer.write, shard, cases.make_arrays(writer.manifest, shard))
            wait([other], timeout=0.3)
            assert shard in writer.pending("train")
        other.result()
    assert read_ways(place) == ways and shard not in writer.pending("train")


def test_a_head_of_another_shape_than_the_states_or_none_is_refused(tmp_path: Path) -> None:
    """Early stores of a teacher without a bias have no bias."""
    named = {"name": "hidden", "parameters": {"dtype": "int8"}}
    arrays = make_codec("hidden").array_specs(cases.VOCAB, 6)
    manifest = cases.make_manifest(codec=named, arrays=arrays)
    shapes = {"lm_head": (cases.VOCAB, 6), "lm_head_bias": (cases.VOCAB,)}
    for name, wrong in (("lm_head", (cases.VOCAB, 7)), ("lm_head_bias", (cases.VOCAB + 1,))):
        resources = {n: np.zeros(s, np.float32) for n, s in (shapes | {name: wrong}).items()}
        ShardWriter.create_or_resume(tmp_path / name, manifest, resources)
        store = ShardStore.open(tmp_path / name, allow_incomplete=True)
        with pytest.raises(IntegrityError, match=rf"{name}\].*shape .*expected"):
            _ = store.resources
        ShardWriter.create_or_resume(tmp_path / "none" / name, manifest, resources | {"extra": resources.pop(name)})
    assert set(ShardStore.open(tmp_path / "none/lm_head_bias", allow_incomplete=True).resources) == {"extra", "lm_head"}
    with pytest.raises(IntegrityError, match=r"resource is missing.*got lm_head"):
        ShardStore.open(tmp_path / "none/lm_head", allow_incomplete=True)


def test_a_finished_store_has_nothing_pending_and_does_not_change(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, writer = cases.file_bytes(store), cases.open_writer(store)
    assert writer.is_complete() and writer.pending("train") == []
    with monkeypatch.context() as patch:  # a listing from before the shard was written
        patch.setattr(LocalLocation, "sizes", lambda *_: {"train/tokens/c/0/0": 1})
        assert writer.pending("train") == []
    shard = writer.manifest.shards("train")[0]
    arrays = cases.make_arrays(writer.manifest, shard)
    arrays["token_gumbels"][:, 1:] += 1
    writer.write(shard, arrays)  # other values do not replace what is there
    with writer.claim(shard) as mine:
        assert not mine
    # A claim that was let go of is none: another writer has finished the shard meanwhile.
    (store / shard.record_file).unlink()
    with writer.claim(shard) as mine:
        assert mine
    cases.write_pending(cases.open_writer(store))
    writer.write(shard, arrays)
    assert cases.file_bytes(store) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("token_gumbels"), "wrong arrays"),
        (lambda a: a.update(extra=a["token_gumbels"]), "wrong arrays"),
        (lambda a: a.update(entry_gumbels=a["entry_gumbels"].astype("float32")), "does not fit"),
        (lambda a: a.update(tokens=a["tokens"][:-1]), "does not fit"),
        (lambda a: a["tokens"].__setitem__((2, 3), cases.VOCAB), "train row 10, position 3.*got 50"),
        (lambda a: a["tokens"].__setitem__((2, 3), -1), "train row 10, position 3"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), np.nan), "row 9, position 4.*got nan"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), -np.inf), "got -inf"),
        (lambda a: a["token_log_probs"].__setitem__((1, 4), 0.01), r"got 0\.01"),
        (lambda a: a["token_log_probs"].__setitem__((1, 0), -0.5), r"row 9, position 0.*-0\.5"),
        (lambda a: a["entry_gumbels"].__setitem__((2, 3, 1), np.inf), "row 10, position 3.*inf.*dtype"),
        (lambda a: a["entry_gumbels"].__setitem__((5, 4, 2), np.nan), "row 13, position 4.*nan"),
    ],
)
def test_arrays_that_cannot_be_right_are_refused(tmp_path: Path, change, message: str) -> None:
    writer = cases.open_writer(tmp_path / "store")
    shard = writer.pending("train")[1]
    arrays = cases.make_arrays(writer.manifest, shard)
    change(arrays)
    with pytest.raises(GdistillError, match=message):
        writer.write(shard, arrays)
    assert shard in writer.pending("train")


def test_a_shard_being_rewritten_is_in_no_ledger(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = cases.open_writer(store)
    shard = writer.manifest.shards("train")[1]
    (store / "train/token_gumbels/c/1/0").write_bytes(b"damaged")
    write, seen = LocalLocation.write, []

    def watched(place: LocalLocation, name: str, data: bytes) -> None:
        seen.append((name, read_record(place, writer.manifest, shard) is not None))
        write(place, name, data)

    monkeypatch.setattr(LocalLocation, "write", watched)
    cases.write_pending(writer)
    assert [recorded for _, recorded in seen] == [False] * 7
    assert seen[-1][0] == "ledger/train/000001.json", "last"


def test_a_whole_file_of_another_shard_or_run_is_noticed_without_hashing(tmp_path: Path) -> None:
    """Their bytes do not compress: the sizes of the files tell nothing."""
    codec = {"name": "quantized", "parameters": {"bits": 8}}
    arrays = make_codec("quantized", bits=8).array_specs(cases.VOCAB, None)
    for seed, run in enumerate(("older", "store")):
        manifest = cases.make_manifest(codec=codec, arrays=arrays, seed=seed, splits={"train": 24})
        writer = ShardWriter.create_or_resume(tmp_path / run, manifest, cases.make_resources())
        for shard in writer.pending("train"):
            values = cases.make_arrays(manifest, shard)
            rng = np.random.default_rng([seed, shard.index])
            values["levels"][:] = rng.integers(0, 256, values["levels"].shape)
            writer.write(shard, values)
    path = tmp_path / "store/train/levels/c/0/0/0"
    sound = path.read_bytes()
    for other in ("store/train/levels/c/1/0/0", "older/train/levels/c/0/0/0"):
        data = (tmp_path / other).read_bytes()
        assert len(data) == len(sound)
        path.write_bytes(data)
        assert [shard.index for shard in writer.pending("train")] == [0]
        assert not writer.is_complete()
        rows = ShardStore.open(tmp_path / "store").split("train")
        with pytest.raises(IntegrityError, match=r"altered.*train shard 0.*another one than"):
            rows.read_chunk(0)
        rows.read_chunk(2)
        path.write_bytes(sound)
    assert writer.is_complete()
    marks = [ShardStore.open(tmp_path / run).split("train").fingerprint for run in ("older", "store")]
    assert marks[0] != marks[1], "an order of rows belongs to one store"
