"""The tiled conditioner against the dense softmax(xi) @ W: time, peak memory, gradients.

    python -m benchmarks.conditioner [--out benchmarks/results/conditioner.json]

Both formulations run in turns in one process on the same noise. Two settings:

* ``noise in memory``: the noise is a tensor that both are given (arrival times, or xi).
* ``keyed noise``: nothing is in memory. The dense formulation first makes all of it, once; the
  tiled one makes each tile twice, in forward and again in backward.

Peak memory is what a formulation holds beyond its inputs, its output and the gradient of W, which
every formulation has to return.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.dense_noise import DenseNoise
from benchmarks.measure import interleaved_seconds, machine, peak_extra_bytes
from shards.atomic import write_json_atomic
from shards.noise.kinds import KeyedPrior, Noise, dense_arrivals
from shards.noise.philox import PositionKeys
from trainer.students.conditioning import GumbelConditioner

BARS = {"memory_ratio": 0.1, "time_ratio": 1.1, "gradient_relative_error": 1e-5}


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


def tiled_pass(
    conditioner: GumbelConditioner, noise: Noise, upstream: Tensor
) -> tuple[Tensor, Tensor]:
    """The conditioner's forward and backward."""
    conditioner.weight.grad = None
    output = conditioner(noise)
    output.backward(upstream)
    gradient = conditioner.weight.grad
    assert gradient is not None
    conditioner.weight.grad = None
    return output.detach(), gradient


def compare(
    dense: Callable[[], tuple[Tensor, Tensor]],
    tiled: Callable[[], tuple[Tensor, Tensor]],
    device: torch.device,
    repeats: int,
) -> dict[str, object]:
    """Errors first, then memory, then time."""
    (output, gradient), (our_output, our_gradient) = dense(), tiled()
    errors = {
        "output_relative_error": _relative(our_output, output),
        "gradient_relative_error": _relative(our_gradient, gradient),
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


def _relative(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def run_benchmark(
    vocab_size: int,
    hidden_size: int,
    num_positions: int,
    *,
    device: torch.device,
    repeats: int,
    dtype: torch.dtype = torch.float32,
) -> dict[str, object]:
    """Both settings at one shape."""
    torch.manual_seed(0)
    conditioner = GumbelConditioner(vocab_size, hidden_size).to(device)
    torch.nn.init.normal_(conditioner.weight)
    upstream = torch.randn(num_positions, hidden_size, device=device)
    keyed = keyed_noise(num_positions, vocab_size, device)

    def in_turn(dense: Callable[[], object], tiled: Callable[[], object]) -> dict[str, object]:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return compare(dense, tiled, device, repeats)  # type: ignore[arg-type]

    arrivals = dense_arrivals(keyed)
    xi, noise = -arrivals.log(), DenseNoise(arrivals)
    in_memory = in_turn(
        lambda: dense_pass(xi, conditioner.weight, upstream),
        lambda: tiled_pass(conditioner, noise, upstream),
    )
    del arrivals, xi, noise
    from_keys = in_turn(
        lambda: dense_pass(-dense_arrivals(keyed).log(), conditioner.weight, upstream),
        lambda: tiled_pass(conditioner, keyed, upstream),
    )
    return {
        "shape": {"V": vocab_size, "D": hidden_size, "masked_tokens": num_positions},
        "dtype": str(dtype).removeprefix("torch."),
        "noise in memory": in_memory,
        "keyed noise": from_keys,
        "bars": BARS,
        "bars_met": {name: in_memory[name] <= bar for name, bar in BARS.items()},  # type: ignore[operator]
    }


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/conditioner.json"
    ),
    vocab_size: int = 50257,
    hidden_size: int = 768,
    num_positions: int = 4096,
    repeats: int = 5,
    device: str = "cpu",
) -> None:
    """Measure, write the JSON and print the ratios."""
    target = torch.device(device)
    found = run_benchmark(vocab_size, hidden_size, num_positions, device=target, repeats=repeats)
    write_json_atomic(out, {"machine": machine(target), **found})
    for setting in ("noise in memory", "keyed noise"):
        part = found[setting]
        shown = ("memory_ratio", "time_ratio", "output_relative_error", "gradient_relative_error")
        print(setting, *(f"{name} {part[name]:.3g}" for name in shown), sep="; ")  # type: ignore[index]


if __name__ == "__main__":
    typer.run(main)
