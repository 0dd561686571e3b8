"""The tiled conditioner against the dense softmax(xi) @ W: time, peak memory, gradients.

``make gpu`` runs it. Both formulations run in turns in one process on the same noise. Two settings:

* ``noise in memory``: the noise is a tensor that both are given (arrival times, or xi).
* ``keyed noise``: nothing is in memory. The dense formulation first makes all of it, once; the
  tiled one makes each tile twice, in forward and again in backward.

Peak memory is what a formulation holds beyond its inputs, its output and the gradient of W, which
every formulation has to return.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from benchmarks.measure import interleaved_seconds, peak_extra_bytes
from shards.noise.embedding import Noise, dense_arrivals
from shards.noise.gumbel import KeyedPrior
from shards.noise.philox import PositionKeys
from trainer.students.conditioning import GumbelConditioner

Pass = Callable[[], tuple[Tensor, Tensor]]


def keyed_noise(num_positions: int, vocab_size: int, device: torch.device) -> KeyedPrior:
    """Prior noise of a batch of masked positions."""
    rows = torch.arange(num_positions, device=device)
    return KeyedPrior(PositionKeys(11, rows, rows % 128), vocab_size)


def dense_pass(xi: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(xi) @ W and the gradient of W, as the paper writes it."""
    weight = weight.detach().requires_grad_()
    output = torch.softmax(xi, dim=-1) @ weight
    output.backward(upstream)
    assert weight.grad is not None
    return output.detach(), weight.grad


def tiled_pass(conditioner: GumbelConditioner, noise: Noise, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The conditioner's forward and backward."""
    conditioner.weight.grad = None
    output = conditioner(noise)
    output.backward(upstream)
    gradient, conditioner.weight.grad = conditioner.weight.grad, None
    assert gradient is not None
    return output.detach(), gradient


def compare(dense: Pass, tiled: Pass, device: torch.device, repeats: int) -> dict[str, object]:
    """Errors first, then memory, then time."""
    (output, gradient), (our_output, our_gradient) = dense(), tiled()
    errors = {
        "output_relative_error": float((our_output - output).norm() / output.norm()),
        "gradient_relative_error": float((our_gradient - gradient).norm() / gradient.norm()),
    }
    results_bytes = output.nbytes + gradient.nbytes
    del output, gradient, our_output, our_gradient
    work = {"dense": dense, "tiled": tiled}
    peaks = {name: peak_extra_bytes(run, device) - results_bytes for name, run in work.items()}
    seconds = interleaved_seconds(work, device, repeats=repeats)
    middle = {name: median(values) for name, values in seconds.items()}
    return {
        **errors,
        "peak_extra_bytes": peaks,
        "memory_ratio": peaks["tiled"] / peaks["dense"],
        "seconds": middle,
        "all_seconds": seconds,
        "time_ratio": middle["tiled"] / middle["dense"],
    }


def run_benchmark(
    sizes: tuple[int, int, int], device: torch.device, repeats: int, dtype: torch.dtype
) -> dict[str, object]:
    """Both settings at one shape: vocabulary, width, masked tokens."""
    vocab_size, hidden_size, num_positions = sizes
    torch.manual_seed(0)
    conditioner = GumbelConditioner(vocab_size, hidden_size).to(device)
    torch.nn.init.normal_(conditioner.weight)
    upstream = torch.randn(num_positions, hidden_size, device=device)
    keyed = keyed_noise(num_positions, vocab_size, device)

    def in_turn(dense: Pass, tiled: Pass) -> dict[str, object]:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return compare(dense, tiled, device, repeats)

    arrivals = dense_arrivals(keyed)
    xi, noise = -arrivals.log(), DenseNoise(arrivals)
    in_memory = in_turn(
        lambda: dense_pass(xi, conditioner.weight, upstream), lambda: tiled_pass(conditioner, noise, upstream)
    )
    arrivals = xi = noise = None  # frees their memory
    from_keys = in_turn(
        lambda: dense_pass(-dense_arrivals(keyed).log(), conditioner.weight, upstream),
        lambda: tiled_pass(conditioner, keyed, upstream),
    )
    return {
        "shape": {"V": vocab_size, "D": hidden_size, "masked_tokens": num_positions},
        "dtype": str(dtype).removeprefix("torch."),
        "noise in memory": in_memory,
        "keyed noise": from_keys,
    }
