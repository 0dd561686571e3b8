"""The maze as a task: success, distance to the teacher, agreement with its decode."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from benchmarks.quality.plan import Plan, Run
from evaluation.maze import load_task, natural_rule, pool, score_samples, teacher_rows
from evaluation.samples import SampleSet
from evaluation.score import Score, wilson_interval
from shards.noise import Noise
from trainer import load_student
from trainer.sampling import make_sampler, sampling_noise

Cell = dict[str, Any]
MARGINS = ((0.0, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, math.inf))
"""Nats."""


class MazeBench:
    """Judges students of one maze.

    Args:
        plan: Samples and passes.
        home: Folder of the extraction.
    """

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home

    @cached_property
    def task(self) -> Any:
        """The maze, its teacher and its exact optimum."""
        return load_task(self.home, self.plan.nfe)

    def measure(self, run: Run, folder: Path) -> dict[str, Cell]:
        """NFE -> figures of one student, its sampling seeds together."""
        student = load_student(folder).eval()
        result = {}
        for nfe in run.recipe.nfe or self.plan.nfe:
            scores = [self._score(student, nfe, seed) for seed in self.plan.sample_seeds]
            result[str(nfe)] = pool([first for first, _ in scores], [other for _, other in scores])
        result["by_margin"] = self._by_margin(student, self.plan.sample_seeds[0])
        return result

    @torch.no_grad()
    def _by_margin(self, student: Any, seed: int) -> list[Cell]:
        """Agreement in one pass by how near the nearest tie of the teacher's decode is.

        The margin of a row is the least distance between the largest and the next log p + xi.
        """
        samples = self._draw(student, 1, seed)
        decoded = teacher_rows(self.task, samples)
        noise = self._noise(seed)
        shape = (len(decoded), self.task.row_length, noise.vocab_size)
        gumbels = -noise.tile(0, noise.vocab_size).log().view(shape)[:, 1:]
        log_probs = self.task.teacher(input_ids=decoded).logits[:, :-1].float().log_softmax(-1)
        best, second = (log_probs + gumbels).topk(2, dim=-1).values.unbind(-1)
        margin = (best - second).amin(dim=1)
        equal = (torch.tensor(samples.tokens) == decoded).all(dim=1)
        return [
            _share(equal[(margin >= low) & (margin < high)], low, high) for low, high in MARGINS
        ]

    def _noise(self, seed: int) -> Noise:
        ids = torch.arange(self.plan.num_samples)
        return sampling_noise(seed, ids, self.task.row_length, len(self.task.words))

    def _score(self, student: Any, nfe: int, seed: int) -> tuple[Score, Score]:
        return score_samples(self.task, self._draw(student, nfe, seed))

    def _draw(self, student: Any, nfe: int, seed: int) -> SampleSet:
        task, count, is_conditioned = self.task, self.plan.num_samples, student.is_conditioned
        ids, noise = torch.arange(count), self._noise(seed) if is_conditioned else None
        rows = torch.full((count, task.row_length), student.mask_id)
        rows[:, 0] = student.config.bos_token_id
        rule = natural_rule("gumbel" if is_conditioned else "none")
        noise_settings = {"tau": 1.0} if is_conditioned else {}
        sampler = make_sampler("ancestral", nfe=nfe, decision=rule, **noise_settings)
        drawn = sampler.sample(student, rows, ids, noise, seed)
        return SampleSet(
            name="",
            tokens=drawn.tokens.tolist(),
            texts=[None] * count,
            indices=ids.tolist(),
            nfe=[nfe] * count,
            lines=[],
            seed=seed,
            sampler={},
            settings={},
            source=Path(),
        )

    def reference(self) -> Cell:
        """NFE -> success of the exact optimum of every student without noise."""
        return {"optimum": {str(nfe): value for nfe, value in self.task.optimum.items()}}

    def summarise(self, figures: Mapping[str, Sequence[Mapping[str, Cell]]]) -> list[str]:
        """Markdown, a line per recipe: success in per cent, total variation, agreement, paths."""
        budgets = [str(nfe) for nfe in self.plan.nfe]
        head = ["recipe", *(f"NFE {nfe}" for nfe in budgets), "TV at NFE 1", "agreement", "paths"]
        exact = [f"{100 * self.task.optimum[nfe]:.1f}" for nfe in self.plan.nfe]
        lines = [head, ["---"] * len(head), ["exact optimum without noise", *exact, "", "", ""]]
        for name, seeds in figures.items():
            cells = [_success([cells[nfe] for cells in seeds]) for nfe in budgets]
            first = [cells[budgets[0]] for cells in seeds]
            variation = ", ".join(f"{cell['total_variation_to_teacher']:.3f}" for cell in first)
            equal = ", ".join(f"{100 * cell['equal_to_teacher_decode']:.1f}" for cell in first)
            paths = ", ".join(str(cell["num_distinct_paths"]) for cell in first)
            lines.append([name, *cells, variation, equal, paths])
        return ["| " + " | ".join(line) + " |" for line in lines]


def _share(equal: Bool[Tensor, "n"], low: float, high: float) -> Cell:
    count, total = int(equal.sum()), len(equal)
    interval = list(wilson_interval(count, total)) if total else None
    bounds = {"from_nats": low, "to_nats": high if math.isfinite(high) else None}
    return {**bounds, "num_samples": total, "num_equal": count, "interval_95": interval}


def _success(cells: Sequence[Cell]) -> str:
    return ", ".join(
        f"{100 * cell['success']:.1f} [{100 * cell['interval_95'][0]:.1f}, "
        f"{100 * cell['interval_95'][1]:.1f}]"
        for cell in cells
    )
