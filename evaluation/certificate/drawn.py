"""Samples with everything that names their noise: read, checked, refused where it cannot be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from evaluation.samples import read_records, read_samples, short
from shards.base import GdistillError, UsageError
from shards.codec import Codec, make_codec
from shards.language_model import DtypeName
from shards.noise import Noise
from trainer.sampling import sampling_noise
from trainer.sampling.rules import STEPS_PER_ATTEMPT

MOST_TAU = 1e6
"""Beyond it no logit counts, and float32 ends."""

VERIFIED = ("coupled", "medusa", "drafter")
"""Samplers whose tokens a teacher verifies; the first one's in float32, the others' in the
precision of the backbone that their student stands on."""


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
        dtype: Precision of that model's weights, and so of its logits.
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
    dtype: DtypeName

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
    samples = read_samples(file)
    records = [record.values for record in read_records(file, "sample")]
    settings, sampler = samples.settings, samples.sampler
    if not settings:
        remedy = "give the folder that gdistill-sample wrote"
        where = file.with_name("settings.json")
        raise UsageError("no settings beside the samples", where=where, remedy=remedy)
    if any(record.get("seed") is None for record in records):
        raise UsageError(
            "the samples have no recorded seed",
            where=file,
            remedy="sample again with gdistill-sample, which writes it down",
        )
    identity, config = (_object(file, settings, name) for name in ("identity", "student_config"))
    kind, rule = sampler.get("sampler"), sampler.get("acceptance", "coupled")
    verified = kind in VERIFIED and rule == "coupled"
    if kind in VERIFIED and not verified:
        raise _no_noise(file, f"drawn with acceptance={rule}")
    conditioning = config.get("conditioning")
    if conditioning == "uniform":
        raise _no_noise(file, "decided by one uniform per token, which is no Gumbel noise")
    if conditioning == "none" and not verified:
        raise _no_noise(file, "drawn by a student without noise")
    if sampler.get("redraw_noise"):
        raise _no_noise(file, "redraw_noise: other noise at every step")
    vocab_size, verifier = settings.get("vocab_size"), identity.get("verifier_sha256")
    if type(vocab_size) is not int or not 2 <= vocab_size < 2**31:
        raise _damaged(file, "vocab_size", vocab_size, "a whole number >= 2")
    if verified and not isinstance(verifier, str | None):
        raise _damaged(file, "verifier_sha256", verifier, "a hash")
    return DrawnFile(
        source=file,
        rows=[_row(values, f"{file}, line {n}", vocab_size) for n, values in enumerate(records, 1)],
        seed=samples.seed,
        tau=_tau(file, sampler.get("tau")),
        vocab_size=vocab_size,
        codec=_codec(file, identity.get("codec")),
        sampler=str(sampler.get("sampler")),
        is_verified=verified,
        verifier_sha256=verifier if verified else None,
        dtype=_dtype(file, config.get("backbone_dtype") if kind in VERIFIED[1:] else None),
    )


def _object(file: Path, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the settings."""
    found = settings.get(name)
    if not isinstance(found, dict):
        raise _damaged(file, name, found, "an object")
    return found


def _tau(file: Path, tau: object) -> float:
    """1 where the sampler has none."""
    if tau is None:
        return 1.0
    if not isinstance(tau, float | int) or not 0 < tau <= MOST_TAU:
        raise _damaged(file, "tau", tau, f"above 0, at most {MOST_TAU:g}")
    return float(tau)


def _dtype(file: Path, dtype: object) -> DtypeName:
    """float32 where the student stands on no backbone."""
    if dtype not in (None, *get_args(DtypeName)):
        raise _damaged(file, "backbone_dtype", dtype, " or ".join(get_args(DtypeName)))
    return dtype or "float32"  # type: ignore[return-value]


def _codec(file: Path, codec: object) -> Codec | None:
    if codec is None:
        return None
    parameters = codec.get("parameters") if isinstance(codec, dict) else None
    if not isinstance(codec, dict) or not isinstance(parameters, dict):
        raise _damaged(file, "codec", codec, '{"name": ..., "parameters": {...}}')
    return make_codec(str(codec.get("name")), **parameters)


def _row(values: Mapping[str, Any], where: str, vocab_size: int) -> DrawnRow:
    tokens, index, attempt = values["tokens"], values.get("index"), values.get("attempt", 0)
    filled, given = values.get("filled"), values.get("num_given", 1)
    if type(given) is int and filled is None:
        filled = list(range(max(1, given), len(tokens)))
    fine = (
        all(type(value) is int and 0 <= value < 2**31 for value in (index, given, attempt))
        and isinstance(filled, list)
        and all(type(place) is int and 0 <= place < len(tokens) for place in filled)
        and all(token < vocab_size for token in tokens)
        and bool(tokens)
    )
    if not fine:
        raise GdistillError(
            "not a line of gdistill-sample",
            where=where,
            got=short({**values, "text": None}),
            expected=f"index, tokens below {vocab_size}, and which of them were filled",
            remedy="sample again, or give the file that the sampler wrote",
        )
    assert isinstance(filled, list) and isinstance(index, int)
    return DrawnRow(index, tokens, sorted({*filled} - {0}), attempt)


def _damaged(file: Path, name: str, got: object, expected: str) -> GdistillError:
    return GdistillError(
        "damaged settings",
        where=f"{file.with_name('settings.json')}, {name}",
        got=short(got),
        expected=expected,
        remedy="restore the file that gdistill-sample wrote",
    )


def _no_noise(file: Path, got: str) -> UsageError:
    return UsageError(
        "no noise that decided these samples can be found again",
        where=file,
        got=got,
        expected="samples of the coupled or drafter sampler, of medusa with acceptance=coupled, or "
        "of a student with noise held fixed",
    )
