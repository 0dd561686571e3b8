"""From folders of samples to curves: which files belong to one line, and which lines compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.curve.matched import CurvePoint
from evaluation.samples import SampleSet, drawn_with, find_sample_files, named_folder, read_samples
from evaluation.score import Score
from shards.base import UsageError

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
