"""Validation: the averaged weights, every row once, the same corruption every time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shards.errors import GdistillError, UsageError
from shards.provenance import derive_seed
from shards.store.reader import SplitReader
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from trainer.objective.batch import Batch, BatchMaker
from trainer.objective.schedules import FULL, MAX_BATCHES, Clips, best_clips, candidates
from trainer.objective.substitution import require_reachable
from trainer.students.registry import LossOutput, Student
from trainer.training.parallel import sum_over_processes
from trainer.training.settings import RunConfig

SPLIT = "validation"


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a split."""

    reader: SplitReader
    num_rows: int

    @property
    def fingerprint(self) -> str:
        return f"{self.reader.fingerprint}, first {self.num_rows}"

    @property
    def rows_per_chunk(self) -> int:
        return self.reader.rows_per_chunk

    @property
    def chunk_bytes(self) -> int:
        return self.reader.chunk_bytes

    def read_chunk(self, index: int) -> dict[str, np.ndarray]:
        return self.reader.read_chunk(index)


class Validator:
    """Scores a student on the validation split.

    Corruption and noise are keyed by the run seed and the row alone, so every validation of a run
    meets the same ones, and times cover (1e-3, 1) whatever clips training uses.

    Raises:
        UsageError: When the split has fewer rows than there are processes.
    """

    def __init__(
        self, config: RunConfig, store: ShardStore, accelerator: Accelerator, with_noise: bool
    ) -> None:
        self._config, self._accelerator = config.training, accelerator
        seed = derive_seed(config.seed, "validation")
        self._make_batch = BatchMaker(store, SPLIT, seed, accelerator.device, with_noise)
        reader = store.split(SPLIT, self._make_batch.arrays)
        num_rows = min(reader.num_rows, self._config.num_validation_rows or reader.num_rows)
        if num_rows < accelerator.num_processes:
            raise UsageError(
                "too few validation rows for the processes",
                where="training.num_validation_rows",
                got=num_rows,
                expected=f"at least {accelerator.num_processes}",
            )
        self._stream = ShardStream(
            FirstRows(reader, num_rows),
            seed=seed,
            global_batch_size=self._config.validation_batch_size or self._config.global_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_workers=self._config.num_workers,
            shuffle=False,
        )

    @torch.no_grad()
    def score(self, module: nn.Module, student: Student) -> dict[str, Any]:
        """NLL per token in nats (a bound for diffusion students), position 0 not counted."""
        nll_sum, num_tokens = 0.0, 0
        for batch in self._batches():
            outputs = self._outputs(module, batch, FULL)
            for value in torch.stack([output.nll_sum for output in outputs]).tolist():
                nll_sum += value
            num_tokens += sum(output.num_tokens for output in outputs)
        total, count = sum_over_processes([nll_sum, float(num_tokens)], self._accelerator)
        nll = total / count
        if not math.isfinite(nll):
            raise GdistillError(
                "the validation loss is not finite",
                where=SPLIT,
                got=f"{nll} nats per token",
                remedy="lower the learning rate and go on from the last good checkpoint",
            )
        return {
            "nll_nats": nll,
            "perplexity": math.exp(min(nll, 700.0)),
            "num_tokens": int(count),
            "conditional": student.is_conditioned,
        }

    @torch.no_grad()
    def search_clips(self, module: nn.Module, student: Student) -> Clips:
        """The clips of t under which the block losses vary least (var_min)."""
        losses = {}
        for clips in candidates():
            if not _is_reachable(clips, student):
                continue
            losses[clips] = [
                self._gather_blocks(self._outputs(module, batch, clips))
                for _, batch in zip(range(MAX_BATCHES), self._batches(), strict=False)
            ]
        return best_clips(losses)

    def _batches(self) -> Iterator[Batch]:
        for rows in self._stream.one_pass():
            yield self._make_batch(rows, rows.step)

    def _outputs(self, module: nn.Module, batch: Batch, clips: Clips) -> list[LossOutput]:
        device = self._accelerator.device
        outputs = [module(part.to(device), clips) for part in self._parts(batch)]
        if isinstance(module, FSDPModule):
            module.reshard()  # else the next forward would reuse these gathered weights
        return outputs

    def _parts(self, batch: Batch) -> list[Batch]:
        """Micro-batches, as many on every process: a sharded forward pass is collective.

        A process's share of the last batch may be a row short, or empty.
        """
        size = self._config.micro_batch_size
        parts = list(batch.micro_batches(size))
        largest_share = -(-batch.global_batch_size // self._accelerator.num_processes)
        wanted = 1 if size is None else -(-largest_share // size)
        return parts + [batch.rows(slice(0))] * (wanted - len(parts))

    def _gather_blocks(self, outputs: list[LossOutput]) -> Tensor:
        local = torch.cat([output.block_nlls.float().cpu() for output in outputs])
        return torch.cat(gather_object([local]))


def _is_reachable(clips: Clips, student: Student) -> bool:
    if not student.settings.diffusion.resample:
        return True
    try:
        require_reachable(clips, student.config.tokens_per_block)
    except UsageError:
        return False
    return True


def has_validation_rows(splits: Mapping[str, int]) -> bool:
    """Whether a store can be validated on."""
    return splits.get(SPLIT, 0) > 0
