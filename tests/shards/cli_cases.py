"""A posterior store of a made-up teacher, as extraction writes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.codec.protocol import Codec, TeacherOutput
from shards.codec.registry import codec_parameters
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter

VOCAB, LENGTH, SEED = 23, 6, 5
SPLITS = {"train": 20, "validation": 3}
Run = Callable[..., tuple[int, str]]


def teacher_output(split: str, start: int, stop: int) -> TeacherOutput:
    """A teacher of made-up distributions, a pure function of the rows."""
    generator = torch.Generator().manual_seed(sorted(SPLITS).index(split))
    logits = 2 * torch.randn(SPLITS[split], LENGTH - 1, VOCAB, generator=generator)
    log_probs = logits.log_softmax(-1)
    tokens = torch.multinomial(log_probs.exp().flatten(0, 1), 1, generator=generator)
    tokens = tokens.reshape(logits.shape[:2])
    return TeacherOutput(log_probs[start:stop], tokens[start:stop], torch.arange(start, stop))


def write_encoded(location: Path, codec: Codec) -> ShardStore:
    """A store as extraction with ``codec`` writes it."""
    manifest = Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(VOCAB, None),
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
    unigram = np.full(VOCAB, -math.log(VOCAB), dtype=np.float32)
    resources = {"unigram_log_probs": unigram}
    writer = ShardWriter.create_or_resume(location, manifest, resources)
    tensors = {name: torch.from_numpy(value) for name, value in resources.items()}
    for split in SPLITS:
        for shard in writer.pending(split):
            output = teacher_output(split, shard.start, shard.stop)
            encoded: dict[str, Any] = dict(codec.encode(output, SEED, tensors))
            own = output.log_probs.gather(-1, output.tokens[..., None]).squeeze(-1)
            arrays = {
                name: np.zeros((shard.num_rows, LENGTH, *spec.trailing_shape), spec.dtype)
                for name, spec in manifest.all_arrays.items()
            }
            for name, value in {**encoded, "token_log_probs": own, "tokens": output.tokens}.items():
                arrays[name][:, 1:] = value.numpy()
            writer.write(shard, arrays)
    return ShardStore.open(location)
