"""Students on a frozen backbone: Medusa heads, and the drafter, a layer beside it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn.functional import pad
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from shards.errors import UsageError
from shards.language_model.loading import find_pretrained
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import SHAPES, backbone_run, store_of, write_backbone
from tests.trainer.run_cases import LENGTH, VOCAB, assert_same_run, first_batch
from tests.trainer.training.test_resume import run_with_signal
from trainer import load_student
from trainer.objective.batch import all_but_first
from trainer.students import drafter, medusa
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.drafter import Drafter, llama_runner, network_runner
from trainer.students.registry import Medusa
from trainer.training.loop import Trainer, train
from trainer.training.settings import build_student

NUM_HEADS = 2
SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"intermediate_size": 24, "num_attention_heads": 4}
BOTH = pytest.mark.parametrize("student", ["medusa", "drafter"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where backbones and their stores are written once and left alone."""
    return tmp_path_factory.mktemp("backbones")


def places(folder: Path, shape: str = "llama") -> tuple[Path, Path]:
    """A backbone of that shape and its store."""
    backbone, store = folder / shape, folder / f"store-{shape}"
    if not backbone.exists():
        write_backbone(backbone, shape)
    if not store.exists():
        store_of(store, backbone)
    return backbone, store


def fresh(folder: Path, student: str, shape: str = "llama", **changes: Any) -> tuple[Any, Path]:
    """A student at step 0, and the store."""
    backbone, store = places(folder, shape)
    config = backbone_run(backbone, student, **changes)
    return build_student(config, ShardStore.open(store), None), store


def tiny_drafter(folder: Path, shape: str = "llama", scale: float = 0.3, **changes: Any) -> tuple[Drafter, Path]:
    """A drafter at step 0 (``scale`` 0), or with random weights; and the store."""
    student, store = fresh(folder, "drafter", shape, **changes)
    assert isinstance(student, Drafter)
    torch.manual_seed(5)
    if scale:
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter, std=scale)
    return student, store


def trained_heads(folder: Path, shape: str = "llama", scale: float = 0.3, **changes: Any) -> tuple[Medusa, Path]:
    """Medusa heads with weights as after some training, of which none is zero; and the store."""
    student, store = fresh(folder, "medusa", shape, **changes)
    assert isinstance(student, Medusa)
    generator = torch.Generator().manual_seed(5)
    for weight in student.eval().parameters():
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=scale)
    return student, store


# What holds for both.


@BOTH
def test_a_run_keeps_all_but_the_backbone(folder: Path, tmp_path: Path, student: str) -> None:
    backbone, store = places(folder)
    trainer = Trainer(backbone_run(backbone, student), ShardStore.open(store), tmp_path)
    made: Any = trainer.student
    before = {n: w.clone() for n, w in made.language_model.network.state_dict().items()}
    start = {n: w.detach().clone() for n, w in made.named_parameters()}
    assert trainer.run()
    after = made.language_model.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not [n for n, w in made.named_parameters() if torch.equal(start[n], w)], "not trained"
    files = [*tmp_path.rglob("*.safetensors")]
    assert len(files) == 4
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = {name.split("/")[0] for name in tensors.keys()}  # noqa: SIM118
        assert names <= {*(name.split("/")[0] for name in start), "time_bounds"}, file
    size = sum(weight.numel() for weight in start.values())
    assert (tmp_path / "model/model.safetensors").stat().st_size < 4 * size + 8000
    told, record = (json.loads((tmp_path / f"model/{name}.json").read_text()) for name in ("config", "student"))
    size = sum(weight.numel() for weight in made.language_model.network.parameters())
    known = {"weights_sha256": find_pretrained(backbone).weights_sha256, "num_parameters": size}
    assert known.items() <= told["frozen"].items() and str(folder.parent) not in json.dumps((told, record))
    places_told = told["backbone"]["location"], made.config.backbone["location"]
    assert places_told == (os.path.relpath(backbone, tmp_path / "model"), str(backbone))
    made.settings = replace(made.settings, backbone=replace(made.settings.backbone, location="org/name"))
    assert made.published(tmp_path) == {}, "an id of the hub is none of a folder"
    tokens, noise = torch.arange(4).view(2, 2), EmbeddedNoise(torch.randn(2, 5, 16))
    given = (tokens, noise) if student == "medusa" else (tokens,)
    mine = load_student(tmp_path)(*given).logits
    with pytest.raises(UsageError, match=r"does not read this.*labels"):
        made(*given, labels=tokens)
    nothing = made.loss(first_batch(store).rows(slice(0))).loss
    nothing.backward()
    assert nothing == 0
    loaded = AutoModel.from_pretrained(tmp_path / "model").eval()
    assert torch.allclose(loaded(*given).logits, mine, atol=1e-5)
    assert mine.shape[:2] == (2, 2) and mine.shape[-1] == VOCAB


@BOTH
def test_resumed_runs_equal_uninterrupted_ones(folder: Path, tmp_path: Path, student: str) -> None:
    """Bit for bit; a drafter's from any store, heads that own their output in micro-batches."""
    backbone, store = places(folder)
    changes = {"model__backbone__head_output": "full", "training__micro_batch_size": 3}
    if student == "drafter":
        store, changes = store_of(tmp_path / "store", backbone, codec_name="seeded"), {}
    config = backbone_run(backbone, student, **changes)
    assert train(config, store, tmp_path / "whole")
    assert not run_with_signal(config, store, tmp_path / "parts", at_step=4)
    assert train(config, store, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@BOTH
def test_other_backbones_are_refused_by_hash(folder: Path, tmp_path: Path, student: str) -> None:
    backbone, store = places(folder)
    other, run, moved = tmp_path / "other", tmp_path / "run", tmp_path / "elsewhere"
    write_backbone(other, seed=1)
    ours, theirs = (find_pretrained(each).weights_sha256 for each in (backbone, other))
    both = rf"another backbone.*weights_sha256.*({ours}.*{theirs}|{theirs}.*{ours}) of \S+;"
    with pytest.raises(UsageError, match=both):
        train(backbone_run(other, student), store, run)
    train(backbone_run(backbone, student, training__num_steps=1), store, run)
    with pytest.raises(UsageError, match=both):
        load_student(run, backbone=str(other))
    elsewhere = ShardStore.open(store_of(tmp_path / "store", other))
    with pytest.raises(UsageError, match="the model stands on another backbone"):
        build_student(backbone_run(other, student), elsewhere, run)
    (run / "model").rename(moved)
    config = json.loads((moved / "config.json").read_text())
    config["backbone"]["location"] = "../gone"
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"cannot be loaded.*({ours}.*--backbone|--backbone.*{ours})"):
        load_student(moved)
    assert load_student(moved, backbone=str(backbone)) is not None


REFUSED = [
    ("medusa", {"model__diffusion__search_schedule": "true"}, "model.diffusion.search_schedule"),
    ("medusa", {"model__block_size": 4}, "model.block_size"),
    ("medusa", {"model__kd__kind": "token"}, "model.kd.kind"),
    ("medusa", {"model__backbone__num_proposed": LENGTH - 1}, r"too short.*at most 6 for rows of 8 tokens"),
    ("medusa", {"model__backbone__location": "none"}, "stands on a language model"),
    ("mdlm", {}, r"model\.backbone"),
    ("drafter", {"model__conditioning": "gumbel"}, "got gumbel; expected none: this student takes no noise"),
    ("drafter", {"model__backbone__own_noise": "seen"}, "own_noise"),
]


@pytest.mark.parametrize(("student", "changes", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_idle_settings_are_refused(folder: Path, tmp_path: Path, student: str, changes: Any, named: str) -> None:
    backbone, store = places(folder)
    with pytest.raises(UsageError, match=named):
        train(backbone_run(backbone, student, **changes), store, tmp_path)


def random_backbone(family: str, folder: Path, **sizes: Any) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **sizes}))
    model.save_pretrained(folder / family)


def test_backbones_that_nothing_can_stand_on_are_refused(tmp_path: Path) -> None:
    """Logits that are scaled behind the head; a state in the place of keys and values; too few tokens."""
    for student, family, sizes, named in (
        ("medusa", "llama", {**HEADS, "vocab_size": VOCAB - 1}, "fewer tokens.*got 11; expected at least 12"),
        ("medusa", "cohere", {**HEADS, "logit_scale": 0.1}, "cannot be continued"),
        ("drafter", "mamba", {"state_size": 4}, "no drafter can stand on this backbone"),
    ):
        random_backbone(family, tmp_path, **sizes)
        with pytest.raises(UsageError, match=named):
            fresh(tmp_path, student, family)


# Medusa heads: the backbone's own head at step 0, causal in the noise.


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_step_0_every_head_is_the_backbones(shape: str, dtype: str, folder: Path) -> None:
    """Padded, tied and biased heads, grouped queries; W1, A and what is added to W2 are zero."""
    changes = {"model__backbone__dtype": dtype, "model__backbone__head_output": "low_rank"}
    student = fresh(folder, "medusa", shape, **changes, model__backbone__head_rank=5)[0].eval()
    assert student.heads[1].output[0].out_features == 5
    tokens = torch.randint(VOCAB, (3, 6), generator=torch.Generator().manual_seed(0))
    noise = torch.randn(3, 6 + NUM_HEADS + 1, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        network = student.language_model.network
        logits = network(input_ids=tokens).logits[..., :VOCAB].float()
        proposed = student(tokens, EmbeddedNoise(noise)).logits
    assert proposed.shape == (3, 6, NUM_HEADS, VOCAB)
    # Equal up to the order of sums: another kernel, a step of bfloat16 for logits of about 8.
    room = 1e-4 if dtype == "float32" else 0.07
    for head in range(NUM_HEADS):
        assert torch.allclose(proposed[:, :, head], logits.log_softmax(-1), atol=room)
    with pytest.raises(UsageError, match="needs noise"):
        student(tokens)
    spread = student.noise_sequence(noise).var(-1, correction=0)
    torch.testing.assert_close(spread, torch.ones(spread.shape), rtol=1e-2, atol=0, msg="what heads see is normed")


@pytest.mark.parametrize("own", ["seen", "hidden"])
def test_noise_reaches_no_head_that_proposes_an_earlier_token(folder: Path, own: str) -> None:
    """By gradients: head k = 1..K behind token i sees the noise of i + 1 .. i + 1 + k alone.

    Hidden, its own, the last of these, is missing.
    """
    student, _ = trained_heads(folder, model__backbone__own_noise=own)
    tokens = torch.randint(VOCAB, (1, 4), generator=torch.Generator().manual_seed(2))
    noise = torch.randn(1, 4 + NUM_HEADS + 1, 16, requires_grad=True)
    proposed = student(tokens, EmbeddedNoise(noise)).logits
    for anchor in range(4):
        for k in range(1, NUM_HEADS + 1):
            target = proposed[0, anchor, k - 1, 3]
            (gradient,) = torch.autograd.grad(target, noise, retain_graph=True)
            seen = (gradient[0] != 0).any(dim=-1).nonzero()[:, 0].tolist()
            stop = anchor + k + (2 if own == "seen" else 1)
            assert seen == list(range(anchor + 1, stop)), (anchor, k)


@pytest.mark.parametrize("head", ["shared", "low_rank", "full"])
def test_the_loss_is_that_of_the_proposals(folder: Path, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head's NLL of its own token, from ``forward``, weighed 0.8^k over their sum; in chunks of rows."""
    monkeypatch.setattr(medusa, "CHUNK_ROWS", {"cpu": 4, "cuda": 4})
    student, store = trained_heads(folder, model__backbone__head_output=head)
    batch, calls = first_batch(store), []
    network = student.language_model.network
    handle = network.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    output = student.loss(batch)
    handle.remove()
    assert len(calls) == 1, "one backbone forward per row"
    with torch.no_grad():
        places = all_but_first(batch.tokens)
        noise = student.embed_noise(batch.noise.at(places)).laid_out(places.index, batch.tokens.shape)
        anchors = LENGTH - 1 - NUM_HEADS
        proposed = student(batch.tokens[:, :anchors], noise).logits
    total = torch.zeros(3, anchors)
    for k, weight in ((1, 0.8), (2, 0.64)):
        targets = batch.tokens[:, 1 + k : 1 + k + anchors, None]
        total -= weight / 1.44 * proposed[:, :, k - 1].gather(-1, targets)[..., 0]
    torch.testing.assert_close(output.loss.detach(), total.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(output.token_nlls, pad(total, (1, NUM_HEADS)), rtol=1e-4, atol=1e-5)
    assert output.num_tokens == 3 * anchors and output.num_masked == 3 * anchors * NUM_HEADS
    output.loss.backward()
    assert not [name for name, p in student.named_parameters() if p.grad is None or not p.grad.any()]


# The drafter: what its layers are, what it learns from.


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_at_step_0_it_is_the_backbone_without_its_middle(shape: str, folder: Path) -> None:
    """Of a backbone of two layers the backbone itself; a third makes a difference."""
    student, _ = tiny_drafter(folder, shape, scale=0.0)
    network = AutoModelForCausalLM.from_pretrained(folder / shape).eval()
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    wanted = network(tokens).logits[..., :VOCAB]
    assert torch.allclose(student(tokens).logits, wanted, atol=1e-4)


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@torch.no_grad()
def test_own_operations_are_the_networks(shape: str, tmp_path: Path) -> None:
    """Rows at unlike positions that see unlike keys; what lies in the cache behind two steps."""
    write_backbone(tmp_path, shape, num_hidden_layers=3)
    network = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    generator, chosen = torch.Generator(), drafter._chosen(network)
    assert chosen == [network.base_model.layers[i] for i in (0, 2)], "the first and the last"
    weights = [dict(layer.named_parameters()) for layer in chosen]
    found = []
    for runner in (llama_runner, network_runner):
        generator.manual_seed(4)
        run, cache = runner(network, weights), DynamicCache()
        for width in (3, 6, 9):
            rows = torch.randn(2, 3, 16, generator=generator)
            positions = torch.randint(6, 40, (2, 3), generator=generator)
            seen = torch.rand(2, 3, width, generator=generator) < 0.6
            seen[..., -3:] |= torch.eye(3, dtype=torch.bool)
            found.append(run(rows, positions, seen, cache))
        found += [part for layer in cache.layers for part in (layer.keys, layer.values)]
    half = len(found) // 2
    assert half == 7
    for ours, theirs in zip(found[:half], found[half:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_only_llamas_form_has_steps_of_own_operations(folder: Path, tmp_path: Path) -> None:
    """GPT-2 has other parts; Qwen3 has more, and says something else."""
    for shape, expected in (("llama", True), ("qwen2", True), ("gpt2", False)):
        assert tiny_drafter(folder, shape)[0]._is_llama is expected, shape
    random_backbone("qwen3", tmp_path, **HEADS, num_key_value_heads=2, head_dim=4)
    assert tiny_drafter(tmp_path, "qwen3")[0]._is_llama is False
    eager = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(_attn_implementation="eager"))
    added = drafter.attention_mask(eager, torch.tensor([[[True, False]]]))
    assert added.tolist() == [[[[0.0, torch.finfo(torch.float32).min]]]], (
        "to scores, where a kernel takes no truth values"
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_it_learns_the_backbones_distribution_everywhere(shape: str, folder: Path, monkeypatch: Any) -> None:
    """The loss by its definition, in chunks; a row's does not depend on its companions nor on what comes."""
    monkeypatch.setattr(drafter, "CHUNK_ROWS", {"cpu": 5, "cuda": 5})
    student, store = tiny_drafter(folder, shape)
    batch = first_batch(store, 4)
    output, tokens = student.loss(batch), batch.tokens
    plain = AutoModelForCausalLM.from_pretrained(folder / shape).eval()
    log_p = plain(tokens).logits[:, :-1, :VOCAB].log_softmax(dim=-1)
    log_q = torch.cat([student(tokens[:, :stop]).logits[:, -1:] for stop in range(1, LENGTH)], dim=1).log_softmax(
        dim=-1
    )
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    tv = (log_p.exp() - log_q.exp()).abs().sum(dim=-1) / 2
    assert torch.allclose(output.token_nlls[:, 1:], kl, atol=1e-3)
    assert torch.isclose(output.loss, (0.5 * kl + tv).mean(), atol=1e-4)
    assert output.num_tokens == kl.numel() and not output.token_nlls[:, 0].any() and not output.token_nlls.requires_grad
    part = student.loss(batch.rows(slice(2, 4)))
    assert torch.allclose(output.token_nlls[2:4], part.token_nlls, atol=1e-4)


def test_tokens_that_do_not_count_teach_nothing(folder: Path) -> None:
    student, store = tiny_drafter(folder)
    batch = first_batch(store, 4)
    counted = torch.zeros_like(batch.tokens, dtype=torch.bool)
    counted[:, 3] = True
    whole, some = student.loss(batch), student.loss(replace(batch, counted=counted))
    assert torch.allclose(some.token_nlls[:, 3], whole.token_nlls[:, 3])
    assert int((some.token_nlls != 0).sum()) == some.num_tokens == 4
    torch.testing.assert_close(some.loss + student.loss(replace(batch, counted=~counted)).loss, whole.loss)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_backbones_train(shape: str, folder: Path) -> None:
    student, store = tiny_drafter(folder, shape, 0.1, model__backbone__dtype="bfloat16")
    assert student.language_model.network.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        output = student.loss(first_batch(store, 4))
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters())
    assert all(p.dtype == torch.float32 for p in student.parameters())


def test_drafters_of_other_forms_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    """The folder of an earlier version, by what its config says."""
    tiny_drafter(folder, model__backbone__dtype="bfloat16")[0].save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["backbone"] |= {"lora_rank": 16, "num_starts": 32}
    file.write_text(json.dumps(config))
    loaded: Any = load_student(tmp_path, backbone=str(folder / "llama"))  # what all students once named
    assert loaded.language_model.network.dtype == torch.bfloat16
    frozen = config["frozen"]
    for name, commit in (("linear_layers", "2090fb1"), ("layer", "ccf86f2")):
        file.write_text(json.dumps({**config, "frozen": {**frozen, name: {}}}))
        with pytest.raises(UsageError, match=rf"no more.*{name}.*commit {commit}.*reads it"):
            load_student(tmp_path)
