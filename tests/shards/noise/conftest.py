"""The compiled noise kernel, where this machine can make one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from shards.noise.philox import use_noise_kernel


@pytest.fixture(scope="module")
def compiled_noise() -> Iterator[None]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the compiler of PyTorch writes no code for its plainest kernels")
    use_noise_kernel("compiled")
    yield
    use_noise_kernel("eager")
