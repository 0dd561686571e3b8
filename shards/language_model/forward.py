"""Rows through a model: how many at once, on which device, and logits that are not rounded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from shards.console import stderr
from shards.errors import GdistillError, UsageError, first_line

LARGEST_GPU_TENSOR = 2**31 - 1
"""Elements; beyond it kernels that count in 32 bits fail, or worse."""


def largest_batch(row_elements: int, device: torch.device) -> int:
    """Rows whose tensors a device's kernels can index; at least one, whatever its length."""
    if device.type != "cuda":
        return sys.maxsize
    return max(1, LARGEST_GPU_TENSOR // row_elements)


def require_indexable(row_elements: int, device: torch.device, remedy: str) -> None:
    """Refuse rows of which a GPU's kernels cannot index one; ``row_elements``: tokens x vocabulary."""
    if device.type == "cuda" and row_elements > LARGEST_GPU_TENSOR:
        what, got = "one row is too long for a GPU's kernels", f"{row_elements:,} logits of a row"
        expected = f"at most {LARGEST_GPU_TENSOR:,}, tokens x vocabulary"
        raise GdistillError(what, where=device, got=got, expected=expected, remedy=remedy)


@dataclass
class BatchSize:
    """Rows per batch, halved for the rest of the run whenever memory runs out.

    Batches begin at the same rows in every run, whoever does the shard: float rounding may depend
    on what shares a batch. Backing off is the one thing that moves the borders.
    """

    rows: int

    def halve(self, error: BaseException, num_rows: int) -> None:
        """Back off from a batch of ``num_rows`` rows that did not fit; GdistillError if it had one."""
        if num_rows == 1:
            what = "out of memory with a batch of one row"
            remedy = "use shorter rows, --dtype bfloat16 or a larger device"
            raise GdistillError(what, got=first_line(error), remedy=remedy) from error
        self.rows = num_rows // 2
        stderr.print(f"out of memory: batches of {self.rows} rows from here on")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller batch may help."""
    from accelerate.utils.memory import should_reduce_batch_size  # slow to load

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and should_reduce_batch_size(error)


def in_batches(work: Callable[[slice], None], num_rows: int, size: BatchSize) -> None:
    """Do ``work`` on all rows, batch by batch; where memory runs out, the size is halved for good."""
    start = 0
    while start < num_rows:
        part, failure = slice(start, min(start + size.rows, num_rows)), None
        try:
            work(part)
            start = part.stop
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = MemoryError(first_line(error))
        # Not while the error is handled: its traceback holds every tensor of the attempt.
        if failure is not None:
            torch.cuda.empty_cache()
            size.halve(failure, part.stop - part.start)


# Where a model computes, and in what precision.


DtypeName = Literal["float32", "bfloat16"]


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device that this PyTorch can compute on; else a UsageError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device, what = None, "unknown device"
    with suppress(RuntimeError):
        device, what = torch.device(name), "device not supported"
    if device is None or device.type not in ("cpu", "cuda"):
        expected, remedy = "auto, cpu, cuda or cuda:N", "use --device auto"
        raise UsageError(what, where="--device", got=name, expected=expected, remedy=remedy)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        got = f"{torch.cuda.device_count()} GPUs that this PyTorch can use"
        expected = "a GPU, and a build of PyTorch for it"
        remedy = "use --device cpu, or install a CUDA build of PyTorch"
        what, where = "no such GPU", f"--device {name}"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    return device


def allow_tf32(device: torch.device) -> str:
    """Let this process's float32 matrix products run as TF32 on a GPU that has it; which of both runs.

    For what tolerates inputs of 10 bits: samples of a student, perplexity under a judge.
    Extraction does not: log p of a token moves by up to 0.04 nats (emulated on a CPU), and is
    promised to 2e-4. ``NVIDIA_TF32_OVERRIDE=0`` turns it off.
    """
    if device.type != "cuda" or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return "float32"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "float32"
    torch.backends.cuda.matmul.allow_tf32 = True
    return "TF32"


# The last layer of a model: logits in float32 whatever the precision of the rest.
#
# Logits of GPT-2 lie around -90, where bfloat16 steps by half a nat; rounding them costs 0.01 nats of KL per token.
# The product of bfloat16 factors is exact in float32, so the head never rounds at all.


class Float32Head(nn.Module):
    """Takes the place of a model's output layer and remembers its last input [B, T, D] and output [B, T, V]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.last_hidden: Tensor | None = None
        self.last_logits: Tensor | None = None
        self._wide = None
        if self.weight.dtype != torch.float32 and self.weight.device.type != "cuda":
            self._wide = self.weight.float()

    def forward(self, hidden: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
        hidden = hidden.to(self.weight.device)  # the layer before may lie on another one
        bias = None if self.bias is None else self.bias.float()
        if self.weight.dtype == torch.float32 or self._wide is not None:
            weight = self.weight if self._wide is None else self._wide
            logits = functional.linear(hidden.float(), weight, bias)
        else:
            flat = hidden.flatten(0, -2).to(self.weight.dtype)
            logits = torch.mm(flat, self.weight.T, out_dtype=torch.float32)
            logits = logits if bias is None else logits.add_(bias)
            logits = logits.unflatten(0, hidden.shape[:-1])
        self.last_hidden, self.last_logits = hidden, logits
        return logits

    def forget(self) -> None:
        """Let go of the remembered tensors."""
        self.last_hidden = self.last_logits = None


def install_float32_head(network: nn.Module) -> Float32Head | None:
    """Put a float32 head in place of the model's output layer, if that is a plain linear one."""
    linear = network.get_output_embeddings()  # type: ignore[operator]
    if type(linear) is not nn.Linear:
        return None
    head = Float32Head(linear)
    network.set_output_embeddings(head)  # type: ignore[operator]
    return head
