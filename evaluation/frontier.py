"""``gdistill-eval frontier`` and ``check-scores``: students by how near the text they write.

Every file of a sweep is a point: perplexity by a judge, distance of its samples from held-out text.
A model's setting is chosen on one half of its samples and reported on the other, so that choosing
among many settings buys nothing. Passes are forward passes per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from evaluation.figures import TEACHER, figure_file, look
from evaluation.report import Table, write_report
from evaluation.samples import SAMPLER_FIELDS, SampleSet, find_sample_files, named_folder, read_samples
from evaluation.text.distance import MIN_SAMPLES, Estimate, Rows, naive_samples, require_enough, unigram_entropy_nats
from evaluation.text.reading import Judging, readings_folder
from evaluation.text.reference import ReferenceText, Ruler
from shards.atomic import require_writable
from shards.console import progress_bar
from shards.errors import UsageError
from shards.settings import code_version


@dataclass(frozen=True)
class Point:
    """One file of samples: one model, one setting of its sampler.

    Attributes:
        model: Name of the run.
        setting: Of its sampler; the table shows what is not the same for all points.
        passes: Forward passes per sequence.
        processor_seconds: Per sequence; None where the file does not say.
        chosen_by: Distance of the first half of the samples.
        distance: Of the other half.
        perplexity: Of the other half by the judge; None without one.
        described: Of the other half, what ranks nothing.
    """

    model: str
    setting: str
    passes: float
    processor_seconds: float | None
    chosen_by: float
    distance: Estimate
    perplexity: float | None
    described: Mapping[str, float]


def read_point(model: str, samples: SampleSet, ruler: Ruler, half: int) -> Point:
    """Measure two halves of a file apart, as large as those of the others: few rows are further from any text.

    Raises:
        UsageError: For rows without a number of passes.
    """
    if samples.nfe_mean is None:
        raise UsageError("samples without a number of forward passes", where=samples.source)
    rows = ruler.text.rows_of(samples)[: 2 * half]
    texts = samples.require_texts()[: 2 * half] if ruler.judging is not None else None
    first, second = (
        ruler.measure(rows[n::2], None if texts is None else ruler.features_of(texts[n::2])) for n in (0, 1)
    )
    perplexity = None
    if ruler.judging is not None and texts is not None:
        perplexity = ruler.judging.perplexity(texts[1::2], where=samples.source).value
    entropy = float(np.mean([unigram_entropy_nats(row) for row in samples.tokens[1 : 2 * half : 2]]))
    return Point(
        model,
        ", ".join(f"{k} {samples.sampler[k]}" for k in SAMPLER_FIELDS if samples.sampler.get(k) is not None),
        samples.nfe_mean,
        samples.processor_seconds_mean,
        first[ruler.ranking].value,
        second[ruler.ranking],
        perplexity,
        {"entropy_nats": entropy, **{name: one.value for name, one in second.items()}},
    )


def nearest(points: Sequence[Point]) -> dict[tuple[str, float], Point]:
    """(Model, passes) -> the setting that is nearest by the first half."""
    found: dict[tuple[str, float], Point] = {}
    for point in sorted(points, key=lambda point: point.chosen_by):
        found.setdefault((point.model, point.passes), point)
    return dict(sorted(found.items(), key=lambda item: (item[0][1], item[0][0])))


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is as good as in both; ascending in the first, lower is better."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def dominance(points: Sequence[Point]) -> list[str]:
    """One sentence per pair of models: what one beats of the other, in no more passes."""

    def beats(ours: Point, theirs: Point) -> bool:
        return (
            ours.passes <= theirs.passes
            and ours.distance.value < theirs.distance.value
            and (ours.perplexity or 0.0) <= (theirs.perplexity or 0.0)
        )

    sentences = []
    for one, other in permutations(dict.fromkeys(p.model for p in points), 2):
        ours, theirs = ([p for p in points if p.model == name] for name in (one, other))
        if beaten := sum(any(beats(p, q) for p in ours) for q in theirs):
            what = "in distance" + ("" if theirs[0].perplexity is None else " and perplexity")
            sentences.append(f"{one} beats {beaten} of {len(theirs)} settings of {other} {what}, in no more passes.")
    return sentences


def frontier(
    runs: Annotated[list[str], typer.Argument(help="Folders of a sweep, one per model: FOLDER or NAME=FOLDER.")],
    data: Annotated[Path, typer.Option(help="Store that the students were trained from.")],
    judge: Annotated[str | None, typer.Option(help="Causal LM, not the teacher: Fréchet distance, perplexity.")] = None,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("frontier"),
    device: Annotated[str | None, typer.Option(help="Device of the judge.")] = None,
) -> None:
    """Every setting a point in (distance, perplexity); which model is nearest at how many passes.

    Samples come from gdistill-sample --sweep, at least 256 per file. Interrupted, the same command
    goes on.
    """
    named = [named_folder(text) for text in runs]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        raise UsageError("two runs of one name", where=", ".join(names), remedy="use NAME=FOLDER")
    sets = [(name, read_samples(f, folder)) for name, folder in named for f in find_sample_files(folder)]
    require_writable(out)
    least = min((samples for _, samples in sets), key=lambda samples: len(samples.tokens))
    require_enough(len(least.tokens), least.source, 2 * MIN_SAMPLES, f"gdistill-sample --num {4 * MIN_SAMPLES}")
    half = len(least.tokens) // 2
    length = max(len(row) for _, samples in sets for row in samples.tokens)
    text = ReferenceText.read(data, 2 * half, length)
    judging = None if judge is None else Judging.load(judge, device, kept=readings_folder(out))
    ruler = Ruler(text, half, judging)
    points = []
    with progress_bar("frontier", len(sets), unit="files") as bar:
        for name, samples in sets:
            points.append(read_point(name, samples, ruler, half))
            bar.advance(1)
    floor = ruler.floor[ruler.ranking]
    table = _nearest_table(points, ruler.ranking, floor, ruler.num_rows)
    sentences = dominance(points)
    figure = _figure(points, floor, ruler.ranking, out / "frontier.png")
    page = write_report(
        out,
        title="Distance from the text",
        summary=" ".join(sentences) or "No model beats a setting of another.",
        tables=[table],
        figures=[("Each model where it is nearest; every setting, and the frontier; down and left is better", figure)],
        results={
            "ranking": ruler.ranking,
            "floor": asdict(floor),
            "judge": dict(judging.judge.identity) if judging else None,
            "points": [asdict(point) for point in points],
            "code_version": code_version(),
        },
    )
    typer.echo("\n".join([table.to_text(), "", *sentences]))
    typer.echo(f"wrote {page}, results.json and frontier.png")


def _nearest_table(points: Sequence[Point], ranking: str, floor: Estimate, num: int) -> Table:
    described = {"entropy": "entropy_nats", "beginnings": "distinct_beginnings", "16-grams": "memorised_16_grams"}
    rows, parts = [], {point.setting: point.setting.split(", ") for point in points}
    of_all = [part for part in parts[points[0].setting] if all(part in own for own in parts.values())]
    for (model, passes), point in nearest(points).items():
        seconds = "-" if point.processor_seconds is None else f"{point.processor_seconds:.3g}"
        perplexity = "-" if point.perplexity is None else f"{point.perplexity:.1f}"
        found = map(point.described.get, described.values())  # nothing is memorised where no training rows are known
        shown = ("-" if value is None else f"{value:.3g}" for value in found)
        setting = ", ".join(part for part in parts[point.setting] if part not in of_all) or "-"
        rows.append((model, f"{round(passes, 1):g}", seconds, str(point.distance), perplexity, *shown, setting))
    rows.append(("the text itself", "-", "-", str(floor), *["-"] * (2 + len(described))))
    header = ("model", "passes", "CPU s", ranking, "perplexity", *described, "sampled")
    note = (
        "Passes (a verifier's, where one reads all drafts) and CPU s per sequence. Distance from "
        f"{num} held-out rows [95% jackknife interval over samples]; settings chosen on the other half of the "
        "samples. Beginnings: share that no earlier sample has. 16-grams: share found in the training rows. "
        f"All were sampled with {', '.join(of_all) or 'nothing alike'}."
    )
    return Table("Nearest the text", header, tuple(rows), notes=(note,))


def _figure(points: Sequence[Point], floor: Estimate, ranking: str, path: Path) -> Path:
    """Distance over passes, each model where it is nearest; with a judge also perplexity over distance."""
    columns = 1 if points[0].perplexity is None else 2
    with figure_file(path, num_columns=columns, size=(2 + 5 * columns, 4.6)) as (figure, panels):
        left, *right = panels[0]
        for number, model in enumerate(dict.fromkeys(point.model for point in points)):
            style, own = look(number), [point for point in points if point.model == model]
            reached = [(p.passes, p.distance.value, p.distance.low, p.distance.high) for p in nearest(own).values()]
            passes, value, low, high = np.array(reached).T
            left.errorbar(passes, value, [value - low, high - value], label=model, capsize=2, **style)
            for axes in right:
                places = [(point.distance.value, point.perplexity or 1.0) for point in own]
                axes.plot(*zip(*places, strict=True), alpha=0.35, **{**style, "ls": ""})
                axes.plot(*zip(*pareto(places), strict=True), **style)
        what = f"{ranking.replace('_', ' ')} from the text"
        left.axhline(floor.value, color=TEACHER, ls=":", label="the text itself")
        left.set_xscale("log", base=2)
        left.set(xlabel="forward passes per sequence", ylabel=what)
        left.xaxis.set_major_formatter("{x:g}")
        for axes in right:
            axes.axvline(floor.value, color=TEACHER, ls=":")
            axes.set(xlabel=what, ylabel="generative perplexity", yscale="log")
        figure.legend(loc="outside right upper")
    return path


def check_scores(
    data: Annotated[Path, typer.Option(help="Store whose text samples are held against.")],
    samples: Annotated[Path | None, typer.Option(help="A real student's samples, which must come out ahead.")] = None,
    judge: Annotated[str | None, typer.Option(help="Causal LM for scores by a judge.")] = None,
    num: Annotated[int, typer.Option(help="Rows of each naive sampler.")] = 512,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("check-scores"),
    device: Annotated[str | None, typer.Option(help="Device of the judge.")] = None,
) -> None:
    """Samplers without a parameter against the text: which scores they win, so rank nothing."""
    real = None if samples is None else read_samples(find_sample_files(samples)[0])
    require_enough(num, "--num")
    if real is not None:
        require_enough(len(real.tokens), real.source)
    require_writable(out)
    length = None if real is None else max(map(len, real.tokens))
    text = ReferenceText.read(data, 2 * num, length)
    if text.training is None:
        raise UsageError("no token ids to draw from", where="--data", expected="a store")
    judging = None if judge is None else Judging.load(judge, device, kept=readings_folder(out))
    ruler = Ruler(text, num, judging)
    sets: dict[str, Rows] = {"the text itself": ruler.own_rows}
    if real is not None:
        sets[f"student: {real.name}"] = text.rows_of(real)
    honest = list(sets)
    drawn = naive_samples(text.training[:, :length], ruler.num_rows)
    sets |= {name: rows.tolist() for name, rows in drawn.items()}
    scores = {name: _all_scores(rows, ruler) for name, rows in sets.items()}
    if judging is not None:  # its own rows are among the typical ones, and among MAUVE's references
        own = scores["the text itself"]
        own["typicality_gap"] = ruler.floor["typicality_gap"].value
        own["-mauve"] = -ruler.mauve_floor.value
    naive = [values for name, values in scores.items() if name not in honest]
    ranks = {
        score: max(scores[name][score] for name in honest) < min(v[score] for v in naive) for score in scores[honest[0]]
    }
    rows = [(name, *(f"{values[c]:.3g}" for c in ranks)) for name, values in scores.items()]
    rows.append(("ranks", *("yes" if ranks[c] else "no" for c in ranks)))
    note = "A score ranks where all naive samplers are behind text and student; less is better."
    table = Table("Naive samplers", ("rows", *ranks), tuple(rows), notes=(note,))
    results = {"scores": scores, "ranks": ranks, "code_version": code_version()}
    write_report(out, title="Check of scores", summary=note, tables=[table], results=results)
    typer.echo(table.to_text())
    typer.echo(f"wrote {out / 'report.html'}")


def _all_scores(rows: Rows, ruler: Ruler) -> dict[str, float]:
    """Every score of some rows of token ids, less is better."""
    judging, texts, features = ruler.judging, [], None
    if judging is not None:
        texts = ruler.text.decode(rows)
        features = ruler.features_of(texts)
    found = {name: one.value for name, one in ruler.measure(rows, features).items()}
    found["-distinct_beginnings"] = -found.pop("distinct_beginnings")
    found["-entropy_nats"] = -float(np.mean([unigram_entropy_nats(row) for row in rows]))
    if judging is not None and features is not None:
        found["-mauve"] = -ruler.mauve(features).value
        found["perplexity"] = judging.perplexity(texts).value
    return found
