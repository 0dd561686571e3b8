"""What Gumbel conditioning adds to a model: one projection of V x H parameters, and its work.

Parameters, operations and memory of a training step at any vocabulary are counted on the student
itself, built without values; its time is measured where it is asked for.

The first table reproduces the paper's. The parameter counts are the nominal ones that its
percentages imply (117M, 774M, 6.74B, 13B, 7B); its Qwen-7B row implies V = 152,000, while the
published model has 151,936 (622.3M).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from shards.errors import UsageError
from shards.noise.kinds import KeyedPrior, Noise
from shards.noise.philox import PositionKeys
from trainer.objective.batch import Batch, Places
from trainer.students.registry import MDLM, MDLMConfig, StudentSettings
from trainer.training.memory_plan import noise_tile_bytes
from trainer.training.metrics import training_flops


@dataclass(frozen=True)
class Overhead:
    """One model of the table.

    Attributes:
        model: Its name.
        vocab_size: V.
        hidden_size: H.
        num_parameters: Parameters of the model without the projection, as the paper counts them.
    """

    model: str
    vocab_size: int
    hidden_size: int
    num_parameters: float

    @property
    def projection_parameters(self) -> int:
        """V x H."""
        return self.vocab_size * self.hidden_size

    @property
    def share(self) -> float:
        """Projection over model, as a fraction."""
        return self.projection_parameters / self.num_parameters


MODELS = (
    Overhead("GPT-2 Small", 50257, 768, 117e6),
    Overhead("GPT-2 Large", 50257, 1280, 774e6),
    Overhead("LLaMA-7B", 32000, 4096, 6.74e9),
    Overhead("LLaMA-13B", 32000, 5120, 13.0e9),
    Overhead("Qwen-7B", 152_000, 4096, 7.0e9),
)


def overhead_table(models: Sequence[Overhead] = MODELS) -> str:
    """The table as aligned text: model, V, H, projection in millions, share in percent."""
    lines = [f"{'model':<14}{'V':>9}{'H':>7}{'V x H':>10}{'share':>8}"]
    for row in models:
        millions = f"{row.projection_parameters / 1e6:.1f}M"
        share = f"{100 * row.share:.1f}%"
        lines.append(
            f"{row.model:<14}{row.vocab_size:>9,}{row.hidden_size:>7,}{millions:>10}{share:>8}"
        )
    return "\n".join(lines)


STATE_BYTES = 20
"""Per parameter, float32: the weight, its gradient, AdamW's two moments, the moving average."""


@dataclass(frozen=True)
class Scale:
    """A training step whose cost is asked for.

    Attributes:
        settings: The student, as it is with noise.
        row_length: Tokens per row.
        num_rows: Rows per forward pass.
        masked_share: Share of the tokens that are masked, and so see noise.
        device: Kind of device, which decides how large tiles are.
    """

    settings: StudentSettings
    row_length: int = 1024
    num_rows: int = 16
    masked_share: float = 0.5
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name, least in (("row_length", 2), ("num_rows", 1)):
            value = getattr(self, name)
            if value < least:
                raise UsageError("too few", where=name, got=value, expected=f"at least {least}")
        if self.device not in ("cuda", "cpu"):
            raise UsageError("unknown device", got=self.device, expected="cuda or cpu")
        if not 0 < self.masked_share <= 1:
            expected = "in (0, 1]"
            raise UsageError("bad share", where="masked", got=self.masked_share, expected=expected)

    @property
    def num_masked(self) -> int:
        """Masked positions of a forward pass."""
        return max(1, round(self.masked_share * self.num_rows * self.row_length))

    def student(self, vocab_size: int, conditioning: str) -> MDLM:
        """The student over V tokens, shapes without values."""
        settings = self.settings
        if conditioning == "none":
            settings = replace(settings, noise=NoiseSettings())
        settings = replace(settings, conditioning=conditioning)  # type: ignore[arg-type]
        with torch.device("meta"):
            return MDLM(
                MDLMConfig.build(settings, vocab_size=vocab_size, row_length=self.row_length)
            )


@dataclass(frozen=True)
class NoiseCost:
    """What Gumbel conditioning adds at one vocabulary.

    Attributes:
        vocab_size: V.
        parameters: Added parameters.
        parameter_share: Added over those of the student without noise.
        gflops_per_step: Added operations of a training step (forward and backward), 1e9.
        flops_share: Of the whole step's.
        state_bytes: Weights, gradients, moments and average of the added parameters.
        working_bytes: Tiles, and what is kept for the backward pass.
        dense_bytes: Instead of these, softmax(xi) held whole in float32.
        time_share: Measured share of the step's time; None where nothing was measured.
    """

    vocab_size: int
    parameters: int
    parameter_share: float
    gflops_per_step: float
    flops_share: float
    state_bytes: int
    working_bytes: int
    dense_bytes: int
    time_share: float | None = None


def parse_vocab_sizes(text: str) -> list[int]:
    """``32000,50257`` as integers.

    Raises:
        UsageError: For anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 2 <= int(part) < 2**31 for part in parts):
        expected = "sizes such as 32000,152000"
        raise UsageError("bad vocabulary", where="--vocab-size", got=text[:40], expected=expected)
    return [int(part) for part in parts]


def noise_cost(scale: Scale, vocab_size: int, is_timed: bool = False) -> NoiseCost:
    """Count what a conditioned student has and computes beyond one without noise.

    With ``is_timed`` its time is measured too, on this machine.
    """
    noisy, plain = (scale.student(vocab_size, name) for name in ("gumbel", "none"))
    sizes = [sum(p.numel() for p in student.parameters()) for student in (noisy, plain)]
    flops = [training_flops(one, scale.num_rows, scale.num_masked) for one in (noisy, plain)]
    return NoiseCost(
        vocab_size,
        sizes[0] - sizes[1],
        sizes[0] / sizes[1] - 1,
        (flops[0] - flops[1]) / 1e9,
        1 - flops[1] / flops[0],
        STATE_BYTES * (sizes[0] - sizes[1]),
        noise_tile_bytes(vocab_size, scale.num_masked, scale.device)
        + kept_bytes(scale)
        + read_bytes(scale, vocab_size),
        4 * scale.num_masked * vocab_size,
        measured_time_share(scale, vocab_size) if is_timed else None,
    )


def kept_bytes(scale: Scale) -> int:
    """What autograd keeps of the conditioner: a sum per position, and what the map A has read."""
    settings = scale.settings
    is_direct = settings.noise.rank is None and settings.noise.projection == "own"
    inner = 0 if is_direct else settings.noise.rank or settings.hidden_size
    return 4 * scale.num_masked * (1 + inner)


def read_bytes(scale: Scale, vocab_size: int) -> int:
    """What autograd keeps of the readings: each three states, and three numbers an entry."""
    settings = scale.settings
    num_read = settings.noise.top_k or vocab_size
    each = 3 * (settings.hidden_size + num_read)
    ids = settings.noise.top_k
    return 4 * scale.num_masked * (ids + each * len(settings.noise.layers))


def cost_table(costs: Sequence[NoiseCost]) -> str:
    """Aligned text: V, parameters, shares, operations, memory in megabytes."""
    head = ("V", "parameters", "share", "GFLOP/step", "share", "state", "working", "dense", "time")
    lines = [
        (
            f"{cost.vocab_size:,}",
            f"{cost.parameters / 1e6:.1f}M",
            f"{100 * cost.parameter_share:.1f}%",
            f"{cost.gflops_per_step:,.1f}",
            f"{100 * cost.flops_share:.1f}%",
            *(
                f"{size / 1e6:,.0f} MB"
                for size in (cost.state_bytes, cost.working_bytes, cost.dense_bytes)
            ),
            "" if cost.time_share is None else f"{100 * cost.time_share:.0f}%",
        )
        for cost in costs
    ]
    widths = [max(map(len, column)) + 2 for column in zip(head, *lines, strict=True)]
    padded = ("".join(map(str.rjust, line, widths)) for line in (head, *lines))
    return "\n".join(line.rstrip() for line in padded)


@dataclass(frozen=True)
class _PriorRows:
    """Keyed prior noise for rows of no store: costs what posterior noise costs, less its head."""

    vocab_size: int

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        places = Places.of(where)
        return KeyedPrior(PositionKeys(0, places.rows, places.positions), self.vocab_size)

    def rows(self, part: slice) -> _PriorRows:
        return self

    def to(self, device: torch.device) -> _PriorRows:
        return self


def measured_time_share(scale: Scale, vocab_size: int, repeats: int = 3) -> float:
    """Share of a step's time (forward and backward) on this machine, by medians of turns.

    The students take turns, so that both meet the same load.
    """
    if scale.device == "cuda" and not torch.cuda.is_available():
        remedy = "add --device cpu"
        raise UsageError("CUDA is asked for and absent", where="--measure", remedy=remedy)
    device = torch.device(scale.device)
    rows = torch.arange(scale.num_rows, device=device)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (scale.num_rows, scale.row_length), generator=random)
    tokens = tokens.to(device)
    noise = _PriorRows(vocab_size)
    batch = Batch(tokens, tokens.float(), rows, rows, scale.num_rows, 0, 0, 0, noise)
    bounds = (scale.masked_share, scale.masked_share)
    students: list[Any] = []
    for name in ("gumbel", "none"):
        torch.manual_seed(0)
        config = scale.student(vocab_size, name).config
        made: Any = MDLM(config)
        students.append(made.to(device).train())
    seconds: list[list[float]] = [[], []]
    for turn in range(repeats + 1):
        for times, student in zip(seconds, students, strict=True):
            started = time.perf_counter()
            student.loss(batch, time_bounds=bounds).loss.backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:  # the first warms up
                times.append(time.perf_counter() - started)
    noisy, plain = (statistics.median(times) for times in seconds)
    return max(0.0, 1 - plain / noisy)
