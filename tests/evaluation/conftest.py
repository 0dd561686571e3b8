"""A judge small enough to be made for a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from evaluation.text.reading import JudgeModel, load_judge
from tests.evaluation.kit import Told


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is kept for the user goes here."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("evaluation.text.reading.user_cache", lambda: folder)
    return folder


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained causal model of 16 positions over the words ``a`` and ``b``."""
    folder = tmp_path_factory.mktemp("gpt2-judge")  # mauve-text asks for this in the name
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(folder)
    sizes = {"vocab_size": 4, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1}
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the same judge whatever ran before
        config = GPT2Config(**sizes, bos_token_id=2, eos_token_id=2)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def judge(judge_folder: Path) -> JudgeModel:
    """Loaded once; a test that changes it loads one of its own."""
    return load_judge(str(judge_folder))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    return lambda: capsys.readouterr().err
