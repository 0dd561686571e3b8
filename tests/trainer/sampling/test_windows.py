"""Verified samples of teachers whose attention has a window shorter than the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import backbone_run, store_of
from tests.trainer.sampling_cases import BOS, draw, tiny_student
from trainer.sampling.coupled import gumbel_scores
from trainer.sampling.noise import sampling_noise
from trainer.sampling.registry import make_sampler
from trainer.students.registry import Student
from trainer.training.construction import build_student

VOCAB, LENGTH, WINDOW, SEED = 12, 24, 5, 3
IDS = torch.tensor([4, 0, 11, 7, 23, 5, 8])
SLIDING = {"sliding_window": WINDOW}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
MIXED = {"num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "mistral": SLIDING,
    "mixtral": {**SLIDING, **MIXED},
    "gemma2": {**SLIDING, **LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SLIDING, **LAYERS, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt_oss": {**SLIDING, **LAYERS, **MIXED, "head_dim": 8},
    "qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 0},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
        "max_position_embeddings": 64,
    },
    "starcoder2": SLIDING,
    "cohere2": {**SLIDING, **LAYERS},
}


def teacher(family: str) -> Any:
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    own = family in ("gpt2", "gpt_neo")
    common = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(
        family, **{**common, **({} if own else shape), **FAMILIES[family]}
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def ragged(mask_id: int) -> Tensor:
    """Prompts of 1 to 19 tokens."""
    tokens = torch.full((len(IDS), LENGTH), mask_id)
    tokens[:, 0] = BOS
    for row, length in enumerate((1, 9, 3, 19, 6, 1, 13)):
        tokens[row, 1:length] = (torch.arange(1, length) * (row + 3)) % VOCAB
    return tokens


@torch.no_grad()
def own_decode(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """argmax(l + xi) row by row without a cache, and how far no near tie has been met."""
    rows, certain = tokens.clone(), torch.full((len(tokens),), LENGTH)
    for slot, index in enumerate(IDS):
        noise = sampling_noise(SEED, index[None], LENGTH, VOCAB)
        for place in range(LENGTH):
            if rows[slot, place] == VOCAB:
                logits = model(rows[slot : slot + 1, :place]).logits[:, -1, :VOCAB].float()
                best = gumbel_scores(logits, noise.select(torch.tensor([place])), 1.0)[0].topk(2)
                rows[slot, place] = best.indices[0]
                if float(best.values[0] - best.values[1]) < 1e-3:
                    certain[slot] = min(int(certain[slot]), place)
    return rows, certain


def check(student: Student, name: str, truth: tuple[Tensor, Tensor], **settings: Any) -> None:
    """All rows together and each alone are the teacher's own decode."""
    tokens, sampler = ragged(VOCAB), make_sampler(name, **settings)
    together = draw(student, sampler, IDS, tokens).tokens
    alone = [draw(student, sampler, IDS[i : i + 1], tokens[i : i + 1]).tokens for i in range(3)]
    for found in (together, torch.cat(alone)):
        for row, (ours, stop) in enumerate(zip(found, truth[1].tolist(), strict=False)):
            assert ours[:stop].tolist() == truth[0][row, :stop].tolist(), f"row {row}"
    assert int(truth[1].sum()) > 0.9 * tokens.numel(), "near ties are few"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_window_is_that_of_a_row_alone(family: str, tmp_path: Path) -> None:
    model = teacher(family)
    model.save_pretrained(tmp_path)
    truth = own_decode(model, ragged(VOCAB))
    shape = {"vocab_size": VOCAB, "row_length": LENGTH}
    for student in (tiny_student(**shape), tiny_student("bd3lm", block_size=4, **shape)):
        check(student, "coupled", truth, verifier=str(tmp_path), max_lookahead=5)


def backbone_student(folder: Path, kind: str) -> tuple[Student, Any]:
    """Heads or a layer on a Mistral, trained on rows within its window."""
    model = teacher("mistral")
    model.config.sliding_window = 12
    model.save_pretrained(folder / "backbone")
    store = store_of(folder / "store", folder / "backbone")
    run = backbone_run(folder / "backbone", kind, model__backbone__num_proposed=3)
    return build_student(run, ShardStore.open(store), None).eval(), model


def test_heads_and_their_backbone_see_the_window(tmp_path: Path) -> None:
    student, model = backbone_student(tmp_path, "medusa")
    check(student, "medusa", own_decode(model, ragged(VOCAB)))


def test_trees_are_refused_beyond_the_window(tmp_path: Path) -> None:
    """Their masks know no window; rows within it are the backbone's own."""
    student, _ = backbone_student(tmp_path, "drafter")
    with pytest.raises(UsageError, match=r"length.*got 24 tokens; expected at most 12"):
        draw(student, make_sampler("drafter"), IDS, ragged(VOCAB))
    draw(student, make_sampler("drafter"), IDS[:1], ragged(VOCAB)[:1, :12])
