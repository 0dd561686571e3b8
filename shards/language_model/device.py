"""Where a model computes, and in what precision."""

from __future__ import annotations

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


def _refused(what: str, name: str) -> UsageError:
    return UsageError(
        what,
        where="--device",
        got=name,
        expected="auto, cpu, cuda or cuda:N",
        remedy="use --device auto",
    )
