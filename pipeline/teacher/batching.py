"""How many rows go through the teacher at once, unless told."""

from __future__ import annotations

import torch

from shards.language_model import largest_batch

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 1 << 12, 1 << 15
CPU_BATCH_BYTES = 1 << 30
GPU_MEMORY_SHARE = 0.4
FLOATS_PER_LOGIT = 6
"""Float32 tensors of the logits' size alive at once: two batches, their log-softmax, the codec's
temporaries."""


def automatic_batch_size(
    row_length: int, vocab_size: int, weight_bytes: int, device: torch.device
) -> int:
    """Rows of one forward pass. The same on every machine with the same device.

    Args:
        weight_bytes: Size of the teacher in memory.
    """
    budget, most = CPU_BATCH_BYTES, CPU_BATCH_TOKENS
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        budget = max(1 << 30, int(GPU_MEMORY_SHARE * (total - weight_bytes)))
        most = GPU_BATCH_TOKENS
    row_bytes = row_length * vocab_size * 4 * FLOATS_PER_LOGIT
    most_rows = min(most // row_length, largest_batch(row_length * vocab_size, device))
    return max(1, min(budget // row_bytes, most_rows))
