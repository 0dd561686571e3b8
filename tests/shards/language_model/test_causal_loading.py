"""One loader for three roles: what is no whole, causal language model is refused in every one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from evaluation.text.reading import UNLIMITED_CONTEXT, load_judge
from pipeline.teacher import Teacher
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import (
    PretrainedFiles,
    check_device_map,
    find_pretrained,
    load_causal_model,
)
from tests.pipeline.extract_cases import CONTEXT_LENGTH, VOCAB_SIZE, save_teacher, save_tokenizer
from trainer.sampling.verifier import load_verifier

CPU = torch.device("cpu")
LOADERS: dict[str, Callable[[Path], Any]] = {
    "teacher": lambda folder: Teacher.load(folder, device="cpu"),
    "judge": lambda folder: load_judge(str(folder)),
    "verifier": lambda folder: load_verifier(str(folder), VOCAB_SIZE, CPU),
}
every_role = pytest.mark.parametrize("role", LOADERS)


def save_bert(folder: Path, initializer_range: float, **changes: Any) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=CONTEXT_LENGTH,
            initializer_range=initializer_range,
            **changes,
        )
        BertForMaskedLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


@every_role
def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path, role: str) -> None:
    folder = save_bert(tmp_path, 0.02)
    with pytest.raises(UsageError, match=rf"the {role} is not causal.*is_decoder"):
        LOADERS[role](folder)


@every_role
def test_a_missing_tensor_is_refused(tmp_path: Path, role: str) -> None:
    """The library would draw it at random, and the model would score all the same."""
    weights = save_teacher(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(GdistillError, match=rf"the {role}'s weights are incomplete.*mlp\.c_fc"):
        LOADERS[role](tmp_path)


@every_role
def test_a_folder_without_weights_is_refused(tmp_path: Path, role: str) -> None:
    (save_teacher(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=rf"the {role} has no weights"):
        LOADERS[role](tmp_path)


@every_role
def test_code_beside_a_model_does_not_run(tmp_path: Path, role: str) -> None:
    folder, ran = save_teacher(tmp_path / "model"), tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nclass Own: ...\n"
    (folder / "modeling_own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own-kind"
    config["auto_map"] = {
        "AutoConfig": "modeling_own.Own",
        "AutoModelForCausalLM": "modeling_own.Own",
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"cannot read the {role}'s configuration"):
        LOADERS[role](folder)
    assert not ran.exists()


@pytest.mark.parametrize(("dtype", "initializer_range"), [("float32", 0.02), ("bfloat16", 0.3)])
def test_look_ahead_shows_in_either_precision(
    tmp_path: Path, dtype: Any, initializer_range: float
) -> None:
    folder = save_bert(tmp_path, initializer_range)
    with pytest.raises(UsageError, match="not causal"):
        Teacher.load(folder, dtype, "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_model_as_a_decoder_is_a_teacher(tmp_path: Path, dtype: Any) -> None:
    folder = save_bert(tmp_path, 0.3, is_decoder=True)
    loaded = Teacher.load(folder, dtype, "cpu")
    assert loaded.head is not None and loaded.head.last_hidden is None
    assert loaded.log_probs(torch.tensor([[0, 3, 4]])).shape == (1, 2, VOCAB_SIZE)


def test_one_small_pass_is_all_the_question_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, forward = [], GPT2LMHeadModel.forward

    def counted(self: GPT2LMHeadModel, **arguments: Any) -> Any:
        shapes.append(tuple(arguments["input_ids"].shape))
        return forward(self, **arguments)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", counted)
    Teacher.load(save_teacher(tmp_path), device="cpu")
    assert shapes == [(5, 8)]


class TwiceTheHead(nn.Linear):
    """An output layer that is more than a matrix product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_logits_that_would_be_rounded_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, load = save_teacher(tmp_path), AutoModelForCausalLM.from_pretrained

    def with_own_head(*arguments: Any, **options: Any) -> Any:
        network, report = load(*arguments, **options)
        weight = network.lm_head.weight
        network.lm_head = TwiceTheHead(*weight.T.shape, bias=False, dtype=weight.dtype)
        network.lm_head.weight = weight
        return network, report

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", with_own_head)
    with pytest.raises(UsageError, match=r"no float32 logits.*bfloat16.*use --dtype float32"):
        Teacher.load(folder, "bfloat16", "cpu")
    loaded = Teacher.load(folder, "float32", "cpu")
    assert loaded.head is None and loaded.log_probs(torch.tensor([[0, 3]])).dtype == torch.float32


def save_bloom(folder: Path) -> Path:
    config = BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


def save_mamba(folder: Path) -> Path:
    config = MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=1, state_size=4, use_mambapy=False
    )
    MambaForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


@pytest.mark.parametrize("save", [save_bloom, save_mamba])
def test_models_that_read_any_length_score(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    folder = save(tmp_path)
    assert Teacher.load(folder, device="cpu").context_length is None
    assert load_judge(str(folder)).context_length == UNLIMITED_CONTEXT
    assert load_verifier(str(folder), VOCAB_SIZE, CPU).context_length is None


def files_with(config: Any) -> PretrainedFiles:
    return PretrainedFiles("model", Path("model"), config)


def test_the_context_is_found_under_any_name_and_in_nested_configurations(tmp_path: Path) -> None:
    nested = Gemma3Config(
        text_config={"max_position_embeddings": 77, "hidden_size": 8, "vocab_size": 9}
    )
    files = files_with(nested)
    assert (files.context_length, files.hidden_size, files.num_logits) == (77, 8, 9)
    assert files_with(BloomConfig(seq_length=55)).context_length == 55
    assert files_with(MambaConfig()).context_length is None
    assert find_pretrained(save_teacher(tmp_path)).context_length == CONTEXT_LENGTH


def test_a_configuration_is_told_by_what_it_computes() -> None:
    """A teacher of another configuration is another teacher, whatever its weights."""
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11)
    first = files_with(config).config_sha256
    assert files_with(GPT2Config(**config.to_dict())).config_sha256 == first
    for change in ({"layer_norm_epsilon": 1e-3}, {"activation_function": "relu"}, {"n_head": 4}):
        other = GPT2Config(**{**config.to_dict(), **change})
        assert files_with(other).config_sha256 != first
    for change in ({"_name_or_path": "elsewhere"}, {"transformers_version": "0"}):
        assert files_with(GPT2Config(**{**config.to_dict(), **change})).config_sha256 == first


@pytest.mark.parametrize(
    "device_map", ["nowhere", "cuda:97", "meta", {}, {"": "disk"}, {"": 97}, {"": True}], ids=str
)
def test_a_device_that_is_not_there_is_one_line(device_map: Any) -> None:
    with pytest.raises(UsageError, match=r"no such place for a model \[device_map\]"):
        check_device_map(device_map)


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"], ids=str)
def test_a_device_map_computes_the_same(tmp_path: Path, device_map: Any) -> None:
    if torch.cuda.is_available() and device_map == "auto":
        device_map = "cpu"  # kernels of another device round differently
    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    rows = torch.arange(10).view(2, 5)
    logits = [
        load_causal_model(find_pretrained(tmp_path), device_map=where).network(rows).logits
        for where in (None, device_map)
    ]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)
