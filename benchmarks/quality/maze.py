"""The maze as a task: success, distance to the teacher, agreement with its decode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.maze_task import load_task, pool
from benchmarks.quality.plan import Plan, Run
from trainer import load_student
from trainer.sampling.fill import Sampler, SampleResult
from trainer.sampling.registry import make_sampler

Cell = dict[str, Any]


class MazeBench:
    """Judges students of one maze, extracted into ``home``."""

    def __init__(self, plan: Plan, home: Path) -> None:
        self.plan, self.home = plan, home

    @cached_property
    def task(self) -> Any:
        """The maze, its teacher and its exact optimum."""
        return load_task(self.home, self.plan.nfe)

    def measure(self, run: Run, folder: Path) -> dict[str, Cell]:
        """NFE -> figures of one student, its sampling seeds together."""
        student = load_student(folder).eval()
        budgets = self.plan.nfe if run.recipe.nfe is None else run.recipe.nfe
        result: dict[str, Any] = {}
        for nfe in budgets or (None,):
            sampler = self._sampler(run, student, nfe)
            drawn = {seed: self._draw(student, sampler, seed) for seed in self.plan.sample_seeds}
            scores = [self.task.score(found.tokens, seed) for seed, found in drawn.items()]
            cell = pool([first for first, _ in scores], [other for _, other in scores])
            passes = torch.cat([found.nfe for found in drawn.values()])
            cell["nfe_mean"] = passes.double().mean().item()
            result["own" if nfe is None else str(nfe)] = cell
        return result

    def _sampler(self, run: Run, student: Any, nfe: int | None) -> Sampler:
        """The recipe's sampler with what suits the student, unless the recipe says otherwise."""
        recipe = run.recipe
        settings: dict[str, Any] = {} if nfe is None else {"nfe": nfe}
        if student.is_conditioned:
            settings["tau"] = 1.0
        # Without noise all variety is in the draws; given the noise the text is determined.
        settings["decision"] = "argmax" if student.is_conditioned else "categorical"
        if recipe.verifier is not None:
            settings["verifier"] = str(self.home / run.folder_of(recipe.verifier))
        return make_sampler(recipe.sampler, **{**settings, **recipe.sampling})

    def _draw(self, student: Any, sampler: Sampler, seed: int) -> SampleResult:
        task, count = self.task, self.plan.num_samples
        ids = torch.arange(count)
        noise = task.noise(seed, count, student.codec) if student.is_conditioned else None
        rows = torch.full((count, task.row_length), student.mask_id)
        rows[:, 0] = student.config.bos_token_id
        return sampler.sample(student, rows, ids, noise, seed)

    def reference(self) -> Cell:
        """NFE -> success of the exact optimum of every student without noise."""
        return {"optimum": {str(nfe): value for nfe, value in self.task.optimum.items()}}

    def summarise(self, figures: Mapping[str, Sequence[Mapping[str, Cell]]]) -> list[str]:
        """Markdown, a line per recipe: success in per cent, total variation, agreement, paths."""
        budgets = [str(nfe) for nfe in self.plan.nfe]
        head = ["recipe", *(f"NFE {nfe}" for nfe in budgets), "TV at NFE 1", "agreement", "paths"]
        if any("own" in cells for seeds in figures.values() for cells in seeds):
            head.insert(1 + len(budgets), "own NFE")
        exact = [f"{100 * self.task.optimum[nfe]:.1f}" for nfe in self.plan.nfe]
        own = len(head) - 4 - len(budgets)
        bound = ["exact optimum without noise", *exact, *[""] * (own + 3)]
        lines = [head, ["---"] * len(head), bound]
        groups = {recipe.name: recipe.group for recipe in self.plan.recipes}
        last = ""
        for name, seeds in figures.items():
            if groups.get(name, "") != last:
                last = groups.get(name, "")
                lines.append([f"*{last}*", *[""] * (len(head) - 1)])
            keys = [nfe if nfe in seeds[0] else None for nfe in budgets]
            cells = ["" if k is None else _success([c[k] for c in seeds]) for k in keys]
            if own:
                cells.append(_own(seeds))
            first = [next(iter(cells.values())) for cells in seeds]
            variation = ", ".join(f"{cell['total_variation_to_teacher']:.3f}" for cell in first)
            equal = ", ".join(f"{100 * cell['equal_to_teacher_decode']:.1f}" for cell in first)
            paths = ", ".join(str(cell["num_distinct_paths"]) for cell in first)
            lines.append([name, *cells, variation, equal, paths])
        return ["| " + " | ".join(line) + " |" for line in lines]


def _own(seeds: Sequence[Mapping[str, Cell]]) -> str:
    """Success of a sampler that counts its passes itself, and how many there were."""
    cells = [cells["own"] for cells in seeds if "own" in cells]
    passes = ", ".join(f"{cell['nfe_mean']:.1f}" for cell in cells)
    return f"{_success(cells)} at {passes}" if cells else ""


def _success(cells: Sequence[Cell]) -> str:
    return ", ".join(
        f"{100 * cell['success']:.1f} [{100 * cell['interval_95'][0]:.1f}, {100 * cell['interval_95'][1]:.1f}]"
        for cell in cells
    )
