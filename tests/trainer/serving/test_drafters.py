"""Students in an engine: as drafters of requests, and exported as heads of vLLM's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from shards.errors import UsageError
from shards.noise.embedding import dense_arrivals
from shards.noise.murmur3 import engine_gumbels
from tests.commands import call
from tests.trainer.backbone_cases import VOCAB, write_backbone
from tests.trainer.sampling_cases import save, tiny_student
from trainer.serving.coupling import draw
from trainer.serving.drafters import Prefix, StudentDrafter, drafts_of, embeddings
from trainer.serving.export import export
from trainer.serving.plugin import Requests
from trainer.students.backbone import load_backbone
from trainer.students.configuration import BackboneSettings, StudentSettings
from trainer.students.drafter import Drafter
from trainer.students.medusa import Medusa

KINDS = ["mdlm, noise", "mdlm", "bd3lm, noise", "ar", "medusa, noise", "medusa", "drafter"]


def on_backbone(kind: Any, folder: Path, conditioning: Any = "none", **own: Any) -> Any:
    """Heads or a layer on a tiny Llama, every weight of them drawn."""
    below = load_backbone(write_backbone(folder / "llama"), VOCAB, "float32")
    backbone = BackboneSettings(num_proposed=2, **own)
    shape: dict[str, Any] = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "dropout": 0.0}
    settings = StudentSettings(**shape, conditioning=conditioning, backbone=backbone)
    config = kind.config_class.build(settings, vocab_size=VOCAB, row_length=12, bos_token_id=0)
    config.frozen = kind.describe(below)
    student = kind(config)
    torch.manual_seed(1)
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    student.attach(below)
    return student.eval()


def make(kind: str, folder: Path) -> Any:
    name, _, noise = kind.partition(", ")
    conditioning = "gumbel" if noise else "none"
    if name in ("medusa", "drafter"):
        return on_backbone(Medusa if name == "medusa" else Drafter, folder, conditioning)
    shape = {"vocab_size": VOCAB, "row_length": 16, "block_size": 4 if name == "bd3lm" else None}
    return tiny_student(name, conditioning, **shape)


def prefixes() -> list[Prefix]:
    draw = torch.Generator().manual_seed(1)
    found = []
    for i, (length, heat) in enumerate(((3, 1.0), (6, 0.0), (4, 0.7), (9, 1.0))):
        tokens = torch.randint(1, VOCAB, (length,), generator=draw).tolist()
        found.append(Prefix(str(i), tokens, 100 + i, heat, torch.randn(16, generator=draw)))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_depend_on_the_request_alone(kind: str, tmp_path: Path) -> None:
    """Whatever the batch; and what a drafter keeps of a request that goes on changes nothing."""
    student, asked = make(kind, tmp_path), prefixes()
    together = drafts_of(student).draft(asked, 2)
    assert len({*map(tuple, together)}) > 1, "else no request can be told from another"
    assert all(len(row) <= 2 for row in together)
    assert all(0 <= token < VOCAB for row in together for token in row)
    drafter = drafts_of(student)
    for prefix, expected in zip(asked, together, strict=True):
        assert drafts_of(student).draft([prefix], 2) == [expected]
        assert drafter.draft([prefix], 2) == [expected], "behind other requests"
    assert drafts_of(student).draft(asked[::-1], 2) == together[::-1]
    if "medusa" not in kind:
        long = replace(asked[0], tokens=[1] * (65 if kind == "drafter" else 17))
        assert drafts_of(student).draft([long, asked[1]], 2) == [[], together[1]], "its rows end"
        near = replace(asked[0], tokens=long.tokens[1:])
        (alone,) = drafts_of(student).draft([near], 2)
        assert drafts_of(student).draft([near, asked[1]], 2) == [alone, together[1]], "or are about to"
    drafter = drafts_of(student)
    drafter.draft(asked, 2)
    assert drafter.draft(asked[::-1], 2) == together[::-1], "rows go on in another order"
    longer = [replace(each, tokens=[*each.tokens, 1, 2]) for each in asked[1:3]]
    again = [replace(asked[0], seed=7)]  # a name that has ended comes again
    for batch in (longer, [*longer, replace(asked[0], name="new")], again):  # others end and begin
        assert drafter.draft(batch, 2) == drafts_of(student).draft(batch, 2)


@torch.no_grad()
def test_drafts_race_under_the_noise_that_the_engine_draws_with(tmp_path: Path) -> None:
    """A student that is the target itself proposes what the engine takes."""
    asked, ar, mdlm, heads = prefixes(), *(make(kind, tmp_path) for kind in ("ar", "mdlm", "medusa"))

    def taken(prefix: Prefix, log_probs: torch.Tensor, first: int) -> list[int]:
        scaled, count = log_probs / (prefix.temperature or 1.0), len(log_probs)
        seeds, places = torch.full((count,), prefix.seed), first - 1 + torch.arange(count)
        greedy = torch.full((count,), prefix.temperature == 0)
        return draw(scaled, seeds, places, is_greedy=greedy).tolist()

    for prefix, drafts in zip(asked, drafts_of(ar).draft(asked, 3), strict=True):
        written = [*prefix.tokens]
        for _ in range(3):
            log_probs = ar.predict(torch.tensor([written]))[0, -1:, :-1]
            written += taken(prefix, log_probs, len(written))
        assert written == [*prefix.tokens, *drafts]
    for prefix, drafts in zip(asked, drafts_of(mdlm).draft(asked, 3), strict=True):
        first, row = len(prefix.tokens), torch.tensor([[*prefix.tokens, *[VOCAB] * 16][:16]])
        where = (torch.arange(16) >= first) & (torch.arange(16) < first + 3)
        assert drafts == taken(prefix, mdlm.predict_at(row, where[None])[:, :-1], first)
    blind, seeing = (on_backbone(Medusa, tmp_path, "gumbel", own_noise=own) for own in ("hidden", "seen"))
    for made in (heads, blind, seeing):  # those that have seen their token's own noise propose what is likeliest
        for prefix, drafts in zip(asked, drafts_of(made).draft(asked, 2), strict=True):
            assert prefix.hidden is not None
            first = len(prefix.tokens)
            noise = None if made is heads else embeddings(made, [prefix], torch.arange(first - 1, first + 2)[None])
            log_probs = made.propose(prefix.hidden[None], noise and noise.embedding)[0]
            likeliest = log_probs.argmax(dim=-1).tolist()
            assert drafts == (likeliest if made is seeing else taken(prefix, log_probs, first))


@pytest.mark.parametrize(("kind", "begin", "end"), [("mdlm", 4, 16), ("medusa", 3, 6)])
@torch.no_grad()
def test_the_noise_that_is_shown_is_the_engines(kind: str, begin: int, end: int, tmp_path: Path) -> None:
    """Of an MDLM's open places; of heads' own tokens, and the last one that stands. By heat."""
    student, seen = make(f"{kind}, noise", tmp_path), []
    student.conditioner.register_forward_hook(lambda _, given, __: seen.append(given[:2]))
    asked = prefixes()[1:3]
    drafts_of(student).draft(asked, 2)
    (_, cold), (noise, tau) = seen
    prefix = asked[1]
    places = torch.arange(begin, end)
    expected = engine_gumbels(torch.full_like(places, prefix.seed), places - 1, 0, VOCAB)
    torch.testing.assert_close(-dense_arrivals(noise).log(), expected, rtol=1e-4, atol=1e-4)
    assert (len(prefix.tokens), cold, tau) == (4, 0.0, prefix.temperature)


def test_what_an_engine_is_given_is_checked(tmp_path: Path) -> None:
    """The student's folder, and that its tokens are the target's."""
    place, other = (save(tmp_path / name, "ar", "none") for name in ("student", "other"))
    words = (other / "tokenizer.json").read_text()
    swapped = words.replace('"up"', '"x"').replace('"down"', '"up"').replace('"x"', '"down"')
    (other / "tokenizer.json").write_text(swapped)

    def config(target: Path = place, size: int = 11, **settings: Any) -> Any:
        return SimpleNamespace(
            additional_config=settings,
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            model_config=SimpleNamespace(model=str(target), get_vocab_size=lambda: size),
        )

    made = StudentDrafter(config(size=12, gdistill_drafter=str(place)))  # one more than has a word
    assert made.most == 3 and not made.needs_hidden
    for target, size, settings, message in (
        (place, 11, {}, "no student to draft with.*gdistill_drafter"),
        (place, 10, {"gdistill_drafter": str(place)}, "more tokens than the target.*got 11"),
        (other, 11, {"gdistill_drafter": str(place)}, "another tokenizer"),
    ):
        with pytest.raises(UsageError, match=message):
            StudentDrafter(config(target, size, **settings))


def test_hidden_states_are_those_of_the_last_token_that_was_kept(tmp_path: Path) -> None:
    """Rows of a step: each request's drafts, and one more; of two drafts one was kept."""
    drafter = StudentDrafter.__new__(StudentDrafter)
    drafter.student = student = make("medusa", tmp_path)
    drafter.drafts, drafter.most, drafter.needs_hidden = drafts_of(student), 2, True
    drafter.requests = None
    tokens, known = np.ones((3, 8), np.int32), np.array([5, 4, 6])
    with pytest.raises(UsageError, match=r"needs the plugin.*VLLM_PLUGINS=gdistill"):
        drafter.propose([[1]], known, tokens)
    hidden = torch.randn(5, 16).bfloat16()
    requests = Requests(["a", "b", "c"], torch.tensor([1, 2, 3]), torch.zeros(3))
    drafter.look(requests, hidden, type("Verified", (), {"num_draft_tokens": [2, 0, 0]}))
    found = drafter.propose([[7, 8], [], [9]], known, tokens)
    with torch.no_grad():
        expected = student.propose(hidden[[1, 4]].float(), None).argmax(dim=-1).tolist()
    assert found == [expected[0], [], expected[1]]
    # A row's own tokens so far, its seed and its temperature are what is drafted for.
    drafter.drafts = drafts_of(noisy := make("mdlm, noise", tmp_path))
    tokens = torch.randint(1, VOCAB, (3, 8), generator=torch.Generator().manual_seed(0)).numpy()
    drafter.look(replace(requests, temperatures=torch.tensor([0.0, 1.0, 4.0])), hidden, None)
    asked = [Prefix("a", tokens[0, :5].tolist(), 1, 0.0), Prefix("c", tokens[2, :6].tolist(), 3, 4.0)]
    expected = drafts_of(noisy).draft(asked, 2)
    assert drafter.propose([[7], [], [9]], known, tokens) == [expected[0], [], expected[1]]
    assert drafter.counts is None, "no drafts were verified"


@pytest.mark.parametrize("output", ["shared", "low_rank", "full"])
def test_exported_heads_propose_what_they_did(output: str, tmp_path: Path, capsys: Any) -> None:
    student = on_backbone(Medusa, tmp_path, head_output=output, head_rank=3)
    student.save_pretrained(tmp_path / "model")
    words = ("export", tmp_path / "model", "--out", tmp_path / "out")
    assert call("gdistill-train", *words, "--backbone", tmp_path / "llama") == 0
    assert re.search('"method": "medusa", .*"num_speculative_tokens": 2}', capsys.readouterr().out)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sizes = {"num_heads": 2, "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "medusa_fc_bias": False}
    assert config == {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes}
    weights, hidden = load_file(tmp_path / "out" / "model.safetensors"), torch.randn(5, 16)
    expected = student.propose(hidden, None)
    for k in range(2):  # vllm/model_executor/models/medusa.py
        block = hidden + silu(hidden @ weights[f"blocks.{k}.layers.0.weight"].T)
        found = (block @ weights[f"lm_heads.{k}.weight"].T).log_softmax(dim=-1)
        torch.testing.assert_close(found, expected[:, k], rtol=1e-4, atol=1e-4)


def test_what_no_engine_fits_is_not_exported(tmp_path: Path) -> None:
    for student, message in (
        (make("medusa, noise", tmp_path), "heads that read noise do not fit"),
        (make("mdlm", tmp_path), "no format of an engine fits"),
    ):
        with pytest.raises(UsageError, match=rf"{message}.*make serve DRAFTER"):
            export(student, tmp_path / "out")
    assert not (tmp_path / "out").exists()
