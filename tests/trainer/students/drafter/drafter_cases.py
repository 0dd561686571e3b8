"""Tiny drafters on random backbones, with weights that do something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.backbone_cases import backbone_run, store_of, write_backbone
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.drafter.student import Drafter
from trainer.training.construction import build_student

RECIPES: dict[str, dict[str, Any]] = {
    "none": {"model__conditioning": "none"},
    "uniform": {"model__conditioning": "uniform", "model__backbone__own_noise": "seen"},
    "seen": {"model__conditioning": "gumbel", "model__backbone__own_noise": "seen"},
    "hidden": {"model__conditioning": "gumbel", "model__backbone__own_noise": "hidden"},
    "waiting": {
        "model__conditioning": "gumbel",
        "model__backbone__own_noise": "hidden",
        "model__noise__layers": [1, 1],
    },
}


def tiny_drafter(
    folder: Path, shape: str = "llama", recipe: str = "hidden", scale: float = 0.3, **changes: Any
) -> tuple[Drafter, ShardStore]:
    """A drafter at step 0 (``scale`` 0), or with random adapters, slots and noise embedding."""
    backbone = folder / shape
    if not backbone.exists():
        write_backbone(backbone, shape)
    store = folder / f"store-{shape}"
    if not store.exists():
        store_of(store, backbone)
    config = backbone_run(backbone, "drafter", **{**RECIPES[recipe], **changes})
    student = build_student(config, ShardStore.open(store), None)
    assert isinstance(student, Drafter)
    torch.manual_seed(5)
    if scale:
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter, std=scale)
    return student, ShardStore.open(store)


def a_noise_table(student: Drafter, num_rows: int, length: int, seed: int = 2) -> Tensor:
    """Noise embeddings of no noise in particular, and the shares that slots wait for."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(num_rows, length, 16, generator=generator)
    if not len(student.readings):
        return table
    shares = 3 * torch.randn(num_rows, length, student.config.vocab_size, generator=generator)
    return torch.cat((table, shares.softmax(dim=-1)), dim=-1)


def a_batch(store: ShardStore, num_rows: int = 4, seed: int = 0) -> Batch:
    """The first rows of the train split with their noise."""
    make = BatchMaker(store, "train", seed, torch.device("cpu"), True)
    rows = ShardStream(
        store.split("train", make.arrays), seed=seed, global_batch_size=num_rows, num_workers=0
    )
    return make(next(iter(rows)), 0)
