from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from pipeline.generate import (
    GeneratedRows,
    cached_token_bytes,
    generate_rows,
    processed,
    rows_at_once,
    rows_that_fit,
)
from pipeline.settings import SequentialSettings
from pipeline.teacher import Teacher
from pipeline.tokens.dataset import TokenDataset
from shards.errors import UsageError
from shards.noise.gumbel import gumbel_argmax
from shards.noise.kinds import KeyedPrior, Noise, dense_arrivals
from shards.noise.philox import PositionKeys
from shards.store.store import ShardStore
from tests.pipeline.extract_cases import (
    ROW_LENGTH,
    VOCAB_SIZE,
    contents,
    options,
    run,
    save_teacher,
)

PLAIN = SequentialSettings()
WRITTEN = {"mode": "sequential", "codec": {"name": "full", "num_entries": None}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher.load(folder, device="cpu")


def stored_noise(store: ShardStore, split: str) -> tuple[Noise, torch.Tensor]:
    """The frozen noise of every scored position of a split, and the rows."""
    arrays = store.split(split).read_rows(0, store.split(split).num_rows)
    tokens = torch.from_numpy(arrays["tokens"]).long()
    rows, positions = torch.ones_like(tokens).bool().nonzero(as_tuple=True)
    rows, positions = rows[positions > 0], positions[positions > 0]
    noise = store.codec.decode(
        {name: torch.from_numpy(arrays[name])[rows, positions] for name in store.manifest.arrays},
        tokens[rows, positions],
        torch.from_numpy(arrays["token_log_probs"])[rows, positions],
        PositionKeys(store.manifest.noise_seed(split), rows, positions),
        store.resources,
    )
    return noise, tokens


def test_cached_generation_is_gumbel_max_over_the_full_forward_pass(teacher: Teacher) -> None:
    first, row_ids = torch.tensor([0, 5, 7]), torch.tensor([10, 11, 12])
    rows = generate_rows(teacher, first, row_ids, ROW_LENGTH, stream_seed=3)
    expected = first[:, None]
    for position in range(1, ROW_LENGTH):
        padded = torch.cat([expected, torch.zeros(3, 1, dtype=torch.int64)], 1)
        log_probs = teacher.log_probs(padded)[:, -1]
        keys = PositionKeys(3, row_ids, torch.full((3,), position))
        noise = dense_arrivals(KeyedPrior(keys, VOCAB_SIZE))
        expected = torch.cat([expected, gumbel_argmax(log_probs, noise)[:, None]], 1)
    assert torch.equal(rows, expected)


def test_tokens_follow_the_teachers_distribution(teacher: Teacher) -> None:
    num_rows = 4000
    first = torch.full((num_rows,), 4)
    rows = generate_rows(teacher, first, torch.arange(num_rows), 2, stream_seed=9)
    expected = teacher.log_probs(torch.tensor([[4, 0]]))[0, 0].double().exp() * num_rows
    counts = torch.bincount(rows[:, 1], minlength=VOCAB_SIZE).double()
    rare = expected < 5
    pooled = [torch.cat([v[~rare], v[rare].sum()[None]]) for v in (counts, expected)]
    pooled = [v[pooled[1] > 0] for v in pooled]
    assert stats.chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue > 1e-3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "nucleus_p": 0.8}])
def test_stored_noise_reproduces_every_token_when_rows_are_scored_again(
    tmp_path: Path, folder: Path, corpus: Path, teacher: Teacher, sampling: dict
) -> None:
    given = options(folder, corpus, **WRITTEN, sequential=sampling, store={"rows": 40})
    noise, tokens = stored_noise(run(tmp_path, given), "train")
    log_probs = teacher.log_probs(tokens)
    log_probs = processed(log_probs, SequentialSettings(**sampling), tokens[:, 1:])
    winners = gumbel_argmax(log_probs.flatten(0, 1), dense_arrivals(noise))
    assert torch.equal(winners, tokens[:, 1:].flatten())


def test_stored_noise_of_generated_rows_is_standard_gumbel(
    tmp_path: Path, folder: Path, corpus: Path
) -> None:
    """Would fail if tokens were chosen by the stream that the codec draws its noise from."""
    given = options(folder, corpus, **WRITTEN, store={"rows": 200, "validation_rows": 0})
    noise, _ = stored_noise(run(tmp_path, given), "train")
    gumbels = -dense_arrivals(noise).log()
    # Entries of one position are independent, and positions too: n = 200 * 11 * V variates.
    assert stats.kstest(gumbels.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    largest = gumbels.max(-1).values.numpy() - np.log(VOCAB_SIZE)
    assert stats.kstest(largest, "gumbel_r").pvalue > 1e-3


def test_generated_store_is_the_same_in_one_run_and_after_an_interruption(
    tmp_path: Path, folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(folder, corpus, mode="sequential", store={"rows": 40, "validation_rows": 4})
    whole = run(tmp_path / "whole", given)
    assert whole.manifest.splits == {"train": 40, "validation": 4}
    train, held_out = (
        whole.split(name).read_rows(0, 4)["tokens"] for name in ("train", "validation")
    )
    assert (train != held_out).any(axis=1).all(), "splits have noise of their own"
    read, calls = GeneratedRows.read, []

    def failing(self: GeneratedRows, *arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(GeneratedRows, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", given)
    monkeypatch.undo()
    run(tmp_path / "parts", given)
    assert contents(tmp_path / "parts" / "store") == contents(tmp_path / "whole" / "store")


def test_rows_begin_like_documents_and_go_beyond_the_corpus(
    tmp_path: Path, folder: Path, corpus: Path
) -> None:
    """Rows of a corpus in one stream begin anywhere in a document; the teacher's never do."""
    given = options(folder, corpus, mode="sequential", corpus={"packing": "concat"})
    store = run(tmp_path, {**given, "store": {**given["store"], "rows": 130}})
    dataset = TokenDataset.open(tmp_path / "tokens")
    assert dataset.num_rows("train") < 130 == store.manifest.splits["train"]
    assert len(np.unique(dataset.read_rows("train", 0, 20)[:, 0])) > 1
    rows = store.split("train").read_rows(0, 130)["tokens"]
    assert (rows[:, 0] == dataset.bos_id).all()
    assert len(np.unique(rows, axis=0)) > 100, "beyond the corpus nothing repeats"


def test_rows_at_once_are_many_for_small_models_and_bounded_in_memory(teacher: Teacher) -> None:
    assert rows_at_once(teacher, ROW_LENGTH) == 128
    # Keys and values of 2 layers of width 16 in float32: 256 bytes a token.
    assert rows_at_once(teacher, (4 << 30) // 256 // 50) == 50
    assert rows_at_once(teacher, (4 << 30) // 256) == 32


def test_rows_on_a_gpu_are_as_many_as_its_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 Large in float32, 1,024 tokens on 80 GB: 377 MB of cache and 3.6 MB of a step a row."""
    memory = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    gpu, shape = torch.device("cuda"), {"num_hidden_layers": 36, "num_attention_heads": 20}
    token = cached_token_bytes(SimpleNamespace(**shape), 1280, 4)
    assert token == 2 * 36 * 1280 * 4
    assert rows_that_fit(gpu, 1024 * token, 50_257, 0) == 104
    shared = cached_token_bytes(SimpleNamespace(**shape, num_key_value_heads=5), 1280, 4)
    assert rows_that_fit(gpu, 1024 * shared, 50_257, 0) == 408, "heads share keys and values"
    assert rows_that_fit(gpu, 1024 * token, 50_257, 40 * 10**9) == 52
    assert rows_that_fit(gpu, 10**6 * token, 50_257, 0) == 1
    assert rows_that_fit(gpu, 2 * token, 50_257, 0) == 512


def test_a_size_that_fits_is_kept_from_shard_to_shard(
    monkeypatch: pytest.MonkeyPatch, teacher: Teacher
) -> None:
    tried: list[int] = []

    def written(_: Teacher, first: torch.Tensor, *rest: object) -> torch.Tensor:
        tried.append(len(first))
        if len(first) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(len(first), ROW_LENGTH, dtype=torch.int64)

    monkeypatch.setattr("pipeline.generate.generate_rows", written)
    dataset = SimpleNamespace(bos_id=0, row_length=ROW_LENGTH, packing="concat")
    settings = SequentialSettings(batch_size=8)
    rows = object.__new__(GeneratedRows)  # the rows' source is not asked for anything else
    vars(rows).update(teacher=teacher, dataset=dataset, settings=settings, seed=1)
    for start in (0, 6):
        rows.read("train", start, start + 6, lambda _: None)
    assert tried == [6, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def test_mode_and_sampling_are_part_of_the_identity(
    tmp_path: Path, folder: Path, corpus: Path
) -> None:
    small = {"rows": 4, "validation_rows": 0}
    run(tmp_path, options(folder, corpus, mode="sequential", store=small))
    for field, change in (
        ("mode", {}),
        ("temperature", {"mode": "sequential", "sequential": {"temperature": 0.9}}),
        ("nucleus_p", {"mode": "sequential", "sequential": {"nucleus_p": 0.9}}),
    ):
        with pytest.raises(UsageError, match=rf"tokens\.{field}"):
            run(tmp_path, options(folder, corpus, store=small, **change))


def test_nucleus_by_hand() -> None:
    log_probs = torch.tensor([[0.5, 0.1, 0.3, 0.1], [0.95, 0.05, 1e-9, 1e-9]]).log()
    cut = processed(log_probs, SequentialSettings(nucleus_p=0.85))
    assert cut[0].exp().tolist() == pytest.approx([0.625, 0, 0.375, 0])
    assert cut[1].exp().tolist() == [1, 0, 0, 0]
    kept = processed(log_probs, SequentialSettings(nucleus_p=0.85), torch.tensor([1, 3]))
    assert torch.isfinite(kept[torch.arange(2), torch.tensor([1, 3])]).all()
    warm = processed(log_probs, SequentialSettings(temperature=2.0))
    assert warm[0].exp()[0].item() == pytest.approx(
        0.5**0.5 / sum(p**0.5 for p in (0.5, 0.3, 0.1, 0.1))
    )
    assert processed(log_probs, PLAIN) is log_probs


def test_temperature_comes_before_the_nucleus() -> None:
    """At T = 2 (0.6, 0.3, 0.1) is (0.473, 0.334, 0.193): 0.85 keeps two; before, it keeps one."""
    warm = SequentialSettings(temperature=2.0, nucleus_p=0.85)
    probabilities = processed(torch.tensor([0.6, 0.3, 0.1]).log(), warm).exp()
    share = 0.6**0.5 / (0.6**0.5 + 0.3**0.5)
    assert probabilities.tolist() == pytest.approx([share, 1 - share, 0], abs=1e-6)


def test_rows_depend_on_the_seed_the_row_and_the_position(teacher: Teacher) -> None:
    first, ids = torch.zeros(40, dtype=torch.int64), torch.arange(40)
    rows = generate_rows(teacher, first, ids, ROW_LENGTH, stream_seed=1)
    other = generate_rows(teacher, first, ids, ROW_LENGTH, stream_seed=2)
    moved = generate_rows(teacher, first, ids + 1, ROW_LENGTH, stream_seed=1)
    alone = generate_rows(teacher, first[3:4], ids[3:4], ROW_LENGTH, stream_seed=1)
    assert torch.equal(moved[:-1], rows[1:]), "row r is row r, whatever came before"
    assert torch.equal(alone[0], rows[3]), "and whatever shares its batch"
    assert (rows != other).any(1).float().mean() > 0.8
    # With one draw for every position a row would repeat the token its noise likes best.
    assert (rows[:, 1:] != rows[:, 1:2]).any(1).float().mean() > 0.5


@pytest.mark.parametrize("at_once", [1, 20, 1 << 26])
def test_the_nucleus_does_not_depend_on_how_many_rows_are_sorted_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    log_probs = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    monkeypatch.setattr("pipeline.generate.SORTED_AT_ONCE", at_once)
    settings = SequentialSettings(nucleus_p=0.6)
    kept = processed(log_probs, settings) > -torch.inf
    ordered = log_probs.double().exp().sort(-1, descending=True).values.cumsum(-1)
    counts = (ordered <= 0.6).sum(-1).clamp_min(1)
    least = log_probs.sort(-1, descending=True).values.gather(-1, counts[..., None] - 1)
    assert torch.equal(kept, log_probs >= least)
    assert processed(log_probs[:0], settings).shape == (0, 4, 7)
