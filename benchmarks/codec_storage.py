"""Bytes on disk of a codec's arrays, written as a store writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shards.codec import Codec, TeacherOutput
from shards.layout import encode_shard, shard_file, shard_ranges
from shards.manifest import Manifest


def stored_bytes_per_token(
    codec: Codec,
    encoded: Sequence[dict[str, Tensor]],
    outputs: Sequence[TeacherOutput],
    vocab_size: int,
    hidden_size: int | None,
) -> dict[str, float]:
    """Bytes per scored token by array: the codec's arrays, ``tokens`` and ``token_log_probs``.

    One inner chunk holds all rows: a few thousand tokens, as in a store. Everything in the shard
    file counts, checksums and the unscored position 0 included.
    """
    arrays = {name: torch.cat([part[name] for part in encoded]) for name in encoded[0]}
    tokens = torch.cat([output.tokens for output in outputs])
    own = [output.log_probs.gather(-1, output.tokens[..., None])[..., 0] for output in outputs]
    arrays |= {"tokens": tokens.int(), "token_log_probs": torch.cat(own)}
    manifest = _manifest(codec, tokens.shape[0], tokens.shape[1] + 1, vocab_size, hidden_size)
    shard = shard_ranges(manifest, "train")[0]
    files = encode_shard(manifest, shard, {n: _with_position_0(a) for n, a in arrays.items()})
    return {
        name: len(files[shard_file(manifest, "train", name, 0)]) / tokens.numel() for name in arrays
    }


def _with_position_0(tensor: Tensor) -> np.ndarray:
    array = tensor.numpy()
    return np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)


def _manifest(
    codec: Any, rows: int, row_length: int, vocab_size: int, hidden_size: int | None
) -> Manifest:
    return Manifest(
        codec={"name": codec.name, "parameters": dataclasses.asdict(codec)},
        arrays=codec.array_specs(vocab_size, hidden_size),
        vocab_size=vocab_size,
        row_length=row_length,
        splits={"train": rows},
        rows_per_shard=rows,
        rows_per_chunk=rows,
        teacher={},
        tokenizer={},
        tokens={},
        seed=0,
        versions={},
    )
