"""Small stores that the tests of this folder write and damage."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.codec.protocol import Codec, TeacherOutput, codec_parameters, make_codec
from shards.store.manifest import Manifest, ShardRange
from shards.store.store import ShardStore, ShardWriter

VOCAB, LENGTH, KEPT, HIDDEN = 50, 6, 3, 6
SPLITS = {"train": 28, "validation": 5}
FILES = {"tokenizer/tokenizer.json": b'{"a": 1}', "corpus/maze.json": b"[1, 2]"}
LEAST_LIKELY_NATS = -140.0
"""Of one token of each split: its probability is 0 in float32."""
Run = Callable[..., tuple[int, str]]
TeacherRows = tuple[TeacherOutput, dict[str, torch.Tensor]]
"""All rows of a split, and what a codec decodes with."""


def make_manifest(**changes: Any) -> Manifest:
    """A manifest of 2 splits: 4 shards (the last one short) and 1 shard."""
    codec = {"name": "topk", "parameters": {"num_entries": KEPT}}
    fields: dict[str, Any] = {"codec": codec, "vocab_size": VOCAB, "row_length": LENGTH, "seed": 7}
    fields |= {"arrays": make_codec("topk", num_entries=KEPT).array_specs(VOCAB, None), "bos_id": 0}
    fields |= {"splits": SPLITS, "rows_per_shard": 8, "rows_per_chunk": 4}
    fields |= {"teacher": {"id": "tiny", "weights_sha256": "ab" * 32, "dtype": "float32"}}
    fields |= {"tokenizer": {"id": "tiny", "sha256": "cd" * 32}, "versions": {"gdistill": "0.1.0"}}
    fields |= {"tokens": {"fingerprint": "ef" * 32, "corpus": {"name": "text"}}}
    return Manifest(**{**fields, **changes})


def make_resources() -> dict[str, np.ndarray]:
    """A vector and a matrix kept once per store."""
    rng = np.random.default_rng(3)
    return {
        "unigram_log_probs": rng.normal(size=VOCAB).astype(np.float32),
        "lm_head": rng.normal(size=(VOCAB, 4)).astype(np.float16),
    }


def make_arrays(manifest: Manifest, shard: ShardRange) -> dict[str, np.ndarray]:
    """The content of a shard: a pure function of split and rows."""
    split = sorted(manifest.splits).index(shard.split)
    shape = (shard.num_rows, manifest.row_length)
    rng = np.random.default_rng([split, shard.start])
    arrays = {
        "tokens": rng.integers(0, manifest.vocab_size, shape).astype(np.int32),
        "token_log_probs": -rng.exponential(size=shape).astype(np.float32),
    }
    for name, spec in sorted(manifest.arrays.items()):  # a manifest read back has them sorted
        size = (*shape, *spec.trailing_shape)
        arrays[name] = rng.integers(1, manifest.vocab_size // KEPT, size).astype(spec.dtype)
    for name, values in arrays.items():
        if name != "tokens":
            values[:, 0] = 0
    return arrays


def open_writer(location: Any, **changes: Any) -> ShardWriter:
    """Create or resume the small store."""
    manifest = make_manifest(**changes)
    return ShardWriter.create_or_resume(location, manifest, make_resources(), FILES)


def write_store(location: Any, **changes: Any) -> ShardWriter:
    """The small store, finished."""
    writer = open_writer(location, **changes)
    write_pending(writer)
    return writer


def write_pending(writer: ShardWriter) -> None:
    """Write whatever is not done."""
    for split in writer.manifest.splits:
        for shard in writer.pending(split):
            with writer.claim(shard) as mine:
                if mine:
                    writer.write(shard, make_arrays(writer.manifest, shard))


def file_bytes(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit inverted."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def teacher_rows(split: str) -> TeacherRows:
    """All rows of a made-up teacher; one token is next to impossible."""
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


def write_encoded(
    location: Path, codec: Codec, rows: Callable[[str], TeacherRows] = teacher_rows, **changes: Any
) -> ShardStore:
    """A store as extraction with ``codec`` writes it: only the resources that its codec names."""
    output, known = rows("train")
    assert output.hidden is not None
    arrays = codec.array_specs(output.log_probs.shape[-1], output.hidden.shape[-1])
    named = {"name": codec.name, "parameters": codec_parameters(codec)}
    manifest = make_manifest(codec=named, arrays=arrays, **changes)
    resources = {name: known[name].numpy() for name in codec.resource_names}
    writer = ShardWriter.create_or_resume(location, manifest, resources, {"corpus/maze.json": b"[1, 2]"})
    for split in manifest.splits:
        output, _ = rows(split)
        values = dict(codec.encode(output, manifest.noise_seed(split), known))
        values |= {"token_log_probs": output.token_log_probs, "tokens": output.tokens}
        for shard in writer.manifest.shards(split):
            arrays = {
                name: np.zeros((shard.num_rows, manifest.row_length, *spec.trailing_shape), spec.dtype)
                for name, spec in manifest.all_arrays.items()
            }
            for name, value in values.items():
                arrays[name][:, 1:] = value[shard.start : shard.stop].numpy()
            writer.write(shard, arrays)
    return ShardStore.open(location)
