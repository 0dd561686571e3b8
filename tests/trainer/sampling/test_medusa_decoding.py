"""Medusa decoding: lossless under coupled and greedy acceptance, the paper's rule under typical."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import SHAPES, backbone_run, store_of, write_backbone
from tests.trainer.run_cases import LENGTH, VOCAB
from tests.trainer.sampling.test_coupled import IDS
from tests.trainer.sampling_cases import draw, open_rows, tiny_student
from trainer.sampling.coupled import gumbel_scores
from trainer.sampling.fill import StopRule
from trainer.sampling.noise import sampling_noise
from trainer.sampling.own_backbone import MedusaSampler, is_typical
from trainer.students.registry import Medusa
from trainer.training.construction import build_student

LONG = 20
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"model__conditioning": "none"},
    "seen": {"model__backbone__own_noise": "seen"},
    "bf16": {"model__backbone__dtype": "bfloat16"},
}
IN_FLOAT32 = pytest.mark.parametrize("student", [*SHAPES, "plain", "seen"], indirect=True)
IN_BF16 = pytest.mark.parametrize("student", ["bf16"], indirect=True)


def make_student(folder: Path, shape: str = "llama", **changes: Any) -> Medusa:
    backbone = write_backbone(folder / "backbone", shape)
    store = store_of(folder / "store", backbone)
    student = build_student(backbone_run(backbone, **changes), ShardStore.open(store), None)
    assert isinstance(student, Medusa)
    generator = torch.Generator().manual_seed(5)
    for weight in student.parameters():
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return student.eval()


@pytest.fixture(scope="module", params=[*SHAPES, *CHANGES])
def student(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    shape = request.param if request.param in SHAPES else "qwen2"
    folder = tmp_path_factory.mktemp("medusa")
    return make_student(folder, shape, **CHANGES.get(request.param, {}))


def prompts(student: Medusa) -> Tensor:
    tokens = open_rows(student, len(IDS), LONG)
    tokens[1, 1:5] = torch.tensor([3, 8, 3, 2])
    tokens[2, 1:11] = 7
    tokens[3, 1:19] = 9
    return tokens


@torch.no_grad()
def own_decode(student: Medusa, tokens: Tensor, tau: float, room: float) -> tuple[Tensor, Tensor]:
    """One token per pass over the whole prefix; tau 0 is greedy. And up to where no near tie is."""
    network, rows = student.language_model.network, []
    certain = torch.full((len(tokens),), tokens.shape[1])
    for slot, (index, row) in enumerate(zip(IDS, tokens.clone().split(1), strict=True)):
        noise = sampling_noise(3, index[None], tokens.shape[1], VOCAB)
        for place in range(tokens.shape[1]):
            if row[0, place] == VOCAB:
                logits = network(row[:, :place]).logits[:, -1, :VOCAB].float()
                scores = gumbel_scores(logits, noise.select(torch.tensor([place])), tau)
                best = scores[0].topk(2)
                row[0, place] = best.indices[0]
                if float(best.values[0] - best.values[1]) < room:
                    certain[slot] = min(int(certain[slot]), place)
        rows.append(row)
    return torch.cat(rows), certain


@pytest.mark.parametrize(
    ("acceptance", "tau"), [("coupled", 1.0), ("coupled", 0.6), ("greedy", 0.0)]
)
def test_lossless(student: Medusa, acceptance: str, tau: float) -> None:
    """Token for token the backbone's own decode of the noise, or its greedy continuation."""
    tokens = prompts(student)
    sampler = MedusaSampler(acceptance=acceptance, tau=tau or 1.0)  # type: ignore[arg-type]
    result = draw(student, sampler, IDS, tokens)
    in_bf16 = student.settings.backbone.dtype == "bfloat16"
    truth, certain = own_decode(student, tokens, tau, 0.25 if in_bf16 else 1e-3)
    # A pass with a cache rounds otherwise: behind a near tie all may differ.
    for row, stop in enumerate(certain.tolist()):
        assert torch.equal(result.tokens[row, :stop], truth[row, :stop])
    assert in_bf16 or int(certain.sum()) > 0.8 * tokens.numel()
    filled = (tokens == student.mask_id).sum(dim=1)
    gained = result.details["accepted"].sum(dim=1) + result.details["verifier_nfe"]
    assert torch.equal(gained, filled), "a pass gives what was accepted and one token more"
    accepted, reached = (result.details[name].sum(dim=0) for name in ("accepted", "reached"))
    assert (accepted <= reached).all() and int(reached[0]) > 0
    assert int(result.details["drafted"].shape[1]) == student.settings.backbone.num_proposed


@IN_FLOAT32
def test_no_sample_depends_on_its_companions(student: Medusa) -> None:
    tokens = prompts(student)
    together = draw(student, MedusaSampler(), IDS, tokens)
    for slot, index in enumerate(IDS):
        alone = draw(student, MedusaSampler(), index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        assert torch.equal(alone.details["reached"][0], together.details["reached"][slot])


@IN_BF16
def test_in_bf16_companions_move_no_token_before_a_near_tie(student: Medusa) -> None:
    """Logits of other shapes differ by up to 0.063 there: two of them by half of the room."""
    tokens, sampler = prompts(student), MedusaSampler(tau=4.0)  # much noise, few near ties
    _, certain = own_decode(student, tokens, 4.0, room=0.25)
    together = draw(student, sampler, IDS, tokens)
    checked = 0
    for slot, (index, stop) in enumerate(zip(IDS, certain.tolist(), strict=True)):
        alone = draw(student, sampler, index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0, :stop], together.tokens[slot, :stop])
        checked += int((tokens[slot, :stop] == student.mask_id).sum())
    assert checked > 20


def test_perfect_heads_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over the prompt gives one token, each further one K + 1."""
    student = make_student(tmp_path, model__backbone__num_proposed=3)
    ids, tokens = IDS[:2], open_rows(student, 2, LONG)
    truth = draw(student, MedusaSampler(max_lookahead=0), ids, tokens).tokens
    calls: list[int] = []

    def oracle(hidden: Tensor, embedded: Tensor | None) -> Tensor:
        start = 2 + 4 * len(calls)
        calls.append(start)
        wanted = truth[:, start : start + 3]
        wanted = torch.nn.functional.pad(wanted, (0, 3 - wanted.shape[1]))
        return torch.nn.functional.one_hot(wanted, VOCAB).float().log()

    monkeypatch.setattr(student, "propose", oracle)
    result = draw(student, MedusaSampler(), ids, tokens)
    assert torch.equal(result.tokens, truth)
    assert (result.details["verifier_nfe"] == 1 + -(-(LONG - 2) // 4)).all()
    assert torch.equal(result.details["reached"], result.details["accepted"])


def test_heads_are_shown_the_noise_of_the_tokens_they_propose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind token i: the embeddings of i + 1 .. i + 1 + K, and the hidden state of i itself."""
    student = make_student(tmp_path, model__backbone__own_noise="seen")
    tokens, seen = open_rows(student, 1, LONG), []
    propose = student.propose
    monkeypatch.setattr(
        student, "propose", lambda h, e: seen.append((h.clone(), e.clone())) or propose(h, e)
    )
    result = draw(student, MedusaSampler(max_lookahead=1), IDS[:1], tokens)
    noise = sampling_noise(3, IDS[:1], LONG, VOCAB)
    with torch.no_grad():
        embedded = student.embed_noise(noise, 1.0).embedding
        hidden = student.language_model.hidden(result.tokens)[0]
    first = 2
    for h, e in seen:
        width = min(3, LONG - first + 1)
        assert torch.allclose(e[0, :width], embedded[first - 1 : first - 1 + width], atol=1e-6)
        assert torch.allclose(h[0], hidden[first - 2], atol=1e-4)
        # The next round begins behind the tokens that this one gave: compare by what was settled.
        first += 1 + int(torch.equal(propose(h, e)[0, 0].argmax(), result.tokens[0, first]))
    assert len(seen) > 5


def test_typical_acceptance_by_hand() -> None:
    """A sure model keeps only what it holds likely; an unsure one also what it holds unlikely."""
    sure, flat = torch.tensor([0.9, 0.06, 0.04]), torch.full((3,), 1 / 3)
    # exp(-H) is 0.67 for the first and 1/3 for the second: epsilon 0.1 decides both.
    logits, tokens = torch.stack([sure, sure, flat]).log(), torch.tensor([0, 1, 2])
    assert is_typical(logits, tokens, 0.1, 1.0).tolist() == [True, False, True]
    entropy = -float((sure * sure.log()).sum())
    just_below = 0.06 * math.exp(entropy) * 0.99
    assert is_typical(logits, tokens, 0.9, just_below).tolist() == [True, True, True]
    assert is_typical(logits, tokens, 0.9, just_below / 0.97)[1].item() is False


def test_typical_keeps_what_the_backbone_holds_possible(student: Medusa) -> None:
    tokens = prompts(student)
    result = draw(student, MedusaSampler(acceptance="typical"), IDS, tokens)
    assert not (result.tokens == student.mask_id).any()
    strict = MedusaSampler(acceptance="typical", epsilon=1e9, delta=1e9)
    none = draw(student, strict, IDS, tokens)
    assert int(none.details["accepted"].sum()) == 0
    coupled = draw(student, MedusaSampler(max_lookahead=0), IDS, tokens)
    if student.settings.backbone.dtype == "float32":
        assert torch.equal(none.tokens, coupled.tokens)
    everything = draw(student, MedusaSampler(acceptance="typical", epsilon=1e-30), IDS, tokens)
    details = everything.details
    assert torch.equal(details["accepted"], details["drafted"])


def test_samples_end_at_eos(tmp_path: Path) -> None:
    student, ids = make_student(tmp_path), torch.arange(40)
    tokens = open_rows(student, 40, LONG)
    free = draw(student, MedusaSampler(), ids, tokens)
    # A token that many rows have, and none everywhere: rows end in different rounds.
    student.config.eos_token_id = eos = int(free.tokens[:, 8].mode().values)
    ended = draw(student, MedusaSampler(stop=StopRule(at_eos=True)), ids, tokens)
    for row in range(len(ids)):
        place = (free.tokens[row, 1:] == eos).nonzero()
        length = int(place[0]) + 2 if len(place) else LONG
        assert int(ended.lengths[row]) == length
        assert torch.equal(ended.tokens[row, :length], free.tokens[row, :length])
    assert (ended.lengths < LONG).sum() > 5


def test_mistakes_are_named(tmp_path: Path) -> None:
    student = make_student(tmp_path)
    with pytest.raises(UsageError, match="needs heads on a backbone"):
        draw(tiny_student(), MedusaSampler(), IDS)
    with pytest.raises(UsageError, match="shorter rows"):
        draw(student, MedusaSampler(), IDS, open_rows(student, len(IDS), 65))
    holed = open_rows(student, 1, LENGTH)
    holed[0, 6] = 2
    with pytest.raises(UsageError, match="behind positions to fill"):
        draw(student, MedusaSampler(), IDS[:1], holed)
    for settings in ({"tau": 0.0}, {"max_lookahead": -1}, {"epsilon": 0.0}, {"delta": -1.0}):
        with pytest.raises(UsageError, match=next(iter(settings))):
            MedusaSampler(**settings)
    for settings in ({"acceptance": "greedy", "tau": 0.5}, {"epsilon": 0.5}):
        with pytest.raises(UsageError, match="without effect"):
            MedusaSampler(**settings)
    with pytest.raises(UsageError, match="without effect"):
        MedusaSampler(acceptance="typical", top_k=3)
    student.config.codec = {"name": "topk", "parameters": {"num_entries": 3}}
    with pytest.raises(UsageError, match="cuts off"):
        draw(student, MedusaSampler(), IDS)
