"""How samples were drawn, as far as their files tell: what must stand beside every score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.samples.samples import SampleSet
from evaluation.score import range_text

SAMPLER_FIELDS = (
    "sampler", "decision", "temperature", "tau", "nucleus_p", "nucleus_rule", "block_size", "cache",
)  # fmt: skip
"""Sampler settings that decide a score, in the order of the table."""


def drawn_with(samples: SampleSet) -> dict[str, Any]:
    """Student, sampler and its settings, precision, seed and code version of a file of samples.

    What neither the file nor the ``settings.json`` beside it tells is left out.
    """
    settings = samples.settings
    identity = settings.get("identity")
    identity = identity if isinstance(identity, Mapping) else {}
    known = {
        "student": _student(settings),
        "weights_sha256": identity.get("weights_sha256"),
        **{name: samples.sampler.get(name) for name in SAMPLER_FIELDS},
        "nfe": samples.sampler.get("nfe", samples.nfe_mean),
        "precision": settings.get("precision"),
        "seed": samples.seed,
        "tokens": range_text(map(len, samples.tokens)),
        "data": _fingerprint(settings.get("store")),
        "code_version": settings.get("code_version"),
    }
    return {name: value for name, value in known.items() if value is not None}


def _student(settings: Mapping[str, Any]) -> str | None:
    name, config = settings.get("student"), settings.get("student_config")
    conditioning = config.get("conditioning") if isinstance(config, Mapping) else None
    if isinstance(conditioning, str) and conditioning != "none":
        return f"{name} + {conditioning}"
    return name if isinstance(name, str) else None


def _fingerprint(store: object) -> str | None:
    """Of the token dataset that the student was trained on."""
    tokens = store.get("tokens") if isinstance(store, Mapping) else None
    value = tokens.get("fingerprint") if isinstance(tokens, Mapping) else None
    return value if isinstance(value, str) else None
