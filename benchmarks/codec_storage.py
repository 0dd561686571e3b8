"""Bytes on disk of a codec's arrays, written as a store writes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.extract.scores import with_position_0
from pipeline.plan import one_shard_manifest
from shards.codec.protocol import Codec, TeacherOutput
from shards.store.layout import encode_shard, shard_file, shard_ranges


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
    manifest = one_shard_manifest(
        codec, tokens.shape[0], tokens.shape[1] + 1, vocab_size, hidden_size
    )
    shard = shard_ranges(manifest, "train")[0]
    files = encode_shard(manifest, shard, {n: with_position_0(a) for n, a in arrays.items()})
    return {
        name: len(files[shard_file(manifest, "train", name, 0)]) / tokens.numel() for name in arrays
    }
