"""Teachers: log-probabilities held to transformers' own, rows that they write, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import generate
from pipeline.generate import GeneratedRows, generate_rows, processed
from pipeline.settings import SequentialSettings
from pipeline.teacher import Teacher, automatic_batch_size, check_vocabulary
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import largest_batch, resolve_device
from shards.noise.embedding import dense_arrivals
from shards.noise.gumbel import KeyedPrior, gumbel_argmax
from shards.noise.philox import PositionKeys
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import CONTEXT_LENGTH, ROW_LENGTH, VOCAB_SIZE, contents, run, scored

Gpu = Callable[[int], torch.device]
PADDED = 64
NARROW: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
NARROW |= {"num_attention_heads": 4, "max_position_embeddings": CONTEXT_LENGTH}
GROUPED = {**NARROW, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": CONTEXT_LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 4},
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": {**GROUPED, "sliding_window": 6},
    "phi": NARROW,
}


def load(folder: Path, *how: Any, **named: Any) -> Teacher:
    return Teacher.load(folder, *how, device="cpu", **named)


@pytest.fixture
def loaded(teacher: Path) -> Teacher:
    return load(teacher)


def save(folder: Path, family: str) -> Path:
    shape = {**FAMILIES[family], "vocab_size": PADDED, "initializer_range": 0.3}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        if (bias := model.get_output_embeddings().bias) is not None:
            torch.nn.init.normal_(bias)
    model.save_pretrained(folder)
    return extract_cases.save_tokenizer(folder)


def random_rows(num_rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (num_rows, length), generator=torch.Generator().manual_seed(0))


def poison(teacher: Teacher, place: Any, value: float) -> None:
    """Another value in the teacher's logits [B, T, V], at ``place``."""
    head: Any = teacher.head
    clean = head.forward

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        head.last_logits = clean(hidden).clone()
        head.last_logits[place] = value
        return head.last_logits

    head.forward = poisoned


# Right numbers.


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers_over_real_tokens(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family)
    teacher = load(folder)
    # transformers adds Qwen's <|endoftext|> to any tokenizer beside a Qwen.
    assert teacher.vocab_size == len(load_tokenizer(folder)) in (VOCAB_SIZE, VOCAB_SIZE + 1)
    assert teacher.files.context_length == CONTEXT_LENGTH
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = plain(input_ids=random_rows()).logits[:, :-1, : teacher.vocab_size]
    assert logits.std() > 0.1, "a uniform teacher would hide a wrong column"
    # Two products in float32 over 16 numbers, in another order.
    whole = scored(teacher, random_rows()).log_probs
    assert (whole - logits.log_softmax(-1)).abs().max() < 1e-4
    # Token by token with a cache it says the same.
    cache = None
    for position in range(11):
        step, cache = teacher.next_log_probs(random_rows()[:, position : position + 1], cache)
        assert (step - whole[:, position]).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "mistral", "phi"])
def test_bfloat16_keeps_float32_logits(tmp_path: Path, corpus: Path, family: str) -> None:
    folder = save(tmp_path, family)
    teacher = load(folder, "bfloat16")
    output = scored(teacher, random_rows(), torch.tensor([4, 9, 7]), hidden=True)
    narrow, wide = output.log_probs, scored(load(folder), random_rows()).log_probs
    assert narrow.dtype == torch.float32 and output.rows.tolist() == [4, 9, 7]
    # Activations keep 8 bits, some 2^-8 of logits that spread over a few nats: no more than that.
    assert 0 < (narrow - wide).abs().mean() < 0.1
    assert len(narrow.unique()) > 0.9 * narrow.numel(), "rounded logits would coincide"
    # The hidden state and the head rebuild the distribution: float32 rounding only.
    assert output.hidden is not None and output.hidden.dtype == torch.bfloat16
    weight, bias = teacher.lm_head
    assert (bias is None) == (family != "phi")
    bias = torch.zeros(teacher.vocab_size) if bias is None else bias
    given = extract_cases.options(folder, corpus, codec={"name": "hidden"}, teacher={"dtype": "bfloat16"})
    assert torch.equal(run(tmp_path / "out", given).resources["lm_head_bias"], bias)
    rebuilt = (output.hidden.double() @ weight.double().T + bias.double()).log_softmax(-1)
    assert (rebuilt - narrow).abs().max() < 1e-5


def test_a_teacher_is_compiled_and_attends_as_asked(teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    def compile_(model: torch.nn.Module, **_: object) -> object:
        def scorer(**arguments: object) -> object:
            used.append(model)
            return model(**arguments)

        return scorer

    monkeypatch.setattr(torch, "compile", compile_)
    plain = scored(load(teacher), random_rows()).log_probs
    assert used == []
    compiled = load(teacher, compiled=True)
    assert torch.allclose(scored(compiled, random_rows()).log_probs, plain, atol=1e-5)
    assert used == [compiled.model]
    for kernel in ("eager", "sdpa"):
        assert load(teacher, attention=kernel).model.config._attn_implementation == kernel


# Rows and logits that cannot be used.


def test_rows_that_cannot_be_scored_are_refused_by_place(loaded: Teacher) -> None:
    assert scored(loaded, random_rows(1, CONTEXT_LENGTH)).log_probs.shape[1] == CONTEXT_LENGTH - 1
    with pytest.raises(UsageError, match=rf"context.*got 17.*at most {CONTEXT_LENGTH}"):
        scored(loaded, random_rows(1, CONTEXT_LENGTH + 1))
    rows = random_rows()
    for token in (VOCAB_SIZE, -1):
        rows[1, 4] = token
        with pytest.raises(UsageError, match="row 21, position 4"):
            scored(loaded, rows, torch.tensor([20, 21, 22]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_are_refused_by_row_and_position(loaded: Teacher, value: float) -> None:
    rows = random_rows()
    rows[2, 3] = 7
    rows[rows == 9] = 8
    poison(loaded, (2, 2, 7 if value == float("-inf") else 9), value)
    with pytest.raises(GdistillError, match="row 32, position 3"):
        scored(loaded, rows, torch.tensor([30, 31, 32]))


def test_impossible_tokens_elsewhere_are_legal(loaded: Teacher) -> None:
    poison(loaded, (..., 9), float("-inf"))
    rows = random_rows()
    rows[rows == 9] = 8
    log_probs = scored(loaded, rows).log_probs
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(3, 11), atol=1e-5)


def test_a_head_that_runs_out_of_memory_keeps_nothing(loaded: Teacher) -> None:
    head: Any = loaded.head

    def cramped(hidden: torch.Tensor) -> torch.Tensor:
        head.last_hidden = hidden
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    head.forward = cramped
    for attempt in (
        lambda: loaded.forward(random_rows(), torch.arange(3)),
        lambda: loaded.next_log_probs(random_rows()[:, :1]),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert head.last_hidden is None


# Models that cannot be used.


def test_tokenizer_of_another_vocabulary_is_refused() -> None:
    for num_logits, vocab_size in ((50_304, 50_257), (151_936, 151_665), (150, 23), (4000, 3800)):
        check_vocabulary(num_logits, vocab_size, "padded to a round number")
    for num_logits, vocab_size in ((512, 50_257), (50_257, 512), (151, 23), (4000, 3799)):
        with pytest.raises(UsageError, match="different vocabularies"):
            check_vocabulary(num_logits, vocab_size, "too narrow, too wide")


def test_without_a_tokenizer_every_logit_is_a_token(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", "qwen2")
    assert load(folder).vocab_size < PADDED
    for file in folder.glob("*token*"):
        file.unlink()
    assert load(folder).vocab_size == scored(load(folder), random_rows()).log_probs.shape[-1] == PADDED


def test_a_device_that_is_not_there_is_refused(loaded: Teacher) -> None:
    for name, message in (
        (f"cuda:{torch.cuda.device_count()}", "no such GPU"),
        ("abacus", "unknown device"),
        ("meta", r"device not supported.*cuda:N"),
        ("mps", r"device not supported.*cuda:N"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_device(name)
    assert loaded.num_devices == 1
    loaded.model.transformer.ln_f.to("meta")
    assert loaded.num_devices == 2


# Rows of a forward pass, unless told.


def test_a_batch_on_a_cpu_fills_a_gibibyte_or_4096_tokens() -> None:
    cpu = torch.device("cpu")
    # Six float32 tensors of 128 x 50,257 logits are 154,389,504 bytes: six such rows in 2^30.
    assert automatic_batch_size(128, 50_257, 0, cpu) == 6
    assert automatic_batch_size(128, 512, 0, cpu) == 4096 // 128
    assert automatic_batch_size(1024, 200_000, 0, cpu) == 1


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU of so many bytes."""

    def made(num_bytes: int) -> torch.device:
        memory = SimpleNamespace(total_memory=num_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
        return torch.device("cuda")

    return made


def test_no_tensor_of_a_gpu_has_more_elements_than_32_bits_count(gpu_of: Gpu) -> None:
    """V = 151,936 on 141 GB: 40% of the memory would hold 15 rows of 1,024 tokens."""
    gpu, row = gpu_of(141 * 10**9), 1024 * 151_936
    assert automatic_batch_size(1024, 151_936, 0, gpu) == 13 == largest_batch(row, gpu)
    assert 13 * row < 2**31 <= 14 * row
    assert automatic_batch_size(1024, 50_257, 0, gpu) == 32, "of 2^15 tokens"
    # Six float32 tensors of 1,024 x 50,257 logits, in 40% of the 10 GB that the weights leave.
    assert automatic_batch_size(1024, 50_257, 14 * 10**9, gpu_of(24 * 10**9)) == 3
    # A gibibyte for the logits, whatever the weights leave.
    assert automatic_batch_size(1024, 1000, 30 * 10**9, gpu_of(24 * 10**9)) == 32
    assert largest_batch(2**31, gpu) == 1 and largest_batch(row, torch.device("cpu")) > 1000


# Rows that the teacher writes.

FULL = {"mode": "sequential", "codec": {"name": "full"}}


def test_cached_generation_is_gumbel_max_over_the_full_forward_pass(loaded: Teacher) -> None:
    def check() -> None:
        raise GdistillError("asked to stop")

    first, row_ids = torch.tensor([0, 5, 7]), torch.tensor([10, 11, 12])
    rows = generate_rows(loaded, first, row_ids, ROW_LENGTH, stream_seed=3)
    expected = first[:, None]
    for position in range(1, ROW_LENGTH):
        padded = torch.cat([expected, torch.zeros(3, 1, dtype=torch.int64)], 1)
        log_probs = scored(loaded, padded).log_probs[:, -1]
        keys = PositionKeys(3, row_ids, torch.full((3,), position))
        noise = dense_arrivals(KeyedPrior(keys, VOCAB_SIZE))
        expected = torch.cat([expected, gumbel_argmax(log_probs, noise)[:, None]], 1)
    assert torch.equal(rows, expected)
    with pytest.raises(GdistillError, match="asked to stop"):
        generate_rows(loaded, first, row_ids, ROW_LENGTH, stream_seed=3, check=check)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "nucleus_p": 0.8}])
def test_stored_noise_reproduces_every_token_when_rows_are_scored_again(
    tmp_path: Path, asked: Asked, loaded: Teacher, sampling: dict[str, float]
) -> None:
    store = run(tmp_path, asked(**FULL, sequential=sampling, store={"rows": 40}))
    noise, tokens = extract_cases.stored_noise(store)
    settings = SequentialSettings(**sampling)  # type: ignore[arg-type]
    log_probs = processed(scored(loaded, tokens).log_probs, settings, tokens[:, 1:])
    winners = gumbel_argmax(log_probs.flatten(0, 1), dense_arrivals(noise))
    assert torch.equal(winners, tokens[:, 1:].flatten())


def test_stored_noise_of_generated_rows_is_standard_gumbel(tmp_path: Path, asked: Asked) -> None:
    """Would fail if tokens were chosen by the stream that the codec draws its noise from."""
    store = run(tmp_path, asked(**FULL, store={"rows": 200, "validation_rows": 0}))
    assert store.manifest.splits == {"train": 200}
    gumbels = -dense_arrivals(extract_cases.stored_noise(store)[0]).log()
    # Entries of one position are independent, and positions too: n = 200 * 11 * V variates.
    assert stats.kstest(gumbels.flatten().numpy(), "gumbel_r").pvalue > 1e-3
    largest = gumbels.max(-1).values.numpy() - np.log(VOCAB_SIZE)
    assert stats.kstest(largest, "gumbel_r").pvalue > 1e-3


def test_generated_store_is_the_same_in_one_run_and_after_an_interruption(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = asked(mode="sequential", store={"rows": 40, "validation_rows": 4})
    whole = run(tmp_path / "whole", given)
    assert whole.manifest.splits == {"train": 40, "validation": 4}
    train, held_out = (whole.split(name).read_rows(0, 4) for name in ("train", "validation"))
    differ = (train["tokens"] != held_out["tokens"]).any(axis=1)
    assert differ.all(), "splits have noise of their own"
    read, calls = GeneratedRows.read, []

    def failing(self: GeneratedRows, *arguments: Any) -> object:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(self, *arguments)

    monkeypatch.setattr(GeneratedRows, "read", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", given)
    run(tmp_path / "parts", given)
    assert contents(tmp_path / "parts" / "store") == contents(tmp_path / "whole" / "store")


def test_rows_begin_like_documents_and_go_beyond_the_corpus(tmp_path: Path, asked: Asked) -> None:
    """Rows of a corpus in one stream begin anywhere in a document; the teacher's never do."""
    given = asked(mode="sequential", corpus={"packing": "concat"}, store={"rows": 130})
    store, dataset = run(tmp_path, given), TokenDataset.open(tmp_path / "tokens")
    assert dataset.num_rows("train") < 130 == store.manifest.splits["train"]
    assert len(np.unique(dataset.read_rows("train", 0, 20)[:, 0])) > 1
    rows = store.split("train").read_rows(0, 130)["tokens"]
    assert (rows[:, 0] == dataset.bos_id).all()
    assert len(np.unique(rows, axis=0)) > 100, "beyond the corpus nothing repeats"


def test_rows_written_side_by_side_are_bounded_by_memory(loaded: Teacher, gpu_of: Gpu) -> None:
    assert generate.rows_at_once(loaded, ROW_LENGTH) == 128
    # Keys and values of 2 layers of width 16 in float32: 256 bytes a token.
    assert generate.rows_at_once(loaded, (4 << 30) // 256 // 50) == 50
    assert generate.rows_at_once(loaded, 8 << 30) == 1
    # GPT-2 Large's shape in float32, 1,024 tokens, 4 GB of weights: half of what they leave, for 377 MB of cache and
    # 3.6 MB of a step a row.
    shape = {"num_hidden_layers": 36, "num_attention_heads": 20}
    weights = [torch.empty(10**9, device="meta")]
    large: Any = loaded
    large.model = SimpleNamespace(parameters=lambda: weights)
    for changes, memory, expected in (
        ({}, 80, 99),
        ({"num_key_value_heads": 5}, 80, 387),
        ({"head_dim": 128}, 80, 50),  # heads of 128, not of 1280 / 20
        ({}, 4, 1),
        ({}, 800, 512),
    ):
        config = SimpleNamespace(**shape, **changes)
        large.files = SimpleNamespace(text_config=config, hidden_size=1280, num_logits=50_257)
        large.device = gpu_of(memory * 10**9)
        assert generate.rows_at_once(large, 1024) == expected, changes


def test_a_size_that_fits_is_kept_from_shard_to_shard(monkeypatch: pytest.MonkeyPatch, loaded: Teacher) -> None:
    tried: list[int] = []

    def written(_: Teacher, first: torch.Tensor, *rest: object) -> torch.Tensor:
        tried.append(len(first))
        if len(first) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(len(first), ROW_LENGTH, dtype=torch.int64)

    monkeypatch.setattr(generate, "generate_rows", written)
    dataset = SimpleNamespace(bos_id=0, eos_id=1, row_length=ROW_LENGTH, packing="concat")
    settings = SequentialSettings(batch_size=4)
    rows = object.__new__(GeneratedRows)  # the rows' source is not asked for anything else
    vars(rows).update(teacher=loaded, dataset=dataset, settings=settings, seed=1)
    for start in (0, 6):
        rows.read("train", start, start + 6, lambda _: None)
    assert tried == [4, *[2] * 6]
    for own, ends in (([7, 9], {1, 7, 9}), (5, {1, 5}), (None, {1})):
        loaded.model.generation_config.eos_token_id = own
        vars(rows).pop("ends", None)
        assert rows.ends == ends, "the tokenizer's, and the teacher's own"


def test_nucleus_by_hand() -> None:
    first = [0.5, 0.1, 0.3, 0.1]
    log_probs = torch.tensor([first, [0.95, 0.05, 1e-9, 1e-9]]).log()
    cut = processed(log_probs, SequentialSettings(nucleus_p=0.85))
    assert cut[0].exp().tolist() == pytest.approx([0.625, 0, 0.375, 0])
    assert cut[1].exp().tolist() == [1, 0, 0, 0]
    kept = processed(log_probs, SequentialSettings(nucleus_p=0.85), torch.tensor([1, 3]))
    assert torch.isfinite(kept[torch.arange(2), torch.tensor([1, 3])]).all()
    warm = processed(log_probs, SequentialSettings(temperature=2.0))[0].exp()[0].item()
    assert warm == pytest.approx(0.5**0.5 / sum(p**0.5 for p in first))
    assert processed(log_probs, SequentialSettings()) is log_probs
    # At T = 2 (0.6, 0.3, 0.1) is (0.473, 0.334, 0.193): 0.85 keeps two; before, it keeps one.
    warm_cut = SequentialSettings(temperature=2.0, nucleus_p=0.85)
    share = 0.6**0.5 / (0.6**0.5 + 0.3**0.5)
    found = processed(torch.tensor([0.6, 0.3, 0.1]).log(), warm_cut).exp()
    assert found.tolist() == pytest.approx([share, 1 - share, 0], abs=1e-6)


def test_the_nucleus_does_not_depend_on_how_many_rows_are_sorted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log_probs = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    ordered = log_probs.double().exp().sort(-1, descending=True).values.cumsum(-1)
    counts = (ordered <= 0.6).sum(-1).clamp_min(1)
    least = log_probs.sort(-1, descending=True).values.gather(-1, counts[..., None] - 1)
    settings = SequentialSettings(nucleus_p=0.6)
    for at_once in (1, 20, 1 << 26):
        monkeypatch.setattr(generate, "SORTED_AT_ONCE", at_once)
        assert torch.equal(processed(log_probs, settings) > -torch.inf, log_probs >= least)
        assert processed(log_probs[:0], settings).shape == (0, 4, 7)
