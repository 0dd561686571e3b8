"""No damaged file is read as if it were sound, and verify names every one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shards.errors import GdistillError, IntegrityError
from shards.store.manifest import FORMAT_VERSION, Manifest, seal
from shards.store.store import ShardStore
from shards.store.verification import forget, verify
from tests.shards.store import fault_trials as trials
from tests.shards.store_cases import file_bytes, make_manifest, open_writer, write_store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("integrity") / "store"
    write_store(path, splits={"train": 12, "validation": 4})
    return path


@pytest.fixture(scope="module")
def truth(root: Path) -> dict[str, bytes]:
    return trials.read_everything(root)


def test_a_sound_store_has_no_problems(root: Path, truth: dict[str, bytes]) -> None:
    assert verify(root) == []
    assert not [name for name in truth if name.startswith("refused")]


def test_single_bit_flips_are_all_found(root: Path) -> None:
    counts = trials.flip_trials(root, 60, np.random.default_rng(0))
    assert counts["detected_by_verify"] == counts["named_by_verify"] == counts["trials"] == 60
    assert counts["silently_wrong"] == 0
    assert counts["refused_by_reader"] == 60


@pytest.mark.parametrize("damage", ["missing", "empty", "cut by one", "halved", "grown by one"])
def test_no_file_may_be_missing_empty_or_of_another_length(
    root: Path, truth: dict[str, bytes], damage: str
) -> None:
    for name, data in file_bytes(root).items():
        changed = {
            "missing": None,
            "empty": b"",
            "cut by one": data[:-1],
            "halved": data[: len(data) // 2],
            "grown by one": data + b"\0",
        }[damage]
        counts = trials.damage_trial(root, name, changed, truth)
        assert counts["named_by_verify"] and counts["refused_by_reader"], name
        assert counts["silently_wrong"] == 0, name


@pytest.mark.parametrize("data", [None, b"", b"short"])
def test_the_error_names_the_shard_even_after_it_was_read_once(root: Path, data) -> None:
    reader = ShardStore.open(root).split("train")
    reader.read_chunk(2)
    with (
        trials.damaged(root / "train/entry_gumbels/c/1/0/0", data),
        pytest.raises(
            IntegrityError, match=r"train/entry_gumbels/c/1/0/0: train shard 1 \(rows 8 to 11\)"
        ),
    ):
        reader.read_chunk(2)


def test_every_field_of_the_manifest_is_sealed(root: Path) -> None:
    data = (root / "manifest.json").read_bytes()
    for field in json.loads(data):
        value = json.loads(data)
        value[field] = value[field] + 1 if isinstance(value[field], int) else "edited"
        text = json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
        with trials.damaged(root / "manifest.json", text):
            with pytest.raises(GdistillError, match=r"manifest\.json"):
                ShardStore.open(root)
            assert [problem.file for problem in verify(root)] == ["manifest.json"]


def test_a_manifest_edited_and_sealed_again_does_not_fit_the_ledger(root: Path) -> None:
    value = json.loads((root / "manifest.json").read_bytes())
    value.pop("sha256")
    value["teacher"]["id"] = "another"
    with trials.damaged(root / "manifest.json", seal(value)):
        with pytest.raises(IntegrityError, match="another manifest"):
            ShardStore.open(root).split("train").read_chunk(0)
        assert len(verify(root)) == 3


def test_a_store_of_format_1_keeps_its_one_noise_seed() -> None:
    old = make_manifest(format_version=1)
    assert Manifest.from_bytes(old.to_bytes(), "manifest.json").noise_seed("validation") == old.seed
    seeds = [make_manifest().noise_seed(split) for split in ("train", "validation")]
    assert len({*seeds, old.seed}) == 3


def test_a_newer_format_is_refused_by_reader_writer_and_verify(root: Path) -> None:
    value = json.loads((root / "manifest.json").read_bytes())
    value.update(format_version=FORMAT_VERSION + 1, something_new={"a": 1})
    with trials.damaged(root / "manifest.json", json.dumps(value).encode()):
        for attempt in (ShardStore.open, open_writer):
            with pytest.raises(GdistillError, match=r"newer format.*upgrade"):
                attempt(root)
        assert "newer format" in str(verify(root)[0])


def test_a_field_of_another_program_is_refused(root: Path) -> None:
    value = json.loads((root / "manifest.json").read_bytes())
    value.pop("sha256")
    with pytest.raises(IntegrityError, match="fields unknown"):
        Manifest.from_bytes(seal({**value, "extra": 1}), "manifest.json")
    del value["seed"]
    with pytest.raises(IntegrityError, match=r"malformed.*seed"):
        Manifest.from_bytes(seal(value), "manifest.json")


def test_swapped_files_are_found(root: Path) -> None:
    one, two = root / "ledger/train/000000.json", root / "ledger/train/000001.json"
    with trials.damaged(one, two.read_bytes()):
        assert [p.file for p in verify(root)] == ["ledger/train/000000.json"]
        with pytest.raises(IntegrityError, match="does not belong here"):
            ShardStore.open(root).split("train").read_chunk(0)


def test_strangers_are_reported_and_harmless(root: Path, truth: dict[str, bytes]) -> None:
    stranger = root / "train/tokens/c/9/0"
    stranger.parent.mkdir()
    stranger.write_bytes(b"x")
    try:
        (problem,) = verify(root)
        assert problem.file == "train/tokens/c/9/0" and "not a file of this store" in str(problem)
        assert trials.read_everything(root) == truth
    finally:
        stranger.unlink()
        stranger.parent.rmdir()


def test_a_shard_written_anew_or_at_work_is_not_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "store"
    writer = write_store(root)
    path = root / "train/token_gumbels/c/2/0"
    sound = path.read_bytes()
    path.write_bytes(trials.flipped(sound, 77))
    problems = verify(root)
    with writer.location.claim("train-000002", wait=False):
        assert forget(root, problems) == []
    path.write_bytes(sound)
    assert forget(root, problems) == [] and verify(root) == []
