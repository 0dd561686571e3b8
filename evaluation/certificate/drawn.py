"""Samples with everything that names their noise: read, checked, refused where it cannot be had."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evaluation.samples import read_records
from shards.base import GdistillError, UsageError
from shards.codec import Codec, make_codec
from shards.noise import Noise
from trainer.sampling import sampling_noise
from trainer.sampling.rules import STEPS_PER_ATTEMPT
from trainer.sampling.verified import require_whole_noise

VERIFIED = ("coupled", "medusa", "drafter")
"""Samplers whose tokens a teacher verifies."""


@dataclass(frozen=True)
class DrawnRow:
    """One sample.

    Attributes:
        index: Its index in the run.
        tokens: Its tokens.
        filled: Positions that the sampler filled.
        attempt: How often it had been drawn before.
    """

    index: int
    tokens: list[int]
    filled: list[int]
    attempt: int


@dataclass(frozen=True)
class DrawnFile:
    """One file of samples.

    Attributes:
        source: The file.
        rows: Its samples.
        seed: The user's seed.
        tau: Scale of the noise.
        vocab_size: V.
        codec: What the student's noise was cut off by; None for none.
        sampler: The sampler's name.
        is_verified: Whether every token was verified to be the teacher's for its noise.
        verifier_sha256: Of the model that verified the samples, where one did.
    """

    source: Path
    rows: list[DrawnRow]
    seed: int
    tau: float
    vocab_size: int
    codec: Codec | None
    sampler: str
    is_verified: bool
    verifier_sha256: str | None

    def noise(self, row: DrawnRow) -> Noise:
        """xi of the sample's positions, from position 0."""
        ids, draw = torch.tensor([row.index]), row.attempt * STEPS_PER_ATTEMPT
        length = len(row.tokens)
        return sampling_noise(self.seed, ids, length, self.vocab_size, codec=self.codec, draw=draw)


def read_drawn(file: Path) -> DrawnFile:
    """A file of ``gdistill-sample`` with its ``settings.json``.

    Raises:
        UsageError: When the file does not tell its seed or settings, or its noise cannot be found
            again.
        GdistillError: For a damaged line or settings file.
    """
    settings = _read_settings(file.with_name("settings.json"))
    records = [record.values for record in read_records(file, "sample")]
    first = records[0]
    if any(type(record.get("seed")) is not int for record in records):
        raise UsageError(
            "the samples have no recorded seed",
            where=file,
            remedy="sample again with gdistill-sample, which writes it down",
        )
    sampler = first.get("settings", {})
    identity = settings["identity"]
    conditioning = settings.get("student_config", {}).get("conditioning")
    kind, rule = sampler.get("sampler"), sampler.get("acceptance", "coupled")
    verified = kind in VERIFIED and rule == "coupled"
    if kind in VERIFIED and not verified:
        raise _no_noise(file, f"drawn with acceptance={rule}")
    if conditioning == "uniform":
        raise _no_noise(file, "decided by one uniform per token, which is no Gumbel noise")
    if conditioning == "none" and not verified:
        raise _no_noise(file, "drawn by a student without noise")
    if sampler.get("redraw_noise"):
        raise _no_noise(file, "redraw_noise: other noise at every step")
    codec = identity.get("codec")
    drawn = DrawnFile(
        source=file,
        rows=[_row(record, file) for record in records],
        seed=first["seed"],
        tau=float(sampler.get("tau") or 1.0),
        vocab_size=settings["vocab_size"],
        codec=None if codec is None else make_codec(codec["name"], **codec["parameters"]),
        sampler=str(sampler.get("sampler")),
        is_verified=verified,
        verifier_sha256=identity.get("verifier_sha256") if verified else None,
    )
    require_whole_noise(drawn.noise(drawn.rows[0]).select(slice(0, 1)))
    return drawn


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        _ = settings["identity"].get("codec"), settings["vocab_size"] + 0
    except OSError as error:
        remedy = "give the folder that gdistill-sample wrote"
        raise UsageError("no settings beside the samples", where=file, remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GdistillError("damaged settings", where=file, got=error) from error
    return settings


def _row(record: dict[str, Any], file: Path) -> DrawnRow:
    tokens, index = record.get("tokens"), record.get("index")
    if not isinstance(tokens, list) or type(index) is not int:
        raise GdistillError("not a line of gdistill-sample", where=file, got=f"index {index}")
    filled = record.get("filled", range(record.get("num_given", 1), len(tokens)))
    filled = [place for place in filled if 0 < place < len(tokens)]
    return DrawnRow(index, tokens, filled, record.get("attempt", 0))


def _no_noise(file: Path, got: str) -> UsageError:
    return UsageError(
        "no noise that decided these samples can be found again",
        where=file,
        got=got,
        expected="samples of the coupled or drafter sampler, of medusa with acceptance=coupled, or "
        "of a student with noise held fixed",
    )
