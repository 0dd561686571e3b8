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

    6 per weight of the blocks and token read, 12 D per layer and attended pair of positions; the
    head (6 D V) and the noise projection (4 D V: noise has no gradient) for masked rows only.

    Args:
        student: What is trained.
        num_rows: Rows.
        num_masked: Positions that met the head.
    """
    settings, config = student.settings, student.config
    width, layers = settings.hidden_size, settings.num_layers
    matrices = (4 + 2 * settings.mlp_ratio) * width * width * layers
    per_row = 6 * matrices * student.num_read_tokens
    per_row += 12 * width * layers * student.num_attended_pairs
    per_masked = (6 + 4 * student.is_conditioned) * width * (config.vocab_size + 1)
    return float(num_rows * per_row + num_masked * per_masked)


def peak_flops_per_second(
    configured: float | None, device: torch.device, num_devices: int
) -> float | None:
    """Peak of all devices together; None where it is unknown (every CPU, for one).

    Args:
        configured: Peak of one device, FLOP/s; None looks the device up.
        device: The kind of device.
        num_devices: How many there are.
    """
    peak = configured or _known_peak(device)
    return None if peak is None else peak * num_devices


def _known_peak(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return max((peak for part, peak in PEAK_BF16_FLOPS.items() if part in name), default=None)
