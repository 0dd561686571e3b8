"""Students that are a language model of transformers: whose layers they have, how these attend."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.backbone_cases import SHAPES, VOCAB, write_backbone
from tests.trainer.run_cases import LENGTH, tiny_run, write_store
from trainer.initial_weights import network_settings
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.configuration import NoiseSettings
from trainer.students.decoder import DecoderBackbone
from trainer.students.dit import causal_attention, full_attention
from trainer.students.folder import read_model
from trainer.students.registry import MDLM, STUDENTS, Student
from trainer.training.construction import build_student
from trainer.training.settings import RunConfig

NOISE = {
    "model__conditioning": "gumbel",
    "model__noise__injection": "add",
    "model__noise__prior_weight": 1.0,
    "model__noise__layers": "[1,2]",
}
TOKENS = torch.arange(LENGTH)[None] % VOCAB


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return ShardStore.open(write_store(tmp_path_factory.mktemp("decoder") / "store"))


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_backbone(tmp_path_factory.mktemp("one") / "model", "llama")


def run_from(model: Path, **changes: Any) -> RunConfig:
    """The tiny run of a student that begins as that model."""
    kind = STUDENTS[changes.get("student", "mdlm")]
    return tiny_run(network_settings(model, kind), **{"model__conditioning": "none", **changes})


def student_from(model: Path, store: ShardStore, **changes: Any) -> Student:
    return build_student(run_from(model, **changes), store, model).eval()


def batch_of(store: ShardStore, num_rows: int = 3) -> Batch:
    maker = BatchMaker(store, "train", 3, torch.device("cpu"), with_noise=True)
    stream = ShardStream(store.split("train", maker.arrays), seed=0, global_batch_size=num_rows)
    return maker(next(iter(stream)), 1)


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


def test_attending_to_the_left_it_says_what_the_model_says(model: Path, store: ShardStore) -> None:
    """A block's states at their own place, an MDLM's at that of the token they are about."""
    tokens = torch.randint(VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = AutoModelForCausalLM.from_pretrained(model)(tokens).logits[..., :VOCAB]
    block = student_from(model, store, student="bd3lm", model__block_size=4)
    logits = logits_to_the_left(block, tokens)
    torch.testing.assert_close(logits[..., :VOCAB], expected, rtol=1e-4, atol=1e-4)
    assert not logits[..., VOCAB].any(), "the mask's logit begins at 0"
    embedding = block.backbone.vocab_embed.embedding
    torch.testing.assert_close(embedding[VOCAB], embedding[:VOCAB].mean(0))
    shifted = logits_to_the_left(student_from(model, store), tokens)
    torch.testing.assert_close(shifted[:, 1:, :VOCAB], expected[:, :-1], rtol=1e-4, atol=1e-4)


def test_what_it_sees(model: Path, store: ShardStore) -> None:
    """An MDLM both sides; a block of a BD3-LM itself and the clean past."""
    mdlm = student_from(model, store)
    first = [mdlm(each).logits[0, 0] for each in (TOKENS, changed(TOKENS, -1))]
    assert not torch.allclose(*first, atol=1e-3)
    student = student_from(model, store, student="bd3lm", model__block_size=4)
    noised = TOKENS.clone()
    noised[0, 5:7] = student.mask_id
    base = student.denoise(noised, TOKENS)[:, 4:]
    unseen = noised.clone()
    unseen[:, :4] = student.mask_id
    same = student.denoise(unseen, changed(TOKENS, 4, 5, 6, 7))[:, 4:]
    torch.testing.assert_close(same, base, rtol=0, atol=1e-5)
    past = student.denoise(noised, changed(TOKENS, 1))[:, 4:]
    beside = student.denoise(changed(noised, 7), TOKENS)[:, 4]
    assert not torch.allclose(past, base, atol=1e-3)
    assert not torch.allclose(beside, base[:, 0], atol=1e-3)


def test_blocks_behind_a_cache_are_those_of_the_whole_row(model: Path, store: ShardStore) -> None:
    """Keys and values of grouped heads, at their positions, with noise in every block."""
    student = shaken(student_from(model, store, student="bd3lm", model__block_size=4, **NOISE))
    batch = batch_of(store)
    tokens = batch.tokens.clone()
    tokens[:, 5:] = student.mask_id
    everywhere = torch.ones(tokens.shape, dtype=torch.bool)
    assert batch.noise is not None
    condition = student.embed_noise(batch.noise.at(everywhere), 0.85)
    condition = condition.unflatten((3, LENGTH)).map(torch.detach)
    whole = student.predict(tokens, condition)[:, 4:]
    masked = tokens[:, 4:] == student.mask_id
    cache = student.start_cache(3)
    found = student.predict_after(tokens[:, :4], tokens[:, 4:], masked, condition[:, 4:], cache)
    torch.testing.assert_close(found, whole[masked], rtol=0, atol=1e-4)
    again = student.predict_after(tokens[:, :0], tokens[:, 4:], masked, condition[:, 4:], cache)
    torch.testing.assert_close(again, found, rtol=0, atol=1e-4)


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_noise_that_is_added_begins_silent_and_is_learnt(
    model: Path, store: ShardStore, student: str
) -> None:
    blocks = {"student": student, **({"model__block_size": 4} if student == "bd3lm" else {})}
    plain = student_from(model, store, **blocks)
    with_noise = student_from(model, store, **blocks, **NOISE)
    batch = batch_of(store)
    loss = with_noise.loss(batch).loss
    assert torch.equal(loss, plain.loss(batch).loss)
    loss.backward()
    silent = [n for n, p in with_noise.named_parameters() if p.grad is None]
    assert not silent
    weight = with_noise.get_parameter("conditioner.weight")
    assert weight.grad is not None and bool(weight.grad.any())


def test_a_reading_behind_the_last_layer_lies_before_the_final_norm(
    model: Path, store: ShardStore
) -> None:
    """What it adds changes the row's own logits, and nobody else's: no layer follows."""
    run = {**NOISE, "model__noise__layers": "[2]"}
    student = student_from(model, store, **run)
    reading = student.backbone.noise_readings["2"]
    batch = batch_of(store, 1)
    tokens = batch.tokens.clone()
    tokens[:, 3] = student.mask_id
    assert batch.noise is not None
    condition = student.embed_noise(batch.noise.at(torch.ones_like(tokens, dtype=torch.bool)))
    condition = condition.unflatten((1, LENGTH)).map(torch.detach)
    before = student(tokens, condition).logits
    torch.nn.init.normal_(reading.weight)
    after = student(tokens, condition).logits
    moved = (after - before).abs().amax(-1)[0] > 1e-6
    assert moved.tolist() == [position == 3 for position in range(LENGTH)]
    # Behind the norm a state's mean square is that of the norm's weights: 1 here.
    hidden, _ = student.sampling_states(tokens, condition)
    torch.testing.assert_close(hidden[0, 3].square().mean(), torch.tensor(1.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("student", ["mdlm", "bd3lm"])
def test_training_and_sampling_put_the_noise_at_the_same_states(
    model: Path, store: ShardStore, student: str
) -> None:
    """The loss places n noise embeddings, a sampler has them laid out like the row."""
    blocks = {"student": student, **({"model__block_size": 4} if student == "bd3lm" else {})}
    reader = shaken(student_from(model, store, **blocks, **NOISE))
    assert isinstance(reader, MDLM)
    batch = batch_of(store)
    corruption = reader.corrupt(batch)
    places = corruption.places
    nlls = places.read(reader.corrupted_loss(batch, corruption).token_nlls)
    assert batch.noise is not None
    row = reader.embed_noise(batch.noise.at(places)).laid_out(places.index, batch.tokens.shape)
    noised = batch.tokens.masked_fill(corruption.mask, reader.mask_id)
    logits = reader.denoise(noised, batch.tokens, row)[..., :VOCAB]
    expected = -places.read(logits.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0])
    weights = places.read(corruption.weight)
    torch.testing.assert_close(nlls, expected.detach() * weights, rtol=1e-4, atol=1e-5)


def test_states_that_predict_the_next_token_need_those_before(
    llama: Path, store: ShardStore
) -> None:
    network = network_settings(llama, MDLM)["model"]
    added = NoiseSettings(injection="add")
    settings = dataclasses.replace(run_from(llama).model, conditioning="gumbel", noise=added)
    assert settings.language_model == network["language_model"] and settings.predicts_next
    with pytest.raises(UsageError, match=r"injection.*add where predicts_next"):
        dataclasses.replace(settings, noise=NoiseSettings())
    with pytest.raises(UsageError, match=r"predicts_next.*false for a DiT"):
        dataclasses.replace(settings, language_model=None)
    with pytest.raises(UsageError, match=r"time_conditioning.*no time"):
        run_from(llama, model__diffusion__time_conditioning="true")


def test_dropout_is_of_what_a_layer_adds(llama: Path, store: ShardStore) -> None:
    """Nearly all of it dropped, the states are the embeddings, normalised."""
    student = student_from(llama, store, student="bd3lm", model__dropout=1 - 1e-7)
    dropped = states(student.train(), full_attention)
    embedded = student.backbone.vocab_embed(TOKENS)
    torch.testing.assert_close(dropped, student.backbone.network.norm(embedded))
    assert not torch.allclose(states(student.eval(), full_attention), dropped, atol=1e-2)


def test_the_networks_own_dropout_is_off(model: Path, store: ShardStore) -> None:
    """GPT-2 has three kinds of it; the student's is the only one, and 0 here."""
    student = student_from(model, store)
    kept = states(student, full_attention)
    assert torch.equal(states(student.train(), full_attention), kept)


def test_no_rows_give_gradients_of_zero(model: Path, store: ShardStore) -> None:
    """A process's share of a last batch."""
    student = student_from(model, store)
    loss = student.loss(batch_of(store).rows(slice(0))).loss
    assert not float(loss.detach())
    loss.backward()
    grads = [p.grad for p in student.backbone.blocks.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)


def test_the_folder_stands_alone(model: Path, store: ShardStore, tmp_path: Path) -> None:
    student = student_from(model, store)
    student.save_pretrained(tmp_path / "student")
    loaded = read_model(tmp_path / "student").eval()
    assert isinstance(loaded.backbone, DecoderBackbone)
    batch = batch_of(store)
    torch.testing.assert_close(loaded.loss(batch).loss, student.loss(batch).loss)
    assert loaded.config.get_text_config() is loaded.config, "what it holds is no part of its own"
    from_it = student_from(tmp_path / "student", store)
    torch.testing.assert_close(from_it.loss(batch).loss, student.loss(batch).loss)
    copied = dict(from_it.named_parameters())
    assert all(torch.equal(p, copied[n]) for n, p in student.named_parameters())


def test_what_it_costs(llama: Path, store: ShardStore) -> None:
    """6 FLOPs a weight of the layers and token, 12 per layer, pair and width attended.

    Two layers: queries, keys and values of two heads of four, output, three matrices of the MLP.
    """
    matrices = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24)
    expected = 6 * matrices * LENGTH + 12 * 2 * 16 * LENGTH**2
    assert student_from(llama, store).flops_per_row == expected


def test_a_network_without_weights_is_initialised(llama: Path, store: ShardStore) -> None:
    """The same shape from scratch: a baseline."""
    student = build_student(run_from(llama), store, None)
    begun = student_from(llama, store)
    (fresh,) = (p for n, p in student.named_parameters() if n.endswith("0.self_attn.q_proj.weight"))
    (trained,) = (p for n, p in begun.named_parameters() if n.endswith("0.self_attn.q_proj.weight"))
    assert fresh.shape == trained.shape and not torch.equal(fresh, trained)
    assert 0 < float(fresh.detach().std()) < 0.5


def test_attention_keeps_the_scale_of_its_layer(store: ShardStore, tmp_path: Path) -> None:
    """A model whose second layer's scores are halved; that it is the same model is tried inside."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, vocab_size=VOCAB, scale_attn_by_inverse_layer_idx=True)
    network = AutoModelForCausalLM.from_config(config)
    for weight in network.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.5)
    network.save_pretrained(tmp_path / "model")
    student = student_from(tmp_path / "model", store)
    expected = network.eval()(TOKENS).logits[:, :-1]
    torch.testing.assert_close(logits_to_the_left(student, TOKENS)[:, 1:, :VOCAB], expected)
