"""What the GPU suite times: steps from real shards, blocks, a sampler, extraction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.extract import case_of, measure, random_teacher
from benchmarks.measure import interleaved_seconds
from benchmarks.sampling import LARGE_BATCH, SHAPES, Trial
from benchmarks.steps import finish_step, online_batch, tiled_loss
from benchmarks.synthetic import make_student, make_teacher, random_batch, write_store
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from trainer.objective.batch import Batch, BatchMaker
from trainer.sampling.orders import FirstHittingSampler
from trainer.students.registry import MDLM, StudentSettings
from trainer.training.checkpoint import make_optimizer
from trainer.training.settings import OptimizationConfig

H200_BF16_FLOPS = 989e12


def model_flops(student: MDLM, num_rows: int, num_masked: int) -> int:
    """FLOPs of a training pass of a DiT, backward included.

    6 per weight of the blocks and token, 12 D per layer and pair of positions; per masked token 6 D V
    of the head and 4 D V of the noise projection, whose noise has no gradient.
    """
    settings, length = student.settings, student.config.row_length
    width, layers = settings.hidden_size, settings.num_layers
    weights = (4 + 2 * settings.mlp_ratio) * width**2 * layers
    head = (6 + 4 * student.is_conditioned) * width * (student.config.vocab_size + 1)
    return num_rows * (6 * weights * length + 12 * width * layers * length**2) + num_masked * head


@dataclass(frozen=True)
class SuiteShape:
    """What the suite runs at.

    ``teacher``: layers, width, heads; ``conditioner``: width and masked tokens; ``rows``: (row
    length, global batch, micro-batch) of each training benchmark; ``stored_rows`` are read again
    and again; ``extraction``: GPT-2's names for a shape, rows and row length.
    """

    vocab_size: int
    student: StudentSettings
    teacher: tuple[int, int, int]
    conditioner: tuple[int, int]
    rows: tuple[tuple[int, int, int], ...]
    dtype: torch.dtype
    repeats: int
    stored_rows: int
    sampled: str
    extraction: tuple[dict[str, int], int, int]


PAPER = SuiteShape(
    vocab_size=50257,
    student=StudentSettings(conditioning="gumbel", dropout=0.0),
    teacher=(36, 1280, 20),
    conditioner=(768, 4096),
    rows=((128, 512, 128), (1024, 64, 16)),
    dtype=torch.bfloat16,
    repeats=3,
    stored_rows=64,
    sampled="paper",
    extraction=({"n_layer": 36, "n_head": 20, "n_embd": 1280}, 64, 1024),
)
TOY = SuiteShape(
    vocab_size=97,
    student=StudentSettings(
        hidden_size=32, num_layers=1, num_heads=2, condition_size=8, dropout=0.0,
        conditioning="gumbel",
    ),
    teacher=(1, 32, 2),
    conditioner=(16, 32),
    rows=((16, 4, 2), (32, 2, 1)),
    dtype=torch.float32,
    repeats=1,
    stored_rows=4,
    sampled="toy",
    extraction=({"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 97}, 4, 16),
)  # fmt: skip
SUITE_SHAPES = {"paper": PAPER, "toy": TOY}


def training_throughput(
    shape: SuiteShape, row_length: int, batch_size: int, micro: int, device: torch.device
) -> dict[str, Any]:
    """Tokens per second from a store's shards and with an online teacher; MFU.

    A step is ``batch_size / micro`` micro-batches of forward and backward and one update. "From
    shards" is all that training does: chunks are read, decoded, shuffled and copied to the device
    within the time. The online teacher gets its rows for nothing, in memory.
    """
    student = make_student("mdlm", shape.student, row_length, shape.vocab_size, device)
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))
    teacher = make_teacher(shape.teacher, shape.vocab_size, max(row_length, 8), device)
    teacher = teacher.to(shape.dtype)
    slots = [range(first, first + micro) for first in range(0, batch_size, micro)]
    parts = [random_batch(s, row_length, shape.vocab_size, device, batch_size) for s in slots]

    def losses(batches: Iterator[Batch]) -> Iterator[Tensor]:
        for part in batches:
            with torch.autocast(device.type, shape.dtype, enabled=shape.dtype != torch.float32):
                loss = tiled_loss(student, part) / len(parts)
            yield loss

    def step(batches: Iterator[Batch]) -> None:
        finish_step(losses(batches), student, optimizer)

    with tempfile.TemporaryDirectory() as folder:
        rows = max(shape.stored_rows, batch_size)
        store = write_store(Path(folder) / "store", "posterior", rows, row_length, shape.vocab_size)
        stored = _stored_parts(store, batch_size, micro, device)
        work = {
            "from shards": lambda: step(next(stored)),
            "online teacher": lambda: step(online_batch(teacher, part) for part in parts),
        }
        seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    chosen = {name: median(values) for name, values in seconds.items()}
    tokens = batch_size * row_length
    flops = model_flops(student, batch_size, tokens // 2)
    sizes = {"row_length": row_length, "batch_size": batch_size, "micro_batch_size": micro}
    return {
        **sizes,
        "seconds": chosen,
        "tokens_per_second": {name: tokens / value for name, value in chosen.items()},
        "decoupling_gain": chosen["online teacher"] / chosen["from shards"],
        "model_flops_per_step": flops,
        "mfu_of_h200_bf16": flops / chosen["from shards"] / H200_BF16_FLOPS,
    }


def _stored_parts(store: ShardStore, batch_size: int, micro: int, device: torch.device) -> Iterator[Iterator[Batch]]:
    """The micro-batches of one step after another, read as training reads them."""
    make_batch = BatchMaker(store, "train", 3, device, with_noise=True)
    reader = store.split("train", make_batch.arrays)
    stream = ShardStream(reader, seed=3, global_batch_size=batch_size, num_workers=2)
    while True:
        for rows in stream:
            yield (part.to(device) for part in make_batch(rows).micro_batches(micro))


def block_training(shape: SuiteShape, device: torch.device) -> dict[str, Any]:
    """BD3-LM steps with SDPA and with FlexAttention (the latter on CUDA only)."""
    row_length, _, micro = shape.rows[-1]
    paths = ("sdpa", "flex") if device.type == "cuda" else ("sdpa",)
    batch = random_batch(range(micro), row_length, shape.vocab_size, device, micro)
    work = {path: _block_step(shape, path, row_length, batch, device) for path in paths}
    seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    chosen = {name: median(values) for name, values in seconds.items()}
    return {"row_length": row_length, "batch_size": micro, "block_size": 4, "seconds": chosen}


def _block_step(
    shape: SuiteShape, path: str, row_length: int, batch: Batch, device: torch.device
) -> Callable[[], object]:
    settings = replace(shape.student, block_size=4, attention=path)
    student = make_student("bd3lm", settings, row_length, shape.vocab_size, device)
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-12))

    def step() -> object:
        with torch.autocast(device.type, shape.dtype, enabled=shape.dtype != torch.float32):
            loss = tiled_loss(student, batch)
        return finish_step([loss], student, optimizer)

    return step


def first_hitting(shape: SuiteShape, device: torch.device) -> dict[str, Any]:
    """Tokens per second of the first-hitting sampler, many rows at a time over one."""
    sampled = SHAPES[shape.sampled]
    shaped = (sampled.settings, sampled.row_length, sampled.vocab_size, device)
    given = (make_student("mdlm", *shaped).eval(), FirstHittingSampler())
    work: dict[str, Callable[[], object]] = {
        str(rows): Trial("", *given, rows, sampled, shape.dtype) for rows in (1, LARGE_BATCH)
    }
    seconds = interleaved_seconds(work, device, repeats=shape.repeats)
    filled = sampled.num_filled
    speed = {name: int(name) * filled / median(values) for name, values in seconds.items()}
    gain = speed[str(LARGE_BATCH)] / speed["1"]
    return {"num_filled": filled, "tokens_per_second": speed, "batched_gain": gain}


def extraction(shape: SuiteShape, device: torch.device) -> dict[str, Any]:
    """Stage 2 with the default codec over transformers' bare forward pass of the same rows."""
    teacher_shape, num_rows, row_length = shape.extraction
    dtype = str(shape.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        source = random_teacher(teacher_shape, Path(folder) / "teacher")
        draw = np.random.default_rng(0)
        rows = draw.integers(shape.vocab_size, size=(num_rows, row_length), dtype=np.int32)
        case = case_of(source, dtype, device, rows, Path(folder))
        return measure(case, ["posterior"], shape.repeats)
