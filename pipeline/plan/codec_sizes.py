"""Bytes per token that a codec really writes, measured on synthetic distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pipeline.extract import with_position_0
from shards.base import generator
from shards.codec import Codec, TeacherOutput, codec_parameters
from shards.store import Manifest, encode_shard, shard_ranges

NUM_POSITIONS = 512
LARGEST_FLOATS = 1 << 25
HEAD_VOCABULARY = 512
SHARPNESS = (2.0, 8.0)


def measured_bytes_per_token(
    codec: Codec, vocab_size: int, hidden_size: int, row_length: int
) -> float:
    """Compressed bytes per token, id and log-probability included; resources are left out.

    Distributions are p proportional to unigram * exp(s z): a Zipf unigram, z normal, s uniform in
    2 to 8. Their mean entropy is 3.1 nats at V = 50257, about GPT-2's on web text.
    """
    if codec.needs_hidden:
        # The bytes of a hidden state do not depend on V; a small head keeps the plan quick.
        vocab_size = min(vocab_size, HEAD_VOCABULARY)
    positions = max(16, min(NUM_POSITIONS, LARGEST_FLOATS // vocab_size))
    length = min(row_length, positions + 1)
    rows = max(1, positions // (length - 1))
    output, resources = _synthetic(rows, length - 1, vocab_size, hidden_size, codec.needs_hidden)
    encoded = codec.encode(output, 0, resources)
    encoded["token_log_probs"] = output.token_log_probs
    encoded["tokens"] = output.tokens.int()
    manifest = one_shard_manifest(codec, rows, length, vocab_size, hidden_size)
    arrays = {name: with_position_0(tensor) for name, tensor in encoded.items()}
    files = encode_shard(manifest, shard_ranges(manifest, "train")[0], arrays)
    return sum(map(len, files.values())) / (rows * (length - 1))


def _synthetic(
    rows: int, tokens: int, vocab_size: int, hidden_size: int, with_head: bool
) -> tuple[TeacherOutput, dict[str, Tensor]]:
    draw = generator(0, "plan")
    unigram = -torch.arange(1, vocab_size + 1).double().log().float()
    resources = {"unigram_log_probs": unigram.log_softmax(0)}
    hidden = None
    if with_head:
        hidden = torch.randn(rows, tokens, hidden_size, generator=draw)
        head = torch.randn(vocab_size, hidden_size, generator=draw) * 3 / math.sqrt(hidden_size)
        resources["lm_head"] = head
        logits = hidden @ head.T
    else:
        low, high = SHARPNESS
        sharpness = low + (high - low) * torch.rand(rows, tokens, 1, generator=draw)
        logits = torch.randn(rows, tokens, vocab_size, generator=draw) * sharpness + unigram
    log_probs = logits.log_softmax(-1)
    chosen = torch.multinomial(log_probs.flatten(0, 1).exp(), 1, generator=draw)
    output = TeacherOutput(log_probs, chosen.view(rows, tokens), torch.arange(rows), hidden)
    return output, resources


def one_shard_manifest(
    codec: Codec, rows: int, row_length: int, vocab_size: int, hidden_size: int | None
) -> Manifest:
    """A store of one shard of one chunk, to see what a codec's arrays take."""
    return Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
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
