"""Tokens per second of one process: given, measured, or a share of what a machine can do."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch

from pipeline.settings import ExtractRequest, PlanOptions
from shards.base import GdistillError, UsageError

H100_FLOPS, UTILISATION = 989e12, 0.4
"""Peak of an H100 SXM in dense bf16; the share that a forward pass reaches of a peak."""
PRODUCT_SIZE, PRODUCT_SECONDS = 768, 0.2


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one process, on what, and where the figure comes from."""

    tokens_per_second: float
    machine: str
    origin: str

    def line(self) -> str:
        """For people."""
        return f"{self.tokens_per_second:,.0f} tokens/s of {self.machine}, {self.origin}"


def planned_rates(
    request: ExtractRequest, num_parameters: int, given: float | None = None
) -> list[Rate]:
    """The given rate, or that of an earlier run in this folder, or what machines could reach.

    A machine without a GPU is one on which runs are planned and one on which they run: where the
    device is not named, both are told.

    Raises:
        GdistillError: If an earlier run's figures are there and cannot be read.
    """
    if given is not None:
        return [Rate(given, "one process", "as given")]
    if (request.out / "summary.json").exists():
        return [_measured(request)]
    flops = 2 * num_parameters
    device = request.settings.device
    here = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    rates = []
    if device != "cpu":
        share = f"assumed: {UTILISATION:.0%} of its peak in bf16; small teachers reach less"
        rates.append(Rate(UTILISATION * H100_FLOPS / flops, "one H100", share))
    if here:
        share = f"{UTILISATION:.0%} of a product of matrices, measured just now"
        rates.append(Rate(UTILISATION * _cpu_flops() / flops, "this CPU", share))
    return rates


def _measured(request: ExtractRequest) -> Rate:
    file = request.out / "summary.json"
    try:
        rate = float(json.loads(file.read_text(encoding="utf-8"))["tokens_per_second"])
        PlanOptions(rate=rate)  # refuses what is no rate
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        remedy = "remove the file, or give --rate"
        raise GdistillError(
            "cannot read an earlier run's rate", where=file, got=error, remedy=remedy
        ) from error
    return Rate(rate, "one process", f"measured by the run in {request.out}")


def _cpu_flops() -> float:
    """Operations per second of a float32 product on all of this process's threads."""
    matrix = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    torch.mm(matrix, matrix)  # the first one starts the threads
    started, products = time.perf_counter(), 0
    while (seconds := time.perf_counter() - started) < PRODUCT_SECONDS or not products:
        torch.mm(matrix, matrix)
        products += 1
    return products * 2 * PRODUCT_SIZE**3 / seconds
