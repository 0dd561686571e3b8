from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.extract import Extractor
from pipeline.manifest import corpus_unigram, rows_per_unit
from pipeline.settings import StoreSettings
from pipeline.teacher import RawLogits, Teacher, automatic_batch_size
from pipeline.tokens.dataset import TokenDataset
from pipeline.workers import Worker
from shards.codec.posterior import PosteriorCodec
from shards.codec.registry import make_codec
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import BatchSize
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import dense_arrivals
from shards.noise.philox import PositionKeys
from shards.store.manifest import read_ways
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from tests.pipeline.extract_cases import (
    ROW_LENGTH,
    VOCAB_SIZE,
    contents,
    options,
    run,
    save_teacher,
    write_corpus,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, teacher: Path, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("run")
    run(out, options(teacher, corpus))
    return out


def test_store_holds_rows_and_what_the_teacher_says_of_them(finished: Path, teacher: Path) -> None:
    store = ShardStore.open(finished / "store")
    dataset = TokenDataset.open(finished / "tokens")
    model = Teacher.load(teacher, device="cpu")
    assert store.manifest.vocab_size == VOCAB_SIZE
    assert verify(finished / "store") == []
    for split in ("train", "validation"):
        reader = store.split(split)
        rows = dataset.read_rows(split, 0, dataset.num_rows(split))
        arrays = reader.read_rows(0, reader.num_rows)
        assert np.array_equal(arrays["tokens"], rows)
        tokens = torch.from_numpy(rows).long()
        log_probs = model.log_probs(tokens).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        stored = torch.from_numpy(arrays["token_log_probs"])
        assert (stored[:, 1:] - log_probs).abs().max() < 1e-5
        for name, array in arrays.items():
            if name != "tokens":
                assert not array[:, 0].any(), f"{name} has something at position 0"


def test_frozen_noise_reproduces_every_token(tmp_path: Path, teacher: Path, corpus: Path) -> None:
    store = run(tmp_path, options(teacher, corpus, codec={"name": "full", "num_entries": None}))
    arrays = store.split("train").read_rows(0, store.split("train").num_rows)
    tokens = torch.from_numpy(arrays["tokens"]).long()
    rows, positions = torch.ones_like(tokens).bool().nonzero(as_tuple=True)
    rows, positions = rows[positions > 0], positions[positions > 0]
    noise = store.codec.decode(
        {name: torch.from_numpy(arrays[name])[rows, positions] for name in store.manifest.arrays},
        tokens[rows, positions],
        torch.from_numpy(arrays["token_log_probs"])[rows, positions],
        PositionKeys(store.manifest.noise_seed("train"), rows, positions),
        store.resources,
    )
    log_probs = Teacher.load(teacher, device="cpu").log_probs(tokens).flatten(0, 1)
    assert torch.equal(gumbel_argmax(log_probs, dense_arrivals(noise)), tokens[:, 1:].flatten())


def test_equal_rows_of_two_splits_have_noise_of_their_own(
    tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    given = options(teacher, corpus, codec={"name": "full", "num_entries": None})
    given["corpus"] |= {"validation_source": f"text:{corpus}"}
    store = run(tmp_path, given)
    train, held_out = (store.split(s).read_rows(0, 20) for s in ("train", "validation"))
    assert np.array_equal(train["tokens"], held_out["tokens"])
    assert np.array_equal(train["token_log_probs"], held_out["token_log_probs"])
    name = max(store.manifest.arrays, key=lambda array: train[array].nbytes)
    assert (train[name][:, 1:] != held_out[name][:, 1:]).mean() > 0.9


def test_rerun_of_a_finished_store_changes_nothing_and_loads_no_weights(
    finished: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> dict[Path, int]:
        files = [path for path in finished.rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files if path.suffix != ".lock"}

    before = times()
    monkeypatch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("the teacher was loaded"))
    run(finished, options(teacher, corpus))
    assert times() == before


def test_rerun_takes_the_head_from_the_store_and_repairs_a_damaged_one(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(teacher, corpus, codec={"name": "hidden", "num_entries": None})
    run(tmp_path, given)
    before = contents(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "load", lambda *_, **__: pytest.fail("the teacher was loaded"))
        run(tmp_path, given)
    assert contents(tmp_path / "store") == before
    head = next(name for name in before if name.startswith("resources/lm_head/c/"))
    (tmp_path / "store" / head).write_bytes(b"damaged")
    run(tmp_path, given)
    assert contents(tmp_path / "store") == before


def test_the_identity_names_every_package_that_decides_meaning(finished: Path) -> None:
    """Those that move last bits stand beside it, so that an upgrade does not end a store."""
    store = ShardStore.open(finished / "store")
    versions = store.manifest.versions
    assert set(versions) == {"gdistill", "numcodecs", "tokenizers", "zarr"}
    assert all(versions.values())
    (way,) = read_ways(store.location)
    assert way["torch"] == torch.__version__


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path,
    finished: Path,
    teacher: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    fail_at: int,
) -> None:
    forward, calls = Teacher.forward, []

    def failing(self: Teacher, rows: torch.Tensor, *rest: object) -> RawLogits:
        calls.append(len(rows))
        if len(calls) > 4 * fail_at + 2:
            raise KeyboardInterrupt
        return forward(self, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Teacher, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, options(teacher, corpus))
    partial = ShardStore.open(tmp_path / "store", allow_incomplete=True)
    total = sum(-(-rows // 16) for rows in partial.manifest.splits.values())
    assert len(partial.unfinished()) == total - fail_at
    assert not list((tmp_path / "store").glob(".claims/*"))
    monkeypatch.undo()
    run(tmp_path, options(teacher, corpus))
    assert contents(tmp_path / "store") == contents(finished / "store")


def test_a_finished_shard_is_not_computed_again(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, options(teacher, corpus))
    victim = tmp_path / "store" / "ledger" / "train" / "000002.json"
    victim.unlink()
    extracted: list[int] = []
    forward = Teacher.forward

    def counting(self: Teacher, rows: torch.Tensor, *rest: object) -> RawLogits:
        extracted.append(len(rows))
        return forward(self, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Teacher, "forward", counting)
    run(tmp_path, options(teacher, corpus))
    assert sum(extracted) == 16
    assert victim.exists()


def test_out_of_memory_halves_the_batch_and_loses_nothing(
    tmp_path: Path, finished: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, sizes = Teacher.forward, []

    def cramped(self: Teacher, rows: torch.Tensor, *rest: object) -> RawLogits:
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        sizes.append(len(rows))
        return forward(self, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Teacher, "forward", cramped)
    store = run(tmp_path, options(teacher, corpus, batch_size=16))
    assert max(sizes) == 2
    mine, reference = (ShardStore.open(p / "store").split("train") for p in (tmp_path, finished))
    ours, theirs = mine.read_rows(0, mine.num_rows), reference.read_rows(0, mine.num_rows)
    assert np.array_equal(ours["tokens"], theirs["tokens"])
    difference = np.abs(ours["token_log_probs"] - theirs["token_log_probs"]).max()
    assert difference < 1e-5
    assert store.manifest.sha256 == reference.manifest.sha256, "batch size is no identity"


def test_out_of_memory_at_one_row_is_one_error(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> RawLogits:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(Teacher, "forward", full)
    with pytest.raises(GdistillError, match="batch of one row"):
        run(tmp_path, options(teacher, corpus))


def test_encoding_that_runs_out_of_memory_goes_on_in_halves(
    tmp_path: Path, finished: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    normalise = RawLogits.normalise

    def cramped(self: RawLogits, vocab_size: int, buffer: Tensor | None = None) -> object:
        if len(self.tokens) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return normalise(self, vocab_size, buffer)

    monkeypatch.setattr(RawLogits, "normalise", cramped)
    run(tmp_path, options(teacher, corpus))
    assert contents(tmp_path / "store") == contents(finished / "store")


def test_a_codec_that_runs_out_of_memory_at_one_row_is_one_error(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cramped(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(PosteriorCodec, "encode", cramped)
    with pytest.raises(GdistillError, match="batch of one row"):
        run(tmp_path, options(teacher, corpus))


@pytest.mark.parametrize("where", ["encode", "write"])
def test_errors_of_the_background_threads_end_the_run(
    tmp_path: Path, teacher: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_: object) -> None:
        raise GdistillError("disk full")

    if where == "write":
        monkeypatch.setattr(ShardWriter, "write", broken)
    else:
        monkeypatch.setattr(Extractor, "_encode", broken)
    with pytest.raises(GdistillError, match="disk full"):
        run(tmp_path, options(teacher, corpus))
    monkeypatch.undo()
    run(tmp_path, options(teacher, corpus))
    assert verify(tmp_path / "store") == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"codec": {"num_entries": 6}}, "codec.parameters.num_entries"),
        ({"codec": {"name": "full", "num_entries": None}}, "codec.name"),
        ({"teacher": {"dtype": "bfloat16"}}, "teacher.dtype"),
        ({"store": {"rows": 20}}, "splits.train"),
    ],
)
def test_another_identity_is_refused_by_field(
    finished: Path, teacher: Path, corpus: Path, change: dict, field: str
) -> None:
    before = contents(finished)
    with pytest.raises(UsageError, match=rf"begun with other inputs.*{field}.*got .*expected "):
        run(finished, options(teacher, corpus, **change))
    assert contents(finished) == before


def test_other_weights_of_the_same_name_are_refused(
    tmp_path: Path, finished: Path, corpus: Path, teacher: Path
) -> None:
    other = save_teacher(tmp_path / teacher.name, seed=1)
    with pytest.raises(UsageError, match=r"teacher\.weights_sha256"):
        run(finished, options(other, corpus))


def test_a_corpus_that_changed_between_the_stages_is_refused(tmp_path: Path, teacher: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus.txt")
    run(tmp_path / "out", options(teacher, corpus))
    write_corpus(corpus, seed=1)
    with pytest.raises(GdistillError, match="not the one that was tokenized"):
        run(tmp_path / "out", options(teacher, corpus))


def test_rows_limit_takes_the_first_rows(
    tmp_path: Path, teacher: Path, corpus: Path, finished: Path
) -> None:
    """Of token rows, too, that were made for all of them."""
    shutil.copytree(finished / "tokens", tmp_path / "tokens")
    store = run(tmp_path, options(teacher, corpus, store={"rows": 20, "validation_rows": 1}))
    assert store.manifest.splits == {"train": 20, "validation": 1}
    dataset = TokenDataset.open(tmp_path / "tokens")
    assert dataset.num_rows("train") > 20 and dataset.num_rows("validation") > 1
    rows = store.split("train").read_rows(0, 20)["tokens"]
    assert np.array_equal(rows, dataset.read_rows("train", 0, 20))


def test_side_files_make_the_store_self_contained(finished: Path) -> None:
    store = ShardStore.open(finished / "store")
    assert set(store.files("tokenizer")) == {"tokenizer.json", "tokenizer_config.json"}
    assert "unigram_log_probs" in store.resources


def test_unigram_is_the_smoothed_count(finished: Path) -> None:
    dataset = TokenDataset.open(finished / "tokens")
    rows = dataset.read_rows("train", 0, dataset.num_rows("train"))[:, 1:]
    counts = np.array([(rows == token).sum() for token in range(VOCAB_SIZE)])
    expected = np.log((counts + 0.5) / (rows.size + VOCAB_SIZE / 2))
    assert np.allclose(corpus_unigram(dataset), expected, atol=1e-6)
    assert counts[0] == 0, "an unseen token is smoothed, not impossible"


def test_sizes_of_chunks_and_shards_are_bounded_in_tokens_and_bytes() -> None:
    codec = make_codec("posterior")
    assert rows_per_unit(1024, codec.array_specs(50257, None), StoreSettings()) == (4, 256)
    full = make_codec("full").array_specs(50257, None)
    assert rows_per_unit(1024, full, StoreSettings())[0] == 1
    assert rows_per_unit(1024, full, StoreSettings(rows_per_shard=6))[1] == 6


def test_batches_tile_the_rows_and_the_automatic_size_is_fixed() -> None:
    parts = list(BatchSize(4).parts(10))
    assert [(part.start, part.stop) for part in parts] == [(0, 4), (4, 8), (8, 10)]
    cpu = torch.device("cpu")
    assert automatic_batch_size(1024, 50257, 0, cpu) == 1
    assert automatic_batch_size(ROW_LENGTH, VOCAB_SIZE, 0, cpu) * ROW_LENGTH <= 1 << 12


def test_own_shards_come_first_then_everybody_elses() -> None:
    assert Worker(1, 3).order([0, 1, 2, 3, 4]) == [1, 4, 2, 0, 3]
    assert Worker().order([0, 1, 2]) == [0, 1, 2]
    assert Worker(5, 6).order([0, 1]) == [0, 1]
