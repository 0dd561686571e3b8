"""Heads and layers on a backbone: its own tokens, whatever they draft; and typical acceptance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad
from transformers import AutoModelForCausalLM

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import SHAPES, VOCAB, backbone_run, store_of, write_backbone
from tests.trainer.sampling import decoding_cases as check
from tests.trainer.sampling.decoding_cases import IDS, own_decode, prompts
from tests.trainer.sampling_cases import LENGTH, draw, open_rows, tiny_student
from tests.trainer.students.test_drafter import tiny_drafter, trained_heads
from trainer.sampling import own_backbone
from trainer.sampling.fill import StopRule
from trainer.sampling.ngrams import ngrams_of
from trainer.sampling.noise import TokenRule, sampling_noise
from trainer.sampling.own_backbone import MedusaSampler, TreeRows, is_typical
from trainer.sampling.registry import make_sampler
from trainer.sampling.trees import Tree, TreeReader
from trainer.students.drafter import Drafter
from trainer.students.registry import Medusa
from trainer.training.settings import build_student

LONG = 20
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {"model__conditioning": "none"},
    "seen": {"model__backbone__own_noise": "seen"},
    "bf16": {"model__backbone__dtype": "bfloat16"},
}


def make_heads(folder: Path, shape: str = "llama", **changes: Any) -> Medusa:
    return trained_heads(folder, shape, 0.1, **changes)[0]


@pytest.fixture(scope="module", params=[*SHAPES, *CHANGES])
def heads(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Medusa:
    shape = request.param if request.param in SHAPES else "qwen2"
    folder = tmp_path_factory.mktemp("medusa")
    return make_heads(folder, shape, **CHANGES.get(request.param, {}))


@pytest.mark.parametrize(("acceptance", "tau"), [("coupled", 1.0), ("coupled", 0.6), ("coupled", 4.0), ("greedy", 0.0)])
def test_heads_are_lossless(heads: Medusa, acceptance: Any, tau: float) -> None:
    """Together and alone the backbone's own decode of the noise, or its greedy continuation.

    In bf16 logits of other shapes differ by up to 0.063, two of them by half of the room.
    """
    tokens, in_bf16 = prompts(heads, LONG, 19), heads.settings.backbone.dtype == "bfloat16"
    sampler = MedusaSampler(acceptance=acceptance, tau=tau or 1.0)
    together = draw(heads, sampler, IDS, tokens)
    is_sure = acceptance == "greedy" or heads.settings.backbone.own_noise == "seen"
    assert sampler.settled(heads).draft == ("greedy" if is_sure else "gumbel")
    if acceptance == "greedy":
        other = draw(heads, sampler, IDS, tokens, seed=4).details["accepted"]
        assert torch.equal(other, together.details["accepted"]), "noise has no say in drafts either"
    network, room = heads.language_model.network, 0.25 if in_bf16 else 1e-3
    truth, certain = own_decode(network, tokens, IDS, VOCAB, tau, room=room)
    num_checked = 0
    for slot, (index, stop) in enumerate(zip(IDS, certain.tolist(), strict=True)):
        alone = draw(heads, sampler, index[None], tokens[slot : slot + 1])
        # A pass with a cache rounds otherwise: behind a near tie all may differ.
        assert torch.equal(together.tokens[slot, :stop], truth[slot, :stop])
        assert torch.equal(alone.tokens[0, :stop], truth[slot, :stop])
        if not in_bf16:
            assert torch.equal(alone.tokens[0], together.tokens[slot])
            assert torch.equal(alone.details["reached"][0], together.details["reached"][slot])
        num_checked += int((tokens[slot, :stop] == VOCAB).sum())
    assert in_bf16 or int(certain.sum()) > 0.8 * tokens.numel()
    assert tau < 4 or num_checked > 20, "with much noise near ties are few"
    check.every_pass_gains(together, (tokens == VOCAB).sum(dim=1))
    accepted, reached = (together.details[name].sum(dim=0) for name in ("accepted", "reached"))
    assert (accepted <= reached).all() and int(reached[0]) > 0
    assert int(together.details["drafted"].shape[1]) == heads.settings.backbone.num_proposed


@pytest.mark.parametrize("shape", SHAPES)
def test_the_drafter_is_lossless(shape: str, tmp_path: Path) -> None:
    """Padded and tied heads, grouped queries, learnt positions; rows longer than in training."""
    student, _ = tiny_drafter(tmp_path, shape)
    tokens = prompts(student, LENGTH, 1)
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    cases: tuple[dict[str, Any], ...] = (
        {},
        {"tau": 0.7, "max_lookahead": 1},
        {"max_lookahead": 40, "tree": 30, "width": 11},
        {"max_lookahead": 5, "tree": 3, "width": 1, "draft": "greedy"},
        {"top_k": 3, "tree": 9, "max_lookahead": 3},
        {"max_lookahead": 0},
        {"min_reach": 0.3, "max_lookahead": 5, "width": 3},
    )
    for case in cases:
        result = draw(student, make_sampler("drafter", **case), IDS, tokens)
        rule = TokenRule(temperature=case.get("tau", 1.0), top_k=case.get("top_k"))
        truth, _ = own_decode(backbone, tokens, IDS, VOCAB, rule.temperature, rule)
        assert torch.equal(result.tokens, truth), case
        check.every_pass_gains(result, (tokens == VOCAB).sum(dim=1))
        assert result.details["drafted"].shape[1] == min(2, case.get("max_lookahead", 2)), "as many as were trained"


def test_a_real_backbone_decodes_its_own_tokens(tmp_path: Path, shared: Path) -> None:
    """stories260K, a drafter at step 0; a tree that looks at the noise needs fewer passes."""
    backbone = shared / "data" / "stories260K"
    store = store_of(tmp_path / "store", backbone, vocab_size=512)
    config = backbone_run(backbone, "drafter", model__backbone__num_proposed=3)
    student = build_student(config, ShardStore.open(store), None)
    ids, tokens = IDS[:4], torch.full((4, 60), 512)
    tokens[:, 0], tokens[1, 1:6] = 1, torch.tensor([403, 407, 261, 378, 286])
    model, passes = AutoModelForCausalLM.from_pretrained(backbone).eval(), {}
    truth, _ = own_decode(model, tokens, ids, 512)
    for draft in ("gumbel", "greedy"):
        result = draw(student, make_sampler("drafter", draft=draft), ids, tokens)
        assert torch.equal(result.tokens, truth)
        passes[draft] = int(result.details["verifier_nfe"].sum())
    assert passes["gumbel"] < passes["greedy"] < int((tokens == 512).sum())


@pytest.mark.parametrize("reach", [0.0, 0.4])
def test_trees_depend_on_no_companion_and_on_no_room_for_noise(
    reach: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise that is drawn for few positions at a time is the same."""
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=4)
    tokens = prompts(student, LENGTH, 1)
    sampler = make_sampler("drafter", tree=7, width=3, min_reach=reach)
    wanted = check.alone_as_together(student, sampler, tokens)
    assert wanted.details["accepted"].sum() > 0
    for most in (1, 6 * VOCAB * len(IDS)):
        monkeypatch.setitem(own_backbone.MOST_ELEMENTS, "cpu", most)  # of logits too
        found = draw(student, sampler, IDS, tokens)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.details["verifier_nfe"], wanted.details["verifier_nfe"])


def test_steps_and_drafts_are_taken_where_they_are_probable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From all of them to one; two of twelve tokens never hold all of the probability."""
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=4)
    tokens, steps, passes, sizes, read = prompts(student, LENGTH, 1), [], [], [], []
    read_trees = TreeReader.read_trees

    def spy(self: TreeReader, trees: list[Tree], first: Tensor) -> Tensor:
        read.append(max(len(tree.tokens) for tree in trees) - 1)
        return read_trees(self, trees, first)

    monkeypatch.setattr(TreeReader, "read_trees", spy)
    for reach in (0.0, 0.01, 0.4, 0.7, 1.0):
        sampler = make_sampler("drafter", tree=8, width=2, min_reach=reach)
        read.clear()
        found = draw(student, sampler, IDS[:1], tokens[:1]).details
        sizes.append(sum(read) / len(read))
        found = draw(student, sampler, IDS, tokens).details
        steps.append(int(found["drafted"].sum()))
        passes.append(int(found["verifier_nfe"].sum()))
    assert steps[0] >= steps[1] > steps[2] > steps[3] > steps[4]
    assert sizes[0] >= sizes[1] > sizes[2] > sizes[4]
    assert passes[0] <= passes[4]
    assert not found["drafted"][:, 1:].any()


CUT = {"tau": 0.7, "top_k": 5, "max_lookahead": 3}
COUNTED = {"ngrams": "store", "tau": 0.7}


@pytest.mark.parametrize("settings", [CUT, CUT | {"draft": "greedy"}, COUNTED, COUNTED | {"draft": "greedy"}], ids=str)
@torch.no_grad()
def test_scores_are_the_chances_that_the_noise_leaves(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """softmax(l / tau + xi) along each line, of the drafter's logits behind the whole row, or the log of shares."""
    student, store = tiny_drafter(tmp_path, model__backbone__num_proposed=3)
    settings, predict, num_seen = dict(settings), TreeRows.predict, 0
    if "ngrams" in settings:
        settings["ngrams"] = str(store)
    sampler, tokens = make_sampler("drafter", tree=7, width=2, **settings), prompts(student, LENGTH, 1)
    noise = sampling_noise(3, IDS[:2], LENGTH, VOCAB).gumbels().unflatten(0, (2, LENGTH))

    def law(row: list[int]) -> Tensor:
        if "ngrams" in settings:
            return torch.from_numpy(ngrams_of(str(store), VOCAB).probabilities(row)).log()
        logits = student(torch.tensor([row])).logits[0, -1]
        return logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf)

    def watched(rows: TreeRows, part: Any) -> Tensor:
        nonlocal num_seen
        for slot, tree in zip(rows.active.tolist(), rows.trees, strict=True):
            first, scores = int(rows.first[slot]), [0.0]
            for line in tree.lines[1:]:
                row = [*rows.tokens[slot, : first - 1].tolist(), *(tree.tokens[n] for n in line[:-1])]
                xi = 0.0 if sampler.draft else noise[slot, len(row)]
                score = (law(row) / sampler.tau + xi).log_softmax(dim=-1)[tree.tokens[line[-1]]]
                scores.append(scores[line[-2]] + float(score))
            assert tree.scores == pytest.approx(scores, abs=1e-3)
            followed = [parent for parent, _ in tree.numbers]
            assert all(followed.count(parent) <= 2 for parent in followed)
            num_seen += len(scores) > 5
        return predict(rows, part)

    monkeypatch.setattr(TreeRows, "predict", watched)
    draw(student, sampler, IDS[:2], tokens[:2])
    assert num_seen > 2


def test_perfect_heads_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass over the prompt gives one token, each further one K + 1."""
    student = make_heads(tmp_path, model__backbone__num_proposed=3)
    ids, tokens = IDS[:2], open_rows(student, 2, LONG)
    truth = draw(student, MedusaSampler(max_lookahead=0), ids, tokens).tokens
    starts = iter(range(2, 1000, 4))

    def oracle(hidden: Tensor, embedded: Tensor | None) -> Tensor:
        start = next(starts)
        wanted = truth[:, start : start + 3]
        return one_hot(pad(wanted, (0, 3 - wanted.shape[1])), VOCAB).float().log()

    monkeypatch.setattr(student, "propose", oracle)
    result = draw(student, MedusaSampler(), ids, tokens)
    assert torch.equal(result.tokens, truth)
    assert (result.details["verifier_nfe"] == 1 + -(-(LONG - 2) // 4)).all()
    assert torch.equal(result.details["reached"], result.details["accepted"])


def test_a_perfect_drafter_is_followed_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K accepted and one more a pass, behind the first pass, which reads the prompt."""
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=3)
    tokens = prompts(student, LENGTH, 1)
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    truth, _ = own_decode(backbone, tokens, IDS, VOCAB)
    step, known = student.runner(), {}

    def oracle(rows, positions, seen, cache):
        known["next"] = truth[known["row"], (positions + 1).clamp_max(LENGTH - 1)]
        return step(rows, positions, seen, cache)

    def certain(self, outputs):
        return 100.0 * one_hot(known["next"], VOCAB).float()

    monkeypatch.setattr(Drafter, "runner", lambda self: oracle)
    monkeypatch.setattr(Drafter, "logits", certain)
    sampler = make_sampler("drafter", width=1, tree=3, draft="greedy", min_reach=0.9)
    for row, num_open in enumerate((tokens == VOCAB).sum(dim=1).tolist()):
        known["row"] = row
        result = draw(student, sampler, IDS[row : row + 1], tokens[row : row + 1])
        assert torch.equal(result.tokens[0], truth[row])
        assert int(result.details["verifier_nfe"]) == 1 + -(-(num_open - 1) // 4)
        assert torch.equal(result.details["reached"], result.details["accepted"])
        assert torch.equal(result.nfe, result.details["drafted"].sum(dim=1)), "a step of the drafter each"


def test_heads_are_shown_the_noise_of_the_tokens_they_propose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind token i: the embeddings of i + 1 .. i + 1 + K, and the hidden state of i itself."""
    student = make_heads(tmp_path, model__backbone__own_noise="seen")
    tokens, seen = open_rows(student, 1, LONG), []
    propose = student.propose
    monkeypatch.setattr(student, "propose", lambda h, e: seen.append((h.clone(), e.clone())) or propose(h, e))
    result = draw(student, MedusaSampler(max_lookahead=1), IDS[:1], tokens)
    with torch.no_grad():
        noise = sampling_noise(3, IDS[:1], LONG, VOCAB)
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
    sampler = MedusaSampler(acceptance="typical", tau=0.5)  # of p at that temperature; a mask never stays
    for last, stays in ((2, True), (3, False)):
        drafts = torch.tensor([0, 1, last])
        assert torch.equal(sampler.stays(logits / 2, drafts), torch.tensor([True, False, stays]))
    just_below = 0.06 * math.exp(-float((sure * sure.log()).sum())) * 0.99
    assert is_typical(logits, tokens, 0.9, just_below).tolist() == [True, True, True]
    assert is_typical(logits, tokens, 0.9, just_below / 0.97)[1].item() is False


def test_typical_keeps_what_the_backbone_holds_possible(heads: Medusa) -> None:
    tokens = prompts(heads, LONG, 19)
    assert not (draw(heads, MedusaSampler(acceptance="typical"), IDS, tokens).tokens == VOCAB).any()
    strict = MedusaSampler(acceptance="typical", epsilon=1e9, delta=1e9)
    none = draw(heads, strict, IDS, tokens)
    assert int(none.details["accepted"].sum()) == 0
    coupled = draw(heads, MedusaSampler(max_lookahead=0), IDS, tokens)
    if heads.settings.backbone.dtype == "float32":
        assert torch.equal(none.tokens, coupled.tokens)
    lax = MedusaSampler(acceptance="typical", epsilon=1e-30)
    everything = draw(heads, lax, IDS, tokens).details
    assert torch.equal(everything["accepted"], everything["drafted"])


def test_samples_end_at_eos(tmp_path: Path) -> None:
    student, ids = make_heads(tmp_path), torch.arange(40)
    tokens = open_rows(student, 40, LONG)
    free = draw(student, MedusaSampler(), ids, tokens)
    # A token that many rows have, and none everywhere: rows end in different rounds.
    student.config.eos_token_id = eos = int(free.tokens[:, 8].mode().values)
    ended = draw(student, MedusaSampler(stop=StopRule(at_eos=True)), ids, tokens)
    check.ended_at_eos(ended, free, eos)
    assert (ended.lengths < LONG).sum() > 5


@torch.no_grad()
def test_the_cache_keeps_the_path_and_nothing_else(tmp_path: Path) -> None:
    """Ragged rows read as trees in turns say what the bare backbone says of whole rows."""
    write_backbone(tmp_path / "llama", "llama")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    rows = torch.randint(VOCAB, (3, 30), generator=torch.Generator().manual_seed(0))
    first = torch.tensor([2, 7, 4])
    reader = TreeReader(plain, VOCAB, 3, "cpu")
    reader.next_logits(rows, first, 1)
    first = first + 1
    # 0 - 1 - 2, 0 - 3 - 4: the second branch of each row is the right one; one tree is larger.
    for counts in ([1, 3, 2], [3, 1, 2], [2, 2, 3]):
        trees = []
        for row, place in zip(rows.tolist(), first.tolist(), strict=True):
            tree = Tree(row[place - 1])
            for right in (False, True):
                for parent, token in ((0, row[place]), (len(tree.tokens), row[place + 1])):
                    tree.add(token if right else (token + 1) % VOCAB, parent)
            trees.append(tree)
        trees[1].add(3, 0)
        logits = plain.lm_head(reader.read_trees(trees, first))[..., :VOCAB]
        for row, stop in enumerate(first.tolist()):
            alone = plain(rows[row : row + 1, : stop + 2]).logits[0, -3:, :VOCAB]
            assert torch.allclose(logits[row, [0, 3, 4]], alone, atol=1e-4)
        reader.follow([[0, 3, 4][:count] for count in counts])
        first = first + torch.tensor(counts)
        assert torch.equal(reader.lengths, first - 1)


def test_a_tree_holds_its_most_probable_drafts() -> None:
    """Two paths: half of 5 behind a sure 4 before the 6 beside it; what nothing can follow is left."""
    tree = Tree(9)
    tree.grow([[math.log(0.7), math.log(0.2), math.log(0.1)]], [[4, 6, 7]], 2)
    assert (tree.tokens, tree.tips) == ([9, 4, 6], [1, 2])
    tree.stop(2, -math.inf)
    assert tree.tips == [1], "what follows the second of two is not among them"
    tree.stop(9, math.log(0.7))
    assert not tree.tips
    tree.tips = [1, 2]
    tree.grow([[math.log(0.5), math.log(0.1)], [math.log(0.9), math.log(0.1)]], [[5, 8], [4, 5]], 2)
    assert tree.tokens == [9, 4, 6, 5, 4] and tree.depth == 2
    best = tree.cut(3, -math.inf)
    assert (best.tokens, best.lines) == ([9, 4, 6, 5], [[0], [0, 1], [0, 2], [0, 1, 3]])
    assert best.numbers == {(0, 4): 1, (0, 6): 2, (1, 5): 3}
    assert tree.cut(9, math.log(0.3)).tokens == [9, 4, 5]
    assert tree.cut(1, -math.inf).tokens == [9, 4]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("medusa", {"max_lookahead": -1}, "max_lookahead"),
        ("medusa", {"acceptance": "greedy", "tau": 0.5}, "without effect"),
        ("medusa", {"epsilon": 0.5}, "without effect"),
        ("medusa", {"delta": 0.5}, "without effect"),
        ("medusa", {"acceptance": "typical", "top_k": 3}, "without effect"),
        ("drafter", {"tree": 0}, r"a count below 1 \[tree\]; got 0"),
        ("drafter", {"width": 0}, r"a count below 1 \[width\]; got 0"),
    ],
)
def test_bad_settings_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_sampler(name, **settings)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    heads, (layer, _), other = make_heads(tmp_path), tiny_drafter(tmp_path), tiny_student()
    holed = open_rows(heads, 5, 8)
    holed[0, 6] = 2
    for name, student, tokens, message in (
        ("medusa", other, None, "needs heads on a backbone"),
        ("medusa", heads, open_rows(heads, 5, 65), "shorter rows"),
        ("medusa", heads, holed, "behind positions to fill"),
        ("drafter", other, None, "needs layers beside a backbone"),
        ("drafter", layer, open_rows(layer, 5, 65), "reads shorter rows"),
    ):
        with pytest.raises(UsageError, match=message):
            draw(student, make_sampler(name), IDS, tokens)
    heads.config.codec = {"name": "topk", "parameters": {"num_entries": 3}}
    with pytest.raises(UsageError, match="cuts off"):
        draw(heads, MedusaSampler(), IDS)
