"""The maze as a task: success, distance to the teacher, agreement with its decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from benchmarks.quality.plan import Plan, Run
from evaluation.maze import (
    load_task,
    maze_success,
    moves_of_words,
    natural_rule,
    pool,
    teacher_agreement,
    teacher_decode,
)
from evaluation.score import Score
from trainer import load_student
from trainer.sampling import make_sampler, sampling_noise

Cell = dict[str, Any]


class MazeBench:
    """Judges students of one maze.

    Args:
        plan: Samples and passes.
        home: Folder of the extraction.
    """

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home
        self.decodes: dict[int, Int[Tensor, "n l"]] = {}

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
        return result

    def _score(self, student: Any, nfe: int, seed: int) -> tuple[Score, Score]:
        task, count = self.task, self.plan.num_samples
        ids = torch.arange(count)
        noise = sampling_noise(seed, ids, task.row_length, len(task.words))
        rows = torch.full((count, task.row_length), student.mask_id)
        rows[:, 0] = student.config.bos_token_id
        if seed not in self.decodes:
            self.decodes[seed] = teacher_decode(task.teacher, rows[:, 0], noise, task.row_length)
        is_conditioned = student.is_conditioned
        rule = natural_rule("gumbel" if is_conditioned else "none")
        noise_settings = {"tau": 1.0} if is_conditioned else {}
        sampler = make_sampler("ancestral", nfe=nfe, decision=rule, **noise_settings)
        drawn = sampler.sample(student, rows, ids, noise if is_conditioned else None, seed)
        tokens = drawn.tokens.tolist()
        moves = [
            moves_of_words([task.words[i] if i < len(task.words) else "?" for i in row])
            for row in tokens
        ]
        success = maze_success(task.maze, moves, task.path_probabilities, "teacher")
        return success, teacher_agreement(tokens, self.decodes[seed])

    def summarise(
        self, figures: Mapping[str, Sequence[Mapping[str, Cell]]], out: Path
    ) -> list[str]:
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


def _success(cells: Sequence[Cell]) -> str:
    return ", ".join(
        f"{100 * cell['success']:.1f} [{100 * cell['interval_95'][0]:.1f}, "
        f"{100 * cell['interval_95'][1]:.1f}]"
        for cell in cells
    )
