"""The main job in about four minutes on two cores, from a maze to a table and a picture.

    python -m runs.demo [--out out/demo]        # or: make demo

A small maze has 57 ways from start to target. A teacher learns them and is run once; from its
shards two students of one size learn to write a whole way in one pass: one without noise, one that
sees the teacher's Gumbel noise. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "maze-demo.toml"
NFE = (1, 2, 4, 8)
NUM_SAMPLES, SAMPLE_SEED, NUM_SHOWN = 1000, 11, 12
PLAIN = ("model.noise.layers=[]", "model.diffusion.fully_masked_share=0.0", "model.diffusion.max_loss_weight=none")
STUDENTS = {"without noise": ("--conditioning", "none", *(f"--set={setting}" for setting in PLAIN)), "with noise": ()}
"""Of one size and as many steps, each by the recipe that is best for it (1/t without noise)."""
SAMPLING: dict[str, dict[str, Any]] = {
    "without noise": {"sampler": "ancestral", "decision": "categorical"},
    "with noise": {"sampler": "ancestral", "decision": "argmax", "tau": 1.0},
}
"""Without noise all variety is in the draws; given the noise the way is decided."""
SECONDS = {"teacher, shards": 20, "two students": 165, "samples, scores": 20}
"""On two quiet cores. They divide the bar, which measures what is left as it goes."""


def folder_of(out: Path, name: str) -> Path:
    """Of a student's training."""
    return out / name.replace(" ", "-")


def draw(out: Path, bar: Any) -> dict[str, Any]:
    """Samples of both students at every NFE, scored."""
    import torch

    from benchmarks.maze_task import load_task, pool
    from trainer import load_student

    torch.set_num_threads(2)
    task = load_task(out, NFE)
    found: dict[str, Any] = {"task": task, "students": {}, "cells": {}, "rows": {}}
    for name, sampling in SAMPLING.items():
        student = load_student(folder_of(out, name)).eval()
        found["students"][name] = student
        for nfe in NFE:
            bar.note(f"{name}, NFE {nfe}")
            rows = student.generate(num_samples=NUM_SAMPLES, seed=SAMPLE_SEED, nfe=nfe, **sampling)
            success, agreement = task.score(rows, SAMPLE_SEED)
            found["cells"][name, nfe] = pool([success], [agreement])
            found["rows"][name, nfe] = rows.tolist()
            bar.advance(SECONDS["samples, scores"] / (len(NFE) * len(SAMPLING)))
    return found


def shown_sample(found: dict[str, Any]) -> int:
    """The first sample whose way without noise is broken; the next ones are like it."""
    task = found["task"]
    rows = found["rows"]["without noise", 1]
    broken = [not task.maze.is_success(task.moves(row)) for row in rows]
    return broken.index(True) if any(broken) else 0


def draw_picture(found: dict[str, Any], path: Path) -> None:
    """One sample three times, each as map and as tokens: both students', and the teacher's."""
    from evaluation.figures import TEACHER, WITH_NOISE, WITHOUT_NOISE, figure_file

    task, index, cells = found["task"], shown_sample(found), found["cells"]
    teacher = task.teacher_rows(SAMPLE_SEED, NUM_SAMPLES).tolist()
    reached = [task.maze.is_success(task.moves(row)) for row in teacher]
    panels = [
        ("without noise: one pass", found["rows"]["without noise", 1][index],
         cells["without noise", 1]["success"], WITHOUT_NOISE),
        ("with noise: one pass", found["rows"]["with noise", 1][index],
         cells["with noise", 1]["success"], WITH_NOISE),
        (f"the teacher, same noise: {task.row_length - 1} passes", teacher[index],
         sum(reached) / len(reached), TEACHER),
    ]  # fmt: skip
    with figure_file(path, 1, 3, size=(12, 4.6)) as (figure, axes_row):
        figure.suptitle(
            "From S to T in one pass: without noise every token is drawn on its own; "
            "with the teacher's noise all follow one way",
            fontsize=13,
        )
        for axes, (title, row, share, colour) in zip(axes_row[0], panels, strict=True):
            draw_way(axes, task, row, colour)
            axes.set_title(title, color=colour, fontsize=13, loc="center")
            said = f"{100 * share:.0f}% of {NUM_SAMPLES:,} samples reach T"
            axes.set_xlabel(said, fontsize=12, labelpad=8)


def draw_way(axes: Any, task: Any, row: Sequence[int], colour: str) -> None:
    """The maze, the way as arrows up to its first fault (a cross), and the tokens below."""
    from matplotlib.patches import FancyArrowPatch, Rectangle

    maze = task.maze
    height, width = len(maze.rows), len(maze.rows[0])
    for y, line in enumerate(maze.rows):
        for x, cell in enumerate(line):
            face = "#4D4D4D" if cell == "#" else "#FAFAFA"
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="#CCCCCC", lw=0.8))
    words = [task.words[token] for token in row[1:]]
    steps, fault = walked(maze, words)
    for number, ((from_y, from_x), (to_y, to_x)) in enumerate(steps):
        is_last = fault is not None and number == len(steps) - 1
        axes.add_patch(
            FancyArrowPatch(
                (from_x, from_y),
                (to_x, to_y),
                arrowstyle="-|>",
                mutation_scale=16,
                lw=3,
                shrinkA=0,
                shrinkB=0,
                color=colour,
                ls=":" if is_last else "-",
                clip_on=False,
            )
        )
    if fault is not None:
        y, x = steps[-1][1] if steps else maze.start
        axes.plot([x], [y], "X", color="black", ms=15, mec="white", zorder=6, clip_on=False)
    for name, (y, x) in (("S", maze.start), ("T", maze.target)):
        axes.scatter([x], [y], s=330, color="black", zorder=5)
        axes.text(x, y, name, ha="center", va="center", color="white", zorder=7, weight="bold")
    arrows = {"up": "\u2191", "down": "\u2193", "left": "\u2190", "right": "\u2192"}
    for place, word in enumerate(words):
        wrong = fault is not None and place >= fault
        axes.text(
            -0.5 + (place + 0.5) * width / len(words),
            height - 0.1,
            arrows.get(word, "\u00b7"),
            ha="center",
            va="center",
            fontsize=17,
            color="#999999" if wrong else colour,
        )
    axes.set(xlim=(-0.62, width - 0.38), ylim=(height + 0.15, -0.62), aspect="equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def walked(maze: Any, words: Sequence[str]) -> tuple[list[Any], int | None]:
    """Steps (from, to) of the way, up to its first fault, and which token that is, or None.

    A fault is a step off the map, into a wall or onto a cell that was already visited, a move
    behind the end, and an end that is not the target.
    """
    from evaluation.maze import EOS, STEPS

    cells, steps = [maze.start], []
    for place, word in enumerate(words):
        if word not in STEPS:
            rest_is_end = all(other == EOS for other in words[place:])
            return steps, None if cells[-1] == maze.target and rest_is_end else place
        down, right = STEPS[word]
        cell = (cells[-1][0] + down, cells[-1][1] + right)
        inside = 0 <= cell[0] < len(maze.rows) and 0 <= cell[1] < len(maze.rows[0])
        wrong = cell in cells or not inside or maze.rows[cell[0]][cell[1]] == "#"
        ahead = 1.0 if inside and not wrong else 0.5
        steps.append((cells[-1], (cells[-1][0] + ahead * down, cells[-1][1] + ahead * right)))
        if wrong:
            return steps, place
        cells.append(cell)
    return steps, None if cells[-1] == maze.target else len(words)


def write_page(found: dict[str, Any], path: Path) -> None:
    """The page on which the samples settle, pass by pass."""
    import torch

    from evaluation import passes
    from evaluation.maze import teacher_decode
    from trainer.sampling.noise import sampling_noise
    from trainer.sampling.registry import make_sampler

    task = found["task"]
    read = partial(passes.read_moves, task.maze, task.words)
    columns = []
    for name, student in found["students"].items():
        samples = {}
        for nfe in NFE:
            settings = {**SAMPLING[name], "nfe": nfe}
            sampler = make_sampler(settings.pop("sampler"), **settings)
            drawn = (passes.settle(student, sampler, number, SAMPLE_SEED) for number in range(NUM_SHOWN))
            samples[str(nfe)] = [read(*one) for one in drawn]
        columns.append(passes.Column(name, "noise" if student.is_conditioned else "plain", samples))
    length, begun = task.row_length, torch.full((NUM_SHOWN,), task.words.index("<bos>"))
    noise = sampling_noise(SAMPLE_SEED, torch.arange(NUM_SHOWN), length, task.teacher.config.vocab_size)
    rows = teacher_decode(task.teacher, begun, noise, length)
    columns.append(passes.Column("teacher", "teacher", {"own": [read(row, [*range(length)]) for row in rows]}))
    passes.write_page(
        path,
        columns,
        title="A maze, pass by pass",
        about="Two students fill a whole row of ten tokens in few passes. Without noise, tokens of "
        "one pass are drawn each on its own and belong to different ways. With noise they agree: "
        "the noise has decided the way, the same as the teacher's, which needs a pass a token.",
        maze=task.maze,
    )


def table(found: dict[str, Any]) -> Any:
    """Two rows: success in per cent at every NFE, and what was drawn in one pass."""
    from evaluation.report import Table

    task, cells = found["task"], found["cells"]
    rows = []
    for name in SAMPLING:
        first = cells[name, NFE[0]]
        drawn = f"{first['num_distinct_paths']} of {first['num_paths_in_language']}"
        rows.append((name, *(f"{100 * cells[name, nfe]['success']:.1f}" for nfe in NFE), drawn))
    passes = ("1 pass", *(f"{nfe} passes" for nfe in NFE[1:]))
    optimum = ", ".join(f"{100 * task.optimum[nfe]:.1f}" for nfe in NFE)
    return Table(
        title=f"Samples that lead from S to T, % of {NUM_SAMPLES:,}",
        header=("student", *passes, "ways drawn in 1 pass"),
        rows=tuple(rows),
        notes=(f"No student without noise can do better than {optimum}.",),
    )


def sentence(found: dict[str, Any]) -> str:
    """What the table means."""
    (low, high), cells = found["cells"]["with noise", 1]["interval_95"], found["cells"]
    plain, noisy = cells["without noise", 1], cells["with noise", 1]
    return (
        f"In one pass the student with noise finds a way in {100 * noisy['success']:.0f}%"
        f" [{100 * low:.0f}, {100 * high:.0f}] of samples, without noise in"
        f" {100 * plain['success']:.0f}%;\n{100 * noisy['equal_to_teacher_decode']:.0f}% are, token"
        " for token, what the teacher writes from the same noise in ten passes."
    )


def main() -> None:
    """Everything, under one bar."""

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where all goes")
    parser.add_argument("--steps", type=int, help="training steps, instead of the config's")
    options = parser.parse_args()
    out: Path = options.out
    print(
        "gdistill demo: a teacher for a maze with 57 ways, its shards, two students, samples.\n"
        f"About {-(-sum(SECONDS.values()) // 60)} minutes on two cores, no network. Stop it any"
        f" time: the same command goes on. Everything goes to {out}/.",
        flush=True,
    )
    started = time.monotonic()
    from benchmarks.jobs import Job, run_jobs, share_by_the_clock, share_of_training
    from shards.console import progress_bar

    with progress_bar("demo", sum(SECONDS.values()), unit="%") as bar:

        def part(stage: str) -> Callable[[float, str], None]:
            bar.note(stage)
            shown = 0.0

            def report(share: float, running: str) -> None:
                nonlocal shown
                bar.advance(SECONDS[stage] * max(0.0, share - shown))
                shown = max(shown, share)

            return report

        words = ("gdistill-extract", "--corpus", "maze:m57", "--teacher-preset", "demo")
        clock = share_by_the_clock(SECONDS["teacher, shards"])
        extract = Job("extraction", (*words, "--out", str(out)), out / "extract.log", clock)
        run_jobs([extract], 1, part("teacher, shards"))
        jobs = []
        for name, settings in STUDENTS.items():
            home = folder_of(out, name)
            words = ("gdistill-train", "run", "--config", str(CONFIG), "--store", f"{out}/store")
            words += ("--out", str(home), *settings)
            if options.steps is not None:
                words += (f"--set=training.num_steps={options.steps}",)
                words += (f"--set=optimization.warmup_steps={options.steps // 10}",)
            share = share_of_training(home / "metrics.jsonl")
            jobs.append(Job(f"student {name}", words, out / f"{home.name}.log", share))
        run_jobs(jobs, len(jobs), part("two students"))
        found = draw(out, bar)
        picture, page = out / "demo.png", out / "demo.html"
        draw_picture(found, picture)
        write_page(found, page)
    print(f"\n{table(found).to_text()}\n\n{sentence(found)}\n")
    print(
        f"The picture: {picture.resolve()}\n"
        f"Step through the passes in a browser: {page.resolve()}\n"
        f"{time.monotonic() - started:.0f} seconds. Next, your own text:"
        " make extract CORPUS='stories/*.txt' TEACHER=path/or/hub-id"
    )


if __name__ == "__main__":
    from shards.console import run_command

    run_command(main)
