"""The rule by which an engine keeps drafts: whatever is drafted, the text is the target's own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.serving.coupling import NOTHING, draw, keep_agreeing

ids = st.integers(0, 3)
request = st.lists(st.tuples(ids, ids), max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(request, ids), min_size=1, max_size=4))
def test_kept_are_the_drafts_before_the_first_that_differs_and_one_more(
    batch: list[tuple[list[tuple[int, int]], int]],
) -> None:
    pairs = [pair for drafted, _ in batch for pair in drafted]
    drafts, targets = (torch.tensor([p[i] for p in pairs], dtype=torch.int64) for i in (0, 1))
    counts = torch.tensor([len(drafted) for drafted, _ in batch])
    bonus = torch.tensor([last for _, last in batch])
    found = keep_agreeing(drafts, targets, counts, bonus, int(counts.max()))
    for (drafted, last), row in zip(batch, found.tolist(), strict=True):
        expected = []
        for draft, target in drafted:
            expected.append(target)
            if draft != target:
                break
        else:
            expected.append(last)
        assert row == expected + [NOTHING] * (len(row) - len(expected))


def target_logits(prefix: list[int]) -> torch.Tensor:
    """A toy model: logits of the next token, a function of all tokens before."""
    seed = hash(tuple(prefix)) % 2**31
    return torch.randn(12, generator=torch.Generator().manual_seed(seed))


def take(prefix: list[int], seed: int) -> int:
    place = torch.tensor([len(prefix) - 1])
    return int(draw(target_logits(prefix)[None], torch.tensor([seed]), place))


@settings(deadline=None, max_examples=30)
@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.lists(st.integers(0, 11), max_size=5)))
def test_speculative_text_is_the_text_without_drafts(seed: int, proposals: list[list[int]]) -> None:
    plain = [1, 2]
    while len(plain) < 20:
        plain.append(take(plain, seed))
    written = [1, 2]
    for drafts in [*proposals, *[[]] * 20]:
        rows = [written + drafts[:i] for i in range(len(drafts) + 1)]
        targets = [take(row, seed) for row in rows]
        kept = keep_agreeing(
            torch.tensor(drafts, dtype=torch.int64),
            torch.tensor(targets[:-1], dtype=torch.int64),
            torch.tensor([len(drafts)]),
            torch.tensor(targets[-1:]),
            len(drafts),
        )
        written += [token for token in kept[0].tolist() if token != NOTHING]
    assert written[:20] == plain


def test_greedy_rows_take_no_noise() -> None:
    logits = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))
    seeds, places = torch.arange(40), torch.arange(40)
    is_greedy = torch.arange(40) % 2 == 0
    found = draw(logits, seeds, places, is_greedy=is_greedy)
    assert torch.equal(found[::2], logits[::2].argmax(dim=-1))
    assert not torch.equal(found[1::2], logits[1::2].argmax(dim=-1))
    assert torch.equal(found[1::2], draw(logits[1::2], seeds[1::2], places[1::2]))


def test_cut_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 8)
    logits[:, 3:] = -torch.inf
    assert int(draw(logits, torch.arange(500), torch.zeros(500, dtype=torch.int64)).max()) == 2


def test_draws_follow_the_law() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    found = draw(logits, torch.arange(20_000), torch.full((20_000,), 5))
    share = torch.bincount(found, minlength=4) / 20_000
    expected = logits[0].softmax(dim=-1)
    deviation = (expected * (1 - expected) / 20_000).sqrt()
    assert bool(((share - expected).abs() < 4.5 * deviation).all())
