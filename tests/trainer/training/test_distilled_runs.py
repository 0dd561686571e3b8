"""Students that learn from the teacher's stored probabilities, with and without noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.run_cases import VOCAB, teacher_logits, tiny_run, write_store
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.folder import read_model
from trainer.students.registry import AR, BD3LM, MDLM
from trainer.training.construction import build_student
from trainer.training.loop import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that keeps all V probabilities."""
    return write_store(tmp_path_factory.mktemp("whole") / "store", num_entries=VOCAB)


def first_batch(store: Path) -> Batch:
    opened = ShardStore.open(store)
    maker = BatchMaker(opened, "train", 3, CPU, with_noise=True)
    stream = ShardStream(opened.split("train", maker.arrays), seed=0, global_batch_size=8)
    return maker(next(iter(stream)), 0)


STUDENTS = [("mdlm", 8), ("bd3lm", 4)]


@pytest.mark.parametrize("conditioning", ["none", "gumbel"])
@pytest.mark.parametrize(("name", "block"), STUDENTS)
def test_a_diffusion_student_pays_the_dense_kl_where_it_is_masked(
    whole: Path, name: str, block: int, conditioning: str
) -> None:
    weight, extra = 0.75, {"model__block_size": block} if name == "bd3lm" else {}
    token = {"model__kd__kind": "token", "model__kd__weight": weight}
    config = tiny_run(student=name, model__conditioning=conditioning, **token, **extra)
    student = build_student(config, ShardStore.open(whole), None)
    assert isinstance(student, MDLM | BD3LM)
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    batch = first_batch(whole)
    corruption = student.corrupt(batch)
    noised = batch.tokens.masked_fill(corruption.mask, student.mask_id)
    noise = None
    if student.is_conditioned and batch.noise is not None:
        noise = student.embed_noise(batch.noise.at(corruption.mask))
        noise = noise.laid_out(corruption.places.index, noised.shape)
    with torch.no_grad():
        found = student.denoise(noised, batch.tokens, noise)[..., :VOCAB].log_softmax(-1)
        teacher = teacher_logits()[batch.tokens[:, :-1]].log_softmax(-1)
        kl = functional.kl_div(found[:, 1:], teacher, reduction="none", log_target=True).sum(-1)
        nll = -found.gather(-1, batch.tokens[..., None])[..., 0]
        loss = weight * functional.pad(kl, (1, 0)) + (1 - weight) * nll
        expected = (loss * corruption.weight * corruption.mask).sum() / noised.numel()
    output = student.train().loss(batch)
    torch.testing.assert_close(output.loss, expected, rtol=3e-3, atol=1e-5)
    likelihood = student.eval().loss(batch)
    torch.testing.assert_close(likelihood.token_nlls, output.token_nlls, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        likelihood.loss, (nll * corruption.weight * corruption.mask).sum() / noised.numel()
    )


def test_an_autoregressive_student_learns_the_teacher_at_every_position(
    whole: Path, tmp_path: Path
) -> None:
    settings = {"student": "ar", "model__conditioning": "none", "training__num_steps": 60}
    config = tiny_run(model__kd__kind="token", model__kd__temperature=2.0, **settings)
    build = build_student(config, ShardStore.open(whole), None)
    assert train(config, whole, tmp_path / "run")
    student = read_model(tmp_path / "run" / "model")
    assert isinstance(student, AR) and isinstance(build, AR)
    tokens = first_batch(whole).tokens
    teacher = teacher_logits()[tokens[:, :-1]].log_softmax(-1)

    def distance(model: AR) -> torch.Tensor:
        with torch.no_grad():
            found = model.eval().predict(tokens)[:, :-1, :VOCAB]
        return functional.kl_div(found, teacher, reduction="none", log_target=True).sum(-1).mean(0)

    assert (distance(student) < 0.7 * distance(build)).all()


def test_listed_probabilities_with_noise_train_and_resume(store: Path, tmp_path: Path) -> None:
    config = tiny_run(model__kd__kind="token", model__conditioning="gumbel")
    assert train(config, store, tmp_path / "run")
    with pytest.raises(UsageError, match="another setting"):
        train(tiny_run(model__conditioning="gumbel"), store, tmp_path / "run")


@pytest.mark.parametrize("codec", ["seeded", "topk", "quantized", "full"])
def test_a_frozen_draw_is_no_teacher(tmp_path: Path, codec: str) -> None:
    store = write_store(tmp_path / "store", codec)
    with pytest.raises(UsageError, match=rf"one draw of the noise.*{codec}.*posterior or hidden"):
        train(tiny_run(model__kd__kind="token"), store, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_sequence_level_distillation_wants_rows_of_the_teacher(store: Path, tmp_path: Path) -> None:
    config = tiny_run(model__kd__kind="sequence", training__num_steps=2)
    with pytest.raises(UsageError, match=r"rows that the teacher wrote.*--mode sequential"):
        train(config, store, tmp_path / "run")
    tokens = {"fingerprint": "ef" * 32, "corpus": "random", "mode": "sequential"}
    written = write_store(tmp_path / "written", tokens=tokens)
    assert train(config, written, tmp_path / "run")
    sealed = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert sealed["kd"]["kind"] == "sequence"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training__num_noise_draws": 2, "model__conditioning": "none"}, "no draws to count"),
        ({"model__conditioning": "none", "model__noise__rank": 2}, "does not read"),
        ({"model__noise__tau": 0}, "noise.tau"),
        ({"model__kd__kind": "tokens"}, "token"),
        ({"model__kd__weight": 0.5}, "kd.kind=none"),
        ({"model__kd__kind": "sequence", "model__kd__temperature": 2}, "kd.kind=sequence"),
        ({"model__kd__kind": "token", "model__kd__weight": 0}, "kd.weight"),
        ({"model__kd__kind": "token", "model__kd__weight": 1.5}, "kd.weight"),
        ({"model__kd__kind": "token", "model__kd__temperature": 0}, "kd.temperature"),
        ({"model__kd_weight": 0.5}, "unknown config key.*kd_weight"),
    ],
)
def test_mistakes(store: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_student(tiny_run(**settings), ShardStore.open(store), None)


@pytest.mark.parametrize("projection", ["rank=4", "projection=tied"])
def test_noise_brought_into_a_plain_student_begins_silent_and_learns(
    store: Path, tmp_path: Path, projection: str
) -> None:
    """At the start the first loss is the source's; only one of the two factors is zero."""
    plain = tiny_run(model__conditioning="none", training__num_steps=1)
    assert train(plain, store, tmp_path / "plain")
    name, value = projection.split("=")
    config = tiny_run(model__noise__injection="add", **{f"model__noise__{name}": value})
    student = build_student(config, ShardStore.open(store), tmp_path / "plain")
    source = read_model(tmp_path / "plain" / "model")
    batch = first_batch(store)
    first = student.loss(batch).loss
    torch.testing.assert_close(first, source.loss(batch).loss, rtol=1e-5, atol=1e-6)
    first.backward()
    gradients = [p.grad for n, p in student.named_parameters() if n.startswith("conditioner.")]
    assert any(grad is not None and bool((grad != 0).any()) for grad in gradients)
