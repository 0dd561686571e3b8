"""How much memory a run will hold, part by part, before it starts.

State (weights, gradients, moments, moving average) follows from the student's parameters. What the
backward pass keeps is counted: two micro-batches, of one and of two of the store's own rows, go
through the forward pass on the CPU, and autograd is asked what it has saved; rows are alike, so
the rest is a line through both. Every position is masked, the dearest case. Tiles of logits and of
noise are as large as the code makes them on the device that is planned for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shards.errors import UsageError
from shards.noise.embedding import tile_shape
from shards.store.store import ShardStore
from shards.stream.order import window_bytes_of
from shards.stream.stream import ShardStream
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.conditioning import searched_at_once
from trainer.students.dit import Block, compiled_halves
from trainer.students.fused_head import CHUNK_ROWS, HEAD_MULTIPLE
from trainer.students.registry import Student
from trainer.training.construction import build_student
from trainer.training.parallel import TrainingStep
from trainer.training.settings import RunConfig

ALL_MASKED = (0.999, 1.0)
FLOAT32_BYTES = 4
NOISE_BUFFERS = 4
"""Tiles alive at a time while noise is embedded: bits, waits, rates and what is multiplied."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peak bytes of one process.

    Attributes:
        device: Part -> bytes on the device that trains.
        host: Part -> bytes of the process's main memory besides the libraries' own.
        micro_batch_rows: Rows of one forward pass.
        num_parameters: Parameters of the student.
    """

    device: Mapping[str, int]
    host: Mapping[str, int]
    micro_batch_rows: int
    num_parameters: int

    def to_json(self) -> dict[str, Any]:
        """The parts with their sums."""
        totals = {"device_bytes": sum(self.device.values()), "host_bytes": sum(self.host.values())}
        return {**asdict(self), **totals}

    def to_text(self) -> str:
        """One line a part, largest first, in decimal megabytes."""
        lines = [f"{self.num_parameters:,} parameters, {self.micro_batch_rows} rows a forward pass"]
        for place, parts in (("device", self.device), ("host", self.host)):
            lines.append(f"{place:<44}{sum(parts.values()) / 1e6:>12,.1f} MB at its peak")
            ordered = sorted(parts.items(), key=lambda part: -part[1])
            lines += [f"  {name:<42}{size / 1e6:>12,.1f} MB" for name, size in ordered]
        return "\n".join(lines)


def plan_memory(
    config: RunConfig, store: ShardStore, *, device: str = "cuda", world_size: int = 1
) -> MemoryPlan:
    """What one process of a run will hold at its peak.

    Args:
        config: The run.
        store: A finished store.
        device: Kind of device that will train: tiles are larger on ``cuda``.
        world_size: Processes of the run; with ``training.sharding=fsdp`` they share the state.

    Raises:
        UsageError: When the split has fewer than two rows, or the batch does not divide.
    """
    training = config.training
    if training.global_batch_size % world_size:
        raise UsageError(
            "the batch does not divide",
            where="training.global_batch_size",
            got=training.global_batch_size,
            expected=f"a multiple of the world size {world_size}",
        )
    share = training.global_batch_size // world_size
    rows = min(training.micro_batch_size or share, share)
    student = build_student(config, store, None).train()
    compiles = training.compile == "on" or (training.compile == "auto" and device == "cuda")
    compiles = compiles and cut_blocks(student)
    step = TrainingStep(student, training.precision)
    (batch,) = _batches(config, store, student, rows=2)
    one, two = (saved_bytes(step, batch.rows(slice(n))) for n in (1, 2))
    label = "kept for the backward pass" + (", blocks compiled" if compiles else "")
    kept = {label: one + (two - one) * (rows - 1)}
    row_bytes = _row_bytes(batch)
    masked = rows * store.manifest.row_length
    working = {
        "stored rows of a micro-batch": rows * row_bytes,
        **({"stored rows on their way": rows * row_bytes} if device == "cuda" else {}),
        "head in the products' precision": _head_bytes(student, device, training.precision),
        "the larger tile, of logits or of noise": max(
            _logits_bytes(student, masked, device, training.precision),
            _noise_bytes(student, masked, device),
        ),
    }
    pieces = world_size if training.sharding == "fsdp" else 1
    state = _state_bytes(student, pieces)
    return MemoryPlan(
        device={**state, **kept, **working},
        host=_host_bytes(config, store, student, share * row_bytes, world_size),
        micro_batch_rows=rows,
        num_parameters=sum(p.numel() for p in student.parameters()),
    )


def saved_bytes(step: TrainingStep, batch: Batch) -> int:
    """Bytes that autograd keeps of one forward pass, weights and the batch itself not counted."""
    given = {p.untyped_storage().data_ptr() for p in step.parameters()}
    others = [*step.buffers(), *step.student.frozen_weights]
    given |= {tensor.untyped_storage().data_ptr() for tensor in others}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = step(batch, ALL_MASKED)
    del output
    return sum(kept.values())


def _batches(config: RunConfig, store: ShardStore, student: Student, rows: int) -> list[Batch]:
    cpu = torch.device("cpu")
    make_batch = BatchMaker(store, "train", config.seed, cpu, student.reads_codec)
    reader = store.split("train", make_batch.arrays)
    stream = ShardStream(reader, seed=config.seed, global_batch_size=rows)
    return [make_batch(next(stream.one_pass()), 0)]


def _row_bytes(batch: Batch) -> int:
    """Bytes of one row's arrays."""
    tensors = [batch.tokens, batch.token_log_probs]
    if batch.noise is not None:
        tensors += getattr(batch.noise, "arrays", {}).values()
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(student: Student, pieces: int) -> dict[str, int]:
    """Weights, gradients, two moments and the average; sharded, with a block put together."""
    size = FLOAT32_BYTES * sum(p.numel() for p in student.parameters() if p.requires_grad)
    untrained: list[Tensor] = [p for p in student.parameters() if not p.requires_grad]
    untrained += student.frozen_weights
    frozen = sum(p.numel() * p.element_size() for p in untrained)
    buffers = sum(b.numel() * b.element_size() for b in student.buffers())
    parts = {
        "weights": -(-size // pieces) + frozen + buffers,
        "gradients": -(-size // pieces),
        "AdamW's moments": -(-2 * size // pieces),
        "moving average of the weights": -(-size // pieces),
    }
    if pieces > 1:
        blocks = [sum(p.numel() for p in b.parameters()) for b in student.sharded_blocks]
        rest = size // FLOAT32_BYTES - sum(blocks)
        parts["weights put together"] = 2 * FLOAT32_BYTES * (max(blocks) + rest)
    return parts


def cut_blocks(student: Student) -> bool:
    """Compile the student's blocks to what they would keep, without a compiler for any device.

    Returns:
        Whether it has blocks of its own.
    """
    blocks = [module for module in student.modules() if isinstance(module, Block)]
    halves = compiled_halves(_keeps_as_compiled)
    for block in blocks:
        block.halves = halves
    return bool(blocks)


def _keeps_as_compiled(graph: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that cuts forward from backward as Inductor does, and runs both eagerly."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def as_it_stands(part: Any, _: Any) -> Callable[..., Any]:
        return make_boxed_func(part.forward)

    cut = min_cut_rematerialization_partition
    table = select_decomp_table()
    return aot_autograd(fw_compiler=as_it_stands, partition_fn=cut, decompositions=table)(
        graph, inputs
    )


def _head_columns(student: Student, device: str) -> int:
    multiple = HEAD_MULTIPLE.get(device, HEAD_MULTIPLE["cuda"])
    return -(-(student.config.vocab_size + 1) // multiple) * multiple


def _head_bytes(student: Student, device: str, precision: str) -> int:
    """A copy of the head's weights that is narrower, or padded; none where neither is so."""
    columns = _head_columns(student, device)
    if precision != "bf16" and columns == student.config.vocab_size + 1:
        return 0
    return columns * student.settings.hidden_size * (2 if precision == "bf16" else FLOAT32_BYTES)


def _logits_bytes(student: Student, masked: int, device: str, precision: str) -> int:
    """Float32, and beside it the product in the run's own precision if that is another."""
    tile = min(masked, CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"]))
    narrow = 2 if precision == "bf16" else 0
    return tile * _head_columns(student, device) * (narrow + FLOAT32_BYTES)


def _noise_bytes(student: Student, masked: int, device: str) -> int:
    if not student.is_conditioned:
        return 0
    vocab_size = student.config.vocab_size
    tiles = noise_tile_bytes(vocab_size, masked, device)
    if not student.settings.noise.layers:
        return tiles
    # Later readings look at all V entries of some positions at a time, or of all.
    searched = masked
    if student.settings.noise.top_k:
        searched = searched_at_once(masked, vocab_size, torch.device(device))
    return max(tiles, NOISE_BUFFERS * FLOAT32_BYTES * searched * vocab_size)


def noise_tile_bytes(vocab_size: int, num_masked: int, device: str) -> int:
    """Float32 tiles that are alive at a time while noise is embedded, on a kind of device."""
    positions, ids = tile_shape(torch.device(device))
    return NOISE_BUFFERS * FLOAT32_BYTES * min(num_masked, positions) * min(vocab_size, ids)


def _host_bytes(
    config: RunConfig, store: ShardStore, student: Student, share_bytes: int, world_size: int
) -> dict[str, int]:
    """The shuffle's window (spread over the processes), batches read ahead, a checkpoint's copy."""
    arrays = BatchMaker(store, "train", 0, torch.device("cpu"), student.reads_codec).arrays
    reader = store.split("train", arrays)
    batch_size = config.training.global_batch_size
    window = window_bytes_of(reader.num_chunks, reader.chunk_bytes, batch_size)
    parameters = sum(p.numel() for p in student.parameters() if p.requires_grad)
    return {
        "chunks open for shuffling": -(-window // world_size),
        "batches": share_bytes * (2 + config.training.num_workers),
        "whole state while a checkpoint is written": 4 * FLOAT32_BYTES * parameters,
    }
