"""Undoing the word-level tokenization of published corpora, as the mdlm and bd3lms data code does.

Each detokenizer is an ordered table of rewrites; the order matters, and oddities of the originals
(an apostrophe rule that also joins plural nouns to a following quote, a full stop that is only
joined to a plain word) are kept, since published perplexities were measured on their output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from shards.errors import UsageError, did_you_mean

Detokenizer = Callable[[str], str]
Rewrite = tuple[str | re.Pattern[str], str]


def _table(rewrites: Sequence[Rewrite]) -> Detokenizer:
    def apply(text: str) -> str:
        for old, new in rewrites:
            text = text.replace(old, new) if isinstance(old, str) else old.sub(new, text)
        return text

    return apply


def _tight(mark: str) -> Rewrite:
    return f" {mark} ", f"{mark} "


def _bracketed(opening: str, closing: str) -> Rewrite:
    inside = f"[^{re.escape(closing)}]*?"
    pattern = rf"{re.escape(opening)}\s*({inside})\s*{re.escape(closing)}"
    return re.compile(pattern), rf"{opening}\1{closing}"


_WIKITEXT: list[Rewrite] = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *(_tight(mark) for mark in ":;.!?,"),
    *(_bracketed(*pair) for pair in ("()", "[]", "{}", '""', "''")),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]

_PTB: list[Rewrite] = [
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    # Neighbouring N share a space, so one pass leaves every second one.
    (" N ", " 1 "),
    (" N ", " 1 "),
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
]

_LM1B: list[Rewrite] = [
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    _tight("?"),
    (re.compile(r" \?$"), "?"),
    _tight("!"),
    (re.compile(r" !$"), "!"),
    *(_tight(mark) for mark in ",:;"),
    (" / ", "/"),
    (re.compile(r'" ([^"]+) "'), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^()]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
]


def _lambada(text: str) -> str:
    """Straight double quotes, and every passage on a new line."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


DETOKENIZERS: dict[str, Detokenizer] = {
    "none": lambda text: text,
    "wikitext": _table(_WIKITEXT),
    "ptb": _table(_PTB),
    "lm1b": _table(_LM1B),
    "lambada": _lambada,
    "scientific_papers": _table([*_WIKITEXT, *_LM1B]),
}


def detokenizer(name: str) -> Detokenizer:
    """A detokenizer by name; an unknown one is a :class:`UsageError` naming the nearest."""
    if name in DETOKENIZERS:
        return DETOKENIZERS[name]
    what, remedy = "unknown detokenizer", did_you_mean(name, DETOKENIZERS)
    where, expected = "corpus.detokenizer", f"one of {sorted(DETOKENIZERS)}"
    raise UsageError(what, where=where, got=repr(name), expected=expected, remedy=remedy)
