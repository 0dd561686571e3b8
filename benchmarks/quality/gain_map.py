"""Where noise pays: students of one store, by tokens ahead of known text, and by passes over a row.

    python -m benchmarks.quality.gain_map --store STORE --teacher DIR NAME=RUN NAME=RUN,RUN ..

Ahead: one pass behind known text. Conditioned students are read against the best of the plain ones
of their kind, block size and shape, at each distance anew: NLL of the teacher at equal entropy, and
how often a student writes what the teacher would have written from the same noise. Runs with a
comma between are seeds of one student, whose fills count together.

Passes: the ratios of perplexity that the bench has recorded (``--passes``), each student in its
best order. Writes ``gain-map.json`` and, beside it, two tables and a figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jaxtyping import Int
from torch import Tensor

from benchmarks.quality.ahead import Fills
from benchmarks.quality.gain import Gain, gain_of_first
from benchmarks.quality.gain_figure import Cell, draw
from benchmarks.quality.matched import (
    Ratio,
    by_order,
    match_students,
    ratio_lines,
    ratios,
    recipe_of,
)
from benchmarks.quality.plan import Plan
from benchmarks.quality.stories import (
    AHEAD_FILE,
    DISTANCES,
    PARTS,
    fills_ahead,
    read_ahead,
    save_ahead,
    validation_rows,
)
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.errors import UsageError
from shards.settings import from_mapping
from trainer import load_student

SAMPLE_SEED = 11
RESULTS = Path("benchmarks/results")
PASSES = tuple(
    RESULTS / f"quality-{name}.json"
    for name in ("stories", "stories-blocks", "stories-width-64", "stories-width-256")
)
JUDGE = "teacher"
Curves = Mapping[float, Fills]
"""Nucleus p -> fills; 0 is argmax."""


@dataclass(frozen=True)
class Filled:
    """A student's fills.

    Attributes:
        shape: Its kind, layers, width and block size; only students of one shape are compared.
        is_conditioned: Whether it sees noise.
        curves: Its fills, those of all seeds together.
    """

    shape: str
    is_conditioned: bool
    curves: Curves


def best_gain(
    plain: Mapping[str, Curves], noisy: Curves, count: int
) -> tuple[str | None, Gain | None]:
    """The plain student that leaves the conditioned one the least, of those that can be read."""
    found = {name: gain_of_first(curves, noisy, count) for name, curves in plain.items()}
    read = {name: gain for name, gain in found.items() if gain.value == gain.value}
    if not read:
        return None, None
    name = max(read, key=lambda each: read[each].value)
    return name, read[name]


def agreement(fills: Fills, count: int) -> float:
    """Share of fills whose last of ``count`` tokens is the teacher's."""
    return float(fills.equal[:, count - 1].float().mean())


def map_gains(students: Mapping[str, Filled]) -> list[Cell]:
    """Every conditioned student at every distance that it fills.

    Raises:
        UsageError: When none has noise, or one has no plain student of its shape with its seeds.
    """
    noisy = {name: found for name, found in students.items() if found.is_conditioned}
    if not noisy:
        raise UsageError(
            "plain and conditioned students are compared", where="RUNS", got=[*students]
        )
    cells = []
    for name, found in noisy.items():
        plain, own = plain_of(students, name), found.curves
        for count in (each for each in DISTANCES if each <= own[0.0].nll.shape[1]):
            against, gain = best_gain(plain, own, count)
            without = max(agreement(curves[1.0], count) for curves in plain.values())
            equal = agreement(own[0.0], count)
            cells.append(Cell(name, found.shape, count, against, gain, equal, without))
    return cells


def plain_of(students: Mapping[str, Filled], name: str) -> dict[str, Curves]:
    """The plain students of its shape, of the seeds that it has: the first ones of theirs.

    Raises:
        UsageError: When there is none, or one of fewer seeds.
    """
    noisy = students[name]
    num_fills = len(noisy.curves[0.0].nll)
    found = {
        other: {p: part(fill, slice(num_fills)) for p, fill in each.curves.items()}
        for other, each in students.items()
        if each.shape == noisy.shape and not each.is_conditioned
    }
    if not found or any(len(curves[1.0].nll) < num_fills for curves in found.values()):
        expected = f"plain students of as many seeds: {noisy.shape}"
        raise UsageError("nothing to compare with", where=name, got=[*found], expected=expected)
    return found


def part(fills: Fills, rows: slice) -> Fills:
    """Some of the fills."""
    return Fills(**{name: getattr(fills, name)[rows] for name in PARTS})


def together(seeds: Sequence[Curves]) -> Curves:
    """The fills of all seeds of one student."""
    return {
        p: Fills(**{name: torch.cat([getattr(each[p], name) for each in seeds]) for name in PARTS})
        for p in seeds[0]
    }


def shape_of(student: Any) -> str:
    """Kind, layers x width, and the block size of students that have blocks."""
    config = student.config
    shape = f"{type(student).__name__} {config.num_layers} x {config.hidden_size}"
    is_whole = config.tokens_per_block == config.row_length
    return shape if is_whole else f"{shape}, blocks of {config.tokens_per_block}"


def recorded_ratios(files: Iterable[Path]) -> list[Ratio]:
    """What the bench has recorded of whole rows: every conditioned recipe in its best order.

    One that does not reach the text's entropy is compared at the highest that it has.
    """
    ratios_of_all = []
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        plan, entropy = from_mapping(Plan, found["plan"]), found["reference"]["entropy_nats"]
        best: dict[tuple[str, float], Ratio] = {}
        for ratio in ratios(plan, found["recipes"], JUDGE, entropy):
            place = recipe_of(ratio.name), ratio.nfe
            best[place] = min(best.get(place, ratio), ratio, key=_rank)
        ratios_of_all += [
            ratio if ratio.is_matched else at_own_entropy(plan, found["recipes"], ratio, entropy)
            for ratio in best.values()
        ]
    return ratios_of_all


def _rank(ratio: Ratio) -> tuple[bool, float]:
    return not ratio.is_matched, ratio.value


def at_own_entropy(
    plan: Plan, figures: Mapping[str, Sequence[Mapping[str, Any]]], ratio: Ratio, entropy: float
) -> Ratio:
    """The ratio at the entropy that the conditioned recipe has: it does not reach ``entropy``."""
    place = ratio.name, ratio.nfe
    own = match_students(by_order(figures), JUDGE, entropy)[place].entropy_nats
    (found,) = (r for r in ratios(plan, figures, JUDGE, own) if (r.name, r.nfe) == place)
    return replace(found, against=f"{found.against}; at entropy {own:.2f}")


def table(cells: Sequence[Cell]) -> str:
    """A row per student, a column per distance."""
    head = ["gain in nats at equal entropy, best plain student; agreement with the teacher, %"]
    lines = [[*head, *(f"{count} ahead" for count in DISTANCES)]]
    lines.append(["---"] * len(lines[0]))
    for name in dict.fromkeys(cell.student for cell in cells):
        own = {cell.num_ahead: cell for cell in cells if cell.student == name}
        lines.append([name, *(_cell(own.get(count)) for count in DISTANCES)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    agreed = f"{100 * cell.agreement:.0f} against {100 * cell.plain_agreement:.0f}"
    if cell.gain is None:
        return f"entropy not reached without noise; {agreed}"
    low, high = cell.gain.interval
    return f"{cell.gain.value:+.2f} [{low:+.2f}, {high:+.2f}], {cell.plain}; {agreed}"


def named_runs(words: Sequence[str]) -> dict[str, list[Path]]:
    """NAME=RUN or NAME=RUN,RUN words.

    Raises:
        UsageError: For a word without a name, or two of one name.
    """
    pairs = [word.partition("=") for word in words]
    names = [name for name, _, _ in pairs]
    if not all(name and runs for name, _, runs in pairs) or len(set(names)) < len(names):
        raise UsageError(
            "each student needs a name of its own", where="RUNS", got=words, expected="NAME=FOLDER"
        )
    return {name: [Path(run) for run in runs.split(",")] for name, _, runs in pairs}


def fill(runs: Sequence[Path], judge: Any, rows: Int[Tensor, "n l"]) -> Filled:
    """The fills of one student's seeds; those that lie beside its model are not made again."""
    students: list[Any] = [load_student(run).eval() for run in runs]
    curves = []
    for run, student in zip(runs, students, strict=True):
        kept, model = run / AHEAD_FILE, run / "model" / "model.safetensors"
        if not kept.exists() or kept.stat().st_mtime < model.stat().st_mtime:
            save_ahead(fills_ahead(student, judge, rows, SAMPLE_SEED), kept)
        curves.append(read_ahead(kept))
    return Filled(shape_of(students[0]), students[0].is_conditioned, together(curves))


def gain_map(
    runs: Annotated[list[str], typer.Argument(help="NAME=RUN[,RUN..], plain and conditioned.")],
    store: Annotated[Path, typer.Option(help="The store that all were trained on.")],
    teacher: Annotated[str, typer.Option(help="Folder or hub id of the teacher.")],
    passes: Annotated[
        list[Path], typer.Option(help="Results of the bench, for the ratios over passes.")
    ] = PASSES,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="Results.")] = RESULTS,
) -> None:
    """Fill, compare, write."""
    from transformers import AutoModelForCausalLM

    judge: Any = AutoModelForCausalLM.from_pretrained(teacher, trust_remote_code=False).eval()
    rows, named = validation_rows(store), named_runs(runs)
    cells = map_gains({name: fill(folders, judge, rows) for name, folders in named.items()})
    over_passes = recorded_ratios(passes)
    out.mkdir(parents=True, exist_ok=True)
    found = {"cells": cells, "passes": over_passes}
    write_json_atomic(
        out / "gain-map.json", {name: [asdict(each) for each in found[name]] for name in found}
    )
    tables = f"{table(cells)}\n" + "\n".join(ratio_lines(over_passes)) + "\n"
    (out / "gain-map.md").write_text(tables, encoding="utf-8")
    draw(cells, over_passes, out / "gain-map.png")
    typer.echo(tables)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(gain_map)
    run_command(app)
