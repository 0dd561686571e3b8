"""TF32 where it is asked for and to be had, and what it rounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu_precision import RoundedProducts, rounded, to_tf32
from shards.language_model.forward import allow_tf32

GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "override", "runs"),
    [
        ((9, 0), None, "TF32"),
        ((8, 0), "1", "TF32"),
        ((8, 0), "0", "float32"),
        ((7, 5), None, "float32"),
    ],
)
def test_tf32_is_allowed_where_a_gpu_has_it_and_the_user_does_not_object(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], override: str | None, runs: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    if override is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", override)
    assert allow_tf32(GPU) == runs
    assert torch.backends.cuda.matmul.allow_tf32 is (runs == "TF32")


def test_a_cpu_has_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert allow_tf32(torch.device("cpu")) == "float32"
    assert torch.backends.cuda.matmul.allow_tf32 is False


def test_tf32_keeps_ten_bits_of_mantissa() -> None:
    """1 + 2^-10 stays, 1 + 2^-11 is a tie and goes away from zero, 1 + 2^-12 goes to 1."""
    given = torch.tensor([1 + 2.0**-10, 1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-11, 0.0])
    expected = torch.tensor([1 + 2.0**-10, 1 + 2.0**-10, 1.0, -1 - 2.0**-10, 0.0])
    assert torch.equal(to_tf32(given), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_of_products_are_rounded_and_biases_are_not(mode: type) -> None:
    layer = torch.nn.Linear(1, 1)
    layer.weight.data.fill_(1 + 2.0**-12)
    layer.bias.data.fill_(2.0**-12)
    with mode():
        found = rounded("TF32", lambda: layer(torch.ones(1, 1)))
        assert found.item() == 1 + 2.0**-12
        assert layer(torch.ones(1, 1)).item() == 1 + 2.0**-11
    query = torch.full((1, 1, 2, 4), 1 + 2.0**-12)
    with mode(), RoundedProducts("bfloat16"):
        attended = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert bool((attended == 1).all())
    with pytest.raises(AssertionError, match="no product"):
        rounded("TF32", lambda: torch.ones(2) + 1)
