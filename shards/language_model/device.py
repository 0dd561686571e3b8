"""Where a model computes, and in what precision."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from shards.base import UsageError

if TYPE_CHECKING:
    import torch

DtypeName = Literal["float32", "bfloat16"]


def resolve_device(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N`` as a device that this PyTorch can compute on.

    Raises:
        UsageError: If there is no such device here, or it is of another type.
    """
    import torch  # not above: settings need the names of precisions, and a --help not torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise _refused("unknown device", name) from error
    if device.type not in ("cpu", "cuda"):
        raise _refused("device not supported", name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            "no such GPU",
            where=f"--device {name}",
            got=f"{torch.cuda.device_count()} GPUs that this PyTorch can use",
            expected="a GPU, and a build of PyTorch for it",
            remedy="use --device cpu, or install a CUDA build of PyTorch",
        )
    return device


def allow_tf32(device: torch.device) -> str:
    """Let this process's float32 matrix products run as TF32 on a GPU that has it.

    For what tolerates inputs of 10 bits: samples of a student, perplexity under a judge (what it
    costs: benchmarks/results/gpu_precision.json). Extraction does not: log p of a token moves by
    up to 0.04 nats, and is promised to 2e-4. ``NVIDIA_TF32_OVERRIDE=0`` turns it off.

    Returns:
        What runs: ``TF32`` or ``float32``.
    """
    import torch

    if device.type != "cuda" or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return "float32"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "float32"
    torch.backends.cuda.matmul.allow_tf32 = True
    return "TF32"


def _refused(what: str, name: str) -> UsageError:
    return UsageError(
        what,
        where="--device",
        got=name,
        expected="auto, cpu, cuda or cuda:N",
        remedy="use --device auto",
    )
