"""Kills, full disks and rival writers; a few of each (the full counts: benchmarks.faults)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from tests.shards.store import fault_trials as trials
from tests.shards.store_cases import (
    FILES,
    file_bytes,
    make_arrays,
    make_manifest,
    make_resources,
    open_writer,
    write_pending,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The big store as one undisturbed writer leaves it."""
    root = tmp_path_factory.mktemp("reference") / "store"
    trials.write_with(root, 1)
    return file_bytes(root)


def test_several_and_killed_writers_write_the_bytes_of_one(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    seconds = trials.write_with(tmp_path / "three", 3)
    assert file_bytes(tmp_path / "three") == reference
    assert verify(tmp_path / "three") == []
    for seed in (0, 2):  # all three killed, one of three killed
        rng = np.random.default_rng(seed)
        outcome = trials.kill_trial(tmp_path / "store", reference, rng, seconds)
        assert outcome["byte_identical"] == 1


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 20, 47, 91, 132, 170, 213, 251, 302])
def test_dying_at_a_file_operation_loses_nothing(tmp_path: Path, sound: Path, after: int) -> None:
    assert trials.crash_trial(tmp_path / "store", file_bytes(sound), after)


def test_a_full_disk_is_one_clear_error_and_keeps_what_is_done(
    tmp_path: Path, reference: dict[str, bytes]
) -> None:
    largest = max(len(data) for data in reference.values())
    trials.finish([trials.start(trials.full_disk_worker, tmp_path / "store", largest - 1)])
    left = file_bytes(tmp_path / "store")
    assert not [name for name in left if name.endswith(".tmp")]
    assert all(reference[name] == data for name, data in left.items())
    trials.write_with(tmp_path / "store", 1)
    assert file_bytes(tmp_path / "store") == reference


def salted_worker(root: Path, salt: int) -> None:
    """A writer whose log-probabilities differ in the last bit, as another GPU's would."""
    writer = open_writer(root, **trials.BIG)
    for split in writer.manifest.splits:
        for shard in writer.shards(split):
            arrays = make_arrays(writer.manifest, shard)
            arrays["token_log_probs"][:, 1:] -= np.float32(salt)
            arrays["token_gumbels"][:, 1:] = salt
            writer.write(shard, arrays)


def test_rival_writers_with_different_values_never_mix_a_shard(tmp_path: Path) -> None:
    rivals = [trials.start(salted_worker, tmp_path / "store", salt) for salt in (1, 2, 3)]
    trials.finish(rivals)
    assert verify(tmp_path / "store") == []
    store = ShardStore.open(tmp_path / "store")
    writer = open_writer(tmp_path / "store", **trials.BIG)
    for shard in writer.shards("train"):
        rows = store.split("train").read_rows(shard.start, shard.stop)
        (salt,) = np.unique(rows["token_gumbels"][:, 1:])
        expected = make_arrays(store.manifest, shard)["token_log_probs"][:, 1:] - np.float32(salt)
        np.testing.assert_array_equal(rows["token_log_probs"][:, 1:], expected)


def seed_worker(root: Path, seed: int) -> None:
    """A writer of its own identity: fails unless it was the first."""
    write_pending(open_writer(root, seed=seed))


def test_of_rival_identities_exactly_one_gets_the_folder(tmp_path: Path) -> None:
    rivals = [trials.start(seed_worker, tmp_path / "store", seed) for seed in (1, 2, 3, 4)]
    for rival in rivals:
        rival.join()
    assert sorted(rival.exitcode for rival in rivals) == [0, 1, 1, 1]
    assert verify(tmp_path / "store") == []


def test_a_claim_is_held_against_others_and_void_after_a_kill(tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "store")
    shard = writer.pending("train")[0]
    with writer.claim(shard) as mine, open_writer(tmp_path / "store").claim(shard) as other:
        assert mine and not other
    with writer.claim(shard) as again:
        assert again
    assert not (tmp_path / "store" / ".claims").exists()


def test_a_damaged_shard_is_written_again_and_the_others_are_kept(store: Path) -> None:
    root, reference = store, file_bytes(store)
    (root / "train/entry_gap_byte0/c/1/0/0").unlink()
    (root / "train/tokens/c/2/0").write_bytes(b"")
    (root / "ledger/validation/000000.json").write_bytes(b"{}")
    (root / "train/token_gumbels/zarr.json").write_bytes(b"{}")
    (root / "tokenizer/tokenizer.json").unlink()
    writer = open_writer(root)
    pending = [f"{shard.split} {shard.index}" for shard in writer.all_pending()]
    assert pending == ["train 1", "train 2", "validation 0"]
    write_pending(writer)
    assert file_bytes(root) == reference


TEACHER = {"id": "tiny", "weights_sha256": "ab" * 32, "dtype": "float32"}
CHANGES: list[tuple[dict, str]] = [
    ({"seed": 8}, "seed.*got 8.*expected 7"),
    ({"teacher": {**TEACHER, "weights_sha256": "00"}}, "teacher.weights"),
    ({"teacher": {**TEACHER, "dtype": "bf16"}}, "teacher.dtype"),
    ({"tokenizer": {"id": "tiny", "sha256": "00"}}, "tokenizer.sha256"),
    ({"tokens": {"fingerprint": "00", "corpus": {}}}, "tokens"),
    ({"codec": {"name": "topk", "parameters": {"num_entries": 4}}}, "parameters.num_entries"),
    ({"versions": {"gdistill": "0.2.0"}}, r"versions\.gdistill.*0\.2\.0.*0\.1\.0"),
    ({"versions": {"gdistill": "0.1.0", "torch": "2"}}, "versions.torch.*expected 'absent'"),
    ({"rows_per_chunk": 2}, "rows_per_chunk"),
    ({"splits": {"train": 29, "validation": 5}}, "splits.train"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_resuming_with_other_inputs_names_the_field_and_both_values(
    sound: Path, change: dict, message: str
) -> None:
    before = file_bytes(sound)
    with pytest.raises(UsageError, match=message):
        open_writer(sound, **change)
    assert file_bytes(sound) == before
    assert make_manifest().difference(make_manifest(**change)) is not None


def test_resuming_with_another_resource_or_side_file_is_refused(sound: Path) -> None:
    resources = {**make_resources(), "lm_head": make_resources()["lm_head"] + 1}
    with pytest.raises(UsageError, match=r"files\.resources/lm_head"):
        ShardWriter.create_or_resume(sound, make_manifest(), resources, FILES)
    other = {**FILES, "corpus/maze.json": b"[]"}
    with pytest.raises(UsageError, match=r"files\.corpus/maze\.json"):
        ShardWriter.create_or_resume(sound, make_manifest(), make_resources(), other)
