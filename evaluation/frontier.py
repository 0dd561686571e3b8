"""``gdistill-eval frontier`` and ``check-scores``: students by how near the text they write.

Every file of a sweep is a point: perplexity by a judge, distance of its samples from held-out text.
A model's setting is chosen on one half of its samples and reported on the other, so that choosing
among many settings buys nothing. Passes are forward passes per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float, Int

from evaluation.figures import TEACHER, figure_file, look
from evaluation.report import Table, write_report
from evaluation.samples.samples import (
    SampleSet,
    drawn_with,
    find_sample_files,
    named_folder,
    read_data_rows,
    read_samples,
)
from evaluation.scorers import Judging, ScoreOptions
from evaluation.text.distance import (
    Estimate,
    distinct_beginnings,
    energy_distance,
    frechet_distance,
    jackknife,
    memorised_share,
    naive_samples,
    ngram_vectors,
    require_enough,
    typicality_gap,
)
from evaluation.text.diversity import repetition_share, unigram_entropy_nats
from evaluation.text.mauve_divergence import text_features
from evaluation.text.reading import readings_folder
from shards.atomic import require_writable
from shards.console import progress_bar
from shards.errors import UsageError
from shards.provenance import code_version

SHOWN_SETTINGS = ("sampler", "decision", "temperature", "tau", "nucleus_p", "order_temperature")
MOST_TRAINING_ROWS = 20_000

Tokens = Int[np.ndarray, "n l"]
Vectors = Float[np.ndarray, "n d"]


@dataclass(frozen=True)
class Text:
    """Rows of the text that samples are held against.

    Attributes:
        reference: Held-out rows; distances are to them.
        own: As many other rows of the text: their distance is the floor.
        training: Rows that students were trained on.
        tokenizer: Of the rows; None where the store has none.
    """

    reference: Tokens
    own: Tokens
    training: Tokens
    tokenizer: Any

    @classmethod
    def read(cls, place: Path, num: int, length: int | None) -> Text:
        """Of a store: one half of the validation rows as reference, the other as the text's own.

        Not training rows: a corpus may be sorted, and then its splits differ.

        Raises:
            UsageError: Where there is no store, or too few rows in it.
        """
        held_out = read_data_rows(place, "validation", 2 * num)
        training = read_data_rows(place, "train", MOST_TRAINING_ROWS).rows[:, :length]
        rows = np.random.default_rng(0).permutation(held_out.rows[:, :length])
        half = len(rows) // 2
        require_enough(half, f"{place}, half of {held_out.name}")
        tokenizer = None
        for folder in (place / "tokenizer", place / "store/tokenizer"):
            if folder.is_dir():
                from transformers import AutoTokenizer

                tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return cls(rows[:half], rows[half : 2 * half], training, tokenizer)

    def decode(self, rows: Tokens) -> list[str]:
        """The rows as text.

        Raises:
            UsageError: Where the store keeps no tokenizer.
        """
        if self.tokenizer is None:
            raise UsageError(
                "a judge reads text, and this store keeps no tokenizer",
                where="--data",
                remedy="leave out --judge: the energy distance reads token ids",
            )
        return self.tokenizer.batch_decode(rows.tolist(), skip_special_tokens=False)


class Ruler:
    """What measures samples against one text.

    Args:
        text: The text.
        judging: A judge for the Fréchet distance and perplexity; None for the energy distance.
        kept: Folder for states that were read.
    """

    def __init__(self, text: Text, judging: Judging | None, kept: Path) -> None:
        self.text, self.judging, self.kept = text, judging, kept
        self.reference = {name: of(text.reference) for name, of in self._spaces().items()}
        self.own = {name: of(text.own) for name, of in self._spaces().items()}

    def _spaces(self) -> dict[str, Callable[[Tokens], Vectors]]:
        if self.judging is None:
            return {"n-grams": lambda rows: ngram_vectors(rows.tolist())}
        judging = self.judging
        return {
            "n-grams": lambda rows: ngram_vectors(rows.tolist()),
            "states": lambda rows: self.states(self.text.decode(rows), judging),
        }

    def states(self, texts: Sequence[str], judging: Judging) -> Vectors:
        """The judge's states of each text, averaged over its tokens."""
        most = min(judging.limits.max_tokens, judging.judge.context_length)
        found = text_features(judging.judge, texts, most, self.kept, pooling="mean")
        return found.values.astype(np.float64)

    def distances(self, tokens: Tokens, texts: Sequence[str] | None) -> dict[str, Estimate]:
        """Score -> estimate; those by a judge where there is one."""
        vectors = ngram_vectors(tokens.tolist())
        found = {
            "energy": jackknife(partial(energy_distance, y=self.reference["n-grams"]), vectors)
        }
        if self.judging is not None:
            states = self.states(texts or self.text.decode(tokens), self.judging)
            reference, own = self.reference["states"], self.own["states"]
            found["Fréchet"] = jackknife(partial(frechet_distance, y=reference), states)
            found["typicality gap"] = jackknife(
                partial(typicality_gap, fitted=reference, typical=own), states
            )
        return found

    @property
    def ranking(self) -> str:
        """The distance that ranks: by the judge where there is one."""
        return "energy" if self.judging is None else "Fréchet"


def described(tokens: Tokens, text: Text) -> dict[str, float]:
    """Scores that are shown and rank nothing: each is won by a sampler without parameters."""
    rows = tokens.tolist()
    return {
        "entropy_nats": float(np.mean([unigram_entropy_nats(row) for row in rows])),
        "rep_4": float(np.mean([repetition_share(row) for row in rows])),
        "distinct_beginnings": distinct_beginnings(rows),
        "memorised_16_grams": memorised_share(rows, text.training),
    }


@dataclass(frozen=True)
class Point:
    """One file of samples: one model, one setting of its sampler.

    Attributes:
        model: Name of the run.
        setting: What of the sampler differs between the run's files.
        passes: Forward passes per sequence.
        chosen_by: Distance of the first half of the samples.
        distance: Of the other half.
        perplexity: Of the other half by the judge; None without one.
        described: What ranks nothing.
    """

    model: str
    setting: str
    passes: float
    chosen_by: float
    distance: Estimate
    perplexity: float | None
    described: Mapping[str, float]


def read_point(model: str, setting: str, samples: SampleSet, ruler: Ruler) -> Point:
    """Measure one file, its halves apart.

    Raises:
        UsageError: For rows of unequal length, or too few of them.
    """
    if len({len(row) for row in samples.tokens}) > 1:
        raise UsageError("rows of unequal length", where=samples.source, expected="whole rows")
    require_enough(len(samples.tokens) // 2, f"{samples.source}, each half")
    if samples.nfe_mean is None:
        raise UsageError("samples without a number of forward passes", where=samples.source)
    tokens = np.array(samples.tokens)
    texts = samples.require_texts() if ruler.judging is not None else None
    halves = [np.arange(len(tokens)) % 2 == half for half in (0, 1)]
    first, second = (
        ruler.distances(tokens[half], texts and [t for t, k in zip(texts, half, strict=True) if k])[
            ruler.ranking
        ]
        for half in halves
    )
    perplexity = None
    if ruler.judging is not None:
        score = ruler.judging.perplexity(samples)
        assert score.per_sample is not None
        kept = {index for index, k in zip(samples.indices, halves[1], strict=True) if k}
        own = [index for index in score.per_sample.indices if index in kept]
        perplexity = score.per_sample.select(own).value()
    shown = described(tokens[halves[1]], ruler.text)
    return Point(model, setting, samples.nfe_mean, first.value, second, perplexity, shown)


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
    """One sentence per pair of models: what one beats of the other in both, in no more passes."""
    models, sentences = list(dict.fromkeys(p.model for p in points)), []
    for one in models:
        for other in (model for model in models if model != one):
            theirs = [p for p in points if p.model == other]
            ours = [p for p in points if p.model == one]
            beaten = sum(
                any(
                    p.passes <= q.passes
                    and p.distance.value < q.distance.value
                    and (p.perplexity or 0.0) <= (q.perplexity or 0.0)
                    for p in ours
                )
                for q in theirs
            )
            if beaten:
                sentences.append(
                    f"{one} beats {beaten} of {len(theirs)} settings of {other} in distance and "
                    "perplexity, in no more passes."
                )
    return sentences


def frontier(
    runs: Annotated[
        list[str], typer.Argument(help="Folders of a sweep, one per model: FOLDER or NAME=FOLDER.")
    ],
    data: Annotated[Path, typer.Option(help="Store that the students were trained from.")],
    judge: Annotated[
        str | None,
        typer.Option(help="Causal LM, not the teacher, for Fréchet distance and perplexity."),
    ] = None,
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
    sets = [
        (name, read_samples(f, folder)) for name, folder in named for f in find_sample_files(folder)
    ]
    require_writable(out)
    length = len(sets[0][1].tokens[0])
    text = Text.read(data, min(len(samples.tokens) for _, samples in sets) // 2, length)
    options = ScoreOptions(judge, None, None, None, None, device, kept=readings_folder(out))
    judging = Judging.start(options, [samples for _, samples in sets]) if judge else None
    ruler = Ruler(text, judging, readings_folder(out))
    points = []
    with progress_bar("frontier", len(sets), unit="files") as bar:
        for name, samples in sets:
            facts = {**drawn_with(samples), **samples.sampler}
            shown = [f"{k} {facts[k]}" for k in SHOWN_SETTINGS if facts.get(k) is not None]
            points.append(read_point(name, ", ".join(shown), samples, ruler))
            bar.advance(1)
    floor = ruler.distances(text.own, None)[ruler.ranking]
    table = _nearest_table(points, ruler.ranking, floor, len(text.reference))
    sentences = dominance(points)
    figure = _figure(points, floor, ruler.ranking, out / "frontier.png")
    page = write_report(
        out,
        title="Distance from the text",
        summary=" ".join(sentences) or "No model beats a setting of another in both.",
        tables=[table],
        figures=[("Every setting, and each model's frontier; down and left is better", figure)],
        results={
            "ranking": ruler.ranking,
            "floor": asdict(floor),
            "judge": dict(judging.judge.identity) if judging else None,
            "points": [asdict(point) for point in points],
            "code_version": code_version(),
        },
    )
    typer.echo(table.to_text() + "\n")
    typer.echo("\n".join(sentences))
    typer.echo(f"wrote {page}, results.json and frontier.png")


def _nearest_table(points: Sequence[Point], ranking: str, floor: Estimate, num: int) -> Table:
    rows = [
        (
            model,
            f"{passes:g}",
            _estimate(point.distance),
            "-" if point.perplexity is None else f"{point.perplexity:.1f}",
            f"{point.described['entropy_nats']:.2f}",
            f"{point.described['distinct_beginnings']:.2f}",
            f"{point.described['memorised_16_grams']:.3f}",
            point.setting,
        )
        for (model, passes), point in nearest(points).items()
    ]
    rows.append(("the text itself", "-", _estimate(floor), "-", "-", "-", "-", "-"))
    header = ("model", "passes", f"{ranking} distance", "perplexity", "entropy", "beginnings")
    note = (
        f"Passes per sequence. Distance from {num} held-out rows [95% jackknife interval over "
        "samples]; settings chosen on the other half of the samples. Beginnings: share that no "
        "other sample has. 16-grams: share found in the training rows."
    )
    return Table("Nearest the text", (*header, "16-grams", "sampled"), tuple(rows), notes=(note,))


def _estimate(found: Estimate) -> str:
    return f"{found.value:.3g} [{found.low:.3g}, {found.high:.3g}]"


def _figure(points: Sequence[Point], floor: Estimate, ranking: str, path: Path) -> Path:
    """Perplexity (passes without a judge) over distance; a colour per model."""
    has_judge = points[0].perplexity is not None
    with figure_file(path, size=(7, 4.6)) as (figure, panels):
        axes = panels[0, 0]
        for number, model in enumerate(dict.fromkeys(point.model for point in points)):
            own = [point for point in points if point.model == model]
            height = [p.perplexity if p.perplexity is not None else p.passes for p in own]
            places = list(zip([p.distance.value for p in own], height, strict=True))
            style = look(number)
            axes.plot(*zip(*places, strict=True), alpha=0.35, **{**style, "ls": ""})
            axes.plot(*zip(*pareto(places), strict=True), label=model, **style)
        axes.axvline(floor.value, color=TEACHER, ls=":", label="the text itself")
        axes.set_yscale("log")
        axes.set_xlabel(f"{ranking} distance from the text")
        axes.set_ylabel("generative perplexity" if has_judge else "forward passes per sequence")
        figure.legend(loc="outside right upper")
    return path


def check_scores(
    data: Annotated[Path, typer.Option(help="Store whose text samples are held against.")],
    samples: Annotated[
        Path | None, typer.Option(help="A real student's samples, which must come out ahead.")
    ] = None,
    judge: Annotated[str | None, typer.Option(help="Causal LM for scores by a judge.")] = None,
    num: Annotated[int, typer.Option(help="Rows of each naive sampler.")] = 512,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("check-scores"),
    device: Annotated[str | None, typer.Option(help="Device of the judge.")] = None,
) -> None:
    """Samplers without a parameter against the text: which scores they win, so rank nothing."""
    real = None if samples is None else read_samples(find_sample_files(samples)[0])
    require_enough(num, "--num")
    require_writable(out)
    text = Text.read(data, num, None if real is None else len(real.tokens[0]))
    options = ScoreOptions(judge, None, None, None, None, device, kept=readings_folder(out))
    judging = Judging.start(options, [real] if real else []) if judge else None
    ruler = Ruler(text, judging, readings_folder(out))
    sets = {"the text itself": text.own}
    if real is not None:
        sets[f"student: {real.name}"] = np.array(real.tokens)
    sets |= naive_samples(text.training, len(text.reference))
    scores = {name: _all_scores(rows, ruler) for name, rows in sets.items()}
    honest = [name for name in sets if name.startswith(("the text", "student"))]
    ranks = {
        score: max(scores[name][score] for name in honest)
        < min(values[score] for name, values in scores.items() if name not in honest)
        for score in scores[honest[0]]
    }
    columns = tuple(ranks)
    rows = [(name, *(f"{values[c]:.3g}" for c in columns)) for name, values in scores.items()]
    rows.append(("ranks", *("yes" if ranks[c] else "no" for c in columns)))
    note = "A score ranks where all naive samplers are behind text and student; less is better."
    table = Table("Naive samplers", ("rows", *columns), tuple(rows), notes=(note,))
    results = {"scores": scores, "ranks": ranks, "code_version": code_version()}
    write_report(out, title="Check of scores", summary=note, tables=[table], results=results)
    typer.echo(table.to_text())
    typer.echo(f"wrote {out / 'report.html'}")


def _all_scores(rows: Tokens, ruler: Ruler) -> dict[str, float]:
    """Every score of some rows, less is better."""
    found = {name: one.value for name, one in ruler.distances(rows, None).items()}
    shown = described(rows, ruler.text)
    found["-entropy"] = -shown["entropy_nats"]
    found["rep-4"] = shown["rep_4"]
    if ruler.judging is not None:
        from evaluation.text.perplexity import generative_perplexity

        judging = ruler.judging
        texts = ruler.text.decode(rows)
        found["perplexity"] = generative_perplexity(
            judging.judge, texts, max_tokens=judging.limits.max_tokens, memory=judging.memory
        ).value
    return found
