"""From folders of samples to curves: which files belong to one line, and which lines compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float

from evaluation.bootstrap import NUM_BOOTSTRAP, bootstrap_draws, percentile_interval
from evaluation.figures import LINE_STYLES, MARKERS, figure_file, look
from evaluation.report import Table, write_report
from evaluation.samples.samples import (
    SampleSet,
    drawn_with,
    find_sample_files,
    named_folder,
    read_data_rows,
    read_samples,
)
from evaluation.score import Score
from evaluation.scorers import Judging, ScoreOptions
from evaluation.text.diversity import entropy_score, unigram_entropy_nats
from evaluation.text.reading import readings_folder
from shards.atomic import require_writable, write_bytes_atomic
from shards.errors import UsageError, visible
from shards.provenance import code_version

SWEPT = ("nucleus_p", "temperature", "tau")
"""Settings that trade entropy for perplexity; files of one line may differ in one of them."""
COMPARED = ("tokens", "vocab_size", "tokenizer", "precision")
"""What must be equal for entropies of two lines to mean the same."""


@dataclass(frozen=True)
class Run:
    """The files of one model: one setting of the sweep and one NFE each."""

    name: str
    files: tuple[SampleSet, ...]


@dataclass(frozen=True)
class Curve:
    """One line of the figure: a model at one NFE.

    Attributes:
        model: Name of the run.
        nfe: Forward passes; the budget where the sampler has one, else the mean made.
        swept: The setting that differs between points; None for a single point.
        settings: Its value at each point.
        points: One per file, in the order of ``settings``.
        is_paired: Whether every file has the same seed and sample indices.
        perplexities: Each point's score, for tables.
        entropies: Each point's score.
    """

    model: str
    nfe: float
    swept: str | None
    settings: tuple[Any, ...]
    points: tuple[CurvePoint, ...]
    is_paired: bool
    perplexities: tuple[Score, ...]
    entropies: tuple[Score, ...]


def read_run(text: str) -> Run:
    """``FOLDER`` or ``NAME=FOLDER``: every file of samples below it, checked to be of one student.

    Raises:
        UsageError: Without samples, or for files of one folder that differ in more than NFE and
            one setting of the sweep.
    """
    name, folder = named_folder(text)
    files = tuple(read_samples(file, folder) for file in find_sample_files(folder))
    _require_one_student(files, folder)
    return Run(name, files)


def facts(samples: SampleSet) -> dict[str, Any]:
    """What decides a file's entropy and perplexity besides NFE and the judge."""
    known = drawn_with(samples)
    known.pop("nfe", None)
    known.pop("code_version", None)
    store = samples.settings.get("store")
    tokenizer = store.get("tokenizer") if isinstance(store, Mapping) else None
    return known | {
        "vocab_size": samples.settings.get("vocab_size"),
        "tokenizer": tokenizer,
    }


def _require_one_student(files: Sequence[SampleSet], folder: Path) -> None:
    each = [facts(samples) for samples in files]
    differing = [
        name
        for name in dict.fromkeys(name for known in each for name in known)
        if any(known.get(name) != each[0].get(name) for known in each)
    ]
    swept = [name for name in SWEPT if name in differing]
    wrong = [name for name in differing if name not in SWEPT] or (swept[1:] and swept)
    if not wrong:
        return
    name = " and ".join(wrong)
    values = {str(known.get(wrong[0])): None for known in each}
    raise UsageError(
        "the folder mixes samples of several curves",
        where=f"{folder}: {name}",
        got=", ".join(values),
        expected=f"files that differ in NFE and one of {', '.join(SWEPT)}",
        remedy="give each curve's folder as a run of its own",
    )


def require_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs whose entropies or lengths mean different things.

    Raises:
        UsageError: Naming the first field that differs.
    """
    first = facts(runs[0].files[0])
    for run in runs:
        ours = facts(run.files[0])
        for name in COMPARED:
            known = ours.get(name) is not None and first.get(name) is not None
            if known and ours[name] != first[name]:
                raise UsageError(
                    "these runs cannot be compared",
                    where=f"{run.name}: {name}",
                    got=ours[name],
                    expected=f"{first[name]} as in {runs[0].name}",
                    remedy="sample both alike",
                )


def curves_of(
    run: Run, entropy: Callable[[SampleSet], Score], perplexity: Callable[[SampleSet], Score]
) -> list[Curve]:
    """A curve per NFE of a run, by rising NFE.

    Args:
        run: The files.
        entropy: Scores a file's entropy, sample by sample.
        perplexity: Scores a file's generative perplexity, sample by sample.
    """
    by_nfe: dict[float, list[SampleSet]] = {}
    for samples in run.files:
        by_nfe.setdefault(_nfe(samples), []).append(samples)
    each = [facts(samples) for samples in run.files]
    swept = next((name for name in SWEPT if len({str(k.get(name)) for k in each}) > 1), None)
    return [
        _curve(run.name, nfe, swept, files, entropy, perplexity)
        for nfe, files in sorted(by_nfe.items())
    ]


def _nfe(samples: SampleSet) -> float:
    budget = samples.sampler.get("nfe")
    if type(budget) is int and budget > 0:
        return float(budget)
    if not samples.nfe_mean:
        raise UsageError(
            "samples without a number of forward passes",
            where=samples.source,
            got="no nfe in settings and lines",
            expected="samples of gdistill-sample",
            remedy='add "nfe" to every line',
        )
    return round(samples.nfe_mean, 1)


def _curve(
    model: str,
    nfe: float,
    swept: str | None,
    files: Sequence[SampleSet],
    entropy: Callable[[SampleSet], Score],
    perplexity: Callable[[SampleSet], Score],
) -> Curve:
    files = sorted(files, key=lambda one: _sortable(facts(one).get(swept or "")))
    entropies, perplexities = [entropy(one) for one in files], [perplexity(one) for one in files]
    points = [point_of(*scores) for scores in zip(entropies, perplexities, strict=True)]
    identities = {(one.seed, perplexities[i].per_sample.indices) for i, one in enumerate(files)}  # type: ignore[union-attr]
    return Curve(
        model=model,
        nfe=nfe,
        swept=swept,
        settings=tuple(facts(one).get(swept) if swept else None for one in files),
        points=tuple(points),
        is_paired=len(identities) == 1,
        perplexities=tuple(perplexities),
        entropies=tuple(entropies),
    )


def _sortable(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def point_of(entropy: Score, perplexity: Score) -> CurvePoint:
    """The samples that have both, as a point."""
    assert entropy.per_sample is not None and perplexity.per_sample is not None
    kept = perplexity.per_sample
    return CurvePoint(
        np.array(kept.numerators),
        np.array(kept.denominators),
        np.array(entropy.per_sample.select(kept.indices).numerators),
    )


# Perplexity at one entropy, interpolated over a sweep.
#
# A sampler trades entropy for perplexity: a smaller nucleus or a lower temperature makes any model
# look better. So models are compared where their entropies are equal: log perplexity is taken as a
# piecewise linear function of entropy through the points of a sweep and read off at H.


@dataclass(frozen=True)
class CurvePoint:
    """n samples drawn with one setting of a sweep.

    Attributes:
        nll_nats: Nats of each sample under the judge, summed over its counted tokens.
        num_tokens: Counted tokens of each sample.
        entropies_nats: Unigram entropy of each sample in the student's own tokens.
    """

    nll_nats: Float[np.ndarray, "n"]
    num_tokens: Float[np.ndarray, "n"]
    entropies_nats: Float[np.ndarray, "n"]

    @property
    def log_perplexity(self) -> float:
        """Of all samples together: sum of nats / sum of tokens."""
        return float(self.nll_nats.sum() / self.num_tokens.sum())

    @property
    def entropy_nats(self) -> float:
        """Mean over samples."""
        return float(self.entropies_nats.mean())


@dataclass(frozen=True)
class MatchedValue:
    """What a curve says at an entropy.

    Attributes:
        perplexity: At ``entropy_nats``.
        interval: 95% bootstrap interval over samples; None for single samples.
        entropy_nats: H where the sweep reaches it, else that of the point nearest to H.
        is_reached: Whether H lies between the points of the sweep.
        share_reached: Share of bootstrap draws in which it does; the others were extrapolated.
    """

    perplexity: float
    interval: tuple[float, float] | None
    entropy_nats: float
    is_reached: bool
    share_reached: float


def matched_perplexity(
    points: Sequence[CurvePoint],
    entropy_nats: float,
    *,
    is_paired: bool,
    num_draws: int = NUM_BOOTSTRAP,
    seed: int = 0,
) -> MatchedValue:
    """Perplexity of a sweep at entropy H.

    Args:
        points: One per setting of the sweep, in any order.
        entropy_nats: H.
        is_paired: Whether sample i of every point comes from the same seed and index: then one
            draw of samples is used for all points, as the points are correlated.
        num_draws: Bootstrap draws.
        seed: Of the bootstrap.

    Raises:
        ValueError: Without a point, or for paired points of different sizes.
    """
    sizes = {len(point.nll_nats) for point in points}
    if not points or (is_paired and len(sizes) > 1):
        raise ValueError(f"need points, paired ones of one size; got sizes {sorted(sizes)}")
    entropies = np.array([[point.entropy_nats for point in points]])
    values = np.array([[point.log_perplexity for point in points]])
    is_reached = bool(entropies.min() <= entropy_nats <= entropies.max())
    nearest = int(np.abs(entropies[0] - entropy_nats).argmin())
    own = entropy_nats if is_reached else float(entropies[0, nearest])
    drawn_entropies, drawn_values = _resampled(points, is_paired, num_draws, seed)
    if is_reached:
        value = interpolate(entropies, values, own)[0]
        drawn = interpolate(drawn_entropies, drawn_values, own)
    else:
        value, drawn = values[0, nearest], drawn_values[:, nearest]
    inside = (drawn_entropies.min(1) <= entropy_nats) & (entropy_nats <= drawn_entropies.max(1))
    low, high = percentile_interval(np.exp(drawn))
    return MatchedValue(
        perplexity=float(np.exp(value)),
        interval=(low, high) if min(sizes) > 1 else None,
        entropy_nats=own,
        is_reached=is_reached,
        share_reached=float(inside.mean()),
    )


def interpolate(
    entropies: Float[np.ndarray, "b k"], values: Float[np.ndarray, "b k"], entropy_nats: float
) -> Float[np.ndarray, "b"]:
    """Piecewise linear ``values`` at H for each of B curves; beyond an end, its segment goes on."""
    order = entropies.argsort(1, kind="stable")
    x, y = np.take_along_axis(entropies, order, 1), np.take_along_axis(values, order, 1)
    if x.shape[1] == 1:
        return y[:, 0]
    right = np.clip((x < entropy_nats).sum(1), 1, x.shape[1] - 1)
    rows = np.arange(len(x))
    x0, x1, y0, y1 = x[rows, right - 1], x[rows, right], y[rows, right - 1], y[rows, right]
    width = x1 - x0
    share = np.divide(entropy_nats - x0, width, out=np.full(len(x), 0.5), where=width > 0)
    return y0 + share * (y1 - y0)


def _resampled(
    points: Sequence[CurvePoint], is_paired: bool, num_draws: int, seed: int
) -> tuple[Float[np.ndarray, "b k"], Float[np.ndarray, "b k"]]:
    """Entropy and log perplexity of every point in every bootstrap draw."""
    entropies, values = [], []
    for number, point in enumerate(points):
        own_seed = seed if is_paired else seed + number
        draws = bootstrap_draws(len(point.nll_nats), num_draws, own_seed)
        entropies.append(point.entropies_nats[draws].mean(1))
        values.append(point.nll_nats[draws].sum(1) / point.num_tokens[draws].sum(1))
    return np.stack(entropies, 1), np.stack(values, 1)


# Curves as tables: perplexity at one entropy, model x NFE, and every point behind it.


Matched = Mapping[tuple[str, float], MatchedValue]


def match(curves: Sequence[Curve], entropy_nats: float) -> dict[tuple[str, float], MatchedValue]:
    """(model, NFE) -> what its curve says at H."""
    return {
        (curve.model, curve.nfe): matched_perplexity(
            curve.points, entropy_nats, is_paired=curve.is_paired
        )
        for curve in curves
    }


def matched_table(matched: Matched, entropy_nats: float, source: str) -> Table:
    """Model x NFE; where H is out of reach, the nearest point with its own entropy in parentheses.

    Args:
        matched: From :func:`match`.
        entropy_nats: H.
        source: Where H comes from, for the note.
    """
    models = list(dict.fromkeys(model for model, _ in matched))
    budgets = sorted({nfe for _, nfe in matched})
    rows = tuple(
        (model, *(_cell(matched.get((model, nfe))) for nfe in budgets)) for model in models
    )
    notes = (
        f"Log perplexity interpolated at an entropy of {entropy_nats:.3f} nats ({source}). In "
        "brackets: 95% bootstrap intervals over samples.",
        "(H = ...): the sweep does not reach that entropy; its nearest point, at its own entropy.",
    )
    title = f"Generative perplexity at entropy {entropy_nats:.3f}"
    return Table(title, ("model", *(f"NFE {nfe:g}" for nfe in budgets)), rows, notes=notes)


def points_table(curves: Sequence[Curve]) -> Table:
    """Every point: the setting, its entropy and both aggregates of perplexity."""
    rows = [
        (
            curve.model,
            f"{curve.nfe:g}",
            "-" if curve.swept is None else f"{curve.swept} {setting}",
            str(len(point.nll_nats)),
            f"{point.entropy_nats:.3f}",
            f"{perplexity.value:.2f}",
            f"{perplexity.details['per_sample_mean']:.2f}",
            f"{entropy.details['distinct_2']:.3f}",
            f"{entropy.details['repeated_4']:.3f}",
        )
        for curve in curves
        for setting, point, perplexity, entropy in zip(
            curve.settings, curve.points, curve.perplexities, curve.entropies, strict=True
        )
    ]
    header = ("model", "NFE", "setting", "n", "entropy", "perplexity", "mean per sample")
    return Table("Points", (*header, "distinct-2", "repeated 4-grams"), tuple(rows))


def curve_results(
    curves: Sequence[Curve], matched: Matched, entropy_nats: float, source: str
) -> dict[str, Any]:
    """JSON-ready: H, what was matched, and every point."""
    return {
        "entropy_nats": entropy_nats,
        "entropy_source": source,
        "aggregate": "corpus",
        "judge": dict(curves[0].perplexities[0].settings),
        "matched": [
            {
                "model": model,
                "nfe": nfe,
                "perplexity": value.perplexity,
                "interval_95": list(value.interval) if value.interval else None,
                "entropy_nats": value.entropy_nats,
                "is_reached": value.is_reached,
                "share_of_draws_reached": value.share_reached,
            }
            for (model, nfe), value in matched.items()
        ],
        "points": [
            {
                "model": curve.model,
                "nfe": curve.nfe,
                "swept": curve.swept,
                "setting": setting,
                "perplexity": perplexity.to_json(),
                "entropy": entropy.to_json(),
            }
            for curve in curves
            for setting, perplexity, entropy in zip(
                curve.settings, curve.perplexities, curve.entropies, strict=True
            )
        ],
    }


def _cell(value: MatchedValue | None) -> str:
    if value is None:
        return "-"
    text = f"{value.perplexity:.1f}"
    if value.interval:
        text += f" [{value.interval[0]:.1f}, {value.interval[1]:.1f}]"
    return text if value.is_reached else f"{text} (H = {value.entropy_nats:.2f})"


# Perplexity against entropy, a line per model and NFE; and against NFE at one entropy.


def curve_figure(
    curves: Sequence[Curve], matched: Matched, entropy_nats: float, output: Path
) -> Path:
    """Write a PNG of both panels.

    Args:
        curves: Every model at every NFE.
        matched: What they say at H; open marks are points of their own entropy.
        entropy_nats: H.
        output: The file.
    """
    models = list(dict.fromkeys(curve.model for curve in curves))
    with figure_file(output, 1, 2, size=(13, 4.2)) as (_, panels):
        sweeps, budgets = panels[0]
        _draw_sweeps(sweeps, curves, models)
        sweeps.axvline(entropy_nats, color="grey", lw=0.8, ls=":")
        _draw_budgets(budgets, matched, models)
        budgets.set_title(f"at entropy {entropy_nats:.2f} (open: out of reach)")
        for axes in (sweeps, budgets):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
            axes.tick_params(axis="y", which="both", labelsize=8)
            axes.set_ylabel("generative perplexity")
        _label_sweeps(sweeps, sorted({curve.nfe for curve in curves}))
        # A colour is a model in both panels; outside, where no line is hidden.
        budgets.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return output


def _draw_sweeps(axes: Any, curves: Sequence[Curve], models: Sequence[str]) -> None:
    budgets = sorted({curve.nfe for curve in curves})
    for curve in curves:
        place = budgets.index(curve.nfe)
        pairs = sorted((point.entropy_nats, point.log_perplexity) for point in curve.points)
        axes.plot(
            [entropy for entropy, _ in pairs],
            [math.exp(value) for _, value in pairs],
            color=look(models.index(curve.model))["color"],
            ls=LINE_STYLES[place % len(LINE_STYLES)],
            marker=MARKERS[place % len(MARKERS)],
            ms=3.5,
        )
    axes.set_xlabel("unigram entropy, nats (right is more varied)")


def _label_sweeps(axes: Any, budgets: Sequence[float]) -> None:
    """A style of line is a number of passes."""
    for place, nfe in enumerate(budgets):
        style, marker = LINE_STYLES[place % len(LINE_STYLES)], MARKERS[place % len(MARKERS)]
        axes.plot([], [], color="grey", ls=style, marker=marker, ms=3.5, label=f"NFE {nfe:g}")
    axes.legend(handlelength=3)


def _draw_budgets(axes: Any, matched: Matched, models: Sequence[str]) -> None:
    for number, model in enumerate(models):
        cells = sorted((nfe, value) for (name, nfe), value in matched.items() if name == model)
        color = look(number)["color"]
        reached = [(nfe, value.perplexity) for nfe, value in cells if value.is_reached]
        if reached:
            axes.plot(*zip(*reached, strict=True), color=color, lw=1)
        for nfe, value in cells:
            low, high = value.interval or (value.perplexity, value.perplexity)
            errors = [[value.perplexity - min(low, value.perplexity)]]
            errors.append([max(high, value.perplexity) - value.perplexity])
            face = color if value.is_reached else "none"
            axes.errorbar(
                [nfe * 1.02**number],
                [value.perplexity],
                errors,
                color=color,
                fmt="o",
                mfc=face,
                ms=5,
                capsize=2,
            )
        axes.plot([], [], "o-", color=color, label=_plain(model))
    axes.set_xscale("log", base=2)
    ticks = sorted({nfe for _, nfe in matched})
    axes.set_xticks(ticks, [f"{nfe:g}" for nfe in ticks])
    axes.set_xlabel("NFE (forward passes)")


def _plain(name: str) -> str:
    """A name as it stands: matplotlib would set ``$...$`` as mathematics and hide a first ``_``."""
    return visible(name).replace("$", r"\$").removeprefix("_")


# ``gdistill-eval curve``: models compared at one entropy.


MAX_DATA_ROWS = 2000


def curve(
    runs: Annotated[
        list[str],
        typer.Argument(help="Folders of a sweep, one per model: FOLDER or NAME=FOLDER."),
    ],
    judge: Annotated[str, typer.Option(help="Causal LM: hub id or local folder.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Store or tokens/ folder: H is the mean entropy of its rows."),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --data.")] = "validation",
    entropy: Annotated[float | None, typer.Option(help="H in nats, instead of the data's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Truncate texts to this many judge tokens (1024).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens between windows (half the judge's context).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("curve"),
    device: Annotated[str | None, typer.Option(help="Device of the judge.")] = None,
) -> None:
    """Perplexity at one entropy: model x NFE, from samples of gdistill-sample --sweep.

    Interrupted, the same command goes on.
    """
    read = [read_run(text) for text in runs]
    names = [run.name for run in read]
    if len(set(names)) < len(names):
        raise UsageError("two runs of one name", where=", ".join(names), remedy="use NAME=FOLDER")
    require_comparable(read)
    wanted, source = _target(read, data, split, entropy)
    require_writable(out)
    kept = readings_folder(out)
    options = ScoreOptions(judge, None, None, max_tokens, stride, device, kept=kept)
    curves = _score(read, options)
    matched = match(curves, wanted)
    tables = [matched_table(matched, wanted, source), points_table(curves)]
    figure = curve_figure(curves, matched, wanted, out / "curve.png")
    results = curve_results(curves, matched, wanted, source)
    page = write_report(
        out,
        title="Perplexity at equal entropy",
        summary=f"{len(read)} models; {_judged(curves)}.",
        tables=tables,
        figures=[("Perplexity against entropy, and against NFE at one entropy", figure)],
        results=results | {"code_version": code_version()},
    )
    write_bytes_atomic(out / "curve.csv", tables[0].to_csv().encode())
    for table in tables:
        typer.echo(table.to_text() + "\n")
    typer.echo(f"wrote {page}, results.json, curve.png and curve.csv")


def _score(runs: list[Run], options: ScoreOptions) -> list[Curve]:
    files = [samples for run in runs for samples in run.files]
    judging = Judging.start(options, files)
    return [
        line
        for run in runs
        for line in curves_of(
            run,
            entropy=lambda samples: entropy_score(samples.tokens, samples.indices),
            perplexity=judging.perplexity,
        )
    ]


def _judged(curves: list[Curve]) -> str:
    settings = curves[0].perplexities[0].settings
    return (
        f"judge {settings['judge']} ({str(settings['judge_sha256'])[:12]}), at most "
        f"{settings['max_tokens']} tokens, windows of {settings['context_tokens']} every "
        f"{settings['stride_tokens']}, corpus aggregate"
    )


def _target(
    runs: list[Run], data: Path | None, split: str, entropy: float | None
) -> tuple[float, str]:
    """H and where it comes from.

    Raises:
        UsageError: Unless exactly one source is named, or for data of another tokenizer or of
            shorter rows than the samples.
    """
    if (data is None) == (entropy is None):
        raise UsageError(
            "no entropy to compare at" if data is None else "two entropies to compare at",
            where="--data, --entropy",
            expected="one of them",
            remedy="--data STORE measures the data's, at the samples' length",
        )
    if entropy is not None:
        if not 0 < entropy < 20:
            raise UsageError("no such entropy", where="--entropy", got=entropy, expected="nats > 0")
        return entropy, "as told"
    assert data is not None
    rows = read_data_rows(data, split, MAX_DATA_ROWS)
    samples = runs[0].files[0]
    length = max(len(tokens) for tokens in samples.tokens)
    known = samples.settings.get("vocab_size")
    if isinstance(known, int) and known != rows.vocab_size:
        raise UsageError(
            "the data are of another tokenizer than the samples",
            where=f"--data {data}",
            got=f"{rows.vocab_size} entries",
            expected=f"{known}, as the samples' student",
        )
    if rows.rows.shape[1] < length:
        raise UsageError(
            "the data's rows are shorter than the samples",
            where=f"--data {data}",
            got=f"{rows.rows.shape[1]} tokens",
            expected=f"at least {length}: entropy grows with length",
        )
    values = [unigram_entropy_nats(row) for row in rows.rows[:, :length].tolist()]
    return float(np.mean(values)), f"{rows.name}, first {length} tokens of each"
