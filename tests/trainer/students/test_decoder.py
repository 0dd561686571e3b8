"""Students that begin as a language model of transformers: how they attend and go on."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, BertForMaskedLM, PreTrainedTokenizerFast

from benchmarks.goldens import denoise, predict
from shards.errors import UsageError
from shards.store.store import ShardStore
from tests.commands import call
from tests.trainer.backbone_cases import SHAPES, VOCAB, tiny_config, write_backbone
from tests.trainer.run_cases import LENGTH, first_batch, tiny_run, write_store
from tests.trainer.students.student_cases import row_noise
from trainer import initial_weights
from trainer.initial_weights import find_source, network_settings
from trainer.loading import load_student
from trainer.students.backbone import attention_window
from trainer.students.configuration import NoiseSettings
from trainer.students.decoder import DecoderBackbone, PlainHead
from trainer.students.dit import causal_attention, full_attention
from trainer.students.folder import read_model, weights_sha256
from trainer.students.registry import MDLM, STUDENTS, Student
from trainer.training.loop import train
from trainer.training.settings import RunConfig, build_student

NOISE = {
    "model__conditioning": "gumbel",
    "model__noise__injection": "add",
    "model__noise__prior_weight": 1.0,
    "model__noise__layers": "[1,2]",
}
BLOCKS = {"student": "bd3lm", "model__block_size": 4}
KINDS = pytest.mark.parametrize("kind", [{}, BLOCKS], ids=["mdlm", "bd3lm"])
TOKENS = torch.arange(LENGTH)[None] % VOCAB


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp(request.param) / "model", request.param)


def run_from(model: Path, run_folder: Path | None = None, **changes: Any) -> RunConfig:
    """The tiny run of a student that begins as that model."""
    network = network_settings(model, STUDENTS[changes.get("student", "mdlm")], run_folder)
    return tiny_run(network, **{"model__conditioning": "none", **changes})


def student_from(model: Path, store: Path, **changes: Any) -> Student:
    return build_student(run_from(model, **changes), ShardStore.open(store), model).eval()


def states(student: Student, attend: Any, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    embedded = student.backbone.vocab_embed(tokens)
    return student.backbone(embedded, None, torch.arange(tokens.shape[1]), attend)


def shaken(student: Student) -> Student:
    """With weights of the noise that do something."""
    torch.manual_seed(0)
    for name, weight in student.named_parameters():
        if "noise_readings" in name or "conditioner" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return student


def changed(tokens: torch.Tensor, *places: int) -> torch.Tensor:
    other = tokens.clone()
    other[:, list(places)] = (other[:, list(places)] + 1) % VOCAB
    return other


def logits_to_the_left(student: Student, tokens: torch.Tensor) -> torch.Tensor:
    return student.backbone.output_layer(states(student, causal_attention, tokens))


def test_attending_to_the_left_it_says_what_the_model_says(model: Path, store: Path) -> None:
    """A block's states at their own place, an MDLM's at that of the token they are about."""
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = AutoModelForCausalLM.from_pretrained(model)(tokens).logits[..., :VOCAB]
    block = student_from(model, store, **BLOCKS)
    logits = logits_to_the_left(block, tokens)
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-4, atol=1e-4)
    assert not logits[..., VOCAB].any(), "the mask's logit begins at 0"
    embedding = block.backbone.vocab_embed.embedding
    torch.testing.assert_close(embedding[VOCAB], embedding[:VOCAB].mean(0))
    shifted = logits_to_the_left(student_from(model, store), tokens)
    torch.testing.assert_close(shifted[:, 1:, :VOCAB], expected[:, :-1], rtol=1e-4, atol=1e-4)


def test_what_it_sees(model: Path, store: Path) -> None:
    """An MDLM both sides; a block of a BD3-LM itself and the clean past."""
    mdlm = student_from(model, store)
    first = [mdlm(each).logits[0, 0] for each in (TOKENS, changed(TOKENS, -1))]
    assert not torch.allclose(*first, atol=1e-3)
    student = student_from(model, store, **BLOCKS)
    noised = TOKENS.clone()
    noised[0, 5:7] = student.mask_id
    base = denoise(student, noised, TOKENS)[:, 4:]
    unseen = noised.clone()
    unseen[:, :4] = student.mask_id
    same = denoise(student, unseen, changed(TOKENS, 4, 5, 6, 7))[:, 4:]
    torch.testing.assert_close(same, base, rtol=0, atol=1e-5)
    past = denoise(student, noised, changed(TOKENS, 1))[:, 4:]
    beside = denoise(student, changed(noised, 7), TOKENS)[:, 4]
    assert not torch.allclose(past, base, atol=1e-3)
    assert not torch.allclose(beside, base[:, 0], atol=1e-3)


def test_blocks_behind_a_cache_are_those_of_the_whole_row(model: Path, store: Path) -> None:
    """Keys and values of grouped heads, at their positions, with noise in every block."""
    student, batch = shaken(student_from(model, store, **BLOCKS, **NOISE)), first_batch(store)
    tokens = batch.tokens.clone()
    tokens[:, 5:] = student.mask_id
    condition = row_noise(student, batch, 0.85)
    whole = predict(student, tokens, condition)[:, 4:]
    block, masked, own = tokens[:, 4:], tokens[:, 4:] == student.mask_id, condition[:, 4:]
    cache = student.start_cache(3)
    found = student.predict_after(tokens[:, :4], block, masked, own, cache)
    torch.testing.assert_close(found, whole[masked], rtol=0, atol=1e-4)
    again = student.predict_after(tokens[:, :0], block, masked, own, cache)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-4)


@KINDS
def test_added_noise_begins_silent_and_is_learnt(model: Path, store: Path, kind: Any) -> None:
    with_noise, batch = student_from(model, store, **kind, **NOISE), first_batch(store)
    loss = with_noise.loss(batch).loss
    assert torch.equal(loss, student_from(model, store, **kind).loss(batch).loss)
    loss.backward()
    assert [n for n, p in with_noise.named_parameters() if p.grad is None] == []
    assert bool(with_noise.get_parameter("conditioner.weight").grad.any())


def test_a_reading_behind_the_last_layer_is_before_the_norm(model: Path, store: Path) -> None:
    """What it adds changes the row's own logits, and nobody else's: no layer follows."""
    student = student_from(model, store, **{**NOISE, "model__noise__layers": "[2]"})
    batch = first_batch(store, 1)
    tokens, condition = batch.tokens.clone(), row_noise(student, batch)
    tokens[:, 3] = student.mask_id
    before = student(tokens, condition).logits
    torch.nn.init.normal_(student.backbone.noise_readings["2"].weight)
    after = student(tokens, condition).logits
    moved = (after - before).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [position == 3 for position in range(LENGTH)]
    # Behind the norm a state's mean square is that of the norm's weights: 1 here.
    hidden, _ = student.sampling_states(tokens, condition)
    torch.testing.assert_close(hidden[0, 3].square().mean(), torch.tensor(1.0), rtol=1e-3, atol=0)


@KINDS
def test_training_reads_noise_where_sampling_does(model: Path, store: Path, kind: Any) -> None:
    """The loss places n noise embeddings, a sampler has them laid out like the row."""
    reader, batch = shaken(student_from(model, store, **kind, **NOISE)), first_batch(store)
    assert isinstance(reader, MDLM)
    corruption = reader.corrupt(batch)
    places = corruption.places
    nlls = places.read(reader.corrupted_loss(batch, corruption).token_nlls)
    row = reader.embed_noise(batch.noise.at(places)).laid_out(places.index, batch.tokens.shape)
    noised = batch.tokens.masked_fill(corruption.mask, reader.mask_id)
    logits = denoise(reader, noised, batch.tokens, row)[..., :VOCAB]
    expected = -places.read(logits.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0])
    weights = places.read(corruption.weight)
    torch.testing.assert_close(nlls, expected.detach() * weights, rtol=1e-4, atol=1e-5)


def test_dropout_is_of_what_a_layer_adds_and_the_networks_own_is_off(model: Path, store: Path) -> None:
    """Nearly all of it dropped, the states are the embeddings, normalised. GPT-2 has three kinds of its own."""
    student = student_from(model, store, student="bd3lm", model__dropout=1 - 1e-7)
    dropped, kept = states(student.train(), full_attention), states(student.eval(), full_attention)
    assert not torch.allclose(kept, dropped, atol=1e-2)
    if "llama" in str(model):  # without positions in its embeddings
        torch.testing.assert_close(dropped, student.backbone.network.norm(student.backbone.vocab_embed(TOKENS)))
    student = build_student(run_from(model), ShardStore.open(store), model)
    assert all(part.training for part in student.modules()), "as it begins"
    kept = states(student.eval(), full_attention)
    assert torch.equal(states(student.train(), full_attention), kept)


def test_no_rows_give_gradients_of_zero(model: Path, store: Path) -> None:
    """A process's share of a last batch."""
    student = student_from(model, store)
    loss = student.loss(first_batch(store).rows(slice(0))).loss
    assert not float(loss.detach())
    loss.backward()
    grads = [p.grad for p in student.backbone.blocks.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_the_folder_stands_alone(model: Path, store: Path, tmp_path: Path) -> None:
    student, batch = student_from(model, store), first_batch(store)
    student.save_pretrained(tmp_path)
    loaded, from_it = read_model(tmp_path).eval(), student_from(tmp_path, store)
    assert isinstance(loaded.backbone, DecoderBackbone)
    assert loaded.config.get_text_config() is loaded.config, "what it holds is no part of its own"
    for other in (loaded, from_it):
        torch.testing.assert_close(other.loss(batch).loss, student.loss(batch).loss)
    copied = dict(from_it.named_parameters())
    assert all(torch.equal(p, copied[n]) for n, p in student.named_parameters())


def test_a_network_without_weights_is_initialised(llama: Path, store: Path) -> None:
    """The same shape from scratch: a baseline."""
    student = build_student(run_from(llama, model__embedding_init_std=0.02), ShardStore.open(store), None)
    assert student.backbone.vocab_embed.init_std == 0.02
    fresh, trained = (
        next(p for n, p in made.named_parameters() if n.endswith("0.self_attn.q_proj.weight"))
        for made in (student, student_from(llama, store))
    )
    assert fresh.shape == trained.shape and not torch.equal(fresh, trained)
    assert 0 < float(fresh.detach().std()) < 0.5


def test_attention_keeps_the_scale_of_its_layer(store: Path, tmp_path: Path) -> None:
    """A model whose second layer's scores are halved; that it is the same model is tried inside."""
    model = write_backbone(tmp_path, "gpt2", num_logits=VOCAB, scale_attn_by_inverse_layer_idx=True)
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    found = logits_to_the_left(student_from(model, store), TOKENS)[:, 1:, :VOCAB]
    torch.testing.assert_close(found, network(TOKENS).logits[:, :-1])


# --init-from: what it decides, how runs go on.


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def test_the_command_takes_the_networks_widths(store: Path, llama: Path, tmp_path: Path) -> None:
    """A preset's give way. The language model's configuration is kept as it was read; then it is needed no more."""
    source = shutil.copytree(llama, tmp_path / "source")
    start = ("run", "--store", store, "--preset", "tiny", "--init-from", source)
    short = ("--set", "training.num_steps=2", "--set", "training.global_batch_size=4")
    assert call("gdistill-train", *start, *short, "--out", tmp_path) == 0
    shutil.rmtree(source)
    assert call("gdistill-train", *start, *short, "--out", tmp_path) == 0
    student = load_student(tmp_path)
    settings = student.settings
    assert (settings.hidden_size, settings.num_layers, settings.num_heads) == (16, 2, 4)
    assert student.generate(num_samples=2, nfe=3, seed=0).shape == (2, LENGTH)
    assert "llama language model" in (tmp_path / "model" / "README.md").read_text()
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["language_model"] == network_settings(llama, MDLM)["model"]["language_model"]
    assert saved["language_model"]["model_type"] == "llama"


def go_on(model: Path, store: Path, out: Path, num_steps: int, source: Path | None = None) -> bool:
    """Train a student that begins as that model, or at ``source``, up to a step."""
    changes = {"training__num_steps": num_steps, "optimization__schedule": "constant"}
    return train(run_from(model, out, **changes), store, out, init_from=source or model)


def test_a_run_goes_on_with_its_language_model_moved_or_gone(store: Path, llama: Path, tmp_path: Path) -> None:
    """Bit for bit as a run that was never stopped; other weights, in its place or elsewhere, and other widths
    are refused."""
    model, out = shutil.copytree(llama, tmp_path / "model"), tmp_path / "parts"
    assert go_on(model, store, tmp_path / "whole", 4) and go_on(model, store, out, 2)
    moved = model.rename(tmp_path / "moved")
    assert go_on(moved, store, out, 3)
    for place in (model, tmp_path / "other"):
        with pytest.raises(UsageError, match="other weights"):
            go_on(write_backbone(place, "llama", seed=1), store, out, 4)
    wider = write_backbone(tmp_path / "wider", "llama", intermediate_size=32)
    with pytest.raises(UsageError, match=r"another setting.*\.intermediate_size.*got 32"):
        go_on(wider, store, out, 4, moved)
    shutil.rmtree(moved)
    with pytest.raises(UsageError, match="no model there"):
        network_settings(moved, MDLM)
    assert go_on(moved, store, out, 4)
    expected, got = weights(tmp_path / "whole"), weights(out)
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    student, network = find_source(out), find_source(llama)
    assert student.language_model is None and network.language_model is not None
    assert student.weights_sha256 != network.weights_sha256
    assert replace(network, folder=Path("org/name")).weights_sha256 == network.weights_sha256, "as of the hub"


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_read_again_begins_with_it(store: Path, llama: Path, tmp_path: Path, student: str) -> None:
    """Its network in both parts, its weights in the first; the second begins with the first's. It is read once."""
    source = shutil.copytree(llama, tmp_path / "source")
    chosen = ["--set", "training.num_steps=20", "--set", "training.global_batch_size=4"]
    chosen += ["--set", "optimization.learning_rate=1e-9", "--student", student]
    line = ("two-stage", "--store", store, "--out", tmp_path, "--init-from", source)
    assert call("gdistill-train", *line, *chosen) == 0
    shutil.rmtree(source)
    assert call("gdistill-train", *line, *chosen) == 0
    record = json.loads((tmp_path / "model" / "student.json").read_text())
    first = weights_sha256(tmp_path / "plain" / "model")
    assert record["run"]["init_from"]["weights_sha256"] == first
    second = load_student(tmp_path)
    assert second.is_conditioned and second.settings.noise.layers == (1, 2)
    name = "layers.1.mlp.up_proj.weight"
    expected = AutoModelForCausalLM.from_pretrained(llama).state_dict()[f"model.{name}"]
    for folder in (tmp_path / "plain", tmp_path):
        found = weights(folder)[f"backbone.network.{name}"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {**SIZES, "num_attention_heads": 2, "intermediate_size": 24}


def windowed(window: int) -> Any:
    return AutoConfig.for_model("mistral", **HEADS, num_key_value_heads=2, sliding_window=window)


WINDOWS: tuple[tuple[dict[str, Any], int | None], ...] = (
    ({"sliding_window": 6}, 6),
    ({"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, 6),
    ({"sliding_window": 6, "layer_types": ["full_attention"]}, None),
    ({"sliding_window": None}, None),
    ({"window_size": 5, "attention_layers": ["global", "local"]}, 5),
    ({"window_size": 5, "attention_layers": ["global"]}, None),
    ({"sliding_window": 6, "attention_chunk_size": 4}, 4),
)


def test_the_shortest_window_that_a_layer_has() -> None:
    for settings, window in WINDOWS:
        assert attention_window(SimpleNamespace(**settings)) == window, settings


FITS = "a limit as long as the row is none"
LIMITS = [
    (windowed(LENGTH), FITS),
    (tiny_config("llama", max_position_embeddings=LENGTH), FITS),
    (AutoConfig.for_model("phi", **HEADS), FITS),
    (windowed(LENGTH - 1), f"window of {LENGTH - 1} .*at least the {LENGTH} of a row"),
    (AutoConfig.for_model("mamba", **SIZES), "cannot become a student .*mamba"),
    (AutoConfig.for_model("bloom", **HEADS), "cannot become a student .*bloom"),
    (tiny_config("llama", VOCAB - 1), "vocabulary.*got 11"),
    (tiny_config("llama", max_position_embeddings=7), "rows.*got 8; .*most 7"),
    (AutoConfig.for_model("bert", **HEADS), "not causal|cannot become"),
    (AutoConfig.for_model("granite", **HEADS, logits_scaling=1.01), "differ by .* of their spread"),
]


def random_model(config: Any, folder: Path) -> Path:
    make = BertForMaskedLM if config.model_type == "bert" else AutoModelForCausalLM.from_config
    model = make(config)
    if config.model_type == "phi":  # whose logits have a bias
        torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("config", "expected"), LIMITS, ids=lambda value: str(value)[:12])
def test_which_models_fit(
    store: Path, tmp_path: Path, config: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is tried holds the student's logits of a few positions of a row."""
    shapes, project = [], PlainHead.features
    monkeypatch.setattr(initial_weights, "COMPARED_AT_ONCE", 3)
    monkeypatch.setattr(PlainHead, "features", lambda own, x, _: shapes.append(x.shape[1]) or project(own, x, _))
    with nullcontext() if expected == FITS else pytest.raises(UsageError, match=expected):
        student_from(random_model(config, tmp_path), store)
    assert shapes == ([3, 3, 1] if expected == FITS or "spread" in expected else [])


def test_logits_that_are_others_at_one_position_are_seen(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst position counts, wherever it lies in the parts that are compared."""
    project = PlainHead.features
    factor = torch.tensor([1.0, 1.1, 1.0])[:, None]
    monkeypatch.setattr(initial_weights, "COMPARED_AT_ONCE", 3)
    monkeypatch.setattr(PlainHead, "features", lambda own, x, _: project(own, x, _) * (factor if len(x[0]) == 3 else 1))
    with pytest.raises(UsageError, match=r"differ by .* of their spread"):
        student_from(random_model(windowed(LENGTH), tmp_path), store)


def tokenizer_of(first: str, size: int = VOCAB) -> PreTrainedTokenizerFast:
    ids = {first: 0, **{f"w{i}": i for i in range(1, size)}}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(ids, first)))


def test_another_tokenizer_is_refused(llama: Path, tmp_path: Path) -> None:
    """Tokens of the store under other ids would be garbage to the model. Its weights become float32."""
    tokenizer_of("a").save_pretrained(tmp_path / "tokens")
    files = {f"tokenizer/{p.name}": p.read_bytes() for p in (tmp_path / "tokens").iterdir()}
    store = write_store(tmp_path / "store", files=files)
    model = shutil.copytree(llama, tmp_path / "model")
    student_from(model, store)  # without a tokenizer there is nothing to compare
    for words, told in ((("b",), "'b' as id 0; expected 'a'"), (("a", VOCAB - 1), "None as id 11; expected 'w11'")):
        tokenizer_of(*words).save_pretrained(model)
        with pytest.raises(UsageError, match=rf"1 other tokens, the first {told}"):
            student_from(model, store)
    tokenizer_of("a").save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    assert {weight.dtype for weight in student_from(model, store).parameters()} == {torch.float32}


def test_what_cannot_be_begun(store: Path, llama: Path, finished: Path, tmp_path: Path) -> None:
    assert network_settings(finished, MDLM) == {} == network_settings(None, MDLM), "of a student nothing is taken"
    added = NoiseSettings(injection="add")
    settings = replace(run_from(llama).model, conditioning="gumbel", noise=added)
    network = network_settings(llama, MDLM)["model"]
    assert settings.language_model == network["language_model"] and settings.predicts_next
    with pytest.raises(UsageError, match=r"injection.*add where predicts_next"):
        replace(settings, noise=NoiseSettings())
    with pytest.raises(UsageError, match=r"predicts_next.*false for a DiT"):
        replace(settings, language_model=None)
    with pytest.raises(UsageError, match=r"time_conditioning.*no time"):
        run_from(llama, model__diffusion__time_conditioning="true")
    with pytest.raises(UsageError, match="network_settings"):
        build_student(tiny_run(model__conditioning="none"), ShardStore.open(store), llama)
    with pytest.raises(UsageError, match=r"does not read \[model\.language_model\].* student ar;"):
        student_from(llama, store, student="ar")
    with pytest.raises(UsageError, match="no model there"):
        network_settings(tmp_path / "absent", MDLM)
    with pytest.raises(UsageError, match=r"cannot find the source.*no-such-model"):
        network_settings("no-such-model", MDLM)
