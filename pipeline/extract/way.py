"""The workers of one store compute alike: the first one's way is recorded, and others follow it.

Two things a worker can choose are taken over from the first, threads and rows of a forward pass.
The rest it can only have or not: the device, the kernels of its CPU, the versions of libraries. A
worker that differs there computes the same log-probabilities within rounding, so it is told, and
refused only where the user is strict.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipeline.settings import ExtractSettings
from pipeline.teacher import Teacher, automatic_batch_size
from shards.base import UsageError, stderr
from shards.language_model import largest_batch, require_indexable
from shards.noise import noise_kernel
from shards.store import Manifest, ShardWriter, read_ways, record_ways

ROUNDING_NATS = 2e-4
"""Twice the most that log p of a token moved between CPU kernels, threads and rows per pass in
float32: 9.3e-5, with stories260K on 65,536 tokens of text, log p down to -32."""


@dataclass(frozen=True)
class WayOfComputing:
    """What decides the last bits of a forward pass.

    Attributes:
        device: ``cpu``, or the GPU's name; ``4 x`` before it where the teacher lies on several.
        threads: CPU threads of a forward pass; 0 on a GPU.
        rows_per_pass: Rows of a forward pass.
        kernels: Instruction set of the CPU's kernels; on a GPU, whether TF32 is allowed, and where
            the noise kernel could not be compiled.
        attention: Attention kernel by transformers' name.
        compiled: Whether the model runs through ``torch.compile``.
        torch: Version.
        transformers: Version.
    """

    device: str
    threads: int
    rows_per_pass: int
    kernels: str
    attention: str
    compiled: bool
    torch: str
    transformers: str

    def difference(self, other: dict[str, Any]) -> str:
        """``name value, was value`` of every field that differs; empty if none does."""
        mine = asdict(self)
        return ", ".join(
            f"{name} {value} (was {other.get(name)})"
            for name, value in mine.items()
            if value != other.get(name)
        )


def settle_way(writer: ShardWriter, settings: ExtractSettings, teacher: Teacher) -> WayOfComputing:
    """Fix how this process computes, like the store's first worker where it can, and record it.

    Raises:
        UsageError: If it computes differently and the settings are strict.
    """
    with writer.location.claim("way", wait=True):  # two that begin at once agree on who is first
        ways = read_ways(writer.location)
        first = ways[0] if ways else {}
        way = _own_way(writer.manifest, settings, teacher, first)
        difference = way.difference(first) if first else ""
        if difference and settings.strict:
            raise UsageError(
                "this process computes differently from the store's first worker",
                where=writer.location.url,
                got=difference,
                remedy="run it on the same hardware and software, or without --strict",
            )
        record_ways(writer.location, [asdict(way)])
    if difference:
        stderr.print(
            f"this process computes differently from the store's first worker: {difference}; "
            f"log-probabilities agree within rounding ({ROUNDING_NATS:g} nats in float32)"
        )
    return way


def _own_way(
    manifest: Manifest, settings: ExtractSettings, teacher: Teacher, first: dict[str, Any]
) -> WayOfComputing:
    on_gpu = teacher.device.type == "cuda"
    device = torch.cuda.get_device_name(teacher.device) if on_gpu else "cpu"
    if teacher.num_devices > 1:
        device = f"{teacher.num_devices} x {device}"
    followed = first if str(first.get("device")).endswith("cpu") != on_gpu else {}
    threads = 0
    if not on_gpu:
        threads = settings.threads or followed.get("threads") or torch.get_num_threads()
        torch.set_num_threads(threads)
    rows = settings.batch_size or followed.get("rows_per_pass") or _rows(manifest, teacher)
    row_elements = manifest.row_length * teacher.files.num_logits
    remedy = "extract shorter rows: --row-length"
    require_indexable(row_elements, teacher.device, remedy)
    rows = min(rows, largest_batch(row_elements, teacher.device))
    return WayOfComputing(
        device=device,
        threads=threads,
        rows_per_pass=rows,
        kernels=_kernels(on_gpu),
        attention=str(getattr(teacher.model.config, "_attn_implementation", None)),
        compiled=settings.teacher.compiled,
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
    )


def _kernels(on_gpu: bool) -> str:
    if on_gpu:
        products = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
        return products + ("" if noise_kernel("cuda") == "compiled" else ", eager noise")
    kept = os.environ.get("MKL_CBWR")
    return torch.backends.cpu.get_cpu_capability() + (f" MKL_CBWR={kept}" if kept else "")


def _rows(manifest: Manifest, teacher: Teacher) -> int:
    weight_bytes = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
    return automatic_batch_size(
        manifest.row_length, teacher.files.num_logits, weight_bytes, teacher.device
    )
