"""Hostile resources, arrays, records and chunks: each one line, and no codec of theirs is made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zstandard

from shards.store.location import FileRecord
from shards.store.store import ShardStore
from shards.store.verification import verify
from tests.shards.store.hostile_cases import refused, replace_file, reseal, seal_ledger, use


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
        {"files": {"../up": {"bytes": 1, "sha256": "0" * 64}}, "tails": {}},
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
