"""Log-probabilities of teachers, held to transformers' own; and teachers that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    ViTConfig,
)

from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from pipeline.teacher import Teacher, automatic_batch_size, check_vocabulary
from pipeline.tokens.tokenizer import load_tokenizer
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import largest_batch, resolve_device
from shards.language_model.loading import find_pretrained
from shards.store.store import ShardStore
from tests.pipeline.extract_cases import (
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    WORDS,
    options,
    save_teacher,
    save_tokenizer,
)

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
GPT2 = {"n_positions": CONTEXT_LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 4}
FAMILIES = {
    "gpt2": GPT2Config(vocab_size=PADDED, **GPT2, initializer_range=0.3),
    "llama": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral": MistralConfig(**GROUPED, sliding_window=6),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def loaded(folder: Path) -> Teacher:
    return Teacher.load(folder, device="cpu")


def save(folder: Path, family: str, max_shard_size: str = "5GB") -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family])
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return save_tokenizer(folder)


def random_rows(num_rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (num_rows, length), generator=torch.Generator().manual_seed(0))


def poison(teacher: Teacher, place: Any, value: float) -> None:
    """Another value in the teacher's logits [B, T, V], at ``place``."""
    head = teacher.head
    assert head is not None
    clean = head.forward

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        head.last_logits = clean(hidden).clone()
        head.last_logits[place] = value
        return head.last_logits

    head.forward = poisoned  # type: ignore[method-assign]


# Right numbers.


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
        logits = plain(input_ids=random_rows()).logits[:, :-1, : teacher.vocab_size]
    assert logits.std() > 0.1, "a uniform teacher would hide a wrong column"
    # Two products in float32 over 16 numbers, in another order.
    whole = teacher.log_probs(random_rows())
    assert (whole - logits.log_softmax(-1)).abs().max() < 1e-4
    # Token by token with a cache it says the same.
    cache = None
    for position in range(11):
        step, cache = teacher.next_log_probs(random_rows()[:, position : position + 1], cache)
        assert (step - whole[:, position]).abs().max() < 1e-4


def test_log_probs_of_a_trained_teacher_equal_the_loss_of_transformers(shared: Path) -> None:
    folder = shared / "data" / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside."
    rows = torch.tensor([tokenizer(text)["input_ids"]])
    picked = Teacher.load(folder, device="cpu").log_probs(rows).gather(-1, rows[:, 1:, None])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(input_ids=rows).logits[:, :-1]
    per_token = torch.nn.functional.cross_entropy(logits[0], rows[0, 1:], reduction="none")
    assert (picked[0, :, 0] + per_token).abs().max() < 1e-4
    assert per_token.mean() < 2.0, "a trained teacher knows this sentence"


def test_entry_i_is_the_distribution_of_token_i_plus_one(loaded: Teacher) -> None:
    rows = random_rows(1, 8)
    changed = rows.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB_SIZE
    moved = (loaded.log_probs(rows) != loaded.log_probs(changed)).any(-1)[0]
    # Token 5 is seen by the distributions of tokens 6 and 7 only: entries 5 and 6.
    assert moved.tolist() == [False] * 5 + [True, True]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_bfloat16_keeps_float32_logits(tmp_path: Path, family: str) -> None:
    folder = save(tmp_path, family)
    teacher = Teacher.load(folder, "bfloat16", "cpu")
    output = teacher.output(random_rows(), torch.tensor([4, 9, 7]), need_hidden=True)
    narrow, wide = output.log_probs, Teacher.load(folder, device="cpu").log_probs(random_rows())
    assert narrow.dtype == torch.float32 and output.rows.tolist() == [4, 9, 7]
    # Activations keep 8 bits, some 2^-8 of logits that spread over a few nats: no more than that.
    assert 0 < (narrow - wide).abs().mean() < 0.1
    assert len(narrow.unique()) > 0.9 * narrow.numel(), "rounded logits would coincide"
    # The hidden state and the head rebuild the distribution: float32 rounding only.
    assert output.hidden is not None and output.hidden.dtype == torch.bfloat16
    weight, bias = teacher.lm_head
    assert bias is None
    rebuilt = (output.hidden.double() @ weight.double().T).log_softmax(-1)
    assert (rebuilt - narrow).abs().max() < 1e-5


def test_a_compiled_teacher_scores_through_the_compiled_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[object] = []

    def compile_(model: torch.nn.Module, **_: object) -> object:
        def scorer(**arguments: object) -> object:
            used.append(model)
            return model(**arguments)

        return scorer

    monkeypatch.setattr(torch, "compile", compile_)
    plain = Teacher.load(folder, device="cpu").log_probs(random_rows())
    assert used == []
    compiled = Teacher.load(folder, device="cpu", compiled=True)
    assert torch.allclose(compiled.log_probs(random_rows()), plain, atol=1e-5)
    assert used == [compiled.model]


def test_the_attention_kernel_is_the_one_asked_for(folder: Path) -> None:
    for kernel in ("eager", "sdpa"):
        asked = Teacher.load(folder, device="cpu", attention=kernel)
        assert asked.model.config._attn_implementation == kernel
    with pytest.raises(UsageError, match=r"attention kernel cannot be used.*got foo"):
        Teacher.load(folder, device="cpu", attention="foo")


def test_padding_is_left_out_and_said(tmp_path: Path, corpus: Path) -> None:
    given = options(save(tmp_path / "teacher", "mistral"), corpus)
    lines = run_extraction(resolve_request(tmp_path / "run", given), Worker())
    padding = PADDED - VOCAB_SIZE
    assert any(f"64, the last {padding} of no token: left out" in line for line in lines)
    assert ShardStore.open(tmp_path / "run" / "store").manifest.vocab_size == VOCAB_SIZE


# Which teacher it is.


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_weights_in_several_files_are_the_same_teacher(tmp_path: Path, family: str) -> None:
    one, many = save(tmp_path / "one", family), save(tmp_path / "many", family, "4KB")
    files = find_pretrained(many)
    assert len(files.weight_files) > 1
    assert files.weights_sha256 == find_pretrained(one).weights_sha256
    log_probs = [
        Teacher.load(place, device="cpu").log_probs(random_rows()) for place in (one, many)
    ]
    assert (log_probs[0] - log_probs[1]).abs().max() < 1e-5
    files.weight_files[0].unlink()
    with pytest.raises(Exception, match="a file of the teacher's weights is missing"):
        Teacher.load(many, device="cpu")


def test_weight_hash_tells_values_names_types_and_shapes(folder: Path, tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float32)
    variants = [{"a": values}, {"b": values}, {"a": values.view(2, 3)}, {"a": values.view(3, 2)}]
    variants += [{"a": values.view(torch.int32)}, {"a": values + 1e-6}]
    hashes = set()
    for number, tensors in enumerate(variants):
        place = shutil.copytree(folder, tmp_path / str(number))
        save_file(tensors, place / "model.safetensors")
        hashes.add(find_pretrained(place).weights_sha256)
    assert len(hashes) == len(variants)


def test_a_home_directory_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    written = f"~/{folder.name}"
    assert find_pretrained(written).weights_sha256 == find_pretrained(folder).weights_sha256
    assert len(load_tokenizer(written)) == VOCAB_SIZE
    with pytest.raises(UsageError, match="no such teacher folder"):
        find_pretrained("~no-such-user/model")


# Rows and logits that cannot be used.


def test_rows_that_cannot_be_scored_are_refused_by_place(loaded: Teacher) -> None:
    with pytest.raises(UsageError, match=rf"context.*got 17.*at most {CONTEXT_LENGTH}"):
        loaded.log_probs(random_rows(1, CONTEXT_LENGTH + 1))
    rows = random_rows()
    rows[1, 4] = VOCAB_SIZE
    with pytest.raises(UsageError, match="row 21, position 4"):
        loaded.output(rows, torch.tensor([20, 21, 22]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_are_refused_by_row_and_position(loaded: Teacher, value: float) -> None:
    rows = random_rows()
    rows[2, 3] = 7
    rows[rows == 9] = 8
    poison(loaded, (2, 2, 7 if value == float("-inf") else 9), value)
    with pytest.raises(GdistillError, match="row 32, position 3"):
        loaded.output(rows, torch.tensor([30, 31, 32]))


def test_impossible_tokens_elsewhere_are_legal(loaded: Teacher) -> None:
    poison(loaded, (..., 9), float("-inf"))
    rows = random_rows()
    rows[rows == 9] = 8
    log_probs = loaded.output(rows, torch.arange(3)).log_probs
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(3, 11), atol=1e-5)


def test_a_model_that_scales_its_logits_has_no_hidden_form(tmp_path: Path) -> None:
    config = LlamaConfig(**{**NARROW, "vocab_size": VOCAB_SIZE})
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, device="cpu")
    assert teacher.vocab_size == VOCAB_SIZE == len(WORDS), "without a tokenizer, the output's width"
    own_forward = teacher.model.forward

    def scaled(**arguments: object) -> object:
        output = own_forward(**arguments)
        output.logits = output.logits * 0.5
        return output

    teacher.model.forward = scaled  # type: ignore[method-assign]
    teacher.output(random_rows(), torch.arange(3))
    with pytest.raises(UsageError, match="changes its logits"):
        teacher.output(random_rows(), torch.arange(3), need_hidden=True)


def test_a_head_that_runs_out_of_memory_keeps_nothing(loaded: Teacher) -> None:
    head = loaded.head
    assert head is not None

    def cramped(hidden: torch.Tensor) -> torch.Tensor:
        head.last_hidden = hidden
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    head.forward = cramped  # type: ignore[method-assign]
    for attempt in (
        lambda: loaded.forward(random_rows(), torch.arange(3)),
        lambda: loaded.next_log_probs(random_rows()[:, :1]),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert head.last_hidden is None


# Models that cannot be used.


def test_tokenizer_of_another_vocabulary_is_refused() -> None:
    check_vocabulary(50304, 50257, "padded to a round number")
    check_vocabulary(151936, 151665, "padded to a round number")
    for num_logits, vocab_size in ((512, 50257), (50257, 512)):
        with pytest.raises(UsageError, match="different vocabularies"):
            check_vocabulary(num_logits, vocab_size, "too narrow, too wide")


def test_folders_without_a_model_are_refused_in_one_line(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"without config\.json"):
        Teacher.load(tmp_path)
    with pytest.raises(UsageError, match="no such teacher folder"):
        Teacher.load(tmp_path / "absent")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(UsageError, match="no weights"):
        Teacher.load(tmp_path, vocab_size=VOCAB_SIZE)
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(UsageError, match="cannot read the teacher's configuration"):
        Teacher.load(tmp_path)
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"no language model.*vit without vocab_size"):
        _ = find_pretrained(tmp_path).num_logits


def test_damaged_weights_are_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(GdistillError, match="cannot load the teacher"):
        Teacher.load(tmp_path)
    with pytest.raises(GdistillError, match="damaged safetensors file"):
        _ = find_pretrained(tmp_path).weights_sha256


def test_a_device_that_is_not_there_is_refused() -> None:
    for name, message in (
        (f"cuda:{torch.cuda.device_count()}", "no such GPU"),
        ("abacus", "unknown device"),
        ("meta", r"device not supported.*cuda:N"),
        ("mps", r"device not supported.*cuda:N"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve_device(name)


# Rows of a forward pass, unless told.


def test_a_batch_on_a_cpu_fills_a_gibibyte_or_4096_tokens() -> None:
    cpu = torch.device("cpu")
    # Six float32 tensors of 128 x 50,257 logits are 154,389,504 bytes: six such rows in 2^30.
    assert automatic_batch_size(128, 50_257, 0, cpu) == 6
    assert automatic_batch_size(128, 512, 0, cpu) == 4096 // 128
    assert automatic_batch_size(1024, 200_000, 0, cpu) == 1


def test_no_tensor_of_a_gpu_has_more_elements_than_32_bits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V = 151,936 on 141 GB: 40% of the memory would hold 15 rows of 1,024 tokens."""
    gpu, row = torch.device("cuda"), 1024 * 151_936
    memory = SimpleNamespace(total_memory=141 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    assert automatic_batch_size(1024, 151_936, 0, gpu) == 13 == largest_batch(row, gpu)
    assert 13 * row < 2**31 <= 14 * row
    assert automatic_batch_size(1024, 50_257, 0, gpu) == 32, "of 2^15 tokens"
    assert largest_batch(2**31, gpu) == 1 and largest_batch(row, torch.device("cpu")) > 1000
