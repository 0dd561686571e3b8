"""A judge small enough to be made for a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

JUDGE_CONTEXT = 16


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept for the user goes here."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("evaluation.text.reading.user_cache", lambda: folder)
    return folder


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained causal model of 16 positions over the words ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("judge")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=4,
        n_positions=JUDGE_CONTEXT,
        n_embd=8,
        n_layer=1,
        n_head=1,
        bos_token_id=2,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the same judge whatever ran before
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
