"""Coupled verification: the verifier's own decode of the noise, whatever student drafts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.sampler_statistics import chi_square
from shards.errors import UsageError
from tests.trainer.sampling.test_adaptive import tiny_llama
from tests.trainer.sampling_cases import BOS, LENGTH, VOCAB, draw, open_rows, tiny_student
from trainer.sampling.coupled import CoupledSampler, gumbel_scores
from trainer.sampling.fill import SampleResult, StopRule
from trainer.sampling.noise import TokenRule, sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.sampling.verifier import CausalReader
from trainer.students.registry import Student

IDS = torch.tensor([4, 0, 11, 7, 23])
STUDENTS = {
    "mdlm": {},
    "plain": {"conditioning": "none"},
    "blocks": {"kind": "bd3lm", "block_size": 4},
    "plain blocks": {"kind": "bd3lm", "conditioning": "none", "block_size": 3},
}


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


@torch.no_grad()
def own_decode(
    model, tokens: Tensor, ids: Tensor, tau: float, seed: int = 3, rule: TokenRule | None = None
) -> Tensor:
    """argmax(l + tau xi) over what the rule keeps, one token per pass over the whole prefix."""
    rows, length = [], tokens.shape[1]
    for index, row in zip(ids, tokens.split(1), strict=True):
        row, noise = row.clone(), sampling_noise(seed, index[None], length, VOCAB)
        for place in range(length):
            if row[0, place] == VOCAB:
                logits = model(row[:, :place]).logits[:, -1, :VOCAB]
                xi = noise.select(torch.tensor([place]))
                scores = gumbel_scores(logits, xi, tau)
                if rule is not None:
                    scores = scores.masked_fill(rule.probabilities(logits) == 0, -torch.inf)
                row[0, place] = scores.argmax()
        rows.append(row)
    return torch.cat(rows)


def prompts(student: Student) -> Tensor:
    tokens = open_rows(student, len(IDS))
    tokens[1, 1:5] = torch.tensor([3, 8, 3, 2])
    tokens[2, 1:11] = 7
    tokens[3, 1] = 9
    return tokens


@pytest.mark.parametrize("lookahead", [0, 1, 3, 40])
@pytest.mark.parametrize("name", STUDENTS)
def test_the_output_is_the_verifiers_own_decode(name: str, lookahead: int, verifier: str) -> None:
    student = tiny_student(**STUDENTS[name])
    for tau in (1.0, 0.6):
        sampler = CoupledSampler(verifier=verifier, max_lookahead=lookahead, tau=tau)
        tokens = prompts(student)
        result = draw(student, sampler, IDS, tokens)
        assert torch.equal(result.tokens, own_decode(tiny_llama(), tokens, IDS, tau))
        filled = (tokens == student.mask_id).sum(dim=1)
        gained = result.details["accepted"].sum(dim=1) + result.details["verifier_nfe"]
        assert torch.equal(gained, filled), "a pass gives what was accepted and one token more"
        assert (result.nfe <= result.details["verifier_nfe"]).all()
        if lookahead == 0:
            assert (result.nfe == 0).all() and torch.equal(gained, result.details["verifier_nfe"])


@pytest.mark.parametrize("draft", ["greedy", "gumbel"])
@pytest.mark.parametrize(
    "cut", [{"nucleus_p": 0.6}, {"top_k": 2}, {"top_k": 4, "nucleus_p": 0.7}], ids=str
)
def test_the_verifiers_truncation_is_kept(cut: dict, draft: Any, verifier: str) -> None:
    """Its argmax under the same noise, over the tokens that top-k and nucleus keep."""
    student, tau = tiny_student(), 0.9
    sampler = CoupledSampler(verifier=verifier, tau=tau, draft=draft, **cut)
    tokens = prompts(student)
    rule = TokenRule(temperature=tau, **cut)
    expected = own_decode(tiny_llama(), tokens, IDS, tau, rule=rule)
    assert torch.equal(draw(student, sampler, IDS, tokens).tokens, expected)
    assert not torch.equal(expected, own_decode(tiny_llama(), tokens, IDS, tau))


@pytest.mark.parametrize("model", [tiny_gpt2(), tiny_student("ar", "none")], ids=["gpt2", "ours"])
def test_other_verifiers(model, tmp_path: Path) -> None:
    """Learnt positions; no cache at all."""
    model.save_pretrained(tmp_path)
    student = tiny_student()
    tokens = prompts(student)
    result = draw(student, CoupledSampler(verifier=str(tmp_path), max_lookahead=3), IDS, tokens)
    assert torch.equal(result.tokens, own_decode(model, tokens, IDS, 1.0))


def test_a_perfect_draft_is_kept_whole(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over the prompt and K + 1 tokens per pass; agreement 1 at every distance."""
    student, ids = tiny_student(), IDS[:2]
    tokens = open_rows(student, 2)
    truth = own_decode(tiny_llama(), tokens, ids, 1.0)

    def oracle(self, given, where, condition=None, *rest):
        return torch.nn.functional.one_hot(truth[where], VOCAB + 1).float().log()

    monkeypatch.setattr(type(student), "predict_at", oracle)
    result = draw(student, CoupledSampler(verifier=verifier, max_lookahead=4), ids)
    assert torch.equal(result.tokens, truth)
    assert (result.details["verifier_nfe"] == -(-(LENGTH - 1) // 5)).all()
    for one, other in (("drafted", "agreed"), ("reached", "accepted"), ("drafted", "reached")):
        assert torch.equal(result.details[one], result.details[other])


def statistics(result: SampleResult) -> list[list[int]]:
    names = ("reached", "accepted", "drafted", "agreed")
    return [result.details[name].sum(dim=0).tolist() for name in names]


def test_agreement_is_counted_by_distance(verifier: str) -> None:
    student = tiny_student()
    result = draw(student, CoupledSampler(verifier=verifier, max_lookahead=3), torch.arange(40))
    reached, accepted, drafted, agreed = statistics(result)
    assert reached[0] == drafted[0] and accepted[0] == agreed[0] >= reached[1]
    assert accepted[0] > 10 and drafted[1] > reached[1]
    assert all(a <= r <= d for a, r, d in zip(accepted, reached, drafted, strict=True))
    assert all(a <= b for a, b in zip(accepted, agreed, strict=True))


def test_no_sample_depends_on_its_companions(verifier: str) -> None:
    student = tiny_student("bd3lm", block_size=4)
    sampler = CoupledSampler(verifier=verifier, max_lookahead=3)
    tokens = prompts(student)
    together = draw(student, sampler, IDS, tokens)
    for slot, index in enumerate(IDS):
        alone = draw(student, sampler, index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        assert alone.details["verifier_nfe"][0] == together.details["verifier_nfe"][slot]


def test_samples_end_at_eos(verifier: str) -> None:
    student, ids = tiny_student(), torch.arange(60)
    eos = student.config.eos_token_id
    free = draw(student, CoupledSampler(verifier=verifier, max_lookahead=3), ids)
    stop = StopRule(at_eos=True)
    ended = draw(student, CoupledSampler(verifier=verifier, max_lookahead=3, stop=stop), ids)
    for row in range(len(ids)):
        place = (free.tokens[row, 1:] == eos).nonzero()
        length = int(place[0]) + 2 if len(place) else LENGTH
        assert int(ended.lengths[row]) == length
        assert torch.equal(ended.tokens[row, :length], free.tokens[row, :length])
        assert (ended.tokens[row, length:] == eos).all()
    assert (ended.lengths < LENGTH).sum() > 5
    assert ended.details["verifier_nfe"].sum() < free.details["verifier_nfe"].sum()


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gpt2()], ids=["llama", "gpt2"])
def test_the_reader_reads_ragged_rows_as_if_alone(model) -> None:
    generator = torch.Generator().manual_seed(0)
    reader = CausalReader(model, VOCAB, 3, "cpu")
    rows = torch.randint(VOCAB, (3, 30), generator=generator)
    lengths = torch.zeros(3, dtype=torch.int64)
    for _ in range(5):
        stops = lengths + torch.randint(2, 6, (3,), generator=generator)
        logits = reader.next_logits(rows, stops, 2)
        for row, stop in enumerate(stops.tolist()):
            with torch.no_grad():
                alone = model(rows[row : row + 1, :stop]).logits[0, -2:]
            assert torch.allclose(logits[row], alone, atol=1e-4)
        lengths = lengths + torch.randint(0, 2, (3,), generator=generator) + 1
        lengths = torch.minimum(lengths, stops)
        reader.keep(lengths)
        for row, length in enumerate(lengths.tolist()):  # a rejected draft: other tokens come
            rows[row, length:] = torch.randint(VOCAB, (30 - length,), generator=generator)
        if len(rows) == 3 and int(lengths[0]) > 5:
            rows, lengths = rows[[2, 0, 1]], lengths[[2, 0, 1]]
            reader.select(torch.tensor([2, 0, 1]))
    assert reader.num_passes == 5
    assert reader.cache is not None, "what was read is not read again"
    shortest = reader.lengths.argmin()[None]
    stops = reader.lengths[shortest] + 2
    reader.select(shortest)
    logits = reader.next_logits(rows[shortest], stops, 2)
    assert reader.cache is not None, "nor when longer rows have left"
    with torch.no_grad():
        alone = model(rows[shortest, : int(stops)]).logits[0, -2:]
    assert torch.allclose(logits[0], alone, atol=1e-4)


@pytest.mark.parametrize("tau", [1.0, 0.85])
def test_exact_law_of_three_tokens(tau: float, verifier: str) -> None:
    """20,000 rows against the verifier's own joint distribution at temperature tau."""
    student, num = tiny_student(), 20_000
    sampler = CoupledSampler(verifier=verifier, tau=tau, max_lookahead=2)
    tokens = draw(student, sampler, torch.arange(num), open_rows(student, num, 3)).tokens
    counts = torch.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**2)
    exact = exact_law(tau)
    result = chi_square(f"coupled, tau {tau}", counts, exact)
    assert result.passed, result
    assert not chi_square("another temperature", counts, exact_law(0.925)).passed


@torch.no_grad()
def exact_law(tau: float) -> Tensor:
    model = tiny_llama()
    first = (model(torch.tensor([[BOS]])).logits[0, -1].double() / tau).softmax(-1)
    rows = torch.stack([torch.full((VOCAB,), BOS), torch.arange(VOCAB)], dim=1)
    second = (model(rows).logits[:, -1].double() / tau).softmax(-1)
    return first[:, None] * second


def test_mistakes_are_named(verifier: str, tmp_path: Path) -> None:
    student = tiny_student()
    with pytest.raises(UsageError, match="coupled needs a verifier"):
        make_sampler("coupled")
    for settings in ({"tau": 0.0}, {"max_lookahead": -1}):
        with pytest.raises(UsageError, match=next(iter(settings))):
            CoupledSampler(verifier=verifier, **settings)
    holed = open_rows(student, 3)
    holed[1, 6] = 2
    with pytest.raises(UsageError, match="behind positions to fill"):
        draw(student, CoupledSampler(verifier=verifier), IDS[:3], holed)
    tiny_llama(context=4).save_pretrained(tmp_path / "short")
    with pytest.raises(UsageError, match="shorter rows"):
        draw(student, CoupledSampler(verifier=str(tmp_path / "short")), IDS)
    tiny_llama(vocab_size=5).save_pretrained(tmp_path / "small")
    with pytest.raises(UsageError, match="fewer tokens"):
        draw(student, CoupledSampler(verifier=str(tmp_path / "small")), IDS)
    with pytest.raises(UsageError, match="drafts no rows"):
        draw(tiny_student("ar", "none"), CoupledSampler(verifier=verifier), IDS)
    student.config.codec = {"name": "topk", "parameters": {"num_entries": 3}}
    with pytest.raises(UsageError, match="cuts off"):
        draw(student, CoupledSampler(verifier=verifier), IDS)


def test_passes_of_all_draws_count(verifier: str) -> None:
    """Rows that were drawn anew: what every draw cost, and the counts that go with it."""
    student, ids = tiny_student(), torch.arange(30)
    stop = StopRule(min_entropy_nats=1.6, entropy_window=8, max_tries=3)
    once = draw(student, CoupledSampler(verifier=verifier), ids)
    result = draw(student, CoupledSampler(verifier=verifier, stop=stop), ids)
    attempts, details = result.details["attempt"], result.details
    assert (attempts == 0).any() and (attempts > 0).any()
    gained = details["accepted"].sum(dim=1) + details["verifier_nfe"]
    assert torch.equal(gained, (attempts + 1) * (LENGTH - 1))
    again = attempts > 0
    assert (details["drafted"].sum(1) > once.details["drafted"].sum(1))[again].all()
