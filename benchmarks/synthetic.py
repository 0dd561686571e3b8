"""Stores and teachers with true shapes and random content: no network, no weights, no data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shards.codec import TeacherOutput, codec_parameters, make_codec
from shards.manifest import Manifest
from shards.store import ShardStore
from shards.stream import RowBatch
from shards.writer import ShardWriter
from trainer.batch import Batch, BatchMaker
from trainer.students import MDLM, MDLMConfig, StudentSettings

ROWS_AT_ONCE = 8


def unigram(vocab_size: int) -> Tensor:
    """A Zipf law over the ids, as log-probabilities."""
    return torch.log_softmax(-torch.log(torch.arange(vocab_size) + 10.0), dim=0)


def synthetic_output(rows: Tensor, row_length: int, vocab_size: int) -> TeacherOutput:
    """Distributions with a Zipf tail and a few confident tokens; tokens drawn from them."""
    generator = torch.Generator().manual_seed(int(rows[0]))
    shape = (len(rows), row_length - 1, vocab_size)
    logits = torch.randn(shape, generator=generator).mul_(1.5).add_(unigram(vocab_size))
    peaks = torch.randint(vocab_size, (*shape[:2], 4), generator=generator)
    logits.scatter_add_(2, peaks, torch.full(peaks.shape, 9.0))
    log_probs = torch.log_softmax(logits, dim=-1)
    flat = log_probs.flatten(0, 1).exp()
    tokens = torch.multinomial(flat, 1, generator=generator).view(shape[:2])
    return TeacherOutput(log_probs, tokens, rows)


def write_store(
    folder: Path, codec_name: str, num_rows: int, row_length: int, vocab_size: int
) -> ShardStore:
    """A complete store of synthetic rows under that codec."""
    codec, seed = make_codec(codec_name), 5
    resources = {"unigram_log_probs": unigram(vocab_size)}
    manifest = Manifest(
        codec={"name": codec_name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, None),
        vocab_size=vocab_size,
        row_length=row_length,
        splits={"train": num_rows},
        rows_per_shard=min(ROWS_AT_ONCE, num_rows),
        rows_per_chunk=min(ROWS_AT_ONCE, num_rows),
        teacher={"id": "synthetic"},
        tokenizer={"id": "synthetic"},
        tokens={"fingerprint": "synthetic"},
        seed=seed,
        versions={},
    )
    arrays = {name: value.numpy() for name, value in resources.items()}
    writer = ShardWriter.create_or_resume(folder, manifest, arrays)
    for shard in writer.pending("train"):
        rows = torch.arange(shard.start, shard.stop)
        output = synthetic_output(rows, row_length, vocab_size)
        encoded = codec.encode(output, seed, resources)
        chosen = output.log_probs.gather(-1, output.tokens[..., None])[..., 0]
        columns = {"tokens": output.tokens.int(), "token_log_probs": chosen, **encoded}
        writer.write(shard, {name: _with_position_0(value) for name, value in columns.items()})
    return ShardStore.open(folder)


def _with_position_0(values: Tensor) -> np.ndarray:
    array = values.numpy()
    first = np.zeros((array.shape[0], 1, *array.shape[2:]), array.dtype)
    return np.concatenate((first, array), axis=1)


def read_batch(store: ShardStore, num_rows: int, device: torch.device) -> Batch:
    """The first rows of a store as one global batch, read from its shards."""
    read = store.split("train").read_rows(0, num_rows)
    index = torch.arange(num_rows)
    arrays = {name: torch.from_numpy(value) for name, value in read.items()}
    rows = RowBatch(arrays, index, index, num_rows, epoch=0, step=0)
    return BatchMaker(store, 7, device, with_noise=True)(rows, step=0)


def make_student(
    settings: StudentSettings, row_length: int, vocab_size: int, device: torch.device
) -> MDLM:
    """An MDLM whose zero-initialised parameters are random too, so that every path contributes."""
    torch.manual_seed(0)
    config = MDLMConfig.build(settings, vocab_size=vocab_size, row_length=row_length)
    student = MDLM(config).to(device)
    for parameter in student.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return student.train()


def make_teacher(
    num_layers: int, hidden_size: int, num_heads: int, vocab_size: int, device: torch.device
) -> GPT2LMHeadModel:
    """A GPT-2 with random weights; 36 x 1280 with 20 heads is the shape of GPT-2 Large."""
    config = GPT2Config(
        vocab_size=vocab_size, n_layer=num_layers, n_embd=hidden_size, n_head=num_heads
    )
    torch.manual_seed(0)
    with device:
        teacher = GPT2LMHeadModel(config)
    return teacher.eval().requires_grad_(False)
