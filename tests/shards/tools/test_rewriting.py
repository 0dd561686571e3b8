"""Conversion from every codec that keeps the distribution to every one that keeps a draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shards.codec.registry import make_codec
from shards.console import Bar
from shards.errors import UsageError
from shards.noise.kinds import dense_arrivals
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.tools.rewriting import convert, count_unigram, merge, stored_noise, subset
from tests.shards.cli_cases import LENGTH, SPLITS, VOCAB, write_encoded

SOURCES = {
    "hidden": make_codec("hidden", dtype="float16"),
    "posterior": make_codec("posterior", num_entries=VOCAB),
}


@pytest.fixture(scope="module", params=sorted(SOURCES))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return write_encoded(tmp_path_factory.mktemp("source") / "store", SOURCES[request.param])


TARGETS = {
    "seeded": (make_codec("seeded"), 0.03),
    "topk": (make_codec("topk", num_entries=VOCAB), 0.03),
    "quantized": (make_codec("quantized"), 0.6),
    "full": (make_codec("full"), 0.03),
}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_was_converted_decodes_to_the_same_draw(
    source: ShardStore, tmp_path: Path, name: str
) -> None:
    codec, max_error_nats = TARGETS[name]
    convert(source, str(tmp_path / "out"), codec, Bar())
    made = ShardStore.open(tmp_path / "out")
    assert verify(tmp_path / "out") == []
    assert set(codec.resource_names) <= set(made.resources)
    if "unigram_log_probs" in source.resources:
        kept = made.resources["unigram_log_probs"]
        assert torch.equal(kept, source.resources["unigram_log_probs"])
    for split, rows in SPLITS.items():
        before, after = (s.split(split).read_rows(0, rows) for s in (source, made))
        assert np.array_equal(before["token_log_probs"], after["token_log_probs"])
        ours = dense_arrivals(stored_noise(source, split, 0, before)).log()
        theirs = dense_arrivals(stored_noise(made, split, 0, after)).log()
        assert bool(theirs.isfinite().all())
        assert float((ours - theirs).abs().max()) < max_error_nats


def test_a_subset_tells_its_store_and_is_taken_for_no_other(
    source: ShardStore, tmp_path: Path
) -> None:
    """Even with all rows: what was done to a store belongs to what it is."""
    splits = {"train": 20, "validation": 3}
    subset(source, str(tmp_path / "all"), splits, Bar())
    made = ShardStore.open(tmp_path / "all").manifest
    assert made.tokens["subset_of"] == source.manifest.sha256
    with pytest.raises(UsageError, match="begun with other inputs"):
        merge([source], str(tmp_path / "all"), Bar())


@pytest.mark.parametrize("name", ["topk", "quantized", "full"])
def test_the_noise_of_a_next_to_impossible_token_is_exact(
    source: ShardStore, tmp_path: Path, name: str
) -> None:
    codec, _ = TARGETS[name]
    convert(source, str(tmp_path / "out"), codec, Bar())
    made = ShardStore.open(tmp_path / "out")
    rows = source.split("train").read_rows(0, 20)
    assert rows["tokens"][1, 3] == 3 and rows["token_log_probs"][1, 3] < -103
    exact = stored_noise(source, "train", 0, rows).token_gumbels.reshape(20, LENGTH - 1)
    stored = made.split("train").read_rows(0, 20)["token_gumbels"][:, 1:]
    assert np.isfinite(stored).all()
    np.testing.assert_allclose(stored, exact.numpy(), rtol=1e-6)


def test_the_counted_unigram_is_that_of_the_training_tokens(source: ShardStore) -> None:
    tokens = source.split("train").read_rows(0, 20)["tokens"][:, 1:]
    counts = np.bincount(tokens.reshape(-1), minlength=VOCAB) + 0.5
    np.testing.assert_allclose(np.exp(count_unigram(source)), counts / counts.sum(), rtol=1e-6)


def test_a_large_split_is_counted_in_evenly_spread_shards(
    source: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.codec.ids.UNIGRAM_TOKENS", 2 * 8 * LENGTH)
    tokens = source.split("train").read_rows(0, 20)["tokens"]
    counted = np.concatenate([tokens[:8], tokens[16:]])[:, 1:]
    counts = np.bincount(counted.reshape(-1), minlength=VOCAB) + 0.5
    np.testing.assert_allclose(np.exp(count_unigram(source)), counts / counts.sum(), rtol=1e-6)
