"""Stores that somebody made to do harm, sealed again where that is needed.

Each ends in one line; nothing outside of the store changes, nothing is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zstandard

from shards.atomic import FileRecord
from shards.cli import description_text
from shards.errors import GdistillError, UsageError, path_inside, safe_name
from shards.store.layout import encode_shard
from shards.store.location import open_location
from shards.store.manifest import read_ways, seal
from shards.store.store import ShardWriter
from shards.store.verification import Description, forget, verify
from shards.stream.dataset import OpenStore, open_store
from tests.shards.store_cases import KEPT, VOCAB, file_bytes, make_arrays, write_store

RESOURCE, HEAD = "resources/unigram_log_probs/zarr.json", "resources/lm_head/zarr.json"
TOKENS = "train/tokens/zarr.json"
Edit = Callable[[dict[str, Any]], object]


def use(root: Path, destination: Path) -> None:
    """Everything that a reader does with a store."""
    store: OpenStore = open_store(root)
    assert store.codec and store.resources
    description_text(Description.of(store))
    for split, num_rows in store.manifest.splits.items():
        for batch in store.stream(split, batch_size=min(4, num_rows), seed=0):
            mask = batch["tokens"] >= 0
            mask[:, 0] = False
            noise = store.stream(split, batch_size=1, seed=0).noise(batch, mask)
            assert not bool(noise.gumbels().isnan().any())
    for folder in ("tokenizer", "corpus"):
        store.copy_files(folder, destination)


def refused(root: Path, destination: Path) -> str:
    """The one line in which using a store ends; nothing outside ``destination`` has changed."""

    def outside() -> dict[str, bytes]:
        files, inside = file_bytes(root.parent), f"{destination.name}/"
        return {name: data for name, data in files.items() if not name.startswith(inside)}

    before = outside()
    with pytest.raises(GdistillError) as caught:
        use(root, destination)
    told = str(caught.value)
    assert "\n" not in told and told.isprintable() and len(told) < 2000
    assert outside() == before
    return told


def test_the_sound_store_is_used_without_a_word(store: Path, tmp_path: Path) -> None:
    use(store, tmp_path / "out")
    reseal(store, lambda fields: fields["teacher"].update(deep=nested(28)))
    use(store, tmp_path / "out")


def reseal(root: Path, edit: Edit) -> None:
    """Change the manifest and seal it again, and every ledger record with it."""
    value = json.loads((root / "manifest.json").read_bytes())
    value.pop("sha256")
    edit(value)
    data = seal(value)
    (root / "manifest.json").write_bytes(data)
    seal_ledger(root, lambda record: record.update(manifest_sha256=json.loads(data)["sha256"]))


def seal_ledger(root: Path, edit: Edit) -> None:
    for path in (root / "ledger").rglob("*.json"):
        record = json.loads(path.read_bytes())
        record.pop("sha256")
        edit(record)
        path.write_bytes(seal(record))


def replace_file(root: Path, name: str, data: bytes) -> None:
    """Another content for a file that the manifest vouches for."""
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)
    record = FileRecord.of(data).to_json()
    reseal(root, lambda value: value["files"].update({name: record}))


def put(root: Path, *place: Any) -> None:
    """A value of the manifest: keys, then the value."""

    def edit(fields: dict[str, Any]) -> None:
        for key in place[:-2]:
            fields = fields[key]
        fields[place[-2]] = place[-1]

    reseal(root, edit)


def of_record(root: Path, name: str, value: Any) -> None:
    seal_ledger(root, lambda record: record.update({name: value}))


def of_record_file(root: Path, name: str, value: Any) -> None:
    def edit(record: dict[str, Any]) -> None:
        for file in record["files"].values():
            file[name] = value

    seal_ledger(root, edit)


def raw(root: Path, name: str, data: bytes) -> None:
    (root / name).write_bytes(data)


def metadata(root: Path, name: str, value: Any, file: str = RESOURCE) -> None:
    fields = json.loads((root / file).read_bytes()) | {name: value}
    replace_file(root, file, json.dumps(fields).encode())


def resource_of(root: Path, num_bytes: int, value: float) -> None:
    data = np.full(num_bytes // 4 + 1, value, "<f4").tobytes()[:num_bytes]
    replace_file(root, "resources/unigram_log_probs/c/0", compressed(data))


def forged(root: Path, array: str, value: float) -> None:
    """One number of a shard, in files whose records, tails and checksums are all right."""
    writer = ShardWriter(open_location(root), open_store(root).manifest)
    shard = writer.manifest.shards("train")[1]
    arrays = make_arrays(writer.manifest, shard)
    arrays[array][6, 3] = value
    writer._put(shard, encode_shard(writer.manifest, shard, arrays))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def compressed(data: bytes) -> bytes:
    frame = zstandard.ZstdCompressor().compress(data)
    return frame + google_crc32c.value(frame).to_bytes(4, "little")


def growing_chunk(root: Path) -> None:
    """A chunk that claims to be small and grows without end."""
    name, bomb = "train/tokens/c/0/0", compressed(bytes(1 << 26))
    offsets = np.array([[0, len(bomb)], [0, len(bomb)]], "<u8").tobytes()
    tail = bomb[-4:] * 2 + offsets + google_crc32c.value(offsets).to_bytes(4, "little")
    (root / name).write_bytes(bomb + tail)

    def edit(record: dict[str, Any]) -> None:
        if record["split"] == "train" and record["index"] == 0:
            record["files"][name] = FileRecord.of(bomb + tail).to_json()
            record["tails"][name] = hashlib.sha256(tail).hexdigest()

    seal_ledger(root, edit)


def no_file(root: Path, name: str, kind: str) -> None:
    """Something else in a file's place."""
    path = root / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")


def many_files(root: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["arrays"].update({f"a{i}": U8 for i in range(300)})
        fields["splits"].update(train=8 * 200_000)

    reseal(root, edit)


def no_tails(root: Path) -> None:
    seal_ledger(root, lambda record: record.update(files=UP, tails={}))


def a_tail_less(root: Path) -> None:
    seal_ledger(root, lambda record: record["tails"].popitem())


def unlisted(root: Path, name: str) -> None:
    reseal(root, lambda fields: fields["files"].pop(name))


def zero_head(root: Path) -> None:
    """A resource of gigabytes in a few bytes."""
    value = json.loads((root / HEAD).read_bytes())
    value["shape"] = [40 << 23, 4]
    value["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 23, 4]
    replace_file(root, HEAD, json.dumps(value).encode())
    for index in range(40):
        replace_file(root, f"resources/lm_head/c/{index}/0", compressed(bytes(64 << 20)) if index == 0 else b"")


PICKLE = {"name": "numcodecs.pickle", "configuration": {"protocol": 5}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
UP = {"../up": {"bytes": 1, "sha256": "0" * 64}}
U8 = {"dtype": "uint8", "trailing_shape": []}
NEW = {"arrays": U8, "splits": 4, "files": FileRecord.of(b"planted").to_json()}
GRIDS = [{"name": "regular", "configuration": {"chunk_shape": [size]}} for size in (10**12, 4)]
OUTSIDE = ["/tmp/planted", "tokenizer/../../planted", "../planted", "..", ".", ""]
OUTSIDE += ["tokenizer/", "tokenizer/./planted", "./tokenizer/planted", "tokenizer/a\\..\\planted"]
OUTSIDE += ["tokenizer/a\0b", "tokenizer/a\nb", "tokenizer/\x1b[2J", "tokenizer/" + "a" * 256]
OUTSIDE += ["C:\\planted", "tokenizer/" + "é" * 128]
ODD_FIELDS: dict[str, list[Any]] = {
    "arrays": [
        *([], 3, None, {"ids": []}, {"ids": {"dtype": "uint8"}}),
        {f"wide{i}": {"dtype": "uint8", "trailing_shape": [1 << 25]} for i in range(6)},  # gigabytes in sum
    ],
    "splits": [
        *([], None, "train", {f"s{i}": 10**6 for i in range(3)}),
        *({"train": rows} for rows in (10**12, 10**30, -1)),
    ],
    "codec": [
        *([], {}, {"name": "topk"}, {"name": 3, "parameters": {}}, "topk", None),
        {"name": "topk", "parameters": {"num_entries": KEPT + 1}},
        *({"name": name, "parameters": {}} for name in ("nosuch", "../topk", "os.system", "")),
        *({"name": name, "parameters": {}} for name in ("seeded", "full", "hidden")),
        *({"name": "quantized", "parameters": {"bits": b}} for b in (8.0, "8", True, None, [8])),
    ],
    "vocab_size": [0, -1, 2**31, 2**31 - 2, VOCAB + 1, 300, 10**30, "50", 50.0, True, None],
    "row_length": [0, 10**9, 1.5, []], "rows_per_shard": [0, 6, "8"], "versions": [3, []],
    "rows_per_chunk": [0, 10**9, None, 3], "seed": ["7", None, 10**40, 7.0], "mask_id": [3],
    "bos_id": [VOCAB, -1, "0", 0.0], "eos_id": [VOCAB], "format_version": [0, "2", None, True, -1],
    "files": [[], None, {"a": 3}, {"a": {}}, {"a": {"bytes": -1, "sha256": "0" * 64}}],
    "teacher": [[], "tiny", None, {"id": "\ud800"}, {"\ud800": 1}, {"deep": nested(40)}, {"deep": nested(900)}],
}  # fmt: skip
ODD_SPECS = [U8 | {"dtype": d} for d in ("object", "O", "S10", ">f4", "datetime64[s]", 3)]
ODD_SPECS += [U8 | {"trailing_shape": s} for s in ([0], [-1], [10**12], [5.0], "abc", 3)]
ODD_NAMES = {
    "arrays": ["../up", "a/b", "/abs", "", ".", "tokens", "c", "a b", "é" * 200, "more"],
    "splits": ["../up", "a/b", "/abs", "", "ledger", "resources", "tokenizer"],
    "files": OUTSIDE,
}
ODD_METADATA: dict[str, list[Any]] = {
    "codecs": [[PICKLE], [GZIP], [], None], "shape": [[10**12], [VOCAB - 1]],
    "data_type": ["object", "|O", {"name": "numpy.datetime64"}], "zarr_format": [2], "more": [1],
    "node_type": ["group"], "chunk_grid": [GRIDS[0]], "storage_transformers": [[PICKLE]],
    "chunk_key_encoding": [{"name": "v2"}],
}  # fmt: skip
ODD_RECORD: dict[str, list[Any]] = {
    "tails": [[], {"train/tokens/c/0/0": "0" * 64}, {"a": "../../etc/passwd"}], "files": [[], UP],
    "index": ["0", 10**9], "start": [-8], "split": [["train"], "nowhere"], "manifest_sha256": [7],
    "deep": [nested(900)],
}  # fmt: skip
ODD_HASHES = {"sha256": ["../" * 10 + "etc/passwd", "0" * 63, "0" * 65, "A" * 64, None, 7]}
ODD_VALUES = {
    "tokens": [VOCAB, -1], "token_log_probs": [np.nan, -np.inf, 0.01], "token_gumbels": [-np.inf],
    "entry_gumbels": [np.nan, np.inf], "entry_gap_byte0": [255], "rest_log_rate": [np.nan],
}  # fmt: skip
ODD_BYTES = [b"[" * 10**5, b"[" * 970 + b"]" * 970, b'{"a":' * 970 + b"1" + b"}" * 970, b"{}"]
ODD_BYTES += [b"[]", b"\xff\xfe", b"", b'{"sha256": NaN}', b"1e999", b"null", b"9" * 5000]
PLACES = ["manifest.json", "train/tokens/c/0/0", "tokenizer/tokenizer.json"]
TABLES: list[tuple[Callable[..., None], dict[str, list[Any]]]] = [
    (put, ODD_FIELDS),
    (metadata, ODD_METADATA),
    (of_record, ODD_RECORD),
    (of_record_file, ODD_HASHES),
    (forged, ODD_VALUES),
    (raw, dict.fromkeys(("manifest.json", "ledger/train/000000.json"), ODD_BYTES)),
    (no_file, {name: ["folder", "pipe", "loop", "device"] for name in PLACES}),
]
ROWS: list[tuple[Callable[..., None], *tuple[Any, ...]]] = [
    *((change,) for change in (many_files, no_tails, a_tail_less, zero_head, growing_chunk)),
    *((unlisted, name) for name in (RESOURCE, TOKENS)),
    (resource_of, 4 * VOCAB, np.nan),
    *((resource_of, size, 0.0) for size in (0, 4 * VOCAB - 1, 4 * VOCAB + 1, 1 << 26)),
    *((put, "arrays", "mass", spec) for spec in ODD_SPECS),
    *((put, table, name, NEW[table]) for table, names in ODD_NAMES.items() for name in names),
    *((metadata, "shape", shape, HEAD) for shape in ([0, 4], [-1, 4], [50.0, 4], [])),
    *((metadata, *odd, TOKENS) for odd in (("codecs", [PICKLE]), ("chunk_grid", GRIDS[1]))),
    *((change, name, odd) for change, table in TABLES for name, values in table.items() for odd in values),
]
TOLD: dict[Callable[..., None], str] = {
    many_files: "too many shards", no_tails: "does not belong here", a_tail_less: "does not belong here",
    zero_head: "bytes from files of", growing_chunk: "holds more than", of_record_file: "not a sha256",
}  # fmt: skip
"""Part of the line; a later check would refuse most of them too."""
IDS = [f"{change.__name__} {odd!r:.60}" for change, *odd in ROWS]


@pytest.mark.parametrize(("change", "odd"), [(change, odd) for change, *odd in ROWS], ids=IDS)
def test_each_ends_in_one_line(store: Path, tmp_path: Path, change: Callable[..., None], odd: Sequence[Any]) -> None:
    change(store, *odd)
    told = refused(store, tmp_path / "out")
    assert TOLD.get(change, "") in told
    if change is put and "more" not in odd and odd[0] != "codec":
        assert [problem.file for problem in verify(store)] == ["manifest.json"]
    if change is no_file and odd[0] != "manifest.json":
        assert odd[0] in [problem.file for problem in verify(store)]
    if change is forged and "gap" not in odd[0]:
        assert f"{odd[0]} out of range [train row 14, position 3]" in told
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("text", ["a\x1b]0;title\x07b", "id\nidentity     forged", "\u202eevil"])
def test_what_others_named_is_shown_escaped(store: Path, text: str) -> None:
    reseal(store, lambda fields: fields["teacher"].update(id=text))
    shown = description_text(Description.of(open_store(store))).split("\n")
    assert all(line.isprintable() for line in shown)
    assert sum(line.startswith("identity") for line in shown) == 1


DEEP = b'{"ways": ' + b"[" * 5000 + b"]" * 5000 + b"}"
ODD_WAYS = [DEEP, b'{"ways": [[["a", 1], [2, 3]]]}', b'{"ways": 3}', b'{"ways": [{"a": [1]}]}']


@pytest.mark.parametrize("data", [*ODD_WAYS, b"{}", b"[]", b"\xff"], ids=lambda data: repr(data[:30]))
def test_a_record_of_computing_is_no_trap(store: Path, tmp_path: Path, data: bytes) -> None:
    (store / "computed.json").write_bytes(data)
    use(store, tmp_path / "out")  # it is no part of the store
    with pytest.raises(GdistillError):
        read_ways(open_location(store))


def test_names_that_leave_the_store_are_refused_and_plain_ones_pass(tmp_path: Path) -> None:
    for name in OUTSIDE:
        for place in (open_location(tmp_path), open_location("memory://hostile")):
            for act in (safe_name, place.read, place.size, place.delete, lambda n, p=place: p.write(n, b"")):
                with pytest.raises(UsageError, match="leaves the store"):
                    act(name)
    for name in ("a", "tokenizer/a.json", "a/b/c", "..a/b..", "ü.json", "a b", "é" * 127 + "a"):
        assert safe_name(name) == name and path_inside(tmp_path, name) == tmp_path / name


def test_links_lead_nowhere(store: Path, tmp_path: Path) -> None:
    out, elsewhere, place, claims = tmp_path / "out", tmp_path / "elsewhere", open_location(store), store / ".claims"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (out / "tokenizer.json").symlink_to(elsewhere / "mine")
    open_store(store).copy_files("tokenizer", out)
    assert (elsewhere / "mine").read_text() == "mine", "a link is replaced, not written through"
    replace_file(store, "tokenizer/deep/file", b"x")
    (out / "deep").symlink_to(elsewhere)
    with pytest.raises(UsageError, match="leaves the store"):
        open_store(store).copy_files("tokenizer", out)
    shutil.rmtree(store / "train/tokens/c/0")
    (store / "train/tokens/c/0").symlink_to(elsewhere)
    for act in (place.delete, place.discard_leftovers, lambda name: place.write(name, b"x")):
        with pytest.raises(UsageError, match="leaves the store"):
            act("train/tokens/c/0/mine")
    for link, target in ((claims / "train-000000", elsewhere / "planted"), (claims, elsewhere)):
        shutil.rmtree(claims, ignore_errors=True)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        with pytest.raises(GdistillError):
            forget(store, verify(store))
    assert os.listdir(elsewhere) == ["mine"]
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(GdistillError):
        open_store(tmp_path / "loop")


def test_linked_files_are_read_as_caches_of_downloads_have_them(store: Path, tmp_path: Path) -> None:
    sizes = open_location(store).sizes()
    for path in [path for path in store.rglob("*") if path.is_file()]:
        blob = tmp_path / "blobs" / path.relative_to(store).as_posix().replace("/", "-")
        blob.parent.mkdir(exist_ok=True)
        shutil.move(path, blob)
        path.symlink_to(blob)
    use(store, tmp_path / "out")
    assert open_location(store).sizes() == sizes


def test_a_resource_of_zarr_2_that_would_unpickle_is_never_opened(store: Path, tmp_path: Path) -> None:
    old = {"zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "compressor": None}
    old |= {"filters": [{"id": "pickle", "protocol": 5}], "order": "C", "fill_value": None}
    replace_file(store, "resources/evil/.zarray", json.dumps(old).encode())
    replace_file(store, "resources/evil/0", b"cos\nsystem\n(S'touch planted'\ntR.")
    assert "evil" not in open_store(store).resources
    use(store, tmp_path / "out")
    assert not Path("planted").exists()


def test_files_of_a_store_without_tails_are_told_apart(tmp_path: Path) -> None:
    """Of versions before tails nothing but a file's own hash tells one from another."""
    root = tmp_path / "store"
    write_store(root, splits={"train": 8, "validation": 8}, seed=1)
    seal_ledger(root, lambda record: record.pop("tails"))
    use(root, tmp_path / "out")
    writer = ShardWriter(open_location(root), open_store(root).manifest)
    assert writer.is_complete()
    one, other = (root / s / "token_log_probs/c/0/0" for s in ("train", "validation"))
    data = one.read_bytes()
    is_as_long = len(data) == other.stat().st_size
    one.write_bytes(other.read_bytes() if is_as_long else data[:-1] + bytes([data[-1] ^ 1]))
    assert "another one than the ledger names" in refused(root, tmp_path / "out")
    assert not writer.is_complete()
    assert len(verify(root)) == 1
