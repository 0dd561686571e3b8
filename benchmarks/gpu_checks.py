"""What must be right on a device before anything is timed on it, against float32 references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.conditioner import dense_pass, keyed_noise, tiled_pass
from benchmarks.steps import dense_gumbels, dense_loss, tiled_loss
from benchmarks.synthetic import make_student, random_batch
from shards.noise.embedding import dense_arrivals
from shards.noise.philox import PositionKeys
from trainer.sampling.noise import TokenRule
from trainer.students.bd3lm import flex_training_attention, training_mask
from trainer.students.conditioning import GumbelConditioner
from trainer.students.dit import masked_attention
from trainer.students.registry import StudentSettings

Checks = dict[str, dict[str, Any]]
SETTINGS = StudentSettings(
    hidden_size=64, num_layers=2, num_heads=2, condition_size=16, dropout=0.0, conditioning="gumbel"
)


def check_everything(vocab_size: int, device: torch.device) -> Checks:
    """Name -> relative error, tolerance and verdict; one that cannot run has failed."""
    groups: dict[str, Callable[[int, torch.device], Checks]] = {
        "keyed noise": check_noise,
        "draws": check_draws,
        "conditioner": check_conditioner,
        "flex attention": check_attention,
        "step": check_step,
    }
    found: Checks = {}
    for name, group in groups.items():
        try:
            found.update(group(vocab_size, device))
        except Exception as error:  # whatever it is, the other checks are worth their while
            found[name] = {"error": describe(error), "passed": False}
    return found


def describe(error: BaseException) -> str:
    """An error's type and text on one line; its traceback would keep tensors alive."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _verdict(error: float, tolerance: float) -> dict[str, Any]:
    return {"error": error, "tolerance": tolerance, "passed": error <= tolerance}


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def check_noise(vocab_size: int, device: torch.device) -> Checks:
    """Keyed noise: the device's arrival times against the CPU's."""
    cpu = dense_arrivals(keyed_noise(16, vocab_size, torch.device("cpu")))
    here = dense_arrivals(keyed_noise(16, vocab_size, device)).cpu()
    return {"keyed noise": _verdict(float(((here - cpu).abs() / cpu).max()), 1e-5)}


def check_draws(vocab_size: int, device: torch.device) -> Checks:
    """Categorical draws: the share of tokens that the device draws otherwise than the CPU."""
    logits = 2 * torch.randn(256, vocab_size + 1, generator=torch.Generator().manual_seed(2))
    index = torch.arange(len(logits))
    keys, rule = PositionKeys(13, index, index), TokenRule(temperature=0.9)
    here = rule.choose(logits.to(device), keys.to(device)).cpu()
    other = (here != rule.choose(logits, keys)).double().mean()
    return {"categorical draws": _verdict(float(other), 0.0)}


def check_conditioner(vocab_size: int, device: torch.device) -> Checks:
    """Tiled forward and backward on the device against dense float64 on the CPU."""
    cpu, num = torch.device("cpu"), 64
    conditioner = GumbelConditioner(vocab_size, 32)
    torch.nn.init.normal_(conditioner.weight)
    upstream = torch.randn(num, 32)
    keyed = keyed_noise(num, vocab_size, cpu)
    xi = -dense_arrivals(keyed).double().log()
    wanted = dense_pass(xi, conditioner.weight.double(), upstream.double())
    found, given = {}, (conditioner.to(device), keyed.to(device), upstream.to(device))
    for suffix, tolerance in (("", 1e-5), (", bf16", 1e-2)):
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(suffix)):
            ours = tiled_pass(*given)
        for name, got, want in zip(("output", "gradient"), ours, wanted, strict=True):
            found[f"conditioner {name}{suffix}"] = _verdict(_relative(got, want), tolerance)
    return found


def check_attention(_: int, device: torch.device) -> Checks:
    """FlexAttention with the block mask against SDPA in float32; on CUDA the gradient too."""
    torch.manual_seed(1)
    length, block = 64, 4
    inputs = [torch.randn(2, 2, 2 * length, 32, device=device) for _ in range(3)]
    learns = device.type == "cuda"
    masked = masked_attention(training_mask(length, block, device))
    results = []
    for attend in (masked, flex_training_attention(length, block, device)):
        leaves = [value.clone().requires_grad_(learns) for value in inputs]
        output = attend(*leaves)
        gradients = torch.autograd.grad(output.square().sum(), leaves) if learns else ()
        results.append((output.detach(), *gradients))
    pairs = list(zip(*results, strict=True))
    found = {"flex output": _verdict(_relative(pairs[0][1], pairs[0][0]), 1e-3)}
    if learns:
        worst = max(_relative(ours, reference) for reference, ours in pairs[1:])
        found["flex gradient"] = _verdict(worst, 1e-3)
    return found


def check_step(vocab_size: int, device: torch.device) -> Checks:
    """Fused step (tiles, masked rows, fused head) against the dense formulation in float32."""
    student = make_student("mdlm", SETTINGS, 32, vocab_size, device)
    batch = random_batch(range(4), 32, vocab_size, device, 4)

    def gradients(loss: Tensor) -> tuple[Tensor, Tensor]:
        student.zero_grad()
        loss.backward()
        found = [p.grad.flatten() for p in student.parameters() if p.grad is not None]
        return loss.detach(), torch.cat(found)

    wanted, found = gradients(dense_loss(student, batch, dense_gumbels(batch))), {}
    for suffix, tolerances in (("", (1e-5, 1e-4)), (", bf16", (1e-2, 5e-2))):
        with torch.autocast(device.type, torch.bfloat16, enabled=bool(suffix)):
            loss = tiled_loss(student, batch)
        pairs = zip(("loss", "gradient"), gradients(loss), wanted, tolerances, strict=True)
        for name, got, want, tolerance in pairs:
            found[f"step {name}{suffix}"] = _verdict(_relative(got, want), tolerance)
    return found
