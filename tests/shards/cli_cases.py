"""Stores of a made-up teacher, as extraction writes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import codec_parameters
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter

VOCAB, LENGTH, HIDDEN, SEED = 31, 7, 6, 5
SPLITS = {"train": 20, "validation": 3}
LEAST_LIKELY_NATS = -140.0
"""Of one token of each split: its probability is 0 in float32."""
Run = Callable[..., tuple[int, str]]


def teacher_rows(split: str) -> tuple[TeacherOutput, dict[str, torch.Tensor]]:
    """All rows of a split, and what a store may keep once; one token is next to impossible."""
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
    unigram = torch.full((VOCAB,), -math.log(VOCAB))
    return output, {"lm_head": head, "lm_head_bias": bias, "unigram_log_probs": unigram}


def write_encoded(location: Path, codec: Codec) -> ShardStore:
    """A store as extraction with ``codec`` writes it: only the resources that its codec names."""
    manifest = Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(VOCAB, HIDDEN),
        vocab_size=VOCAB,
        row_length=LENGTH,
        splits=SPLITS,
        rows_per_shard=8,
        rows_per_chunk=4,
        teacher={"id": "made up", "weights_sha256": "ab" * 32},
        tokenizer={"id": "none", "sha256": "cd" * 32},
        tokens={"fingerprint": "ef" * 32, "corpus": "text:a.txt"},
        seed=SEED,
        versions={},
    )
    _, known = teacher_rows("train")
    resources = {name: known[name].numpy() for name in codec.resource_names}
    writer = ShardWriter.create_or_resume(location, manifest, resources)
    for split in SPLITS:
        output, _ = teacher_rows(split)
        values = dict(codec.encode(output, SEED, known))
        values |= {"token_log_probs": output.token_log_probs, "tokens": output.tokens}
        for shard in writer.shards(split):
            arrays = {
                name: np.zeros((shard.num_rows, LENGTH, *spec.trailing_shape), spec.dtype)
                for name, spec in manifest.all_arrays.items()
            }
            for name, value in values.items():
                arrays[name][:, 1:] = value[shard.start : shard.stop].numpy()
            writer.write(shard, arrays)
    return ShardStore.open(location)
