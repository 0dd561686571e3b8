"""Stores and teachers with true shapes and random content: no network, no weights, no data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shards.codec.protocol import Codec, TeacherOutput, codec_parameters, make_codec
from shards.store.manifest import Manifest
from shards.store.store import ShardStore, ShardWriter
from shards.stream.stream import RowBatch
from trainer.objective.batch import Batch, BatchMaker, StoredRowNoise
from trainer.students.registry import STUDENTS, Student, StudentSettings

ROWS_AT_ONCE, SEED = 8, 5


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


def write_store(folder: Path, codec_name: str, num_rows: int, row_length: int, vocab_size: int) -> ShardStore:
    """A complete store of synthetic rows under that codec."""
    codec = make_codec(codec_name)
    resources = {"unigram_log_probs": unigram(vocab_size)}
    units = dict.fromkeys(("rows_per_shard", "rows_per_chunk"), min(ROWS_AT_ONCE, num_rows))
    manifest = Manifest(
        codec={"name": codec_name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(vocab_size, None),
        vocab_size=vocab_size,
        row_length=row_length,
        splits={"train": num_rows},
        seed=SEED,
        **units,
        **{key: {} for key in ("teacher", "tokenizer", "tokens", "versions")},
    )
    arrays = {name: value.numpy() for name, value in resources.items()}
    writer = ShardWriter.create_or_resume(folder, manifest, arrays)
    for shard in writer.pending("train"):
        output = synthetic_output(torch.arange(shard.start, shard.stop), row_length, vocab_size)
        columns = _columns(output, codec, resources)
        writer.write(shard, {name: value.numpy() for name, value in columns.items()})
    return ShardStore.open(folder)


def _columns(output: TeacherOutput, codec: Codec, resources: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of rows, position 0 among them."""
    given = {"tokens": output.tokens.int(), "token_log_probs": output.token_log_probs}
    found = {**given, **codec.encode(output, SEED, resources)}
    return {n: torch.cat((torch.zeros_like(v[:, :1]), v), dim=1) for n, v in found.items()}


def batch_reader(
    store: ShardStore, num_rows: int, device: torch.device, with_noise: bool = True
) -> Callable[[int], Batch]:
    """Step -> the first rows of a store as its global batch; every step is an epoch of its own."""
    make = BatchMaker(store, "train", 7, device, with_noise=with_noise)
    read = store.split("train").read_rows(0, num_rows)
    arrays = {name: torch.from_numpy(value) for name, value in read.items() if name in make.arrays}
    index = torch.arange(num_rows)
    rows = partial(RowBatch, arrays, index, index, num_rows)
    return lambda step: make(rows(epoch=step, step=step)).to(device)


def random_batch(slots: range, row_length: int, vocab_size: int, device: torch.device, global_batch_size: int) -> Batch:
    """Rows as a store under the ``posterior`` codec gives them, made in memory on the device."""
    codec = make_codec("posterior")
    resources = {"unigram_log_probs": unigram(vocab_size).to(device)}
    rows = torch.tensor(slots, device=device)
    columns = [
        _columns(synthetic_output(part, row_length, vocab_size, device), codec, resources)
        for part in rows.split(ROWS_AT_ONCE)
    ]
    arrays = {name: torch.cat([part[name] for part in columns]) for name in columns[0]}
    tokens, chosen = arrays.pop("tokens").long(), arrays.pop("token_log_probs")
    noise = StoredRowNoise(codec, arrays, tokens, chosen, rows, 7, 0, resources)
    return Batch(tokens, chosen, rows, rows, global_batch_size, 0, 3, noise)


def make_student(
    kind: str, settings: StudentSettings, row_length: int, vocab_size: int, device: torch.device
) -> Student:
    """A student whose zero-initialised parameters are random too, so that every path contributes.

    Training begins with gates and output layer at zero: its tokens would not hang on context.
    """
    torch.manual_seed(0)
    build = STUDENTS[kind].config_class.build
    student = STUDENTS[kind](build(settings, vocab_size=vocab_size, row_length=row_length))
    for parameter in student.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return student.to(device).train()  # type: ignore[arg-type]


def make_teacher(
    shape: tuple[int, int, int], vocab_size: int, context_length: int, device: torch.device
) -> GPT2LMHeadModel:
    """A GPT-2 with random weights; layers, width and heads of GPT-2 Large are 36, 1280 and 20."""
    sizes = dict(zip(("n_layer", "n_embd", "n_head"), shape, strict=True))
    config = GPT2Config(vocab_size=vocab_size, n_positions=context_length, **sizes)
    torch.manual_seed(0)
    with device:
        teacher = GPT2LMHeadModel(config)
    return teacher.eval().requires_grad_(False)
