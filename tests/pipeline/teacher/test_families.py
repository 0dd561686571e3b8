"""Teachers of the shapes that labs use: tiny, with random weights, padded and in several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from pipeline.run import run_extraction
from pipeline.settings import resolve_request
from pipeline.teacher import Teacher
from pipeline.tokens.tokenizer import load_tokenizer
from pipeline.workers import Worker
from shards.errors import UsageError
from shards.language_model.loading import find_pretrained
from shards.store.store import ShardStore
from tests.pipeline.extract_cases import CONTEXT_LENGTH, VOCAB_SIZE, options, save_tokenizer

PADDED = 64
NARROW: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.3,
}
GROUPED = {**NARROW, "num_key_value_heads": 2}
FAMILIES = {
    "gpt2": GPT2Config(
        vocab_size=PADDED,
        n_positions=CONTEXT_LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
    ),
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED, sliding_window=6),
}


def save(folder: Path, family: str, max_shard_size: str = "5GB") -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return save_tokenizer(folder)


def rows() -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (3, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers_over_the_real_tokens(
    tmp_path: Path, family: str
) -> None:
    folder = save(tmp_path, family)
    teacher = Teacher.load(folder, device="cpu")
    # transformers adds Qwen's <|endoftext|> to any tokenizer beside a Qwen.
    assert teacher.vocab_size == len(load_tokenizer(folder)) in (VOCAB_SIZE, VOCAB_SIZE + 1)
    assert teacher.context_length == CONTEXT_LENGTH
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = plain(input_ids=rows()).logits[:, :-1, : teacher.vocab_size]
    assert logits.std() > 0.1, "a uniform teacher would hide a wrong column"
    # Two products in float32 over 16 numbers, in another order.
    assert (teacher.log_probs(rows()) - logits.log_softmax(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cached_walk_agrees_with_the_whole_row(tmp_path: Path, family: str) -> None:
    teacher = Teacher.load(save(tmp_path, family), device="cpu")
    whole, cache = teacher.log_probs(rows()), None
    for position in range(11):
        step, cache = teacher.next_log_probs(rows()[:, position : position + 1], cache)
        assert (step - whole[:, position]).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_weights_in_several_files_are_the_same_teacher(tmp_path: Path, family: str) -> None:
    one, many = save(tmp_path / "one", family), save(tmp_path / "many", family, "4KB")
    files = find_pretrained(many)
    assert len(files.weight_files) > 1
    assert files.weights_sha256 == find_pretrained(one).weights_sha256
    log_probs = [Teacher.load(folder, device="cpu").log_probs(rows()) for folder in (one, many)]
    assert (log_probs[0] - log_probs[1]).abs().max() < 1e-5
    files.weight_files[0].unlink()
    with pytest.raises(Exception, match="a file of the teacher's weights is missing"):
        Teacher.load(many, device="cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_bfloat16_keeps_float32_logits(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family)
    narrow = Teacher.load(folder, "bfloat16", "cpu").log_probs(rows())
    wide = Teacher.load(folder, device="cpu").log_probs(rows())
    assert narrow.dtype == torch.float32
    # Activations keep 8 bits, some 2^-8 of logits that spread over a few nats: no more than that.
    assert 0 < (narrow - wide).abs().mean() < 0.1
    assert len(narrow.unique()) > 0.9 * narrow.numel(), "rounded logits would coincide"


def test_padding_is_left_out_and_said(tmp_path: Path, corpus: Path) -> None:
    given = options(save(tmp_path / "teacher", "mistral"), corpus)
    lines = run_extraction(resolve_request(tmp_path / "run", given), Worker())
    padding = PADDED - VOCAB_SIZE
    assert any(f"64, the last {padding} of no token: left out" in line for line in lines)
    assert ShardStore.open(tmp_path / "run" / "store").manifest.vocab_size == VOCAB_SIZE


def test_a_tokenizer_of_another_family_is_refused_with_the_reason(
    tmp_path: Path, corpus: Path
) -> None:
    words = [f"x{i}" for i in range(PADDED + 1)]
    other = save_tokenizer(tmp_path / "other", words)
    given = options(save(tmp_path / "teacher", "llama"), corpus, teacher={"tokenizer": str(other)})
    with pytest.raises(UsageError, match=rf"got a tokenizer of {PADDED + 1}.*teacher's {PADDED}"):
        run_extraction(resolve_request(tmp_path / "run", given), Worker())
