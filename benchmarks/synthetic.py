"""Stores and teachers with true shapes and random content: no network, no weights, no data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shards.codec.protocol import TeacherOutput
from shards.codec.registry import codec_parameters, make_codec
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter
from shards.stream.stream import RowBatch
from trainer.objective.batch import Batch, BatchMaker, StoredRowNoise
from trainer.students.registry import MDLM, MDLMConfig, StudentSettings

ROWS_AT_ONCE = 8


def unigram(vocab_size: int) -> Tensor:
    """A Zipf law over the ids, as log-probabilities."""
    return torch.log_softmax(-torch.log(torch.arange(vocab_size) + 10.0), dim=0)


def synthetic_output(
    rows: Tensor, row_length: int, vocab_size: int, device: torch.device | str = "cpu"
) -> TeacherOutput:
    """Distributions with a Zipf tail and a few confident tokens; tokens drawn from them."""
    generator = torch.Generator(device).manual_seed(int(rows[0]))
    shape = (len(rows), row_length - 1, vocab_size)
    logits = torch.randn(shape, generator=generator, device=device).mul_(1.5)
    logits += unigram(vocab_size).to(device)
    peaks = torch.randint(vocab_size, (*shape[:2], 4), generator=generator, device=device)
    logits.scatter_add_(2, peaks, torch.full(peaks.shape, 9.0, device=device))
    log_probs = torch.log_softmax(logits, dim=-1)
    flat = log_probs.flatten(0, 1).exp()
    tokens = torch.multinomial(flat, 1, generator=generator).view(shape[:2])
    return TeacherOutput(log_probs, tokens, rows.to(device))


def write_store(
    folder: Path, codec_name: str, num_rows: int, row_length: int, vocab_size: int
) -> ShardStore:
    """A complete store of synthetic rows under that codec."""
    codec, seed = make_codec(codec_name), 5
    resources = {"unigram_log_probs": unigram(vocab_size)}
    per_shard = min(ROWS_AT_ONCE, num_rows)
    manifest = Manifest(
        codec={"name": codec_name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, None),
        vocab_size=vocab_size,
        row_length=row_length,
        splits={"train": num_rows},
        rows_per_shard=per_shard,
        rows_per_chunk=per_shard,
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
        writer.write(shard, {n: _with_position_0(v).numpy() for n, v in columns.items()})
    return ShardStore.open(folder)


def _with_position_0(values: Tensor) -> Tensor:
    return torch.cat((torch.zeros_like(values[:, :1]), values), dim=1)


def batch_reader(
    store: ShardStore, num_rows: int, device: torch.device, with_noise: bool = True
) -> Callable[[int], Batch]:
    """Step -> the first rows of a store as its global batch; every step is an epoch of its own."""
    make = BatchMaker(store, "train", 7, device, with_noise=with_noise)
    read = store.split("train").read_rows(0, num_rows)
    arrays = {name: torch.from_numpy(value) for name, value in read.items() if name in make.arrays}
    index = torch.arange(num_rows)
    rows = partial(RowBatch, arrays, index, index, num_rows)
    return lambda step: make(rows(epoch=step, step=step), step).to(device)


def random_batch(
    num_rows: int,
    row_length: int,
    vocab_size: int,
    device: torch.device,
    first_slot: int,
    global_batch_size: int,
) -> Batch:
    """Rows as a store under the ``posterior`` codec gives them, made in memory on the device."""
    codec = make_codec("posterior")
    resources = {"unigram_log_probs": unigram(vocab_size).to(device)}
    columns: list[dict[str, Tensor]] = []
    for rows in torch.arange(first_slot, first_slot + num_rows).split(ROWS_AT_ONCE):
        output = synthetic_output(rows, row_length, vocab_size, device)
        chosen = output.log_probs.gather(-1, output.tokens[..., None])[..., 0]
        encoded = codec.encode(output, 5, resources)
        columns.append({"tokens": output.tokens, "token_log_probs": chosen, **encoded})
    whole = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
    arrays = {name: _with_position_0(value) for name, value in whole.items()}
    tokens, chosen = arrays.pop("tokens"), arrays.pop("token_log_probs")
    rows = torch.arange(first_slot, first_slot + num_rows, device=device)
    noise = StoredRowNoise(codec, arrays, tokens, chosen, rows, 7, 0, resources)
    return Batch(tokens, chosen, rows, rows, global_batch_size, 0, 0, 3, noise)


def open_gates(student: torch.nn.Module, std: float = 0.1) -> None:
    """Draw the weights that training begins with at zero, gates and output layer, so that tokens
    hang on context."""
    torch.manual_seed(0)
    for name, parameter in student.named_parameters():
        if "adaLN" in name or "output_layer.linear" in name:
            torch.nn.init.normal_(parameter, std=std)


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
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    vocab_size: int,
    device: torch.device,
    context_length: int = 1024,
) -> GPT2LMHeadModel:
    """A GPT-2 with random weights; 36 x 1280 with 20 heads is the shape of GPT-2 Large."""
    shape = {"n_layer": num_layers, "n_embd": hidden_size, "n_head": num_heads}
    config = GPT2Config(vocab_size=vocab_size, n_positions=context_length, **shape)
    torch.manual_seed(0)
    with device:
        teacher = GPT2LMHeadModel(config)
    return teacher.eval().requires_grad_(False)
