"""The drafter's decoding: the backbone's own tokens, whatever its slots propose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import SHAPES, backbone_run, store_of
from tests.trainer.sampling_cases import draw, open_rows, tiny_student
from tests.trainer.students.drafter.drafter_cases import RECIPES, a_noise_table, tiny_drafter
from trainer.sampling.coupled import gumbel_scores
from trainer.sampling.noise import sampling_noise
from trainer.sampling.own_backbone import SlotReader, inverse_cdf
from trainer.sampling.registry import make_sampler
from trainer.students.drafter.layout import SlotLayout
from trainer.students.drafter.student import token_uniforms
from trainer.students.registry import Drafter
from trainer.training.construction import build_student

VOCAB, LENGTH, IDS = 12, 12, torch.tensor([4, 0, 11, 7])


@torch.no_grad()
def own_decode(
    folder: Path, tokens: Tensor, tau: float, uniform: bool, seed: int = 3, vocab: int = VOCAB
) -> Tensor:
    """The bare backbone, one token a pass over the whole prefix."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = []
    for index, row in zip(IDS, tokens.split(1), strict=True):
        row, noise = row.clone(), sampling_noise(seed, index[None], tokens.shape[1], vocab)
        for place in range(tokens.shape[1]):
            if row[0, place] == vocab:
                logits = model(row[:, :place]).logits[:, -1, :vocab]
                xi = noise.select(torch.tensor([place]))
                chosen = gumbel_scores(logits, xi, tau).argmax()
                if uniform:
                    probs = (logits.double() / tau).softmax(dim=-1)
                    chosen = inverse_cdf(probs, token_uniforms(xi))[0]
                row[0, place] = chosen
        rows.append(row)
    return torch.cat(rows)


def prompts(student: Drafter) -> Tensor:
    tokens = open_rows(student, len(IDS), LENGTH)
    tokens[1, 1:5] = torch.tensor([3, 8, 3, 2])
    tokens[2, 1:11] = 7
    return tokens


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_output_is_the_backbones_own_decode(
    recipe: str, shape: str, calls: int, tmp_path: Path
) -> None:
    """Padded and tied heads, grouped queries, learnt positions; rows longer than in training."""
    student, _ = tiny_drafter(tmp_path, shape, recipe)
    student.eval()
    tokens = prompts(student)
    for tau, ahead in ((1.0, None), (0.7, 1)):
        sampler = make_sampler("drafter", tau=tau, calls_per_round=calls, max_lookahead=ahead)
        result = draw(student, sampler, IDS, tokens)
        wanted = own_decode(tmp_path / shape, tokens, tau, recipe == "uniform")
        assert torch.equal(result.tokens, wanted)
        filled = (tokens == VOCAB).sum(dim=1)
        gained = result.details["accepted"].sum(dim=1) + result.details["verifier_nfe"]
        assert torch.equal(gained, filled), "a call gives what was accepted and one token more"
        slots_in = result.nfe if calls == 1 else 2 * result.nfe
        assert ((slots_in - result.details["verifier_nfe"]).abs() <= calls - 1).all()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_real_backbone_decodes_its_own_tokens(calls: int, tmp_path: Path, shared: Path) -> None:
    """stories260K, a drafter at step 0: no token but its own; wrong drafts cost calls only."""
    backbone = shared / "data" / "stories260K"
    store = store_of(tmp_path / "store", backbone, vocab_size=512)
    config = backbone_run(
        backbone, "drafter", model__backbone__num_proposed=3, model__backbone__num_starts=2
    )
    student = build_student(config, ShardStore.open(store), None).eval()
    tokens = torch.full((len(IDS), 40), 512)
    tokens[:, 0], tokens[1, 1:6] = 1, torch.tensor([403, 407, 261, 378, 286])
    result = draw(student, make_sampler("drafter", calls_per_round=calls), IDS, tokens)
    assert torch.equal(result.tokens, own_decode(backbone, tokens, 1.0, False, vocab=512))
    assert result.details["drafted"].sum() > result.details["accepted"].sum()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_perfect_draft_is_kept_whole(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K - 1 accepted and one more a call; or that and the slots' call, which gives one."""
    student, _ = tiny_drafter(tmp_path, recipe="seen")
    tokens = prompts(student)
    tokens[0, 1], tokens[3, 1] = 5, 9  # the oracle tells rows by their prompts
    truth = own_decode(tmp_path / "llama", tokens, 1.0, False)
    read = SlotReader.read

    def oracle(self, given, stops, num_last, starts, table):
        logits, slots = read(self, given, stops, num_last, starts, table)
        if slots.numel():
            rows = [
                int(((truth[:, : given.shape[1]] == row) | (row == VOCAB)).all(1).nonzero()[0])
                for row in given
            ]
            places = (starts[:, :, None] + torch.arange(slots.shape[2])).clamp(max=LENGTH - 1)
            ahead = truth[torch.tensor(rows)[:, None, None], places]
            slots = torch.nn.functional.one_hot(ahead, VOCAB).float()
        return logits, slots

    monkeypatch.setattr(SlotReader, "read", oracle)
    result = draw(student, make_sampler("drafter", calls_per_round=calls), IDS, tokens)
    assert torch.equal(result.tokens, truth)
    filled = (tokens == VOCAB).sum(dim=1)
    most = student.num_slots  # tokens of a call that verifies K - 1 drafts
    if calls == 1:
        wanted = 1 + torch.ceil((filled - 1) / most)
    else:
        whole, rest = filled // (most + 1), filled % (most + 1)
        wanted = 2 * whole + (rest > 0).long() + (rest > 1).long()
    assert torch.equal(result.details["verifier_nfe"], wanted.long())
    assert torch.equal(result.details["reached"], result.details["accepted"])


def test_no_sample_depends_on_its_companions(tmp_path: Path) -> None:
    student, _ = tiny_drafter(tmp_path)
    tokens, sampler = prompts(student), make_sampler("drafter")
    together = draw(student, sampler, IDS, tokens)
    assert together.details["accepted"].sum() > 0
    for slot, index in enumerate(IDS):
        alone = draw(student, sampler, index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        assert torch.equal(alone.details["accepted"][0], together.details["accepted"][slot])


@pytest.mark.parametrize("recipe", ["hidden", "waiting"])
def test_slots_leave_nothing_in_the_cache(recipe: str, tmp_path: Path) -> None:
    """Ragged rows read in turns with slots say what the bare backbone says of the whole rows.

    And slots behind rows of different lengths, much of them in the cache, say what they say in
    training, where a row is read at once.
    """
    student, _ = tiny_drafter(tmp_path, recipe=recipe)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    generator = torch.Generator().manual_seed(0)
    reader, lengths = SlotReader(student, 3), torch.zeros(3, dtype=torch.int64)
    rows = torch.randint(VOCAB, (3, 24), generator=generator)
    table = a_noise_table(student, 3, 24)
    for turn in range(4):
        stops = lengths + torch.randint(2, 6, (3,), generator=generator)
        starts = torch.stack((stops - 1, stops), dim=1)[:, : turn % 3]
        logits, slots = reader.read(rows, stops, 2, starts, table)
        assert slots.shape == (3, turn % 3, student.num_slots, VOCAB)
        if starts.shape[1]:
            layout = SlotLayout(starts, student.num_slots, 24)
            with torch.no_grad():
                inputs = student.slot_inputs(rows, layout, table)
                wanted = student.logits(student.slot_states(rows, layout, inputs))
            assert torch.allclose(slots.flatten(1, 2), wanted, atol=1e-3)
        for row, stop in enumerate(stops.tolist()):
            with torch.no_grad():
                alone = plain(rows[row : row + 1, :stop]).logits[0, -2:, :VOCAB]
            assert torch.allclose(logits[row], alone, atol=1e-4)
        lengths = torch.minimum(lengths + 2, stops)
        reader.keep(lengths)


def test_mistakes_are_named(tmp_path: Path) -> None:
    student, _ = tiny_drafter(tmp_path)
    with pytest.raises(UsageError, match="reads shorter rows"):
        draw(student, make_sampler("drafter"), IDS, open_rows(student, 4, 65))
    with pytest.raises(UsageError, match="needs slots of a backbone"):
        draw(tiny_student(), make_sampler("drafter"), IDS)
    student.config.codec = {"name": "topk", "parameters": {"num_entries": 3}}
    with pytest.raises(UsageError, match="cuts off"):
        draw(student, make_sampler("drafter"), IDS)
