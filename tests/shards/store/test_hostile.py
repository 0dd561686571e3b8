"""Stores that somebody made to do harm: each ends in one line, outside of them nothing changes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zstandard

from shards.base import GdistillError, UsageError, path_inside, safe_name
from shards.storage import FileRecord, open_location
from shards.store import ShardStore, verify
from shards.store.sealed import seal
from tests.shards.store_cases import file_bytes, write_store


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound") / "store"
    write_store(root, codec={"name": "quantized", "parameters": {"bits": 8}})
    return root


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A store of one's own, to be spoilt."""
    return Path(shutil.copytree(sound, tmp_path / "store"))


def use(root: Path, destination: Path) -> None:
    """Everything that a reader does with a store."""
    store = ShardStore.open(root)
    assert store.codec and store.resources
    for split in store.manifest.splits:
        store.split(split).read_rows(0, store.split(split).num_rows)
    for folder in ("tokenizer", "corpus"):
        store.copy_files(folder, destination)


def refused(root: Path, destination: Path) -> str:
    """The one line in which using a store ends; nothing outside ``destination`` has changed."""
    outside = file_bytes(root.parent)
    with pytest.raises(GdistillError) as caught:
        use(root, destination)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert {
        name: data
        for name, data in file_bytes(root.parent).items()
        if not name.startswith(f"{destination.name}/")
    } == outside
    return str(caught.value)


def reseal(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and seal it again, and every ledger record with it."""
    value = json.loads((root / "manifest.json").read_bytes())
    value.pop("sha256")
    change(value)
    data = seal(value)
    (root / "manifest.json").write_bytes(data)
    seal_ledger(root, lambda record: record.update(manifest_sha256=json.loads(data)["sha256"]))


def seal_ledger(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for path in (root / "ledger").rglob("*.json"):
        record = json.loads(path.read_bytes())
        record.pop("sha256")
        change(record)
        path.write_bytes(seal(record))


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Another content for a file that the manifest vouches for."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
    record = FileRecord.of(data).to_json()
    reseal(root, lambda value: value["files"].update({name: record}))


def test_the_sound_store_is_used_without_a_word(store: Path, tmp_path: Path) -> None:
    use(store, tmp_path / "out")
    reseal(store, lambda value: None)
    use(store, tmp_path / "out")


ODD_FIELDS: dict[str, list[Any]] = {
    "arrays": [[], 3, None, {"ids": []}, {"ids": {"dtype": "uint8"}}],
    "splits": [[], None, "train", {"train": 10**12}, {"train": 10**30}, {"train": -1}],
    "codec": [[], {}, {"name": "topk"}, {"name": 3, "parameters": {}}, "topk", None],
    "vocab_size": [0, -1, 2**31, 10**30, "50", 50.0, True, None],
    "row_length": [0, 10**9, 1.5, []],
    "rows_per_shard": [0, 6, "8"],
    "rows_per_chunk": [0, 10**9, None, 3],
    "seed": ["7", None, 10**40, 7.0],
    "bos_id": [50, -1, "0", 0.0],
    "files": [[], None, {"a": 3}, {"a": {}}, {"a": {"bytes": -1, "sha256": "0" * 64}}],
    "format_version": [0, "2", None, True, -1],
    "teacher": [[], "tiny", None],
    "versions": [3, []],
    "mask_id": [3],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, odd in ODD_FIELDS.items() for value in odd]
)
def test_odd_fields(store: Path, tmp_path: Path, field: str, value: Any) -> None:
    reseal(store, lambda manifest: manifest.update({field: value}))
    refused(store, tmp_path / "out")
    assert [problem.file for problem in verify(store)] == ["manifest.json"]


@pytest.mark.parametrize(
    "array",
    [
        {"dtype": "object", "trailing_shape": []},
        {"dtype": "O", "trailing_shape": []},
        {"dtype": "S10", "trailing_shape": []},
        {"dtype": ">f4", "trailing_shape": []},
        {"dtype": "datetime64[s]", "trailing_shape": []},
        {"dtype": 3, "trailing_shape": []},
        {"dtype": "uint8", "trailing_shape": [0]},
        {"dtype": "uint8", "trailing_shape": [-1]},
        {"dtype": "uint8", "trailing_shape": [10**12]},
        {"dtype": "uint8", "trailing_shape": [511.0]},
        {"dtype": "uint8", "trailing_shape": "abc"},
        {"dtype": "uint8", "trailing_shape": 3},
    ],
    ids=str,
)
def test_odd_arrays(store: Path, tmp_path: Path, array: dict[str, Any]) -> None:
    reseal(store, lambda manifest: manifest["arrays"].update(mass=array))
    refused(store, tmp_path / "out")


@pytest.mark.parametrize("name", ["../up", "a/b", "/abs", "", ".", "tokens", "c", "a b", "é" * 200])
def test_arrays_and_splits_have_names_of_one_part(store: Path, tmp_path: Path, name: str) -> None:
    spec = {"dtype": "uint8", "trailing_shape": []}
    reseal(store, lambda manifest: manifest["arrays"].update({name: spec}))
    refused(store, tmp_path / "out")


@pytest.mark.parametrize("name", ["../up", "a/b", "/abs", "", "ledger", "resources", "tokenizer"])
def test_split_names(store: Path, tmp_path: Path, name: str) -> None:
    reseal(store, lambda manifest: manifest["splits"].update({name: 4}))
    refused(store, tmp_path / "out")


OUTSIDE = [
    "/tmp/planted",
    "tokenizer//planted",
    "tokenizer/../../planted",
    "../planted",
    "..",
    ".",
    "",
    "tokenizer/",
    "tokenizer/./planted",
    "./tokenizer/planted",
    "tokenizer/a\\..\\..\\planted",
    "tokenizer/a\0b",
    "tokenizer/a\nb",
    "tokenizer/\x1b[2J",
    "tokenizer/" + "a" * 256,
    "C:\\planted",
]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_names_that_leave_the_store(store: Path, tmp_path: Path, name: str) -> None:
    absolute = f"tokenizer/{tmp_path}/planted" if name == "tokenizer//planted" else name
    record = FileRecord.of(b"planted").to_json()
    reseal(store, lambda manifest: manifest["files"].update({absolute: record}))
    assert "leaves the store" in refused(store, tmp_path / "out")
    assert not (tmp_path / "planted").exists() and not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="leaves the store"):
        safe_name(absolute)
    for place in (open_location(store), open_location("memory://hostile")):
        for act in (place.read, place.size, place.delete):
            with pytest.raises(UsageError, match="leaves the store"):
                act(absolute)
        with pytest.raises(UsageError, match="leaves the store"):
            place.write(absolute, b"")


@pytest.mark.parametrize("name", ["a", "tokenizer/a.json", "a/b/c", "..a/b..", "ü.json", "a b"])
def test_plain_names_pass(name: str, tmp_path: Path) -> None:
    assert safe_name(name) == name and path_inside(tmp_path, name) == tmp_path / name


def test_links_in_the_destination_lead_nowhere(store: Path, tmp_path: Path) -> None:
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    out.mkdir()
    (elsewhere / "mine").write_text("mine")
    (out / "tokenizer.json").symlink_to(elsewhere / "mine")
    ShardStore.open(store).copy_files("tokenizer", out)
    assert (elsewhere / "mine").read_text() == "mine", "a link is replaced, not written through"
    replace_file(store, "tokenizer/deep/file", b"x")
    (out / "deep").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="leaves the store"):
        ShardStore.open(store).copy_files("tokenizer", out)
    assert os.listdir(elsewhere) == ["mine"]


def test_nothing_is_written_through_a_linked_folder_of_a_store(store: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(store / "train/tokens/c/0")
    (store / "train/tokens/c/0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="leaves the store"):
        open_location(store).write("train/tokens/c/0/0", b"x")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_linked_files_are_read_as_caches_of_downloads_have_them(
    store: Path, tmp_path: Path
) -> None:
    for path in [path for path in store.rglob("*") if path.is_file()]:
        blob = tmp_path / "blobs" / path.relative_to(store).as_posix().replace("/", "-")
        blob.parent.mkdir(exist_ok=True)
        shutil.move(path, blob)
        path.symlink_to(blob)
    use(store, tmp_path / "out")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "device"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "train/tokens/c/0/0", "tokenizer/tokenizer.json"]
)
def test_what_is_no_file(store: Path, tmp_path: Path, kind: str, name: str) -> None:
    path = store / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    with pytest.raises(GdistillError) as caught:
        use(store, tmp_path / "out")
    assert "\n" not in str(caught.value)


def resource_metadata(root: Path) -> dict[str, Any]:
    return json.loads((root / "resources/lm_head/zarr.json").read_bytes())


PICKLE = {"name": "numcodecs.pickle", "configuration": {"protocol": 5}}


@pytest.mark.parametrize(
    "change",
    [
        {"zarr_format": 2},
        {"codecs": [PICKLE]},
        {"codecs": [{"name": "gzip", "configuration": {"level": 1}}]},
        {"codecs": []},
        {"codecs": None},
        {"shape": [10**12, 4]},
        {"shape": [-1, 4]},
        {"shape": [50.0, 4]},
        {"shape": []},
        {"data_type": "object"},
        {"data_type": "|O"},
        {"data_type": {"name": "numpy.datetime64"}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [10**12, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 4]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [50, 2]}}},
        {"storage_transformers": [PICKLE]},
        {"chunk_key_encoding": {"name": "v2"}},
        {"node_type": "group"},
        {"more": 1},
    ],
    ids=str,
)
def test_resources_are_of_one_kind(store: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    value = {**resource_metadata(store), **change}
    replace_file(store, "resources/lm_head/zarr.json", json.dumps(value).encode())
    refused(store, tmp_path / "out")


def test_a_resource_of_zarr_2_that_would_unpickle_is_never_opened(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numcodecs

    made: list[object] = []
    monkeypatch.setattr(numcodecs, "get_codec", lambda *given: made.append(given))
    old = {
        "zarr_format": 2,
        "shape": [1],
        "chunks": [1],
        "dtype": "|O",
        "filters": [{"id": "pickle", "protocol": 5}],
        "compressor": None,
        "order": "C",
        "fill_value": None,
    }
    replace_file(store, "resources/evil/.zarray", json.dumps(old).encode())
    replace_file(store, "resources/evil/0", b"cos\nsystem\n(S'touch planted'\ntR.")
    assert "evil" not in ShardStore.open(store).resources
    use(store, tmp_path / "out")
    assert made == []


def compressed(data: bytes) -> bytes:
    frame = zstandard.ZstdCompressor().compress(data)
    return frame + google_crc32c.value(frame).to_bytes(4, "little")


@pytest.mark.parametrize("size", [0, 399, 401, 1 << 26])
def test_a_resource_of_another_size_than_it_says(store: Path, tmp_path: Path, size: int) -> None:
    replace_file(store, "resources/lm_head/c/0/0", compressed(bytes(size)))
    assert "a resource cannot be read" in refused(store, tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": [PICKLE]},
        {"zarr_format": 2},
        {"shape": [29, 6]},
        {"data_type": "int64"},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}},
    ],
    ids=str,
)
def test_arrays_are_those_of_the_manifest(store: Path, tmp_path: Path, change: dict) -> None:
    name = "train/tokens/zarr.json"
    value = {**json.loads((store / name).read_bytes()), **change}
    replace_file(store, name, json.dumps(value).encode())
    assert "metadata of another kind" in refused(store, tmp_path / "out")


def test_an_array_that_the_manifest_does_not_vouch_for(store: Path, tmp_path: Path) -> None:
    reseal(store, lambda manifest: manifest["files"].pop("train/tokens/zarr.json"))
    refused(store, tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"../up": {"bytes": 1, "sha256": "0" * 64}}},
        {"tails": []},
        {"tails": {"train/tokens/c/0/0": "0" * 64}},
        {"tails": {"a": "../../etc/passwd"}},
        {"index": "0"},
        {"index": 10**9},
        {"start": -8},
        {"split": ["train"]},
        {"split": "nowhere"},
        {"manifest_sha256": 7},
    ],
    ids=str,
)
def test_odd_ledger_records(store: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    seal_ledger(store, lambda record: record.update(change))
    refused(store, tmp_path / "out")
    assert len(verify(store)) == 5


@pytest.mark.parametrize("sha256", ["../" * 10 + "etc/passwd", "0" * 63, "A" * 64, None, 7])
def test_hashes_that_are_none(store: Path, tmp_path: Path, sha256: object) -> None:
    def change(record: dict[str, Any]) -> None:
        for file in record["files"].values():
            file["sha256"] = sha256

    seal_ledger(store, change)
    refused(store, tmp_path / "out")


@pytest.mark.parametrize("name", ["manifest.json", "ledger/train/000000.json"])
@pytest.mark.parametrize(
    "data", [b"[" * 10**5, b"{}", b"[]", b"\xff\xfe", b"", b'{"sha256": NaN}', b"1e999", b"null"]
)
def test_json_that_is_no_record(store: Path, tmp_path: Path, name: str, data: bytes) -> None:
    (store / name).write_bytes(data)
    refused(store, tmp_path / "out")


@pytest.mark.parametrize("codec", ["nosuch", "../topk", "os.system", ""])
def test_codecs_that_there_are_not(store: Path, tmp_path: Path, codec: str) -> None:
    reseal(store, lambda m: m.update(codec={"name": codec, "parameters": {}}))
    refused(store, tmp_path / "out")


@pytest.mark.parametrize("bits", [8.0, "8", True, 10**9, None, [8]])
def test_parameters_of_other_types(store: Path, tmp_path: Path, bits: object) -> None:
    codec = {"name": "quantized", "parameters": {"bits": bits}}
    reseal(store, lambda manifest: manifest.update(codec=codec))
    refused(store, tmp_path / "out")


def test_a_shard_whose_chunk_grows_without_end(store: Path, tmp_path: Path) -> None:
    path = store / "train/tokens/c/0/0"
    bomb = compressed(bytes(1 << 26))
    offsets = np.array([[0, len(bomb)], [0, len(bomb)]], "<u8").tobytes()
    tail = bomb[-4:] * 2 + offsets + google_crc32c.value(offsets).to_bytes(4, "little")
    path.write_bytes(bomb + tail)

    def change(record: dict[str, Any]) -> None:
        if record["split"] == "train" and record["index"] == 0:
            record["files"]["train/tokens/c/0/0"] = FileRecord.of(bomb + tail).to_json()
            record["tails"]["train/tokens/c/0/0"] = hashlib.sha256(tail).hexdigest()

    seal_ledger(store, change)
    assert "inner chunk holds" in refused(store, tmp_path / "out")
