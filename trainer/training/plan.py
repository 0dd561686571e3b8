"""How much memory a run will hold, by a formula, before it starts.

State follows from the parameters; what the backward pass keeps of a transformer layer is taken as
34 bytes per token and unit of width in 16 bit, twice that in 32 (Korthikanti et al. 2022, eq. 2,
without the attention scores, which the kernels do not keep); tiles of logits and of noise are as
large as the code makes them. An estimate: allocators and kernels add to it.
"""

from __future__ import annotations

from shards.console import aligned
from shards.errors import UsageError
from shards.store.store import ShardStore
from trainer.students.fused_head import CHUNK_ROWS
from trainer.training.construction import build_student
from trainer.training.settings import RunConfig

BYTES_KEPT = {"bf16": 34, "fp32": 68}


def memory_plan(config: RunConfig, store: ShardStore, num_processes: int = 1) -> dict[str, int]:
    """Bytes that one process holds at its peak, part by part.

    Args:
        config: The run.
        store: A finished store.
        num_processes: Processes of the run; with ``training.sharding=fsdp`` they share the state.

    Raises:
        UsageError: When the batch does not divide, or the student cannot be trained on the store.
    """
    training, size = config.training, config.training.global_batch_size
    if size % num_processes:
        where = "training.global_batch_size"
        expected = f"a multiple of the world size {num_processes}"
        raise UsageError("the batch does not divide", where=where, got=size, expected=expected)
    rows = min(training.micro_batch_size or size, size // num_processes)
    student = build_student(config, store, None)
    trained = 4 * sum(p.numel() for p in student.parameters() if p.requires_grad)
    frozen = [p for p in student.parameters() if not p.requires_grad]
    frozen = sum(p.numel() * p.element_size() for p in [*frozen, *student.frozen_weights])
    pieces = num_processes if training.sharding == "fsdp" else 1
    shape, vocab_size = student.settings, store.manifest.vocab_size
    tokens = rows * student.num_read_tokens
    kept = BYTES_KEPT[training.precision] * shape.hidden_size * shape.num_layers
    chunk = min(tokens, CHUNK_ROWS["cpu" if training.device == "cpu" else "cuda"])
    return {
        "weights": trained // pieces + frozen,
        "gradients": trained // pieces,
        "AdamW's moments": 2 * trained // pieces,
        "moving average of the weights": trained // pieces,
        "kept for the backward pass": tokens * kept,
        "a tile of logits, or of noise": 8 * chunk * (vocab_size + 1),
    }


def plan_text(config: RunConfig, store: ShardStore, num_processes: int) -> str:
    """One line a part, in decimal megabytes, and their sum."""
    parts = memory_plan(config, store, num_processes)
    rows = [[name, f"{size / 1e6:,.1f} MB"] for name, size in parts.items()]
    rows.append(["in all, estimated", f"{sum(parts.values()) / 1e6:,.1f} MB"])
    return "\n".join([f"peak memory of one of {num_processes} processes", *aligned(rows)])
