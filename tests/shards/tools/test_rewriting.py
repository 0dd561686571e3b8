"""Conversion from every codec that keeps the distribution to every one that keeps a draw."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import codec_parameters, make_codec
from shards.console import Bar
from shards.errors import UsageError
from shards.noise.kinds import dense_arrivals
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from shards.tools.rewriting import convert, count_unigram, merge, stored_noise, subset

VOCAB, LENGTH, HIDDEN, SEED = 31, 7, 6, 5
SPLITS = {"train": 20, "validation": 3}
LEAST_LIKELY_NATS = -140.0
"""Of one token of each split: its probability is 0 in float32."""


def teacher_rows(split: str) -> tuple[TeacherOutput, dict[str, torch.Tensor]]:
    """All rows of a split, and its teacher's LM head; one token is next to impossible."""
    generator = torch.Generator().manual_seed(sorted(SPLITS).index(split))
    head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
    bias = torch.zeros(VOCAB)
    bias[3] = LEAST_LIKELY_NATS
    hidden = torch.randn(SPLITS[split], LENGTH - 1, HIDDEN, generator=generator)
    log_probs = (hidden @ head.T + bias).log_softmax(-1)
    flat = log_probs.exp().flatten(0, 1)
    tokens = torch.multinomial(flat, 1, generator=generator).reshape(hidden.shape[:2])
    tokens[1, 2] = 3
    output = TeacherOutput(log_probs, tokens, torch.arange(SPLITS[split]), hidden)
    return output, {"lm_head": head, "lm_head_bias": bias}


def write_source(location: Path, codec: Codec) -> ShardStore:
    """A store as extraction writes it: only the resources that its codec names."""
    manifest = Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(VOCAB, HIDDEN),
        vocab_size=VOCAB,
        row_length=LENGTH,
        splits=SPLITS,
        rows_per_shard=8,
        rows_per_chunk=4,
        teacher={"id": "made up"},
        tokenizer={"id": "none"},
        tokens={"fingerprint": "ef" * 32},
        seed=SEED,
        versions={},
    )
    _, known = teacher_rows("train")
    known["unigram_log_probs"] = torch.full((VOCAB,), -math.log(VOCAB))
    resources = {name: known[name].numpy() for name in codec.resource_names}
    writer = ShardWriter.create_or_resume(location, manifest, resources)
    for split in SPLITS:
        output, _ = teacher_rows(split)
        encoded = codec.encode(output, SEED, known)
        own = output.log_probs.gather(-1, output.tokens[..., None]).squeeze(-1)
        values = {**encoded, "token_log_probs": own, "tokens": output.tokens}
        for shard in writer.shards(split):
            arrays = {
                name: np.zeros((shard.num_rows, LENGTH, *spec.trailing_shape), spec.dtype)
                for name, spec in manifest.all_arrays.items()
            }
            for name, value in values.items():
                arrays[name][:, 1:] = value[shard.start : shard.stop].numpy()
            writer.write(shard, arrays)
    return ShardStore.open(location)


SOURCES = {
    "hidden": make_codec("hidden", dtype="float16"),
    "posterior": make_codec("posterior", num_entries=VOCAB),
}


@pytest.fixture(scope="module", params=sorted(SOURCES))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return write_source(tmp_path_factory.mktemp("source") / "store", SOURCES[request.param])


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


def test_a_unigram_that_is_there_is_kept(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", SOURCES["posterior"])
    convert(source, str(tmp_path / "out"), make_codec("seeded"), Bar())
    kept = ShardStore.open(tmp_path / "out").resources["unigram_log_probs"]
    assert torch.equal(kept, source.resources["unigram_log_probs"])


def test_a_large_split_is_counted_in_evenly_spread_shards(
    source: ShardStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.codec.ids.UNIGRAM_TOKENS", 2 * 8 * LENGTH)
    tokens = source.split("train").read_rows(0, 20)["tokens"]
    counted = np.concatenate([tokens[:8], tokens[16:]])[:, 1:]
    counts = np.bincount(counted.reshape(-1), minlength=VOCAB) + 0.5
    np.testing.assert_allclose(np.exp(count_unigram(source)), counts / counts.sum(), rtol=1e-6)
