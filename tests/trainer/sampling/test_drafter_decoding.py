"""The drafter's decoding: the backbone's own tokens, whatever tree the drafter grows."""

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
from tests.trainer.students.test_drafter import tiny_drafter
from trainer.sampling import own_backbone
from trainer.sampling.coupled import gumbel_scores
from trainer.sampling.noise import TokenRule, sampling_noise
from trainer.sampling.own_backbone import Tree, TreeReader
from trainer.sampling.registry import make_sampler
from trainer.students.drafter import Drafter
from trainer.training.construction import build_student

VOCAB, LENGTH, IDS = 12, 12, torch.tensor([4, 0, 11, 7])


@torch.no_grad()
def own_decode(
    folder: Path, tokens: Tensor, tau: float = 1.0, top_k: int | None = None, vocab: int = VOCAB
) -> Tensor:
    """The bare backbone, one token a pass over the whole prefix."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    kept = TokenRule("categorical", temperature=tau, top_k=top_k).probabilities
    for index, row in zip(IDS, tokens.split(1), strict=True):
        row, noise = row.clone(), sampling_noise(3, index[None], tokens.shape[1], vocab)
        for place in range(tokens.shape[1]):
            if row[0, place] == vocab:
                logits = model(row[:, :place]).logits[:, -1, :vocab]
                scores = gumbel_scores(logits, noise.select(torch.tensor([place])), tau)
                row[0, place] = scores.masked_fill(kept(logits) == 0, -torch.inf).argmax()
        rows.append(row)
    return torch.cat(rows)


def prompts(student: Drafter) -> Tensor:
    """Rows of 1, 5, 11 and 1 given tokens."""
    tokens = open_rows(student, len(IDS), LENGTH)
    tokens[1, 1:5] = torch.tensor([3, 8, 3, 2])
    tokens[2, 1:11] = 7
    return tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_the_output_is_the_backbones_own_decode(shape: str, tmp_path: Path) -> None:
    """Padded and tied heads, grouped queries, learnt positions; rows longer than in training."""
    student, _ = tiny_drafter(tmp_path, shape)
    tokens = prompts(student)
    cases = (
        {},
        {"tau": 0.7, "max_lookahead": 1},
        {"max_lookahead": 4, "tree": 30, "width": 11},
        {"max_lookahead": 5, "tree": 3, "width": 1, "draft": "greedy"},
        {"top_k": 3, "tree": 9, "max_lookahead": 3},
        {"max_lookahead": 0},
        {"draft_dtype": "bfloat16", "tree": 9, "max_lookahead": 3},
    )
    for case in cases:
        result = draw(student, make_sampler("drafter", **case), IDS, tokens)
        wanted = own_decode(tmp_path / shape, tokens, case.get("tau", 1.0), case.get("top_k"))
        assert torch.equal(result.tokens, wanted), case
        filled = (tokens == VOCAB).sum(dim=1)
        gained = result.details["accepted"].sum(dim=1) + result.details["verifier_nfe"]
        assert torch.equal(gained, filled), "a pass gives what was accepted and one token more"


def test_a_real_backbone_decodes_its_own_tokens(tmp_path: Path, shared: Path) -> None:
    """stories260K, a drafter at step 0; a tree that looks at the noise needs fewer passes."""
    backbone = shared / "data" / "stories260K"
    store = store_of(tmp_path / "store", backbone, vocab_size=512)
    config = backbone_run(backbone, "drafter", model__backbone__num_proposed=3)
    student = build_student(config, ShardStore.open(store), None)
    tokens = torch.full((len(IDS), 60), 512)
    tokens[:, 0], tokens[1, 1:6] = 1, torch.tensor([403, 407, 261, 378, 286])
    wanted, passes = own_decode(backbone, tokens, vocab=512), {}
    for draft in ("gumbel", "greedy"):
        result = draw(student, make_sampler("drafter", draft=draft), IDS, tokens)
        assert torch.equal(result.tokens, wanted)
        passes[draft] = int(result.details["verifier_nfe"].sum())
    assert passes["gumbel"] < passes["greedy"] < int((tokens == 512).sum())


def test_a_perfect_drafter_is_followed_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K accepted and one more a pass, behind the first pass, which reads the prompt."""
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=3)
    tokens = prompts(student)
    truth = own_decode(tmp_path / "llama", tokens)
    step, known = student.runner(), {}

    def oracle(rows, positions, seen, cache):
        ahead = (positions + 1).clamp_max(LENGTH - 1)
        known["next"] = truth[known["row"], ahead]
        return step(rows, positions, seen, cache)

    def certain(self, outputs):
        return 100.0 * torch.nn.functional.one_hot(known["next"], VOCAB).float()

    monkeypatch.setattr(Drafter, "runner", lambda self, dtype: oracle)
    monkeypatch.setattr(Drafter, "logits", certain)
    sampler = make_sampler("drafter", width=1, tree=3, draft="greedy")
    for row in range(len(IDS)):
        known["row"] = row
        result = draw(student, sampler, IDS[row : row + 1], tokens[row : row + 1])
        filled = int((tokens[row] == VOCAB).sum())
        assert torch.equal(result.tokens[0], truth[row])
        assert int(result.details["verifier_nfe"]) == 1 + -(-(filled - 1) // 4)
        assert torch.equal(result.details["reached"], result.details["accepted"])


def test_no_sample_depends_on_its_companions(tmp_path: Path) -> None:
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=4)
    tokens, sampler = prompts(student), make_sampler("drafter", tree=7, width=3)
    together = draw(student, sampler, IDS, tokens)
    assert together.details["accepted"].sum() > 0
    for slot, index in enumerate(IDS):
        alone = draw(student, sampler, index[None], tokens[slot : slot + 1])
        assert torch.equal(alone.tokens[0], together.tokens[slot])
        for name in ("accepted", "reached", "drafted", "verifier_nfe"):
            assert torch.equal(alone.details[name][0], together.details[name][slot]), name


@torch.no_grad()
def test_the_cache_keeps_the_path_and_nothing_else(tmp_path: Path) -> None:
    """Ragged rows read as trees in turns say what the bare backbone says of whole rows."""
    student, _ = tiny_drafter(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB, (3, 30), generator=generator)
    first = torch.tensor([2, 7, 4])
    reader = TreeReader(student, 3)
    reader.read_rows(rows, first)
    first = first + 1
    # 0 - 1 - 2, 0 - 3 - 4: the second branch of each row is the right one.
    behind = torch.eye(5, dtype=torch.bool)
    behind[:, 0] = behind[2, 1] = behind[4, 3] = True
    path = torch.tensor([[0, 3, 4]]).expand(3, -1)
    for counts in ([1, 3, 2], [3, 1, 2], [2, 2, 3]):
        own = rows.gather(1, first[:, None] - 1 + torch.arange(3))
        tokens = torch.cat((own[:, :1], (own[:, 1:] + 1) % VOCAB, own[:, 1:]), dim=1)
        logits = reader.read_tree(Tree(tokens, behind.expand(3, -1, -1)), first, 30)
        for row, stop in enumerate(first.tolist()):
            alone = plain(rows[row : row + 1, : stop + 2]).logits[0, -3:, :VOCAB]
            assert torch.allclose(logits[row, [0, 3, 4]], alone, atol=1e-4)
        reader.follow(path, torch.tensor(counts))
        first = first + torch.tensor(counts)
        assert torch.equal(reader.lengths, first - 1)


def test_noise_that_is_drawn_for_few_positions_at_a_time_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, _ = tiny_drafter(tmp_path, model__backbone__num_proposed=4)
    tokens, sampler = prompts(student), make_sampler("drafter", tree=7, width=3)
    wanted = draw(student, sampler, IDS, tokens)
    for most in (1, 6 * VOCAB * len(IDS)):
        monkeypatch.setattr(own_backbone, "MOST_ELEMENTS", {"cpu": most})
        found = draw(student, sampler, IDS, tokens)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.details["verifier_nfe"], wanted.details["verifier_nfe"])


def test_a_tree_is_walked_along_the_own_tokens() -> None:
    """0 - 1 - 3 and 0 - 2 - 4 - 5; a limit ends the way, and so does the first other token."""
    behind = torch.eye(6, dtype=torch.bool)
    behind[:, 0] = behind[3, 1] = behind[4:, 2] = behind[5, 4] = True
    tree = Tree(torch.tensor([[9, 3, 4, 4, 3, 7]]).expand(4, -1), behind.expand(4, -1, -1))
    own = torch.tensor([[4, 4, 3, 0, 7, 0], [4, 4, 3, 0, 7, 0], [3, 4, 3, 0, 7, 0], [5] * 6])
    path, counts = tree.walk(own, torch.tensor([3, 1, 3, 3]))
    assert counts.tolist() == [4, 2, 3, 1]
    kept = [way[:count] for way, count in zip(path.tolist(), counts.tolist(), strict=True)]
    assert kept == [[0, 2, 4, 5], [0, 2], [0, 1, 3], [0]]


def test_mistakes_are_named(tmp_path: Path) -> None:
    student, _ = tiny_drafter(tmp_path)
    with pytest.raises(UsageError, match="reads shorter rows"):
        draw(student, make_sampler("drafter"), IDS, open_rows(student, 4, 65))
    with pytest.raises(UsageError, match="needs a layer beside a backbone"):
        draw(tiny_student(), make_sampler("drafter"), IDS)
    for name in ("tree", "width"):
        with pytest.raises(UsageError, match=rf"a count below 1 \[{name}\]; got 0"):
            make_sampler("drafter", **{name: 0})
