"""Device to host without holding up the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, complete when this returns.

    On a GPU the copies go to pinned memory on a stream of their own, so that kernels of the next
    batch run meanwhile.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if not any(device.type == "cuda" for device in devices):
        return dict(tensors)
    device = devices.pop()
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    host = {}
    with torch.cuda.stream(stream):
        for name, tensor in tensors.items():
            host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host[name].copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
    stream.synchronize()
    return host


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
