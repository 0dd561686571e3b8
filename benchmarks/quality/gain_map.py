"""Where noise pays: students of one store, one pass behind known text, token by token ahead.

    python -m benchmarks.quality.gain_map --store STORE --teacher DIR NAME=RUN NAME=RUN ..

Conditioned students are read against the best of the plain ones given, at each distance anew:
NLL of the teacher at equal entropy, and how often a student writes what the teacher would have
written from the same noise. Writes ``gain-map.json`` and, beside it, a table and a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.quality.ahead import Fills
from benchmarks.quality.gain import Gain, gain_of_first
from benchmarks.quality.stories import DISTANCES, fills_ahead, validation_rows
from shards.base import UsageError, run_command, write_json_atomic
from trainer import load_student

SAMPLE_SEED = 11
Curves = Mapping[float, Fills]
"""Nucleus p -> fills; 0 is argmax."""


@dataclass(frozen=True)
class Cell:
    """A conditioned student at a distance.

    Attributes:
        student: Its name.
        num_ahead: Tokens filled behind known text, in one pass.
        plain: The plain student that is best there.
        gain: Of the conditioned student over it; None where no plain curve reaches its entropy.
        agreement: Share of fills whose last token is the teacher's, of the same noise.
        plain_agreement: The best of the plain students', drawn by that very noise.
    """

    student: str
    num_ahead: int
    plain: str | None
    gain: Gain | None
    agreement: float
    plain_agreement: float


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


def map_gains(plain: Mapping[str, Curves], noisy: Mapping[str, Curves]) -> list[Cell]:
    """Every conditioned student at every distance that all can fill."""
    cells = []
    for name, curves in noisy.items():
        for count in (each for each in DISTANCES if each <= curves[0.0].nll.shape[1]):
            against, gain = best_gain(plain, curves, count)
            without = max(agreement(other[1.0], count) for other in plain.values())
            cells.append(Cell(name, count, against, gain, agreement(curves[0.0], count), without))
    return cells


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


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Left: nats at equal entropy, below 0 the noise pays. Right: agreement with the teacher."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (gains, agreed) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(dict.fromkeys(cell.student for cell in cells)):
        own = [cell for cell in cells if cell.student == name]
        read = [(cell.num_ahead, cell.gain) for cell in own if cell.gain is not None]
        _draw_gains(gains, name, read, f"C{number}")
        agreed.plot(*_shares(own, "agreement"), "o-", color=f"C{number}", ms=4, label=name)
    best = [cell for cell in cells if cell.student == cells[0].student]
    agreed.plot(*_shares(best, "plain_agreement"), "s--", color="0.4", ms=4, label="best without")
    gains.axhline(0, color="0.4", lw=1, ls="--")
    gains.set_title("Below the line the noise pays", loc="left", fontsize=10)
    gains.set_ylabel("NLL less that of the best plain student\nat equal entropy, nats per token")
    agreed.set_title("The teacher's own token from the same noise", loc="left", fontsize=10)
    agreed.set_ylabel("% of fills, at the last token")
    for axes in (gains, agreed):
        axes.set_xscale("log", base=2)
        axes.set_xticks(DISTANCES, [str(count) for count in DISTANCES])
        axes.set_xlabel("masked tokens behind known text, filled in one pass")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_gains(axes: Any, name: str, read: Sequence[tuple[int, Gain]], color: str) -> None:
    places, values = [count for count, _ in read], [gain.value for _, gain in read]
    axes.plot(places, values, "o-", color=color, ms=4, label=name)
    low = [gain.interval[0] for _, gain in read]
    axes.fill_between(places, low, [gain.interval[1] for _, gain in read], color=color, alpha=0.15)


def _shares(cells: Iterable[Cell], field: str) -> tuple[list[int], list[float]]:
    pairs = [(cell.num_ahead, 100 * getattr(cell, field)) for cell in cells]
    return [x for x, _ in pairs], [y for _, y in pairs]


def named_runs(words: Sequence[str]) -> dict[str, Path]:
    """NAME=RUN words.

    Raises:
        UsageError: For a word without a name, or two of one name.
    """
    pairs = [word.partition("=") for word in words]
    names = [name for name, _, _ in pairs]
    if not all(name and run for name, _, run in pairs) or len(set(names)) < len(names):
        raise UsageError(
            "each student needs a name of its own", where="RUNS", got=words, expected="NAME=FOLDER"
        )
    return {name: Path(run) for name, _, run in pairs}


def gain_map(
    runs: Annotated[list[str], typer.Argument(help="NAME=RUN, plain and conditioned students.")],
    store: Annotated[Path, typer.Option(help="The store that all were trained on.")],
    teacher: Annotated[str, typer.Option(help="Folder or hub id of the teacher.")],
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
) -> None:
    """Fill, compare, write."""
    from transformers import AutoModelForCausalLM

    judge: Any = AutoModelForCausalLM.from_pretrained(teacher, trust_remote_code=False).eval()
    rows, found = validation_rows(store), ({}, {})
    for name, run in named_runs(runs).items():
        student: Any = load_student(run).eval()
        found[student.is_conditioned][name] = fills_ahead(student, judge, rows, SAMPLE_SEED)
    if not all(found):
        raise UsageError("plain and conditioned students are compared", where="RUNS", got=runs)
    cells = map_gains(*found)
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / "gain-map.json", {"cells": [asdict(cell) for cell in cells]})
    (out / "gain-map.md").write_text(table(cells), encoding="utf-8")
    draw(cells, out / "gain-map.png")
    typer.echo(table(cells))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(gain_map)
    run_command(app)
