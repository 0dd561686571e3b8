"""Stores that somebody made to do harm: each ends in one line, outside of them nothing changes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shards.errors import GdistillError, UsageError, path_inside, safe_name
from shards.store.location import FileRecord, open_location
from shards.store.store import ShardStore
from shards.store.verification import verify
from tests.shards.store.hostile_cases import refused, replace_file, reseal, use


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
