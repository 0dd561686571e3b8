"""Rewrites worked by hand; expected strings follow the reference's rules, oddities included."""

from __future__ import annotations

import pytest

from pipeline.corpus.detokenize import DETOKENIZERS, detokenizer

CASES = {
    "wikitext": [
        (" = Robert Boulter = \n", " = Robert Boulter =\n"),
        ("= = Career = =", "== Career =="),
        (" the well @-@ known 1 @,@ 000 at 3 @.@ 5 km ", " the well-known 1,000 at 3.5 km "),
        ("He came , saw ; and left : so . Yes", "He came, saw; and left: so. Yes"),
        ('( born 1982 ) said " hello there " [ sic ]', '(born 1982) said "hello there" [sic]'),
        ("the boy 's dog and the boys ' dog", "the boy's dog and the boys' dog"),
        ("at 20 ° C", "at 20°C"),
        ("N of N", "N of N"),
        ("a N b", "a 1 b"),
        ("one \n two", "one\ntwo"),
        ("one\n two", "one\ntwo"),
    ],
    "ptb": [
        ("the company 's profit did n't rise", "the company's profit didn't rise"),
        ("<unk> N N N shares", "? 1 1 1 shares"),
        ("rose $ N a share", "rose $1 a share"),
        ("in row # N of it", "in row #1 of it"),
        ("the analysts ' view", "the analysts' view"),
        ("1\\/2 year", "1/2 year"),
        ("N years", "N years"),
    ],
    "lm1b": [
        ("He said , it is . Then", "He said, it is. Then"),
        ("It is over .", "It is over."),
        ("Is it over ?", "Is it over?"),
        ("Why ? Because !", "Why? Because!"),
        ('the " big " one ( so to say )', 'the "big" one (so to say)'),
        ("it 's $ 5 or £ 4", "it's $5 or £4"),
        ("http : / / a / b", "http://a/b"),
        ("https : / / a / b", "https://a/b"),
        ('"quoted" .', '"quoted" .'),
    ],
    "lambada": [(" “ Yes , ” he said \n", '\n" Yes , " he said')],
    "scientific_papers": [("we find @xmath0 ( see [ 1 ] ) .", "we find @xmath0 (see [1]) .")],
    "none": [(" as , it is ", " as , it is ")],
}


@pytest.mark.parametrize("name", sorted(DETOKENIZERS))
def test_rewrites(name: str) -> None:
    for tokenized, expected in CASES[name]:
        assert detokenizer(name)(tokenized) == expected
