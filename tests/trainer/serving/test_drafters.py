"""Students as drafters: a request's drafts depend on it alone, whatever the batch and the past."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shards.errors import UsageError
from tests.trainer.backbone_cases import VOCAB, write_backbone
from tests.trainer.serving.test_export import on_backbone
from trainer.serving.drafters import Prefix, StudentDrafter, drafts_of
from trainer.serving.plugin import Requests
from trainer.students.autoregressive import AR
from trainer.students.configuration import StudentSettings
from trainer.students.drafter import Drafter
from trainer.students.medusa import Medusa
from trainer.students.registry import BD3LM, MDLM

LENGTH = 16
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mdlm, noise": (MDLM, {"conditioning": "gumbel"}),
    "mdlm": (MDLM, {"conditioning": "none"}),
    "bd3lm, noise": (BD3LM, {"conditioning": "gumbel", "block_size": 4}),
    "ar": (AR, {"conditioning": "none"}),
    "medusa, noise": (Medusa, {"conditioning": "gumbel"}),
    "medusa": (Medusa, {"conditioning": "none"}),
}


def make(kind: str, folder: Path) -> Any:
    cls, extra = KINDS[kind]
    if cls is Medusa:
        return on_backbone(Medusa, write_backbone(folder / "llama"), extra["conditioning"])
    torch.manual_seed(0)
    settings = StudentSettings(hidden_size=16, num_layers=1, num_heads=2, dropout=0.0, **extra)
    student = cls(
        cls.config_class.build(settings, vocab_size=VOCAB, row_length=LENGTH, bos_token_id=0)
    )
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return student.eval()


def prefixes() -> list[Prefix]:
    draw = torch.Generator().manual_seed(1)
    lengths, heat = (3, 6, 4, 9), (1.0, 0.0, 0.7, 1.0)
    return [
        Prefix(
            name=str(i),
            tokens=torch.randint(1, VOCAB, (length,), generator=draw).tolist(),
            seed=100 + i,
            temperature=heat[i],
            hidden=torch.randn(16, generator=draw),
        )
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_depend_on_the_request_alone(kind: str, tmp_path: Path) -> None:
    student, asked = make(kind, tmp_path), prefixes()
    together = drafts_of(student).draft(asked, 2)
    assert any(together) and all(len(row) <= 2 for row in together)
    assert all(0 <= token < VOCAB for row in together for token in row)
    drafter = drafts_of(student)
    for prefix, expected in zip(asked, together, strict=True):
        assert drafts_of(student).draft([prefix], 2) == [expected]
        assert drafter.draft([prefix], 2) == [expected], "behind other requests"
    assert drafts_of(student).draft(asked[::-1], 2) == together[::-1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mdlm", "ar", "medusa", "medusa, noise"])
def test_a_request_that_goes_on_is_drafted_for_as_one_that_comes(kind: str, tmp_path: Path) -> None:
    """What a drafter keeps of a request changes nothing; others end and begin meanwhile."""
    student, asked = make(kind, tmp_path), prefixes()
    drafter = drafts_of(student)
    drafter.draft(asked, 2)
    longer = [replace(each, tokens=[*each.tokens, 1, 2]) for each in asked[1:3]]
    for batch in (longer, [*longer, replace(asked[0], name="new")]):
        assert drafter.draft(batch, 2) == drafts_of(student).draft(batch, 2)


def test_another_seed_drafts_otherwise(tmp_path: Path) -> None:
    student, found = make("mdlm", tmp_path), set()
    for seed in range(8):
        prefix = replace(prefixes()[0], seed=seed)
        found.add(tuple(drafts_of(student).draft([prefix], 2)[0]))
    assert len(found) > 1
    greedy = {
        tuple(drafts_of(student).draft([replace(prefixes()[1], seed=seed)], 2)[0])
        for seed in range(8)
    }
    assert len(greedy) == 1


def test_a_student_that_needs_the_targets_keys_is_refused(tmp_path: Path) -> None:
    student = on_backbone(Drafter, write_backbone(tmp_path / "llama"), "none")
    with pytest.raises(UsageError, match=r"does not draft in an engine.*Drafter.*gdistill-sample"):
        drafts_of(student)


def test_hidden_states_are_those_of_the_last_token_that_was_kept(tmp_path: Path) -> None:
    """Rows of a step: each request's drafts, and one more; of two drafts one was kept."""
    drafter = StudentDrafter.__new__(StudentDrafter)
    drafter.student = student = make("medusa", tmp_path)
    drafter.drafts, drafter.most, drafter.needs_hidden = drafts_of(student), 2, True
    drafter.requests = None
    tokens, known = np.ones((3, 8), np.int32), np.array([5, 4, 6])
    with pytest.raises(UsageError, match=r"needs the plugin.*VLLM_PLUGINS=gdistill"):
        drafter.propose([[1]], known, tokens)
    hidden = torch.randn(5, 16)
    temperatures = torch.zeros(3)
    requests = Requests(["a", "b", "c"], torch.tensor([1, 2, 3]), temperatures)
    verified = type("Verified", (), {"num_draft_tokens": [2, 0, 0]})
    drafter.look(requests, hidden, verified)
    found = drafter.propose([[7, 8], [], [9]], known, tokens)
    with torch.no_grad():
        expected = student.propose(hidden[[1, 4]], None).argmax(dim=-1).tolist()
    assert found == [expected[0], [], expected[1]]
