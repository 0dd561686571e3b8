"""A store as the teacher of transformers' and TRL's trainers."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, pad
from torch.utils.data import default_collate
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.run_cases import ROWS, VOCAB, quiet, teacher_logits, write_store
from trainer.distillation import IGNORED, NOISE_KEY, DistillationLoss, DistillationMixin, store_rows
from trainer.objective.distillation import Distillation


def batch_of(store: Path, num_rows: int = 6) -> dict[str, Any]:
    return default_collate(list(islice(store_rows(store), num_rows)))


def some_logits(batch: dict[str, Any], width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 3 * torch.randn(*batch["labels"].shape, width, generator=generator)


def by_autograd(store: Path, batch: Any, logits: Tensor, labels: Tensor, **kd: float) -> Tensor:
    """Mean over the counted tokens of the loss that students use, position by position."""
    opened = ShardStore.open(store)
    where = labels[:, 1:] != IGNORED
    stored = {name: batch["teacher"][name] for name in batch["teacher"].keys() - {NOISE_KEY}}
    arrays = {name: array[:, 1:][where] for name, array in stored.items()}
    tokens, own = labels[:, 1:][where], arrays.pop("token_log_probs")
    teacher = opened.codec.distribution(arrays, tokens, own, opened.resources)
    log_probs = pad(logits[:, :-1, :VOCAB][where], (0, 1), value=-1e6).log_softmax(-1)
    return Distillation(teacher, **kd).losses(log_probs, tokens, slice(None)).mean()


@pytest.mark.parametrize("num_entries", [4, VOCAB], ids=["listed", "whole"])
@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 1.0), (0.3, 1.0), (1.0, 2.0)])
def test_loss_and_gradient_are_those_of_the_students(
    tmp_path: Path, num_entries: int, weight: float, temperature: float
) -> None:
    """With a padded vocabulary, whose columns take no part, and with tokens that do not count."""
    store = write_store(tmp_path / "store", num_entries=num_entries)
    batch = batch_of(store)
    labels = batch["labels"].clone()
    labels[1, 3:] = IGNORED
    logits = some_logits(batch, VOCAB + 3).requires_grad_()
    loss = DistillationLoss(store, weight=0.9, temperature=temperature)
    found = loss(logits, labels, batch["teacher"], weight=weight)
    expected = by_autograd(store, batch, logits, labels, weight=weight, temperature=temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(3 * value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert not gradients[0][..., VOCAB:].any()
    half = logits.detach().bfloat16()  # as a model under autocast gives them: the loss is float32 still
    losses = [loss(given, labels, batch["teacher"]) for given in (half, half.float())]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_the_teacher_itself_has_no_divergence(store: Path) -> None:
    """Its logits at i are of token i + 1: a shift by one would be seen here.

    Without weight the loss is the cross-entropy.
    """
    batch, loss = batch_of(store), DistillationLoss(store, weight=1.0)
    own, other = teacher_logits()[batch["input_ids"]], some_logits(batch, VOCAB)
    found = [float(loss(each, batch["labels"], batch["teacher"])) for each in (own, other)]
    assert found[0] < 0.01 < 1 < found[1]
    expected = cross_entropy(other[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    plain = DistillationLoss(store, weight=0.0)(other, batch["labels"], batch["teacher"])
    torch.testing.assert_close(plain, expected)
    sharp = (1e4 * one_hot(batch["input_ids"], VOCAB)).float().requires_grad_()  # that leaves the rest nothing
    (gradient,) = torch.autograd.grad(loss(sharp, batch["labels"], batch["teacher"]), sharp)
    assert bool(gradient.isfinite().all())
    assert loss(other, torch.full_like(batch["labels"], IGNORED), batch["teacher"]) == 0, "where no token counts"


def test_rows_come_once_an_epoch_in_an_order_of_the_seed(store: Path) -> None:
    def rows(**options: Any) -> list[tuple[int, ...]]:
        return [tuple(row["input_ids"].tolist()) for row in store_rows(store, **options)]

    stored = rows(split="validation", seed=None, epochs=1)
    tokens = ShardStore.open(store).split("validation").read_rows(0, ROWS["validation"])["tokens"]
    assert stored == [tuple(row) for row in tokens.tolist()]
    trained = ShardStream(ShardStore.open(store).split("train"), seed=0, global_batch_size=8).one_pass()
    own = [tuple(row) for batch in trained for row in batch.arrays["tokens"].tolist()]
    assert sorted(rows(epochs=1)) == sorted(own), "all of them, though 16 do not divide 40"
    two = rows(split="validation", epochs=2)
    assert sorted(two) == sorted(2 * stored) and two[:10] != two[10:]
    assert two == rows(split="validation", epochs=2, with_teacher=False)
    sent = pickle.loads(pickle.dumps(store_rows(store, "validation", epochs=2)))  # to a worker that is spawned
    assert [tuple(row["input_ids"].tolist()) for row in sent] == two
    assert two != rows(split="validation", epochs=2, seed=1)
    seeds = [int(next(iter(store_rows(store, seed=n)))["teacher"][NOISE_KEY][0]) for n in (0, 1)]
    assert len({*seeds, ShardStore.open(store).manifest.noise_seed("train")}) == 3, "each run's noise is its own"
    example = next(iter(store_rows(store, with_teacher=False)))
    labels = example.pop("labels")
    assert labels[0] == IGNORED and (labels[1:] != IGNORED).all()
    assert example.keys() == {"input_ids", "attention_mask"} and example["attention_mask"].all()


def test_what_cannot_be_is_refused(store: Path, tmp_path: Path) -> None:
    topk, batch = write_store(tmp_path / "store", "topk"), batch_of(store)
    for place, settings, words in (
        (topk, {}, ["draw of the noise", "posterior or hidden"]),
        (store, {"weight": 1.5}, ["share out of range", "1.5", "0 to 1"]),
        (store, {"weight": -0.1}, ["share out of range", "-0.1"]),
        (store, {"temperature": 0.0}, ["not a temperature", "above 0"]),
        (store, {"temperature": float("nan")}, ["not a temperature"]),
    ):
        with pytest.raises(UsageError) as refused:
            DistillationLoss(place, **settings)
        assert all(word in str(refused.value) for word in words)
    assert DistillationLoss(store).weight == 0.5
    with pytest.raises(UsageError, match="nonsense"):
        store_rows(store, "nonsense")
    with pytest.raises(UsageError, match="vocabulary is too small"):
        DistillationLoss(store)(some_logits(batch, VOCAB - 1), batch["labels"], batch["teacher"])


def test_a_loss_is_as_large_in_several_processes() -> None:
    """They average gradients of losses that were divided by the tokens of all."""
    for average, number, expected in ((True, 5, 6.0), (True, None, 2.0), (False, 5, 2.0)):
        own: Any = {"args": SimpleNamespace(average_tokens_across_devices=average), "get_tp_size": lambda: 2}
        own |= {"accelerator": SimpleNamespace(num_processes=6), "distillation": lambda *_, **__: torch.tensor(2.0)}
        inputs: Any = {"input_ids": torch.zeros(1, 3, dtype=torch.int64), "labels": None, "teacher": None}
        loss = DistillationMixin.compute_loss(
            SimpleNamespace(**own), language_model(), inputs, num_items_in_batch=number
        )
        assert loss == expected
    with pytest.raises(UsageError, match="rows without their teacher"):
        DistillationMixin.compute_loss(SimpleNamespace(), language_model(), {"labels": None})


class Distilled(DistillationMixin, Trainer):
    pass


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB + 4, **size, **ids, **dropout))


def trained(store: Path, out: Path, resume: bool | str = False, **changes: Any) -> Any:
    made: Any = Distilled(
        language_model(),
        TrainingArguments(**quiet(out, **changes)),
        distillation=DistillationLoss(store, weight=0.5),
        train_dataset=store_rows(store),
        eval_dataset=store_rows(store, "validation", seed=None, epochs=1),
    )
    made.train(resume_from_checkpoint=resume)
    return made


def same_weights(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a.model.parameters(), b.model.parameters()))


def test_a_resumed_training_is_the_uninterrupted_one(store: Path, tmp_path: Path) -> None:
    """Past the end of the first epoch too: 40 rows are ten steps, and it stops after 11 of 13."""
    whole = trained(store, tmp_path / "a", max_steps=13)
    trained(store, tmp_path / "b", max_steps=13, save_strategy="steps", save_steps=11)
    resumed = trained(store, tmp_path / "b", max_steps=13, resume=str(tmp_path / "b/checkpoint-11"))
    assert resumed.state.global_step == 13
    assert same_weights(whole, resumed)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_accumulated_steps_are_those_of_larger_batches(store: Path, tmp_path: Path) -> None:
    """An evaluation says the NLL."""
    whole = trained(store, tmp_path / "a")
    accumulated = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    parts = trained(store, tmp_path / "b", **accumulated)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    rows = ShardStore.open(store).split("validation").read_rows(0, ROWS["validation"])
    tokens = torch.from_numpy(rows["tokens"]).long()
    with torch.no_grad():
        logits = whole.model.eval()(tokens).logits[..., :VOCAB]
    expected = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert whole.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_trl_trains_as_transformers_does(store: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install trl")

    class DistilledSFT(DistillationMixin, trl.SFTTrainer):
        pass

    from transformers import AutoTokenizer

    from tests.pipeline.extract_cases import save_tokenizer

    own = {"bf16": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    sft = DistilledSFT(
        language_model(),
        trl.SFTConfig(**quiet(tmp_path / "sft", **own)),
        distillation=DistillationLoss(store, weight=0.5),
        train_dataset=store_rows(store),
        processing_class=AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer")),
    )
    sft.train()
    assert sft.state.global_step == 8
    assert same_weights(trained(store, tmp_path / "own"), sft)
