"""``--init-from`` a language model: what it decides, how runs go on, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    GraniteConfig,
    MambaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    RwkvConfig,
)

from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import VOCAB, tiny_config, write_backbone
from tests.trainer.run_cases import LENGTH, call, tiny_run, write_store
from trainer.initial_weights import find_source, network_settings
from trainer.loading import load_student
from trainer.students.folder import weights_sha256
from trainer.students.registry import MDLM, STUDENTS
from trainer.training.construction import build_student
from trainer.training.loop import train
from trainer.training.settings import RunConfig


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("initial") / "store")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("initial-model") / "llama", "llama")


def run_from(model: Path, run_folder: Path | None = None, **changes: Any) -> RunConfig:
    network = network_settings(model, STUDENTS[changes.get("student", "mdlm")], run_folder)
    return tiny_run(network, **{"model__conditioning": "none", **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def test_the_command_takes_the_networks_widths(
    monkeypatch: pytest.MonkeyPatch, store: Path, llama: Path, tmp_path: Path
) -> None:
    """A preset's give way; ``--set`` of the user goes before both, and is refused if it differs."""
    start = ("run", "--store", store, "--preset", "tiny", "--init-from", llama)
    short = ("--set", "training.num_steps=2", "--set", "training.global_batch_size=4")
    assert call(monkeypatch, *start, *short, "--out", tmp_path / "run") == 0
    student = load_student(tmp_path / "run")
    settings = student.settings
    assert (settings.hidden_size, settings.num_layers, settings.num_heads) == (16, 2, 4)
    assert student.generate(num_samples=2, nfe=3, seed=0).shape == (2, LENGTH)
    assert "llama language model" in (tmp_path / "run" / "model" / "README.md").read_text()


def test_a_run_goes_on_without_its_language_model(store: Path, llama: Path, tmp_path: Path) -> None:
    """Bit for bit as a run that was never stopped."""
    model = shutil.copytree(llama, tmp_path / "model")
    config: dict[str, Any] = {"optimization__schedule": "constant"}
    assert train(
        run_from(model, training__num_steps=4, **config), store, tmp_path / "a", init_from=model
    )
    half = run_from(model, training__num_steps=2, **config)
    assert train(half, store, tmp_path / "b", init_from=model)
    shutil.rmtree(model)
    with pytest.raises(UsageError, match="no model there"):
        network_settings(model, MDLM)
    whole = run_from(model, tmp_path / "b", training__num_steps=4, **config)
    assert train(whole, store, tmp_path / "b", init_from=model)
    expected, got = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_language_model_is_known_by_content(store: Path, llama: Path, tmp_path: Path) -> None:
    """A moved folder goes on; other weights, in its place or elsewhere, and other widths do not."""
    model = shutil.copytree(llama, tmp_path / "model")

    def go_on(place: Path, num_steps: int, source: Path | None = None) -> bool:
        changes = {"training__num_steps": num_steps, "optimization__schedule": "constant"}
        run = run_from(place, **changes)
        return train(run, store, tmp_path / "run", init_from=source or place)

    assert go_on(model, 2)
    moved = model.rename(tmp_path / "moved")
    assert go_on(moved, 3)
    for place in (model, tmp_path / "other"):
        with pytest.raises(UsageError, match="other weights"):
            go_on(write_backbone(place, "llama", seed=1), 4)
    wider = write_backbone(tmp_path / "wider", "llama", intermediate_size=32)
    with pytest.raises(UsageError, match=r"another setting.*\.intermediate_size.*got 32"):
        go_on(wider, 4, moved)


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_read_again_begins_with_it(
    monkeypatch: pytest.MonkeyPatch, store: Path, llama: Path, tmp_path: Path, student: str
) -> None:
    """Its network in both parts, its weights in the first; the second begins with the first's."""
    out = tmp_path / "run"
    chosen = ["--set", "training.num_steps=20", "--set", "training.global_batch_size=4"]
    chosen += ["--set", "optimization.learning_rate=1e-9"]
    line = ("two-stage", "--store", store, "--out", out, "--student", student, "--init-from", llama)
    assert call(monkeypatch, *line, *chosen) == 0
    record = json.loads((out / "model" / "student.json").read_text())
    assert record["run"]["init_from"]["weights_sha256"] == weights_sha256(out / "plain" / "model")
    second = load_student(out)
    assert second.is_conditioned and second.settings.noise.layers == (1, 2)
    model = AutoModelForCausalLM.from_pretrained(llama).state_dict()
    for folder in (out / "plain", out):
        found = weights(folder)
        name = "layers.1.mlp.up_proj.weight"
        expected = model[f"model.{name}"]
        torch.testing.assert_close(found[f"backbone.network.{name}"], expected, rtol=0, atol=1e-6)


def test_a_student_of_ours_is_known_from_a_language_model(
    store: Path, llama: Path, tmp_path: Path
) -> None:
    assert train(tiny_run(training__num_steps=1), store, tmp_path / "dit")
    assert find_source(tmp_path / "dit").language_model is None
    assert network_settings(tmp_path / "dit", MDLM) == {} == network_settings(None, MDLM)
    assert find_source(llama).language_model is not None
    assert find_source(tmp_path / "dit").weights_sha256 != find_source(llama).weights_sha256


def bert(folder: Path) -> Path:
    sizes = {**SIZES, "num_attention_heads": 2, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    return folder


def scaled(folder: Path) -> Path:
    """A model whose logits are more than W h."""
    sizes = tiny_config("llama").to_dict()
    kept = {n: v for n, v in sizes.items() if n not in ("model_type", "architectures")}
    config = GraniteConfig(**{**kept, "logits_scaling": 3.0})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def random_model(config: PretrainedConfig) -> Any:
    def make(folder: Path) -> Path:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return make


SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}
BLOOM = BloomConfig(vocab_size=16, hidden_size=16, n_layer=2, n_head=2)
MPT = MptConfig(d_model=16, n_heads=2, n_layers=2, vocab_size=16)


def windowed(window: int) -> Any:
    config = MistralConfig(**SIZES, **HEADS, max_position_embeddings=64, sliding_window=window)
    return random_model(config)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windowed(LENGTH - 1), f"window of {LENGTH - 1} .*at least the {LENGTH} of a row"),
        (random_model(MambaConfig(**SIZES)), "cannot become a student .*mamba"),
        (random_model(RwkvConfig(**SIZES)), "cannot become a student .*rwkv"),
        (random_model(BLOOM), "cannot become a student .*bloom"),
        (random_model(MPT), "cannot become a student .*mpt"),
        (lambda folder: write_backbone(folder, num_logits=VOCAB - 1), "vocabulary.*got 11"),
        (lambda folder: write_backbone(folder, max_position_embeddings=7), "rows.*got 8; .*most 7"),
        (bert, "not causal|cannot become"),
        (scaled, "differ by .* of their spread"),
    ],
)
def test_models_that_do_not_fit(store: Path, tmp_path: Path, make: Any, expected: str) -> None:
    model = make(tmp_path / "model")
    with pytest.raises(UsageError, match=expected):
        build_student(run_from(model), ShardStore.open(store), model)


def test_a_window_as_long_as_the_row_is_none(store: Path, tmp_path: Path) -> None:
    model = windowed(LENGTH)(tmp_path / "model")
    build_student(run_from(model), ShardStore.open(store), model)


def tokenizer_of(first: str) -> PreTrainedTokenizerFast:
    ids = {first: 0, **{f"w{i}": i for i in range(1, VOCAB)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(ids, first)))


def test_another_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    """Tokens of the store under other ids would be garbage to the model."""
    tokenizer_of("a").save_pretrained(tmp_path / "tokens")
    files = {f"tokenizer/{p.name}": p.read_bytes() for p in (tmp_path / "tokens").iterdir()}
    opened = ShardStore.open(write_store(tmp_path / "store", files=files))
    model = shutil.copytree(llama, tmp_path / "model")
    tokenizer_of("b").save_pretrained(model)
    with pytest.raises(UsageError, match=r"1 other tokens, the first 'b' as id 0; expected 'a'"):
        build_student(run_from(model), opened, model)
    tokenizer_of("a").save_pretrained(model)
    build_student(run_from(model), opened, model)


def test_what_cannot_be_begun(store: Path, llama: Path, tmp_path: Path) -> None:
    opened = ShardStore.open(store)
    with pytest.raises(UsageError, match="network_settings"):
        build_student(tiny_run(model__conditioning="none"), opened, llama)
    with pytest.raises(UsageError, match=r"does not read \[model\.language_model\].* student ar;"):
        build_student(run_from(llama, student="ar"), opened, llama)
    with pytest.raises(UsageError, match="no model there"):
        network_settings(tmp_path / "absent", MDLM)
    with pytest.raises(UsageError, match=r"cannot find the source.*no-such-model"):
        network_settings("no-such-model", MDLM)


def test_the_configuration_is_kept_as_it_was_read(store: Path, llama: Path, tmp_path: Path) -> None:
    assert train(run_from(llama, training__num_steps=1), store, tmp_path / "run", init_from=llama)
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["language_model"] == network_settings(llama, MDLM)["model"]["language_model"]
    assert saved["language_model"]["model_type"] == "llama"
