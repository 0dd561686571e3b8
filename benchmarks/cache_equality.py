"""Block sampling with a key/value cache against the same passes without one.

    python -m benchmarks.cache_equality [--out DIR]

Every forward pass of the sampler is made twice from the same state: behind the cache, and over the
whole visible window. The table holds, for every block size that divides the trained length, with
and without noise, at the trained length and at twice that (the window slides), the largest
difference of log-probabilities over all passes. Beside it stands how far the same log-probabilities
move when the finished blocks are others: a cache that lost its content would differ by as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer
from torch import Tensor

from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from shards.console import progress_bar
from trainer.sampling.block import BlockRows, BlockSampler
from trainer.sampling.fill import Pass
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import BD3LM, StudentSettings

TOLERANCE = 1e-5
NUM_ROWS = 3


@dataclass
class Passes:
    """What the passes of one run differed by.

    Attributes:
        num_passes: Forward passes behind the cache.
        largest_difference: Of log-probabilities with and without cache.
        context_effect: Of log-probabilities with the finished blocks and with others.
    """

    num_passes: int = 0
    largest_difference: float = 0.0
    context_effect: float = 0.0

    def add(self, cached: Tensor, plain: Tensor, other: Tensor | None) -> None:
        """Note one pass; the mask's own entry is -1e6 and left out."""
        self.num_passes += 1
        self.largest_difference = max(self.largest_difference, distance(cached, plain))
        if other is not None:
            self.context_effect = max(self.context_effect, distance(cached, other))


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the real tokens."""
    return (ours - theirs)[:, :-1].abs().max().item()


@contextmanager
def compared() -> Iterator[Passes]:
    """Within, every pass of a block sampler is made without its cache too."""
    passes, behind_cache = Passes(), BlockRows.predict

    def both(rows: BlockRows, part: Pass):
        plain, other, tokens = rows.predict_from_window(part), None, rows.tokens
        finished = slice(rows.window_start, rows.columns.start)
        if finished.start < finished.stop:
            rows.tokens = tokens.clone()
            rows.tokens[:, finished] = (tokens[:, finished] + 1) % rows.student.mask_id
            other = rows.predict_from_window(part)
            rows.tokens = tokens
        cached = behind_cache(rows, part)
        passes.add(cached, plain, other)
        return cached

    with mock.patch.object(BlockRows, "predict", both):
        yield passes


@dataclass(frozen=True)
class Shape:
    """The student and its rows."""

    row_length: int = 32
    vocab_size: int = 512
    settings: StudentSettings = field(
        default_factory=lambda: StudentSettings(hidden_size=192, num_layers=12, num_heads=3)
    )


def make_student(shape: Shape, block_size: int, conditioning: str) -> BD3LM:
    """All weights random: fresh ones begin with closed gates, and see no context at all."""
    settings = replace(shape.settings, block_size=block_size, conditioning=conditioning)
    config = BD3LM.config_class.build(
        settings, vocab_size=shape.vocab_size, row_length=shape.row_length
    )
    student = BD3LM(config).eval()
    open_gates(student)
    return student


def open_gates(student: torch.nn.Module, std: float = 0.1) -> None:
    """Draw the weights that training begins with at zero: gates and output layer."""
    torch.manual_seed(0)
    for name, parameter in student.named_parameters():
        if "adaLN" in name or "output_layer.linear" in name:
            torch.nn.init.normal_(parameter, std=std)


def run_case(
    shape: Shape, block_size: int, conditioning: str, length: int, inner: Any
) -> dict[str, Any]:
    """One row of the table."""
    student = make_student(shape, block_size, conditioning)
    ids = torch.arange(NUM_ROWS)
    tokens = torch.full((NUM_ROWS, length), student.mask_id)
    tokens[:, 0] = 0
    noise = None
    if conditioning == "gumbel":
        noise = sampling_noise(0, ids, length, shape.vocab_size)
    with compared() as passes:
        drawn = BlockSampler(inner=inner).sample(student, tokens, ids, noise, 0)
    return {
        "block_size": block_size,
        "conditioning": conditioning,
        "inner": inner,
        "length": length,
        "masks_left": int((drawn.tokens == student.mask_id).sum()),
        **asdict(passes),
    }


def run_table(shape: Shape) -> list[dict[str, Any]]:
    """Every block size, conditioning, length and way to fill a block."""
    sizes = [size for size in range(1, shape.row_length + 1) if shape.row_length % size == 0]
    cases = [
        (size, conditioning, length, inner)
        for conditioning in ("none", "gumbel")
        for length in (shape.row_length, 2 * shape.row_length)
        for inner in ("ancestral", "first_hitting")
        for size in sizes
    ]
    rows = []
    with progress_bar("cache equality", len(cases), unit="cases") as bar:
        for case in cases:
            rows.append(run_case(shape, *case))
            bar.advance(1)
    return rows


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{row['conditioning']:<6} {row['inner']:<13} length {row['length']:>4}  "
        f"block {row['block_size']:>3}  passes {row['num_passes']:>4}  "
        f"cache {row['largest_difference']:.1e}  other context {row['context_effect']:.1e}"
    )


def main(out: Path = Path("benchmarks/results"), row_length: int = 32) -> None:
    """Write cache_equality.json; fails when a difference passes the tolerance or a mask is left."""
    shape = Shape(row_length=row_length)
    rows = run_table(shape)
    for row in rows:
        print(line(row))
    largest = max(row["largest_difference"] for row in rows)
    report = {
        "machine": machine(torch.device("cpu")),
        "shape": asdict(shape),
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "cases": rows,
    }
    write_json_atomic(out / "cache_equality.json", report)
    print(f"largest difference {largest:.1e} over {len(rows)} cases")
    if largest > TOLERANCE or any(row["masks_left"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
