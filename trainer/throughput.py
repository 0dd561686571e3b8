"""Model FLOPs of a training step, and the peaks they are compared with (MFU)."""

from __future__ import annotations

import torch

from trainer.students import Student

PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bf16 peaks of the vendors' data sheets, FLOP/s, by a part of the device's name."""


def training_flops(student: Student, num_rows: int, num_masked: int) -> float:
    """FLOPs of one forward and backward pass, as the model needs them (no recomputation).

    6 per weight of the blocks and token, 12 D per layer and attended pair of positions; the head
    (6 D V) and the noise projection (4 D V: noise has no gradient) for masked rows only. A block
    model reads [x_t ; x_0], twice the tokens, and attends about half the pairs.

    Args:
        student: What is trained.
        num_rows: Rows.
        num_masked: Positions that met the head.
    """
    settings, config = student.settings, student.config
    length, width = config.row_length, settings.hidden_size
    halves = 2 if getattr(student, "num_blocks", 1) > 1 else 1
    matrices = (4 + 2 * settings.mlp_ratio) * width * width * settings.num_layers
    pairs = length * length * (2 if halves == 2 else 1)
    body = num_rows * (6 * matrices * halves * length + 12 * width * settings.num_layers * pairs)
    per_masked = (6 + 4 * student.is_conditioned) * width * (config.vocab_size + 1)
    return float(body + num_masked * per_masked)


def peak_flops_per_second(device: torch.device, num_devices: int) -> float | None:
    """Peak of all devices together; None where it is unknown (every CPU, for one)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peaks = [peak for part, peak in PEAK_BF16_FLOPS.items() if part in name]
    return max(peaks) * num_devices if peaks else None
