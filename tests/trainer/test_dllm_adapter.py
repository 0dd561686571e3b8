"""dllm's trainers and samplers with the noise of a store; the model's side needs no dllm."""

from __future__ import annotations

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from shards.codec.protocol import make_codec
from shards.errors import UsageError
from shards.noise.gumbel import KeyedPrior
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed
from tests.trainer.run_cases import LENGTH, ROWS, VOCAB, draw_weights, quiet, teacher_logits, tokenizer, write_store
from trainer.distillation import NOISE_KEY, store_rows
from trainer.dllm_adapter import TAU, NoiseMixin, NoiseSamplerMixin, read_noise
from trainer.objective.batch import Places

MASK, WIDTH = VOCAB, 16


def bert(**changes: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": VOCAB + 1, "hidden_size": WIDTH, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**{**size, **heads, **dropout, **changes})).eval()


def prior(places: Places, seed: int = 3) -> KeyedPrior:
    return KeyedPrior(PositionKeys(seed, places.rows, places.positions), VOCAB)


def some_rows() -> torch.Tensor:
    rows = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    return rows.masked_fill(rows % 2 == 0, MASK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_zero_weights_the_model_is_what_it_was(dtype: torch.dtype, store: Path) -> None:
    rows, model = some_rows(), bert().to(dtype)
    mask = (torch.arange(LENGTH) < 6).expand_as(rows).long()
    expected = model(rows, mask).logits
    own = read_noise(model, tokenizer(), store)
    with own.showing(prior):
        assert torch.equal(model(rows, mask).logits, expected)
        assert torch.equal(model(input_ids=rows, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("first", [None, 0, 5])
def test_masked_positions_read_their_noise(store: Path, first: int | None) -> None:
    """Behind a cache of ``first`` positions too, where dllm's block sampler says position_ids."""
    rows, model = some_rows(), bert()
    own = read_noise(model, tokenizer(), store)
    weight = draw_weights(own)
    positions = torch.arange(LENGTH).expand_as(rows) + (first or 0)
    embeddings = bert().get_input_embeddings()(rows)
    where = Places.of(rows == MASK)
    noise = prior(Places(where.rows, where.positions + (first or 0)))
    embeddings[where.index] += (0.5 * noise.gumbels()).softmax(-1) @ weight
    options = {} if first is None else {"position_ids": positions}
    with own.showing(prior, tau=0.5):
        found = model(input_ids=rows, **options).logits
    expected = bert()(inputs_embeds=embeddings, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class AllMasked(transformers.Trainer):
    """Masks every token but the first, as dllm's trainers do some: within compute_loss."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> torch.Tensor:
        ids = inputs["input_ids"]
        masked = ids.masked_fill(torch.arange(ids.shape[1]) > 0, MASK)
        logits = model(input_ids=masked, attention_mask=inputs["attention_mask"]).logits
        return cross_entropy(logits.transpose(1, 2), inputs["labels"])


class Noisy(NoiseMixin, AllMasked):
    pass


def noisy(store: Path, out: Path, model: Any, **changes: Any) -> Any:
    args, rows = transformers.TrainingArguments(**quiet(out, **changes)), store_rows(store)
    own = {"processing_class": tokenizer(), "train_dataset": rows}
    return Noisy(store=store, model=model, args=args, **own)


def noise_of(store: Path, out: Path, rows: list[Any]) -> torch.Tensor:
    """[B, L - 1, V] xi less a number per position, as the model's layers are given it."""
    model, seen = bert(), []
    made = noisy(store, out, model)
    draw_weights(model.gdistill)
    model.bert.register_forward_pre_hook(
        lambda _, args, options: seen.append(options["inputs_embeds"]), with_kwargs=True
    )
    with torch.no_grad():
        made.compute_loss(model, default_collate(rows))
        base = model.get_input_embeddings()(torch.tensor(MASK))
    return (seen[0][:, 1:] - base)[..., :VOCAB].log()


@pytest.mark.parametrize("codec", ["posterior", "seeded", "full"])
def test_a_rows_noise_makes_its_tokens_the_teachers_choice(tmp_path: Path, codec: str) -> None:
    """Were it another row's or position's, one token in three would be."""
    store = write_store(tmp_path / "store", codec, num_entries=VOCAB)
    rows = list(islice(store_rows(store), 12))
    tokens = torch.stack([row["input_ids"] for row in rows])
    log_probs = teacher_logits()[tokens[:, :-1]].log_softmax(-1)
    chosen = (log_probs + noise_of(store, tmp_path, rows)).argmax(-1)
    assert (chosen == tokens[:, 1:]).float().mean() > 0.95


@pytest.mark.parametrize(("codec", "is_fresh"), [("posterior", True), ("seeded", False)])
def test_an_epochs_noise_is_new_if_codecs_draw(tmp_path: Path, codec: str, is_fresh: bool) -> None:
    store = write_store(tmp_path / "store", codec)
    rows = list(store_rows(store, epochs=2))
    assert len({tuple(row["teacher"][NOISE_KEY].tolist()) for row in rows}) == len(rows) / (1 if is_fresh else 2)
    rows.sort(key=lambda row: row["teacher"][NOISE_KEY][1] % ROWS["train"])
    first, second = (noise_of(store, tmp_path, rows[turn::2]) for turn in (0, 1))
    assert torch.allclose(first, second, atol=1e-3) != is_fresh
    assert torch.equal(first, noise_of(store, tmp_path, rows[::2]))


def test_a_model_learns_to_read_the_noise_and_is_read_back(store: Path, tmp_path: Path) -> None:
    made = noisy(store, tmp_path / "out", bert(), max_steps=150, learning_rate=2e-2)
    made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert losses[-1] < 0.6 * losses[0]
    made.save_model(str(tmp_path / "model"))
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "model").eval()
    own, rows = read_noise(again, tokenizer()), some_rows()
    with own.showing(prior), made.noise_input.showing(prior):
        assert torch.equal(again(rows).logits, made.model.eval()(rows).logits)
    assert own.weight.any()
    assert noisy(store, tmp_path / "again", again).noise_input is own, "what was learnt goes on"
    third = transformers.BertForMaskedLM.from_pretrained(tmp_path / "model")
    assert torch.equal(noisy(store, tmp_path / "third", third).noise_input.weight, own.weight)


class OnePass:
    """All masks at once: what dllm's samplers are to the mixin, in a few lines."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def sample(self, inputs: list[Any], copies: int = 1) -> torch.Tensor:
        return self.model(torch.tensor(inputs * copies)).logits


class NoisyOnePass(NoiseSamplerMixin, OnePass):
    pass


def test_a_samples_noise_is_of_the_seed_and_its_index(store: Path) -> None:
    model = bert()
    draw_weights(own := read_noise(model, tokenizer(), store))
    sampler: Any = NoisyOnePass(model)
    canvas = [0] + [MASK] * (LENGTH - 1)
    four, two = (sampler.sample([canvas] * count, seed=1) for count in (4, 2))
    torch.testing.assert_close(four[:2], two)
    with own.showing(partial(prior, seed=derive_seed(1, "sampling noise")), TAU):
        torch.testing.assert_close(model(torch.tensor([canvas] * 2)).logits, two)
    torch.testing.assert_close(sampler.sample([canvas] * 2, seed=1, tau=0.85), two)
    guided = sampler.sample([canvas] * 2, 2, seed=1)  # the same samples, without their prompts
    torch.testing.assert_close(guided[2:], two)
    for other in ({"seed": 2}, {"seed": 1, "tau": 0.1}):
        assert not torch.allclose(sampler.sample([canvas] * 2, **other), two, atol=1e-3)
    assert not torch.allclose(two[0], two[1], atol=1e-3)
    own.codec = make_codec("topk", num_entries=2)
    assert not torch.allclose(sampler.sample([canvas] * 2, seed=1), two, atol=1e-3), "cut off as the store's is"


def test_what_cannot_be_is_refused(store: Path, tmp_path: Path) -> None:
    ready = bert()
    with read_noise(ready, tokenizer(), store).showing(prior):
        ready(some_rows())
    shifted = transformers.TrainingArguments(**quiet(tmp_path))
    shifted.right_shift_logits = True  # type: ignore[attr-defined]
    options = {"store": store, "model": bert(), "processing_class": tokenizer()}
    for act, words in [
        (lambda: ready(some_rows()), ["is shown none", "NoiseSamplerMixin"]),
        (lambda: read_noise(bert(), tokenizer(mask_token=None), store), ["no mask token", "13"]),
        (lambda: read_noise(bert(vocab_size=VOCAB), tokenizer(), store), ["got 12", "below 12"]),
        (lambda: read_noise(bert(), tokenizer()), ["has no noise yet", "name the store"]),
        (lambda: read_noise(bert(gdistill=ready.config.gdistill), tokenizer()), ["no W lies there"]),
        (lambda: Noisy(args=shifted, **options), ["right_shift_logits"]),
    ]:
        with pytest.raises(UsageError) as refused:
            act()
        assert all(word in str(refused.value) for word in words), refused.value
