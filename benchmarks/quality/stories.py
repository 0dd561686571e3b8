"""Stories as a task: students sampled in several ways, ranked by distance from held-out text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import run_visibly
from benchmarks.quality.plan import Plan, Run

PLAIN = "--sweep nucleus_p=1.0,0.9,0.8,0.7"
WITH_NOISE = "--sweep tau=0.85,1.0,1.3,1.7 --set decision=argmax"


class StoriesBench:
    """Samples and measures students of the stories extracted into ``home``, by users' commands.

    The judge is a causal model that is not the teacher; None for the energy distance of n-grams.
    """

    def __init__(self, plan: Plan, home: Path, judge: Path | None) -> None:
        self.plan, self.home, self.judge = plan, home, judge

    def measure(self, run: Run, folder: Path) -> dict[str, Any]:
        """The last validation of a student; its samples go to ``samples/`` of the bench."""
        orders = ["confidence", "ancestral"] if run.recipe.student == "mdlm" else ["block"]
        usual = WITH_NOISE if run.recipe.conditioning != "none" else PLAIN
        sweeps = run.recipe.sweeps or {order: f"--sampler {order} {usual}" for order in orders}
        for name, chosen in sweeps.items() if run.recipe.is_sampled else ():
            out = self.home / "samples" / run.folder / name
            words = ["gdistill-sample", str(folder), "--out", str(out), *chosen.split()]
            words += ["--num", str(self.plan.num_samples)]
            words += ["--seed", str(self.plan.sample_seeds[0])]
            if "--nfe" not in words:
                words += ["--nfe", ",".join(map(str, run.recipe.nfe or self.plan.nfe))]
            run_visibly(f"{run.folder}, {name}", tuple(words))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        last = [line for line in map(json.loads, lines) if line["kind"] == "validation"][-1]
        return {"validation": last}

    def reference(self) -> dict[str, Any]:
        """What ``gdistill-eval frontier`` found."""
        return json.loads((self.home / "frontier" / "results.json").read_text(encoding="utf-8"))

    def summarise(self, figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
        """Validation, and the table of ``gdistill-eval frontier``: all seeds of all recipes."""
        lines = ["| recipe | validation NLL, nats, of each seed |", "| --- | --- |"]
        for name, seeds in figures.items():
            found = ", ".join(f"{cells['validation']['nll_nats']:.3f}" for cells in seeds)
            lines.append(f"| {name} | {found} |")
        sampled = [run.folder for run in self.plan.runs if run.recipe.is_sampled]
        runs = [f"{folder}={self.home / 'samples' / folder}" for folder in sampled]
        words = ["gdistill-eval", "frontier", *runs, "--data", str(self.home / "store")]
        words += ["--out", str(self.home / "frontier")]
        run_visibly("frontier", (*words, *(("--judge", str(self.judge)) if self.judge else ())))
        table = (self.home / "frontier" / "tables.md").read_text(encoding="utf-8")
        return [*lines, "", *table.splitlines()]
