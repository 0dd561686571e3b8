"""Drafts from counts: the model by hand, the search, and that they change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shards.errors import UsageError
from tests.trainer.sampling import decoding_cases as check
from tests.trainer.sampling.decoding_cases import IDS, prompts
from tests.trainer.sampling_cases import LENGTH, draw
from tests.trainer.students.test_drafter import tiny_drafter
from trainer.sampling.command import described
from trainer.sampling.ngrams import NGrams
from trainer.sampling.registry import make_sampler
from trainer.sampling.trees import Tree

ROWS = np.array([[0, 1, 2, 3, 1], [0, 1, 2, 1, 2]], np.int32)


def test_the_model_by_hand() -> None:
    """Behind 1 stands 2 thrice; behind 0 1 stands 2 twice; nothing crosses the end of a row."""
    model = NGrams(ROWS, 5)
    unigram = np.array([2.5, 4.5, 3.5, 1.5, 0.5]) / 12.5
    assert np.allclose(model.probabilities([]), unigram)
    assert np.allclose(model.probabilities([4]), unigram), "4 was never seen"
    one = 0.75 / 3 * unigram + [0, 0, 2.25 / 3, 0, 0]
    assert np.allclose(model.probabilities([1]), one)
    two = 0.75 / 2 * one + [0, 0, 1.25 / 2, 0, 0]
    assert np.allclose(model.probabilities([0, 1]), two)
    assert np.allclose(model.probabilities([2, 4, 0, 1]), two), "4 0 1 was never seen"
    last = 0.75 * model.probabilities([1, 2, 3]) + [0, 0.25, 0, 0, 0]
    assert np.allclose(model.probabilities([4, 0, 1, 2, 3]), last), "the last four tokens count"
    for known in ([0, 1, 2], [2, 1, 2], [3, 3]):
        assert np.isclose(model.probabilities(known).sum(), 1)
    sizes = [len(NGrams(ROWS, size).tables) for size in (6_208, 6_209, 55_108, 55_109)]
    assert sizes == [4, 3, 3, 2], "a number of 63 bits holds no further token"


def test_the_search_finds_the_most_probable_drafts() -> None:
    """As all drafts in the order of their chances, with and without noise and at a temperature."""
    model, generator = NGrams(ROWS, 5), np.random.default_rng(0)
    for tau in (1.0, 0.7):
        for weights in (np.ones((3, 1)), 1 / generator.exponential(size=(3, 5))):
            chances: dict[tuple[int, ...], float] = {(): 1.0}
            for depth in range(3):
                for line in [line for line in chances if len(line) == depth]:
                    race = model.probabilities([0, 1, *line]) ** (1 / tau) * weights[depth]
                    chances |= {(*line, w): chances[line] * float(p) for w, p in enumerate(race / race.sum())}
            tree = model.grow(Tree(1), [0, 1], weights.astype(np.float32), tau, 6, 5, -np.inf)
            found = {tuple(tree.tokens[n] for n in line[1:]) for line in tree.lines}
            assert found == set(sorted(chances, key=chances.__getitem__, reverse=True)[:7])
            some = model.grow(Tree(1), [0, 1], weights.astype(np.float32), tau, 6, 5, np.log(0.2))
            assert len(some.tokens) == sum(chances[line] > 0.2 for line in found)
            chain = model.grow(Tree(1), [0, 1], weights.astype(np.float32), tau, 2, 1, -np.inf)
            assert len(chain.tokens) == 3, "a chain of two drafts"
    model.unigram, one = np.array([1, 1e-44, 0, 0, 0], np.float32), np.array([[1e4, 1, 1, 1, 1]], np.float32)
    assert model.grow(Tree(4), [4], one, 1.0, 6, 5, -np.inf).tokens == [4, 0], "no draft of a chance that is 0"


def test_counts_change_no_token(tmp_path: Path) -> None:
    """Alone and together; a large tree needs fewer passes than plain decoding."""
    (student, store), passes = tiny_drafter(tmp_path), list[int]()
    tokens = prompts(student, LENGTH, 1)
    plain = draw(student, make_sampler("drafter", max_lookahead=0), IDS, tokens)
    cases: tuple[dict[str, Any], ...] = ({}, {"min_reach": 0.5}, {"draft": "greedy", "width": 2}, {"tree": 3})
    for case in cases:
        found = check.alone_as_together(student, make_sampler("drafter", ngrams=str(store), **case), tokens)
        assert torch.equal(found.tokens, plain.tokens) and not found.nfe.any(), "no step of the drafter"
        check.every_pass_gains(found, (tokens == student.mask_id).sum(dim=1))
        passes.append(int(found.details["verifier_nfe"].sum()))
    assert passes[0] < int(plain.details["verifier_nfe"].sum())
    published = described(make_sampler("drafter", ngrams=str(store)))["ngrams"]
    assert published == "/".join(Path(store).parts[-2:]), "no more of its place"
    student.config.vocab_size += 1
    with pytest.raises(UsageError, match=r"another vocabulary \[ngrams"):
        make_sampler("drafter", ngrams=str(store)).check(student, tokens)
