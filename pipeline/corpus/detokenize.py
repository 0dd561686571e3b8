"""Undoing the word-level tokenization of published corpora, as the mdlm and bd3lms data code does.

Each detokenizer is an ordered table of rewrites, in ``detokenizers.toml``; the order matters, and
oddities of the originals (an apostrophe rule that also joins plural nouns to a following quote, a
full stop that is only joined to a plain word) are kept.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shards.errors import UsageError, did_you_mean

Detokenizer = Callable[[str], str]
TABLES = tomllib.loads(Path(__file__).with_name("detokenizers.toml").read_text(encoding="utf-8"))


def _by_tables(*names: str) -> Detokenizer:
    def rewrite(rule: Any) -> Detokenizer:
        if isinstance(rule, dict):
            pattern = re.compile(rule["regex"])
            return lambda text: pattern.sub(rule["new"], text)
        return lambda text: text.replace(*rule)

    rewrites = [rewrite(rule) for name in names for rule in TABLES[name]]

    def apply(text: str) -> str:
        for each in rewrites:
            text = each(text)
        return text

    return apply


DETOKENIZERS: dict[str, Detokenizer] = {
    "none": lambda text: text,
    **{name: _by_tables(name) for name in TABLES},
    # Straight double quotes, and every passage on a new line.
    "lambada": lambda text: "\n" + text.replace("“", '"').replace("”", '"').strip(),
    "scientific_papers": _by_tables("wikitext", "lm1b"),
}


def detokenizer(name: str) -> Detokenizer:
    """A detokenizer by name; an unknown one is a :class:`UsageError` naming the nearest."""
    if name in DETOKENIZERS:
        return DETOKENIZERS[name]
    where, expected = "corpus.detokenizer", f"one of {sorted(DETOKENIZERS)}"
    hint = did_you_mean(name, DETOKENIZERS)
    got = repr(name)
    raise UsageError("unknown detokenizer", where=where, got=got, expected=expected, remedy=hint)
