"""Rows of a forward pass of the teacher, unless told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pipeline.teacher import automatic_batch_size
from shards.language_model.forward import largest_batch


def test_a_batch_on_a_cpu_fills_a_gibibyte_or_4096_tokens() -> None:
    cpu = torch.device("cpu")
    # Six float32 tensors of 128 x 50,257 logits are 154,389,504 bytes: six such rows in 2^30.
    assert automatic_batch_size(128, 50_257, 0, cpu) == 6
    assert automatic_batch_size(128, 512, 0, cpu) == 4096 // 128
    assert automatic_batch_size(1024, 200_000, 0, cpu) == 1


def test_no_tensor_of_a_gpu_has_more_elements_than_32_bits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V = 151,936 on 141 GB: 40% of the memory would hold 15 rows of 1,024 tokens."""
    gpu, row = torch.device("cuda"), 1024 * 151_936
    memory = SimpleNamespace(total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert automatic_batch_size(1024, 151_936, 0, gpu) == 13 == largest_batch(row, gpu)
    assert 13 * row < 2**31 <= 14 * row
    assert automatic_batch_size(1024, 50_257, 0, gpu) == 32, "of 2^15 tokens"
    assert largest_batch(2**31, gpu) == 1 and largest_batch(row, torch.device("cpu")) > 1000
