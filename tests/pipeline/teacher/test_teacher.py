from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
)

from pipeline.teacher import Teacher, check_vocabulary
from pipeline.tokens.tokenizer import load_tokenizer
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import resolve_device
from shards.language_model.loading import find_pretrained
from tests.pipeline.extract_cases import CONTEXT_LENGTH, VOCAB_SIZE, WORDS, save_teacher


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Teacher:
    return Teacher.load(folder, device="cpu")


def random_rows(num_rows: int, length: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(0))


def own_losses(folder: Path, rows: torch.Tensor) -> torch.Tensor:
    """Per-row loss as transformers itself computes it: mean over the scored tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=row[None], labels=row[None]).loss for row in rows])


def test_log_probs_equal_the_loss_of_transformers(folder: Path, teacher: Teacher) -> None:
    rows = random_rows(5, 12)
    picked = teacher.log_probs(rows).gather(-1, rows[:, 1:, None]).squeeze(-1)
    assert torch.allclose(-picked.mean(1), own_losses(folder, rows), atol=1e-5)


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


def test_entry_i_is_the_distribution_of_token_i_plus_one(teacher: Teacher) -> None:
    rows = random_rows(1, 8)
    changed = rows.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB_SIZE
    moved = (teacher.log_probs(rows) != teacher.log_probs(changed)).any(-1)[0]
    # Token 5 is seen by the distributions of tokens 6 and 7 only: entries 5 and 6.
    assert moved.tolist() == [False] * 5 + [True, True]


def test_distributions_are_normalised_over_real_tokens_of_a_padded_output(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path, num_logits=64)
    teacher = Teacher.load(folder, device="cpu")
    log_probs = teacher.log_probs(random_rows(2, 6))
    assert teacher.vocab_size == VOCAB_SIZE
    assert log_probs.shape == (2, 5, VOCAB_SIZE)
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_bfloat16_teacher_gives_unrounded_float32_logits(folder: Path) -> None:
    teacher = Teacher.load(folder, "bfloat16", "cpu")
    rows = random_rows(3, 10)
    output = teacher.output(rows, torch.arange(3), need_hidden=True)
    weight, bias = teacher.lm_head
    assert output.hidden is not None and output.hidden.dtype == torch.bfloat16
    logits = (output.hidden.double() @ weight.double().T).log_softmax(-1)
    assert bias is None
    # float32 rounding only; bfloat16 logits of this size would be off by 1e-2.
    assert (logits - output.log_probs).abs().max() < 1e-5
    assert output.log_probs.dtype == torch.float32


def test_hidden_state_and_head_rebuild_the_distribution(teacher: Teacher) -> None:
    output = teacher.output(random_rows(2, 7), torch.tensor([4, 9]), need_hidden=True)
    weight, _ = teacher.lm_head
    assert output.hidden is not None
    rebuilt = (output.hidden @ weight.T).log_softmax(-1)
    assert torch.allclose(rebuilt, output.log_probs, atol=1e-5)
    assert output.rows.tolist() == [4, 9]


def test_weight_hash_knows_the_values_and_not_the_files(folder: Path, tmp_path: Path) -> None:
    original = find_pretrained(folder)
    copy = tmp_path / "split"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-{1 + (i % 2)}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, copy / file, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert find_pretrained(copy).weights_sha256 == original.weights_sha256

    tensors[names[0]] = tensors[names[0]].clone()
    tensors[names[0]].view(-1)[0] += 1e-6
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert find_pretrained(other).weights_sha256 != original.weights_sha256


def test_rows_beyond_the_context_are_refused(teacher: Teacher) -> None:
    with pytest.raises(UsageError, match=rf"context.*got 17.*at most {CONTEXT_LENGTH}"):
        teacher.log_probs(random_rows(1, CONTEXT_LENGTH + 1))


def test_ids_outside_the_vocabulary_are_refused_by_place(teacher: Teacher) -> None:
    rows = random_rows(3, 6)
    rows[1, 4] = VOCAB_SIZE
    with pytest.raises(UsageError, match="row 21, position 4"):
        teacher.output(rows, torch.tensor([20, 21, 22]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_are_refused_by_row_and_position(folder: Path, value: float) -> None:
    teacher = Teacher.load(folder, device="cpu")
    rows = random_rows(3, 6)
    rows[2, 3] = 7
    rows[rows == 9] = 8
    assert teacher.head is not None
    head = teacher.head
    clean = head._logits

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        logits = clean(hidden).clone()
        logits[2, 2, 7 if value == float("-inf") else 9] = value
        return logits

    head._logits = poisoned  # type: ignore[method-assign]
    with pytest.raises(GdistillError, match="row 32, position 3"):
        teacher.output(rows, torch.tensor([30, 31, 32]))


def test_impossible_tokens_elsewhere_are_legal(folder: Path) -> None:
    teacher = Teacher.load(folder, device="cpu")
    assert teacher.head is not None
    clean = teacher.head._logits

    def masked(hidden: torch.Tensor) -> torch.Tensor:
        logits = clean(hidden).clone()
        logits[..., 9] = float("-inf")
        return logits

    teacher.head._logits = masked  # type: ignore[method-assign]
    rows = random_rows(2, 6)
    rows[rows == 9] = 8
    log_probs = teacher.output(rows, torch.arange(2)).log_probs
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(2, 5), atol=1e-5)


def test_tokenizer_of_another_vocabulary_is_refused() -> None:
    check_vocabulary(50304, 50257, "padded to a round number")
    check_vocabulary(151936, 151665, "padded to a round number")
    with pytest.raises(UsageError, match="different vocabularies"):
        check_vocabulary(512, 50257, "too narrow")
    with pytest.raises(UsageError, match="different vocabularies"):
        check_vocabulary(50257, 512, "too wide")


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


def test_damaged_weights_are_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(GdistillError, match="cannot load the teacher"):
        Teacher.load(tmp_path)
    with pytest.raises(GdistillError, match="damaged safetensors file"):
        _ = find_pretrained(tmp_path).weights_sha256


def test_a_head_that_runs_out_of_memory_keeps_nothing(folder: Path) -> None:
    teacher = Teacher.load(folder, device="cpu")
    head = teacher.head
    assert head is not None

    def cramped(hidden: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    head._logits = cramped  # type: ignore[method-assign]
    rows = random_rows(2, 6)
    for attempt in (
        lambda: teacher.forward(rows, torch.arange(2)),
        lambda: teacher.next_log_probs(rows[:, :1]),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            attempt()
        assert head.last_hidden is None


def test_a_home_directory_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    written = f"~/{folder.name}"
    assert find_pretrained(written).weights_sha256 == find_pretrained(folder).weights_sha256
    assert len(load_tokenizer(written)) == VOCAB_SIZE
    with pytest.raises(UsageError, match="no such teacher folder"):
        find_pretrained("~no-such-user/model")


def test_a_configuration_of_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"no language model.*vit without vocab_size"):
        _ = find_pretrained(tmp_path).num_logits


def test_a_gpu_that_is_not_there_is_refused() -> None:
    missing = torch.cuda.device_count()
    with pytest.raises(UsageError, match="no such GPU"):
        resolve_device(f"cuda:{missing}")
    with pytest.raises(UsageError, match="unknown device"):
        resolve_device("abacus")
    for other in ("meta", "mps"):
        with pytest.raises(UsageError, match=r"device not supported.*cuda:N"):
            resolve_device(other)


def test_a_model_that_scales_its_logits_has_no_hidden_form(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, device="cpu")
    assert teacher.vocab_size == VOCAB_SIZE == len(WORDS)
    own_forward = teacher.model.forward

    def scaled(**arguments: object) -> object:
        output = own_forward(**arguments)
        output.logits = output.logits * 0.5
        return output

    teacher.model.forward = scaled  # type: ignore[method-assign]
    rows = random_rows(1, 5)
    teacher.output(rows, torch.arange(1))
    with pytest.raises(UsageError, match="changes its logits"):
        teacher.output(rows, torch.arange(1), need_hidden=True)


def test_weight_hash_tells_names_types_and_shapes_of_equal_bytes(
    folder: Path, tmp_path: Path
) -> None:
    values = torch.arange(6, dtype=torch.float32)
    variants = [{"a": values}, {"b": values}, {"a": values.view(2, 3)}, {"a": values.view(3, 2)}]
    variants.append({"a": values.view(torch.int32)})
    hashes = set()
    for number, tensors in enumerate(variants):
        place = tmp_path / str(number)
        shutil.copytree(folder, place)
        save_file(tensors, place / "model.safetensors")
        hashes.add(find_pretrained(place).weights_sha256)
    assert len(hashes) == len(variants)


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
    rows = random_rows(2, 6)
    plain = Teacher.load(folder, device="cpu").log_probs(rows)
    assert used == []
    compiled = Teacher.load(folder, device="cpu", compiled=True)
    assert torch.allclose(compiled.log_probs(rows), plain, atol=1e-5)
    assert used == [compiled.model]


def test_the_attention_kernel_is_the_one_asked_for(folder: Path) -> None:
    for kernel in ("eager", "sdpa"):
        loaded = Teacher.load(folder, device="cpu", attention=kernel)
        assert loaded.model.config._attn_implementation == kernel
    with pytest.raises(UsageError, match=r"attention kernel cannot be used.*got foo"):
        Teacher.load(folder, device="cpu", attention="foo")
