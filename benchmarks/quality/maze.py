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

from benchmarks.maze_task import load_task, pool
from benchmarks.quality.plan import Plan, Run
from evaluation.score import wilson_interval
from trainer import load_student
from trainer.sampling.fill import Sampler, SampleResult
from trainer.sampling.registry import make_sampler

Cell = dict[str, Any]
MARGINS = ((0.0, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, 0.4), (0.4, math.inf))
"""Nats."""


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
        if run.recipe.sampler == "ancestral" and run.recipe.student_of is None:
            result["by_margin"] = self._by_margin(student, self._sampler(run, student, 1))
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

    @torch.no_grad()
    def _by_margin(self, student: Any, sampler: Sampler) -> list[Cell]:
        """Agreement in one pass by how near the nearest tie of the teacher's decode is.

        The margin of a row is the least distance between the largest and the next log p + xi.
        """
        given = (self.plan.sample_seeds[0], self.plan.num_samples)
        tokens = self._draw(student, sampler, given[0]).tokens
        decoded, noise = self.task.teacher_rows(*given), self.task.noise(*given)
        shape = (len(decoded), self.task.row_length, noise.vocab_size)
        gumbels = -noise.tile(0, noise.vocab_size).log().view(shape)[:, 1:]
        log_probs = self.task.teacher(input_ids=decoded).logits[:, :-1].float().log_softmax(-1)
        best, second = (log_probs + gumbels).topk(2, dim=-1).values.unbind(-1)
        margin = (best - second).amin(dim=1)
        equal = (tokens == decoded).all(dim=1)
        return [
            _share(equal[(margin >= low) & (margin < high)], low, high) for low, high in MARGINS
        ]

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


def _share(equal: Bool[Tensor, "n"], low: float, high: float) -> Cell:
    count, total = int(equal.sum()), len(equal)
    interval = list(wilson_interval(count, total)) if total else None
    bounds = {"from_nats": low, "to_nats": high if math.isfinite(high) else None}
    return {**bounds, "num_samples": total, "num_equal": count, "interval_95": interval}


def _own(seeds: Sequence[Mapping[str, Cell]]) -> str:
    """Success of a sampler that counts its passes itself, and how many there were."""
    cells = [cells["own"] for cells in seeds if "own" in cells]
    passes = ", ".join(f"{cell['nfe_mean']:.1f}" for cell in cells)
    return f"{_success(cells)} at {passes}" if cells else ""


def _success(cells: Sequence[Cell]) -> str:
    return ", ".join(
        f"{100 * cell['success']:.1f} [{100 * cell['interval_95'][0]:.1f}, "
        f"{100 * cell['interval_95'][1]:.1f}]"
        for cell in cells
    )
