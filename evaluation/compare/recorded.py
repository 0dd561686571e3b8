"""Scores read back from ``results.json``, and which of them may share a column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.bootstrap import PerSample
from evaluation.samples import named_folder, read_object, short
from shards.base import GdistillError, UsageError

MUST_MATCH: Mapping[str, tuple[str, ...]] = {
    "generative_perplexity": (
        "judge", "judge_sha256", "context_tokens", "stride_tokens", "max_tokens", "precision",
        "borders", "aggregate",
    ),
    "entropy_nats": ("tokens_per_sample",),
    "mauve": (
        "judge", "judge_sha256", "num_references", "max_tokens", "scaling", "seeds", "buckets",
    ),
    "total_variation_to_uniform": ("uniform over",),
}  # fmt: skip
"""Settings of each score that decide its number; those not named here must match in all."""


@dataclass(frozen=True)
class RecordedScore:
    """A score as ``results.json`` has it.

    Attributes:
        name: What was measured.
        value: The number.
        interval: As recorded.
        settings: What it depends on.
        per_sample: Its values sample by sample; None where it has none (MAUVE).
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    settings: Mapping[str, Any]
    per_sample: PerSample | None


@dataclass(frozen=True)
class RecordedRun:
    """One file of samples and its scores.

    Attributes:
        name: For tables.
        run: Name of the folder it was scored in; its other files may be other NFE.
        nfe: Mean number of forward passes; None where unknown.
        drawn_with: How the samples were drawn.
        code_version: Of the code that scored them.
        scores: By name.
        source: The ``results.json``.
    """

    name: str
    run: str
    nfe: float | None
    drawn_with: Mapping[str, Any]
    code_version: str
    scores: Mapping[str, RecordedScore]
    source: Path


def read_run(text: str) -> list[RecordedRun]:
    """``FOLDER`` or ``NAME=FOLDER``: what ``gdistill-eval`` wrote there, a run per file of samples.

    The fewest passes come first.

    Raises:
        UsageError: When nothing was evaluated there.
        GdistillError: For a ``results.json`` of something else, or one without values by sample.
    """
    name, path = named_folder(text)
    file = path / "results.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            "no scores there",
            where=path,
            got="no results.json",
            expected="a folder that gdistill-eval has scored",
            remedy=f"run gdistill-eval {path} first",
        )
    try:
        found = read_object(file)
        parts = [_run(name, part, file, len(found)) for part in found.values()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GdistillError(
            "the scores cannot be read",
            where=file,
            got=f"{type(error).__name__}: {error}",
            expected="results.json of gdistill-eval",
            remedy="evaluate the samples again with this version",
        ) from error
    if not parts:
        raise UsageError("no scores there", where=file, got="an empty record")
    return sorted(parts, key=lambda part: math.inf if part.nfe is None else part.nfe)


def _run(name: str, part: Mapping[str, Any], file: Path, num_files: int) -> RecordedRun:
    scores = [_score(value) for value in part["scores"]]
    own, nfe = _typed(part, "name", str), _typed(part, "nfe_mean", float, int, type(None))
    return RecordedRun(
        name=name if num_files == 1 else f"{name}/{own}",
        run=name,
        nfe=nfe,
        drawn_with=_typed(part, "drawn_with", dict),
        code_version=_typed(part, "code_version", str),
        scores={score.name: score for score in scores},
        source=file,
    )


def _score(value: Mapping[str, Any]) -> RecordedScore:
    interval = value["interval_95"]
    low_high = None if interval is None else tuple(map(float, interval))
    if low_high is not None and len(low_high) != 2:
        raise ValueError(f"interval_95 of {len(low_high)} numbers")
    return RecordedScore(
        name=_typed(value, "name", str),
        value=float(_typed(value, "value", float, int)),
        interval=low_high,
        settings=_typed(value, "settings", dict),
        per_sample=PerSample.from_json(value["per_sample"]) if value["per_sample"] else None,
    )


def _typed(value: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of one of these types; JSON's true and false are no numbers."""
    if type(value[name]) not in kinds:
        raise ValueError(f"{name} is {short(value[name])}")
    return value[name]


def require_one_kind(name: str, runs: Sequence[RecordedRun]) -> None:
    """Refuse to set numbers of one score beside each other that were measured differently.

    Args:
        name: The score.
        runs: All that have it.

    Raises:
        UsageError: Naming the first field that differs, and both runs.
    """
    first = runs[0].scores[name].settings
    for run in runs[1:]:
        ours = run.scores[name].settings
        for field in MUST_MATCH.get(name, tuple(dict.fromkeys([*first, *ours]))):
            if ours.get(field) != first.get(field):
                raise UsageError(
                    f"{name} was measured differently",
                    where=f"{run.name}: {field}",
                    got=ours.get(field),
                    expected=f"{first.get(field)} as in {runs[0].name}",
                    remedy="evaluate both alike, or leave the score out with --scores",
                )
