"""Medusa heads: the backbone's own head at step 0, causal in the noise, nothing frozen moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel, AutoModelForCausalLM, CohereConfig

from shards.errors import UsageError
from shards.language_model.loading import find_pretrained
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.backbone_cases import SHAPES, backbone_run, store_of, write_backbone
from tests.trainer.run_cases import LENGTH, VOCAB, assert_same_run
from tests.trainer.training.test_resume import run_with_signal
from trainer.loading import load_student
from trainer.objective.batch import BatchMaker
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.registry import Medusa
from trainer.training.construction import build_student
from trainer.training.loop import Trainer, train

NUM_HEADS = 2


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("medusa")
    backbone = write_backbone(folder / "backbone")
    return backbone, store_of(folder / "store", backbone)


def fresh(places: tuple[Path, Path], **changes: Any) -> Medusa:
    backbone, store = places
    config = backbone_run(backbone, **changes)
    student = build_student(config, ShardStore.open(store), None)
    assert isinstance(student, Medusa)
    return student.eval()


def first_batch(store: Path, num_rows: int = 3) -> Any:
    opened = ShardStore.open(store)
    make = BatchMaker(opened, "train", 0, torch.device("cpu"), True)
    stream = ShardStream(opened.split("train", make.arrays), seed=0, global_batch_size=num_rows)
    return make(next(iter(stream)), 0)


def shaken(student: Medusa) -> Medusa:
    """Weights as after some training: nothing is zero."""
    generator = torch.Generator().manual_seed(5)
    for weight in student.parameters():
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return student


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_step_0_every_head_is_the_backbones(shape: str, dtype: str, tmp_path: Path) -> None:
    """Padded, tied and biased heads, grouped queries; W1, A and what is added to W2 are zero."""
    backbone = write_backbone(tmp_path / "backbone", shape)
    both = backbone, store_of(tmp_path / "store", backbone)
    student = fresh(both, model__backbone__dtype=dtype, model__backbone__head_output="low_rank")
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


@pytest.mark.parametrize("own", ["seen", "hidden"])
def test_noise_reaches_no_head_that_proposes_an_earlier_token(
    places: tuple[Path, Path], own: str
) -> None:
    """By gradients: head k = 1..K behind token i sees the noise of i + 1 .. i + 1 + k alone.

    Hidden, its own, the last of these, is missing.
    """
    student = shaken(fresh(places, model__backbone__own_noise=own))
    tokens = torch.randint(VOCAB, (1, 4), generator=torch.Generator().manual_seed(2))
    noise = torch.randn(1, 4 + NUM_HEADS + 1, 16, requires_grad=True)
    proposed = student(tokens, EmbeddedNoise(noise)).logits
    for anchor in range(4):
        for k in range(1, NUM_HEADS + 1):
            (gradient,) = torch.autograd.grad(
                proposed[0, anchor, k - 1, 3], noise, retain_graph=True
            )
            seen = (gradient[0] != 0).any(dim=-1).nonzero()[:, 0].tolist()
            stop = anchor + k + (2 if own == "seen" else 1)
            assert seen == list(range(anchor + 1, stop)), (anchor, k)


def test_the_loss_is_that_of_the_proposals(places: tuple[Path, Path]) -> None:
    """Each head's mean NLL of its own token, from ``forward``, weighed 0.8^k over their sum."""
    student = shaken(fresh(places))
    batch = first_batch(places[1])
    calls = []
    network = student.language_model.network
    handle = network.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    output = student.loss(batch)
    handle.remove()
    assert len(calls) == 1, "one backbone forward per row"
    with torch.no_grad():
        embedded = student._embed_rows(batch)
        anchors = LENGTH - 1 - NUM_HEADS
        proposed = student(batch.tokens[:, :anchors], EmbeddedNoise(embedded)).logits
    total = 0.0
    for k, weight in ((1, 0.8), (2, 0.64)):
        targets = batch.tokens[:, 1 + k : 1 + k + anchors, None]
        nll = -proposed[:, :, k - 1].gather(-1, targets).mean()
        total += weight / 1.44 * float(nll)
    assert float(output.loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(output.nll_sum / output.num_tokens) == pytest.approx(total, rel=1e-5)
    assert output.num_tokens == 3 * anchors and output.num_masked == 3 * anchors * NUM_HEADS


def test_frozen_weights_stay_and_the_folder_holds_heads_alone(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    backbone, store = places
    out = tmp_path / "run"
    trainer = Trainer(backbone_run(backbone), ShardStore.open(store), out)
    student = trainer.student
    before = {n: w.clone() for n, w in student.language_model.network.state_dict().items()}
    start = {n: w.detach().clone() for n, w in student.named_parameters()}
    assert trainer.run()
    after = student.language_model.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = [n for n, w in student.named_parameters() if not torch.equal(start[n], w)]
    assert len(moved) == len(start), "all that is trained was trained"
    files = [*out.rglob("*.safetensors")]
    for file in files:
        with safe_open(file, "pt") as tensors:
            names = {name.split("/")[0] for name in tensors.keys()}  # noqa: SIM118
        assert names <= {*start, "time_bounds"}, file
    assert len(files) == 4
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["frozen"]["weights_sha256"] == find_pretrained(backbone).weights_sha256
    assert str(tmp_path) not in (out / "model" / "config.json").read_text()
    loaded = AutoModel.from_pretrained(out / "model").eval()
    tokens, noise = torch.zeros(1, 2, dtype=torch.int64), EmbeddedNoise(torch.randn(1, 5, 16))
    mine = load_student(out)(tokens, noise).logits
    assert torch.allclose(loaded(tokens, noise).logits, mine, atol=1e-5)


def test_a_resumed_run_equals_an_uninterrupted_one(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    backbone, store = places
    changes = {"model__backbone__head_output": "full", "training__micro_batch_size": 3}
    config = backbone_run(backbone, **changes)
    assert train(config, store, tmp_path / "whole")
    assert not run_with_signal(config, store, tmp_path / "parts", at_step=4)
    assert train(config, store, tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("output", ["shared", "low_rank", "full"])
def test_training_lowers_the_loss(places: tuple[Path, Path], output: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model__backbone__head_output": output,
        "model__backbone__head_rank": 4,
        "training__num_steps": 40,
        "optimization__learning_rate": 0.03,
    }
    student = fresh(places, **changes)
    batch = first_batch(places[1], 16)
    before = float(student.loss(batch).loss.detach())
    train(backbone_run(places[0], **changes), places[1], tmp_path / "run")
    after = float(load_student(tmp_path / "run").loss(batch).loss.detach())  # type: ignore[attr-defined]
    assert after < 0.8 * before


def test_other_backbones_are_refused_by_hash(places: tuple[Path, Path], tmp_path: Path) -> None:
    backbone, store = places
    other = write_backbone(tmp_path / "other", seed=1)
    ours, theirs = (find_pretrained(each).weights_sha256 for each in (backbone, other))
    with pytest.raises(UsageError, match="another backbone") as refused:
        train(backbone_run(other), store, tmp_path / "run")
    assert ours in str(refused.value) and theirs in str(refused.value)
    with pytest.raises(UsageError, match="stands on a language model"):
        train(backbone_run("none"), store, tmp_path / "run")  # type: ignore[arg-type]
    train(backbone_run(backbone, training__num_steps=1), store, tmp_path / "run")
    with pytest.raises(UsageError, match="another backbone") as refused:
        load_student(tmp_path / "run", backbone=str(other))
    assert ours in str(refused.value) and theirs in str(refused.value)
    moved = tmp_path / "elsewhere"
    (tmp_path / "run" / "model").rename(moved)
    config = json.loads((moved / "config.json").read_text())
    config["backbone"]["location"] = "../gone"
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot be loaded") as refused:
        load_student(moved)
    assert ours in str(refused.value) and "--backbone" in str(refused.value)
    assert load_student(moved, backbone=str(backbone)) is not None


def test_settings_that_would_be_idle_are_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    backbone, store = places
    idle = {"diffusion.search_schedule": "true", "block_size": 4, "kd.kind": "token"}
    for name, value in idle.items():
        with pytest.raises(UsageError, match=f"model.{name}"):
            train(backbone_run(backbone, **{f"model__{name}": value}), store, tmp_path / "run")
    with pytest.raises(UsageError, match=r"model\.backbone"):
        train(backbone_run(backbone, student="mdlm"), store, tmp_path / "run")
    with pytest.raises(UsageError, match="too short"):
        train(backbone_run(backbone, model__backbone__num_proposed=LENGTH), store, tmp_path / "run")


def test_a_backbone_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = CohereConfig(vocab_size=VOCAB, num_hidden_layers=1, logit_scale=0.1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "backbone")
    store = store_of(tmp_path / "store", tmp_path / "backbone")
    with pytest.raises(UsageError, match="cannot be continued"):
        train(backbone_run(tmp_path / "backbone"), store, tmp_path / "run")
