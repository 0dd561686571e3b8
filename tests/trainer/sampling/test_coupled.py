"""Coupled verification: the verifier's own decode of the noise, whatever student drafts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks.sampler_statistics import chi_square
from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import backbone_run, store_of
from tests.trainer.sampling import decoding_cases as check
from tests.trainer.sampling.decoding_cases import IDS, own_decode, prompts
from tests.trainer.sampling_cases import BOS, LENGTH, VOCAB, draw, open_rows, tiny_llama, tiny_student
from trainer.sampling.coupled import CoupledSampler, drafter_of
from trainer.sampling.fill import StopRule
from trainer.sampling.noise import RowNoise, TokenRule, sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.sampling.verifier import CausalReader, Verifier
from trainer.students.registry import Student
from trainer.training.settings import build_student

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


@pytest.mark.parametrize("lookahead", [0, 1, 3, None])
@pytest.mark.parametrize("name", STUDENTS)
def test_the_output_is_the_verifiers_own_decode(name: str, lookahead: int | None, verifier: str) -> None:
    student = tiny_student(**STUDENTS[name])
    tokens = prompts(student, LENGTH)
    for tau in (1.0, 0.6):
        sampler = CoupledSampler(verifier=verifier, max_lookahead=lookahead, tau=tau)
        draft, ahead = "gumbel" if "plain" in name else "greedy", LENGTH if lookahead is None else lookahead
        settled = sampler.settled(student)
        assert (settled.draft, settled.max_lookahead) == (draft if ahead else None, ahead)
        result = check.alone_as_together(student, sampler, tokens)
        assert torch.equal(result.tokens, own_decode(tiny_llama(), tokens, IDS, VOCAB, tau)[0])
        check.every_pass_gains(result, (tokens == VOCAB).sum(dim=1))
        assert (result.nfe <= result.details["verifier_nfe"]).all()
        assert result.details["drafted"].shape[1] == ahead and bool(result.details["drafted"].any()) == (ahead > 0)
        if lookahead == 0:
            assert not result.nfe.any() and not result.details["accepted"].any()


@torch.no_grad()
@pytest.mark.parametrize("name", STUDENTS)
def test_drafts_are_what_the_student_predicts_with_the_noise(name: str) -> None:
    """Of rows in other blocks, behind a cache; the same when some have left."""
    student = tiny_student(**STUDENTS[name])
    tokens, rows = prompts(student, LENGTH), torch.arange(len(IDS))
    noise = sampling_noise(3, IDS, LENGTH, VOCAB) if student.is_conditioned else None
    condition = RowNoise(noise, LENGTH).embed(student, tokens == VOCAB, rows)
    drafter, place = drafter_of(student, condition, len(rows)), torch.arange(LENGTH)
    for left in ([0, 1, 2, 3, 4], [0, 1, 3, 4], [1], [0], [0]):
        drafter.select(torch.tensor(left))
        rows = rows[left]
        first = (tokens[rows] != VOCAB).sum(dim=1)
        where = (place >= first[:, None]) & (place < drafter.reach(first)[:, None])
        expected = student.predict_at(tokens[rows], where, None if condition is None else condition[rows])
        torch.testing.assert_close(drafter.log_probs(tokens[rows], where), expected[:, :-1], rtol=1e-4, atol=1e-5)
        tokens[rows, first] = 5


@pytest.mark.parametrize("draft", ["greedy", "gumbel"])
@pytest.mark.parametrize("cut", [{"nucleus_p": 0.6}, {"top_k": 2}, {"top_k": 4, "nucleus_p": 0.7}], ids=str)
def test_the_verifiers_truncation_is_kept(cut: dict, draft: Any, verifier: str) -> None:
    """Its argmax under the same noise, over the tokens that top-k and nucleus keep."""
    student, tau = tiny_student(), 0.9
    sampler = CoupledSampler(verifier=verifier, tau=tau, draft=draft, **cut)
    assert sampler.settled(student).draft == draft
    tokens, rule = prompts(student, LENGTH), TokenRule(temperature=tau, **cut)
    expected, whole = (own_decode(tiny_llama(), tokens, IDS, VOCAB, tau, one)[0] for one in (rule, None))
    assert torch.equal(draw(student, sampler, IDS, tokens).tokens, expected)
    assert not torch.equal(expected, whole)


@pytest.mark.parametrize("model", [tiny_gpt2(), tiny_student("ar", "none")], ids=["gpt2", "ours"])
def test_other_verifiers(model: Any, tmp_path: Path) -> None:
    """Learnt positions; no cache at all."""
    model.save_pretrained(tmp_path)
    student = tiny_student()
    tokens = prompts(student, LENGTH)
    result = draw(student, CoupledSampler(verifier=str(tmp_path), max_lookahead=3), IDS, tokens)
    assert torch.equal(result.tokens, own_decode(model, tokens, IDS, VOCAB)[0])


def test_the_layout_for_few_rows_changes_no_weight() -> None:
    """Linear layers by columns; the embedding, which was the output layer as well, by rows as before."""
    model, tokens = tiny_gpt2(), torch.arange(5)[None] % VOCAB
    before, logits = {name: weight.clone() for name, weight in model.state_dict().items()}, model(tokens).logits
    for _ in range(2):
        verifier = Verifier(model, VOCAB)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert model.lm_head.weight.t().is_contiguous() and model.transformer.wte.weight.is_contiguous()
    torch.testing.assert_close(model(tokens).logits, logits, rtol=1e-5, atol=1e-5)
    assert verifier.weights_sha256 == Verifier(tiny_gpt2(), VOCAB).weights_sha256

    def digest(**weights: Tensor) -> str:
        made = torch.nn.Module()
        for name, weight in weights.items():
            made.register_buffer(name, weight)
        return Verifier(made, VOCAB).weights_sha256

    zeros, ones = torch.zeros(4), torch.ones(2)
    assert digest(a=zeros, b=ones) == digest(b=ones, a=zeros)
    assert len({digest(a=zeros), digest(b=zeros), digest(a=zeros[None]), digest(a=zeros.int())}) == 4


def test_a_perfect_draft_is_kept_whole(verifier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over the prompt and K + 1 tokens per pass; agreement 1 at every distance."""
    student = tiny_student()
    truth, _ = own_decode(tiny_llama(), open_rows(student, 2), IDS[:2], VOCAB)

    def oracle(self, given, where, condition=None, *rest):
        return one_hot(truth[where], VOCAB + 1).float().log()

    monkeypatch.setattr(type(student), "predict_at", oracle)
    result = draw(student, CoupledSampler(verifier=verifier, max_lookahead=4), IDS[:2])
    assert torch.equal(result.tokens, truth)
    assert (result.details["verifier_nfe"] == -(-(LENGTH - 1) // 5)).all()
    for other in ("agreed", "reached", "accepted"):
        assert torch.equal(result.details["drafted"], result.details[other])


def test_samples_end_at_eos(verifier: str) -> None:
    student, ids = tiny_student(), torch.arange(60)
    settings = {"verifier": verifier, "max_lookahead": 3}
    free = draw(student, CoupledSampler(**settings), ids)
    ended = draw(student, CoupledSampler(**settings, stop=StopRule(at_eos=True)), ids)
    check.ended_at_eos(ended, free, student.config.eos_token_id)
    assert (ended.lengths < LENGTH).sum() > 5
    assert ended.details["verifier_nfe"].sum() < free.details["verifier_nfe"].sum()


@pytest.mark.parametrize("model", [tiny_llama(), tiny_gpt2()], ids=["llama", "gpt2"])
@torch.no_grad()
def test_the_reader_reads_ragged_rows_as_if_alone(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    reader = CausalReader(model, VOCAB, 3, "cpu")
    rows = torch.randint(VOCAB, (3, 30), generator=generator)
    lengths = torch.zeros(3, dtype=torch.int64)

    def compare(rows: Tensor, stops: Tensor) -> None:
        logits = reader.next_logits(rows, stops, 2)
        for slot, stop in enumerate(stops.tolist()):
            alone = model(rows[slot : slot + 1, :stop]).logits[0, -2:]
            assert torch.allclose(logits[slot], alone, atol=1e-4)

    for _ in range(5):
        stops = lengths + torch.randint(2, 6, (3,), generator=generator)
        compare(rows, stops)
        lengths = lengths + torch.randint(0, 2, (3,), generator=generator) + 1
        lengths = torch.minimum(lengths, stops)
        reader.keep(lengths)
        for row, length in enumerate(lengths.tolist()):  # a rejected draft: other tokens come
            rows[row, length:] = torch.randint(VOCAB, (30 - length,), generator=generator)
        if int(lengths[0]) > 5:
            rows, lengths = rows[[2, 0, 1]], lengths[[2, 0, 1]]
            reader.select(torch.tensor([2, 0, 1]))
    assert reader.num_passes == 5
    assert reader.cache is not None, "what was read is not read again"
    shortest = reader.lengths.argmin()[None]
    stops = reader.lengths[shortest] + 2
    reader.select(shortest)
    compare(rows[shortest], stops)
    assert reader.cache is not None, "nor when longer rows have left"


@torch.no_grad()
def exact_law(tau: float) -> Tensor:
    model = tiny_llama()
    first = (model(torch.tensor([[BOS]])).logits[0, -1].double() / tau).softmax(-1)
    rows = torch.stack([torch.full((VOCAB,), BOS), torch.arange(VOCAB)], dim=1)
    second = (model(rows).logits[:, -1].double() / tau).softmax(-1)
    return first[:, None] * second


@pytest.mark.parametrize("tau", [1.0, 0.85])
def test_exact_law_of_three_tokens(tau: float, verifier: str) -> None:
    """20,000 rows against the verifier's own joint distribution at temperature tau."""
    student, num = tiny_student(), 20_000
    sampler = CoupledSampler(verifier=verifier, tau=tau, max_lookahead=2)
    tokens = draw(student, sampler, torch.arange(num), open_rows(student, num, 3)).tokens
    counts = torch.bincount(tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**2)
    result = chi_square(f"coupled, tau {tau}", counts, exact_law(tau))
    assert result.passed, result
    assert not chi_square("another temperature", counts, exact_law(0.925)).passed


def test_rows_and_verifiers_that_do_not_fit_are_refused(verifier: str, tmp_path: Path) -> None:
    """Here and in adaptive parallel decoding."""
    absent, short, small = (tmp_path / name for name in ("absent", "short", "small"))
    tiny_llama(context=4).save_pretrained(short)
    tiny_llama(vocab_size=5).save_pretrained(small)
    student, cut = tiny_student(), tiny_student()
    cut.config.codec = {"name": "topk", "parameters": {"num_entries": 3}}
    timed, longer = tiny_student(diffusion={"time_conditioning": True}), open_rows(student, len(IDS), LENGTH + 1)
    holed = open_rows(student, len(IDS))
    holed[1, 6] = 2
    for names, drafting, folder, tokens, message in (
        ("coupled", student, verifier, holed, "behind positions to fill"),
        ("coupled", tiny_student("ar", "none"), verifier, None, "drafts no rows"),
        ("coupled", cut, verifier, None, "cuts off"),
        ("apd", student, absent, None, "no such verifier folder"),
        ("apd", tiny_student("bd3lm", block_size=4), verifier, None, "an MDLM"),
        ("apd coupled", student, short, None, "shorter rows"),
        ("apd coupled", student, small, None, "fewer tokens"),
        ("apd coupled", student, verifier, longer, "longer than the student's"),
        ("apd coupled", timed, verifier, None, "the time of each step"),
    ):
        for name in names.split():
            with pytest.raises(UsageError, match=message):
                draw(drafting, make_sampler(name, verifier=str(folder)), IDS, tokens)
    noise, sampler = sampling_noise(3, IDS, LENGTH, VOCAB, codec=cut.codec), CoupledSampler(verifier=verifier)
    with pytest.raises(UsageError, match="cuts off"):
        sampler.sample(student, open_rows(student, len(IDS)), IDS, noise, 3)
    with pytest.raises(UsageError, match="so short rows are never judged"):
        draw(student, replace(sampler, stop=StopRule(min_entropy_nats=1.0)), IDS)
    with pytest.raises(UsageError, match=r"nothing is drafted \[draft, max_lookahead"):
        replace(sampler, max_lookahead=0, draft="gumbel")


def test_passes_of_all_draws_count(verifier: str) -> None:
    """Rows that were drawn anew: what every draw cost, and the counts that go with it."""
    student, ids = tiny_student(), torch.arange(30)
    stop = StopRule(min_entropy_nats=1.6, entropy_window=8, max_tries=3)
    once = draw(student, CoupledSampler(verifier=verifier), ids)
    result = draw(student, CoupledSampler(verifier=verifier, stop=stop), ids)
    again = result.details["attempt"] > 0
    assert again.any() and not again.all()
    check.every_pass_gains(result, (result.details["attempt"] + 1) * (LENGTH - 1))
    assert (result.details["drafted"].sum(1) > once.details["drafted"].sum(1))[again].all()


# Teachers whose attention has a window shorter than the row.

SIZE, LONG, WINDOW = 12, 24, 5
MANY = torch.tensor([4, 0, 11, 7, 23, 5, 8])
GROUPED = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
GROUPED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SLIDING = {**GROUPED, "sliding_window": WINDOW}
LAYERS = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
MIXED = {"num_local_experts": 2, "num_experts_per_tok": 1}
LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "mistral": SLIDING,
    "gemma2": {**LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {**LAYERS, **MIXED, "head_dim": 8},
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 0},
    "gpt_neo": {**LOCAL, "hidden_size": 16, "num_layers": 2, "num_heads": 2} | {"max_position_embeddings": 64},
}


def teacher(family: str) -> Any:
    common = {"vocab_size": SIZE, "bos_token_id": BOS, "eos_token_id": 1, "pad_token_id": None}
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **common, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def ragged() -> Tensor:
    """Prompts of 1 to 19 tokens."""
    tokens = torch.full((len(MANY), LONG), SIZE)
    tokens[:, 0] = BOS
    for row, length in enumerate((1, 9, 3, 19, 6, 1, 13)):
        tokens[row, 1:length] = (torch.arange(1, length) * (row + 3)) % SIZE
    return tokens


def check_window(student: Student, name: str, own: tuple[Tensor, Tensor], **settings: Any) -> None:
    """All rows together and each alone are the teacher's own decode."""
    tokens, sampler, (truth, certain) = ragged(), make_sampler(name, **settings), own
    together = draw(student, sampler, MANY, tokens).tokens
    alone = [draw(student, sampler, MANY[i : i + 1], tokens[i : i + 1]).tokens for i in range(3)]
    for found in (together, torch.cat(alone)):
        for row, (ours, stop) in enumerate(zip(found, certain.tolist(), strict=False)):
            assert ours[:stop].tolist() == truth[row, :stop].tolist(), f"row {row}"
    assert int(certain.sum()) > 0.9 * tokens.numel(), "near ties are few"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_is_that_of_a_row_alone(family: str, tmp_path: Path) -> None:
    model = teacher(family)
    model.save_pretrained(tmp_path)
    own = own_decode(model, ragged(), MANY, SIZE, room=1e-3)
    shape = {"vocab_size": SIZE, "row_length": LONG}
    for student in (tiny_student(**shape), tiny_student("bd3lm", block_size=4, **shape)):
        check_window(student, "coupled", own, verifier=str(tmp_path), max_lookahead=5)


@pytest.mark.parametrize("kind", ["medusa", "drafter"])
def test_heads_see_the_window_and_trees_are_refused_beyond_it(kind: str, tmp_path: Path) -> None:
    """On a Mistral, trained on rows within its window. Masks of trees know no window."""
    model = teacher("mistral")
    model.config.sliding_window = 12
    model.save_pretrained(tmp_path / "backbone")
    store = ShardStore.open(store_of(tmp_path / "store", tmp_path / "backbone"))
    run = backbone_run(tmp_path / "backbone", kind, model__backbone__num_proposed=3)
    student = build_student(run, store, None).eval()
    if kind == "medusa":
        check_window(student, kind, own_decode(model, ragged(), MANY, SIZE, room=1e-3))
        return
    with pytest.raises(UsageError, match=r"length.*got 24 tokens; expected at most 12"):
        draw(student, make_sampler(kind), MANY, ragged())
    draw(student, make_sampler(kind), MANY[:1], ragged()[:1, :12])
