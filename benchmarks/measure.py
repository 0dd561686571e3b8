"""Time and peak memory of a piece of work, and the machine it ran on."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from shards.settings import code_version


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue, so that a host clock means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleaved_seconds(
    work: Mapping[str, Callable[[], object]], device: torch.device, *, repeats: int = 5
) -> dict[str, list[float]]:
    """Seconds of each piece of work, measured in turns so that drift hits all of them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(1 + repeats):  # the first warms up
        for name, run in work.items():
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most memory held at once during ``run`` beyond what was held before.

    CUDA: the allocator's own count. CPU: the kernel's high-water mark of resident memory, reset
    before the run (Linux only).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Freed pages that malloc keeps would count as held before, and hide what the run needs.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    return 1024 * int(_entry("self/status", field).split()[0])


def _entry(file: str, name: str) -> str:
    """What a file of /proc says behind ``name:``; nothing where it does not."""
    lines = Path("/proc", file).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def machine(device: torch.device) -> dict[str, object]:
    """What the figures were measured on, and the code that measured them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "device": device.type,
        "name": name or _entry("cpuinfo", "model name") or platform.processor(),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "commit": code_version(),
    }
