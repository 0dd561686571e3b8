"""The maze from corpus to table: every room of the house, each through its command.

For each layout the teacher is trained and run once; from its shards come, per seed, an MDLM, an
MDLM + Gumbel and what other recipes the configuration names. All are sampled at every NFE by both
decision rules, and scored against the exact optimum of an unconditioned model and against the
teacher's own decode of the same noise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from evaluation.maze.figure import Panels
from evaluation.maze.jobs import Job, check_parallel, run_jobs, run_visibly
from evaluation.maze.report import write_maze_report
from evaluation.maze.results import (
    PLAIN,
    display_name,
    load_task,
    moves_of,
    natural_rule,
    read_words,
    sample_file,
    sampling_floor,
    score_cell,
)
from evaluation.maze.success import Maze, Path_
from evaluation.samples.samples import read_samples
from shards.atomic import require_writable, write_json_atomic
from shards.console import command_app, run_command
from shards.errors import UsageError
from shards.settings import read_toml, resolve, to_mapping

app = command_app()
KINDS = (PLAIN, "gumbel")
RULES = ("categorical", "argmax")


@dataclass(frozen=True)
class WalkConfig:
    """What one walk through the maze does.

    Attributes:
        layouts: Built-in layouts or layout files.
        teacher: Preset of the teacher (``demo`` or ``full``).
        seeds: Training seeds; each trains a pair of students.
        sample_seeds: Sampling seeds.
        num_samples: Samples per sampling seed.
        nfe: NFE budgets.
        training: Layout -> ``key=value`` settings of the trainer.
        recipes: Kind of student -> further settings: of ``none``, of ``gumbel`` (the paper's
            conditioner), and of any other name, a conditioned student beside these two.
    """

    layouts: tuple[str, ...] = ("k4", "m57")
    teacher: str = "demo"
    seeds: tuple[int, ...] = (1,)
    sample_seeds: tuple[int, ...] = (11, 12)
    num_samples: int = 1000
    nfe: tuple[int, ...] = (1, 2, 4, 8, 16)
    training: Mapping[str, list[str]] = field(default_factory=dict)
    recipes: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of student that are trained on every layout with every seed."""
        return (*KINDS, *(name for name in self.recipes if name not in KINDS))

    def __post_init__(self) -> None:
        for name in ("layouts", "seeds", "sample_seeds", "nfe"):
            if not getattr(self, name):
                raise UsageError("an empty list in the config", where=name, expected="at least one")
        if self.num_samples < 1:
            raise UsageError("too few samples", where="num_samples", got=self.num_samples)


@dataclass(frozen=True)
class StudentRun:
    """One student of the walk and where its files are."""

    layout: str
    kind: str
    seed: int
    home: Path

    @property
    def store(self) -> Path:
        return self.home / self.layout / "store"

    @property
    def directory(self) -> Path:
        return self.home / self.layout / f"mdlm-{self.kind.replace(' ', '-')}-seed{self.seed}"

    @property
    def conditioning(self) -> str:
        """Whether it sees noise, as the trainer says it."""
        return PLAIN if self.kind == PLAIN else "gumbel"

    @property
    def name(self) -> str:
        return f"{self.layout} {self.kind} seed {self.seed}"

    def samples(self, rule: str, sample_seed: int) -> Path:
        """Folder of the samples drawn by one decision rule with one seed."""
        return self.directory / "samples" / f"{rule}-{sample_seed}"


def extract(config: WalkConfig, home: Path) -> None:
    """Paths, teacher, stage 1 and stage 2 of every layout."""
    for layout in config.layouts:
        run_visibly(
            f"extraction of {layout}",
            (
                *("gdistill-extract", "--corpus", f"maze:{layout}", "--out", str(home / layout)),
                *("--teacher-preset", config.teacher),
            ),
        )


def train(config: WalkConfig, runs: list[StudentRun], num_parallel: int) -> None:
    """Train every student from the shards."""
    jobs = [
        _training_job(
            run, [*config.training.get(run.layout, []), *config.recipes.get(run.kind, [])]
        )
        for run in runs
    ]
    run_jobs("train", jobs, num_parallel, unit="%")


def _training_job(run: StudentRun, settings: Sequence[str]) -> Job:
    overrides = [word for text in (f"seed={run.seed}", *settings) for word in ("--set", text)]
    command = ("gdistill-train", "run", "--store", str(run.store), "--student", "mdlm")
    command += ("--preset", "maze", "--conditioning", run.conditioning)
    command += ("--out", str(run.directory), *overrides)
    progress = TrainingProgress(run.directory / "metrics.jsonl")
    return Job(run.name, command, run.directory / "train.log", total=100, done=progress)


@dataclass(frozen=True)
class TrainingProgress:
    """Per cent of a training run, from the last line of its metrics."""

    metrics: Path

    def __call__(self) -> int:
        try:
            with open(self.metrics, "rb") as file:
                file.seek(max(0, self.metrics.stat().st_size - 4096))
                last = json.loads(file.read().splitlines()[-1])
            return int(100 * last["step"] / last["num_steps"])
        except (OSError, ValueError, IndexError, KeyError):
            return 0  # no metrics yet, or a line still being written


def sample(config: WalkConfig, runs: list[StudentRun], num_parallel: int) -> None:
    """Sample every student at every NFE by both rules."""
    jobs = [
        _sampling_job(run, config, rule, seed)
        for run in runs
        for rule in RULES
        for seed in config.sample_seeds
    ]
    run_jobs("sample", jobs, num_parallel, unit="runs")


def _sampling_job(run: StudentRun, config: WalkConfig, rule: str, seed: int) -> Job:
    out = run.samples(rule, seed)
    command = ("gdistill-sample", str(run.directory / "model"), "--out", str(out))
    command += ("--num", str(config.num_samples), "--seed", str(seed))
    command += ("--nfe", ",".join(map(str, config.nfe)), "--decision", rule)
    command += ("--tau", "1.0") if run.conditioning == "gumbel" else ()
    return Job(f"{run.name} {rule}", command, out / "sample.log", total=1, done=lambda: 0)


def collect(config: WalkConfig, runs: list[StudentRun], home: Path) -> dict[str, Any]:
    """Score everything that was sampled; the numbers behind the tables."""
    layouts = {layout: _layout_results(config, runs, home, layout) for layout in config.layouts}
    return {"config": to_mapping(config), "layouts": layouts}


def _layout_results(
    config: WalkConfig, runs: list[StudentRun], home: Path, layout: str
) -> dict[str, Any]:
    """One layout: what is true of it, then kind -> decision rule -> NFE -> a cell."""
    task = load_task(home / layout, config.nfe)

    def cell(kind: str, rule: str, nfe: int) -> dict[str, Any]:
        """All training and sampling seeds of one model kind together."""
        same_kind = [run for run in runs if (run.layout, run.kind) == (layout, kind)]
        folders = [run.samples(rule, seed) for run in same_kind for seed in config.sample_seeds]
        return score_cell(task, [sample_file(folder, nfe) for folder in folders])

    return {
        "num_paths": len(task.maze.paths),
        "teacher_mass_on_paths": sum(task.path_probabilities.values()),
        "optimum": {str(nfe): value for nfe, value in task.optimum.items()},
        "sampling_floor": sampling_floor(task, config.num_samples),
        "models": {
            kind: {rule: {str(nfe): cell(kind, rule, nfe) for nfe in config.nfe} for rule in RULES}
            for kind in config.kinds
        },
    }


def panels(config: WalkConfig, runs: list[StudentRun], home: Path) -> Panels:
    """The figure's panels: the first seed of each model at the smallest and a middle NFE."""
    shown = sorted({config.nfe[0], config.nfe[len(config.nfe) // 2]})
    return {
        layout: {
            f"{display_name(run.kind)}, NFE {nfe}": _panel(config, run, home, nfe)
            for run in runs
            if (run.layout, run.seed) == (layout, config.seeds[0])
            for nfe in shown
        }
        for layout in config.layouts
    }


def _panel(
    config: WalkConfig, run: StudentRun, home: Path, nfe: int
) -> tuple[Maze, Sequence[Path_ | None]]:
    store = home / run.layout / "store"
    folder = run.samples(natural_rule(run.kind), config.sample_seeds[0])
    samples = read_samples(sample_file(folder, nfe))
    return Maze.read(store / "corpus" / "maze.json"), moves_of(
        read_words(store / "tokenizer"), samples
    )


@app.command()
def walk(
    config: Annotated[Path, typer.Option(help="What to run.")] = Path("configs/maze-demo.toml"),
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("out/maze-demo"),
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
    parallel: Annotated[int, typer.Option(help="Students trained side by side.")] = 2,
) -> None:
    """Run the maze: paths, teacher, shards, students, samples, scores, report."""
    check_parallel(parallel)  # before hours of work that its mistake would end
    started = time.monotonic()
    settings = resolve(WalkConfig, read_toml(config), overrides=overrides or [])
    require_writable(out)
    write_json_atomic(out / "config.json", to_mapping(settings))
    runs = [
        StudentRun(layout, kind, seed, out)
        for layout in settings.layouts
        for seed in settings.seeds
        for kind in settings.kinds
    ]
    extract(settings, out)
    train(settings, runs, parallel)
    sample(settings, runs, parallel)
    results = collect(settings, runs, out)
    results["seconds"] = time.monotonic() - started
    results["summary"] = (
        f"{len(settings.seeds)} training seed(s) per model, {len(settings.sample_seeds)} sampling "
        f"seeds of {settings.num_samples} samples each; configuration {config.name}; "
        f"{results['seconds']:.0f} seconds on this machine."
    )
    for table in write_maze_report(results, panels(settings, runs, out), out):
        typer.echo(table.to_text() + "\n")
    typer.echo(f"{results['summary']}\nwrote {out / 'report.html'}, results.json and paths.png")


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
