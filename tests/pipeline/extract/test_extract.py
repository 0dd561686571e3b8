"""What a store of stage 2 holds, that it resumes to the same bytes, and that memory may run out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.extract import Extractor
from pipeline.run import corpus_unigram, rows_per_unit
from pipeline.settings import StoreSettings
from pipeline.teacher import RawLogits, Teacher
from pipeline.tokens.dataset import TokenDataset
from shards.codec.posterior import PosteriorCodec
from shards.codec.registry import make_codec
from shards.errors import GdistillError, UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import dense_arrivals
from shards.noise.philox import PositionKeys
from shards.store.manifest import read_ways
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import (
    VOCAB_SIZE,
    contents,
    options,
    run,
    save_teacher,
    write_corpus,
)


def rows_of(dataset: TokenDataset, split: str) -> np.ndarray:
    return dataset.read_rows(split, 0, dataset.num_rows(split))


def fail(message: str) -> Any:
    return lambda *_, **__: pytest.fail(message)


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def test_store_holds_rows_and_what_the_teacher_says_of_them(finished: Path, teacher: Path) -> None:
    store, dataset = ShardStore.open(finished / "store"), TokenDataset.open(finished / "tokens")
    model = Teacher.load(teacher, device="cpu")
    assert store.manifest.vocab_size == VOCAB_SIZE
    assert verify(finished / "store") == []
    for split in ("train", "validation"):
        rows = rows_of(dataset, split)
        arrays = store.split(split).read_rows(0, len(rows))
        assert np.array_equal(arrays["tokens"], rows)
        tokens = torch.from_numpy(rows).long()
        log_probs = model.log_probs(tokens).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        stored = torch.from_numpy(arrays["token_log_probs"])
        assert (stored[:, 1:] - log_probs).abs().max() < 1e-5
        for name, array in arrays.items():
            if name != "tokens":
                assert not array[:, 0].any(), f"{name} has something at position 0"
    # What makes it self-contained, and the packages that decide meaning. Those that move last
    # bits stand beside it, so that an upgrade does not end a store.
    assert set(store.files("tokenizer")) == {"tokenizer.json", "tokenizer_config.json"}
    assert set(store.manifest.versions) == {"gdistill", "numcodecs", "tokenizers", "zarr"}
    (way,) = read_ways(store.location)
    assert way["torch"] == torch.__version__


def test_unigram_is_the_smoothed_count(finished: Path) -> None:
    dataset = TokenDataset.open(finished / "tokens")
    rows = rows_of(dataset, "train")[:, 1:]
    counts = np.array([(rows == token).sum() for token in range(VOCAB_SIZE)])
    expected = np.log((counts + 0.5) / (rows.size + VOCAB_SIZE / 2))
    assert np.allclose(corpus_unigram(dataset), expected, atol=1e-6)
    assert counts[0] == 0, "an unseen token is smoothed, not impossible"
    stored = ShardStore.open(finished / "store").resources["unigram_log_probs"]
    assert np.allclose(stored, expected, atol=1e-6)


def test_frozen_noise_reproduces_every_token_and_differs_between_splits(
    tmp_path: Path, teacher: Path, corpus: Path
) -> None:
    given = options(teacher, corpus, codec={"name": "full", "num_entries": None})
    given["corpus"] |= {"validation_source": f"text:{corpus}"}
    store = run(tmp_path, given)
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
    # Equal rows of two splits have noise of their own.
    held_out = store.split("validation").read_rows(0, 20)
    for name in ("tokens", "token_log_probs"):
        assert np.array_equal(arrays[name][:20], held_out[name])
    name = max(store.manifest.arrays, key=lambda array: arrays[array].nbytes)
    assert (arrays[name][:20, 1:] != held_out[name][:, 1:]).mean() > 0.9


def test_rerun_of_a_finished_store_changes_nothing_and_loads_no_weights(
    finished: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def times() -> dict[Path, int]:
        files = [path for path in finished.rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files if path.suffix != ".lock"}

    before = times()
    monkeypatch.setattr(Teacher, "load", fail("the teacher was loaded"))
    run(finished, asked())
    assert times() == before


def test_rerun_takes_the_head_from_the_store_and_repairs_a_damaged_one(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = asked(codec={"name": "hidden", "num_entries": None})
    run(tmp_path, given)
    before = contents(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "load", fail("the teacher was loaded"))
        run(tmp_path, given)
    assert contents(tmp_path / "store") == before
    head = next(name for name in before if name.startswith("resources/lm_head/c/"))
    (tmp_path / "store" / head).write_bytes(b"damaged")
    run(tmp_path, given)
    assert contents(tmp_path / "store") == before


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path,
    teacher: Path,
    corpus: Path,
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    fail_at: int,
) -> None:
    """And a finished shard is not computed again."""
    forward, calls = Teacher.forward, []

    def failing(self: Teacher, rows: Tensor, *rest: Any) -> RawLogits:
        calls.append(len(rows))
        if len(calls) > 4 * fail_at + 2:
            raise KeyboardInterrupt
        return forward(self, rows, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Teacher, "forward", failing)
        run(tmp_path, options(teacher, corpus))
    calls.clear()
    left = ShardStore.open(tmp_path / "store", allow_incomplete=True).unfinished()
    fail_at = 10**6
    monkeypatch.setattr(Teacher, "forward", failing)
    run(tmp_path, options(teacher, corpus))
    assert sum(calls) == sum(shard.num_rows for shard in left)
    assert contents(tmp_path / "store") == reference


def test_out_of_memory_halves_the_batch_and_loses_nothing(
    tmp_path: Path, finished: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, sizes = Teacher.forward, []

    def cramped(self: Teacher, rows: Tensor, *rest: Any) -> RawLogits:
        if len(rows) > 2:
            out_of_memory()
        sizes.append(len(rows))
        return forward(self, rows, *rest)

    monkeypatch.setattr(Teacher, "forward", cramped)
    store = run(tmp_path, asked(batch_size=16))
    assert max(sizes) == 2
    mine, reference = (ShardStore.open(p / "store").split("train") for p in (tmp_path, finished))
    ours, theirs = mine.read_rows(0, mine.num_rows), reference.read_rows(0, mine.num_rows)
    assert np.array_equal(ours["tokens"], theirs["tokens"])
    assert np.abs(ours["token_log_probs"] - theirs["token_log_probs"]).max() < 1e-5
    assert store.manifest.sha256 == reference.manifest.sha256, "batch size is no identity"


def test_encoding_that_runs_out_of_memory_goes_on_in_halves(
    tmp_path: Path, asked: Asked, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    normalise = RawLogits.normalise

    def cramped(self: RawLogits, *rest: Any) -> object:
        return out_of_memory() if len(self.tokens) > 1 else normalise(self, *rest)

    monkeypatch.setattr(RawLogits, "normalise", cramped)
    run(tmp_path, asked())
    assert contents(tmp_path / "store") == reference


def disk_full(*_: Any) -> None:
    raise GdistillError("disk full")


@pytest.mark.parametrize(
    ("owner", "name", "broken", "message"),
    [
        (Teacher, "forward", out_of_memory, "batch of one row"),
        (PosteriorCodec, "encode", out_of_memory, "batch of one row"),
        (Extractor, "_encode", disk_full, "disk full"),
        (ShardWriter, "write", disk_full, "disk full"),
    ],
)
def test_errors_of_every_thread_end_the_run_in_one_line(
    tmp_path: Path,
    asked: Asked,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    broken: Any,
    message: str,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(GdistillError, match=message):
        run(tmp_path, asked())
    monkeypatch.undo()
    run(tmp_path, asked())
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
    finished: Path, asked: Asked, change: dict[str, Any], field: str
) -> None:
    before = contents(finished)
    with pytest.raises(UsageError, match=rf"begun with other inputs.*{field}.*got .*expected "):
        run(finished, asked(**change))
    assert contents(finished) == before


def test_another_teacher_or_corpus_of_the_same_name_is_refused(
    tmp_path: Path, finished: Path, corpus: Path, teacher: Path
) -> None:
    other = save_teacher(tmp_path / teacher.name, seed=1)
    with pytest.raises(UsageError, match=r"teacher\.weights_sha256"):
        run(finished, options(other, corpus))
    changed = shutil.copytree(teacher, tmp_path / "changed" / teacher.name)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "layer_norm_epsilon": 1e-4}))
    with pytest.raises(UsageError, match=r"teacher\.config_sha256"):
        run(finished, options(changed, corpus))
    own = write_corpus(tmp_path / "corpus.txt")
    run(tmp_path / "out", options(teacher, own))
    write_corpus(own, seed=1)
    with pytest.raises(GdistillError, match="not the one that was tokenized"):
        run(tmp_path / "out", options(teacher, own))


def test_rows_limit_takes_the_first_rows(tmp_path: Path, asked: Asked, finished: Path) -> None:
    """Of token rows, too, that were made for all of them."""
    shutil.copytree(finished / "tokens", tmp_path / "tokens")
    store = run(tmp_path, asked(store={"rows": 20, "validation_rows": 1}))
    assert store.manifest.splits == {"train": 20, "validation": 1}
    dataset = TokenDataset.open(tmp_path / "tokens")
    assert dataset.num_rows("train") > 20 and dataset.num_rows("validation") > 1
    rows = store.split("train").read_rows(0, 20)["tokens"]
    assert np.array_equal(rows, dataset.read_rows("train", 0, 20))


def test_sizes_of_chunks_and_shards_are_bounded_in_tokens_and_bytes() -> None:
    arrays = make_codec("posterior").array_specs(50257, None)
    assert rows_per_unit(1024, arrays, StoreSettings()) == (4, 256)
    full = make_codec("full").array_specs(50257, None)
    assert rows_per_unit(1024, full, StoreSettings())[0] == 1
    assert rows_per_unit(1024, full, StoreSettings(rows_per_shard=6))[1] == 6
