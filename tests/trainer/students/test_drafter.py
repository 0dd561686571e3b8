"""The drafter: what a step is, what it may see, what it learns from, what stays the backbone's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    MambaConfig,
    MambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shards.errors import UsageError
from shards.store.store import ShardStore
from shards.stream.stream import ShardStream
from tests.trainer.backbone_cases import (
    SHAPES,
    VOCAB,
    backbone_run,
    store_of,
    tiny_config,
    write_backbone,
)
from tests.trainer.run_cases import LENGTH, assert_same_run
from tests.trainer.training.test_resume import run_with_signal
from trainer import load_student
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.drafter import Drafter, last_layer_cache, network_runner
from trainer.training.construction import build_student
from trainer.training.loop import train


def tiny_drafter(
    folder: Path, shape: str = "llama", scale: float = 0.3, **changes: Any
) -> tuple[Drafter, ShardStore]:
    """A drafter at step 0 (``scale`` 0), or with random weights."""
    backbone, store = folder / shape, folder / f"store-{shape}"
    if not backbone.exists():
        write_backbone(backbone, shape)
        store_of(store, backbone)
    student = build_student(
        backbone_run(backbone, "drafter", **changes), ShardStore.open(store), None
    )
    assert isinstance(student, Drafter)
    torch.manual_seed(5)
    if scale:
        for parameter in student.parameters():
            torch.nn.init.normal_(parameter, std=scale)
    return student, ShardStore.open(store)


def a_batch(store: ShardStore, num_rows: int = 4, seed: int = 0) -> Batch:
    """The first rows of the train split."""
    make = BatchMaker(store, "train", seed, torch.device("cpu"), False)
    rows = ShardStream(
        store.split("train", make.arrays), seed=seed, global_batch_size=num_rows, num_workers=0
    )
    return make(next(iter(rows)), 0)


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@torch.no_grad()
def test_at_step_0_the_layer_is_the_backbones_last(shape: str, tmp_path: Path) -> None:
    """Fed with what the backbone's last layer reads, it says what the backbone says."""
    student, _ = tiny_drafter(tmp_path, shape, scale=0.0)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    tokens = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
    whole, cache = network(tokens, output_hidden_states=True), DynamicCache()
    network.base_model(input_ids=tokens[:, :4], past_key_values=cache, use_cache=True)
    seen = torch.ones(3, 7, dtype=torch.bool).tril(4).expand(2, -1, -1)
    places, entering = torch.arange(4, 7).expand(2, -1), whole.hidden_states[-2][:, 4:]
    output = student.runner()(entering, places, seen, last_layer_cache(cache))
    assert torch.allclose(student.logits(output), whole.logits[:, 4:, :VOCAB], atol=1e-4)
    assert cache.get_seq_length() == 4, "the backbone's cache stays as it was"


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@torch.no_grad()
def test_a_step_of_own_operations_is_the_networks(shape: str, tmp_path: Path) -> None:
    """Rows at unlike positions that see unlike keys; what lies in the cache behind two steps."""
    student, _ = tiny_drafter(tmp_path, shape)
    network, generator = student.language_model.network, torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCAB, (2, 6), generator=generator)
    weights = {name: student.layer[name.replace(".", "/")] for name in student.names}
    found = []
    for run in (student.runner(), network_runner(network, weights)):
        generator.manual_seed(4)
        _, cache = student.read(tokens)
        for width in (9, 12):
            rows = torch.randn(2, 3, 16, generator=generator)
            places = torch.randint(6, 40, (2, 3), generator=generator)
            seen = torch.rand(2, 3, width, generator=generator) < 0.6
            seen[..., -3:] |= torch.eye(3, dtype=torch.bool)
            found.append(run(rows, places, seen, cache))
        found += [cache.layers[-1].keys, cache.layers[-1].values]
    for ours, theirs in zip(found[:4], found[4:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_only_llamas_form_has_steps_of_own_operations(tmp_path: Path) -> None:
    """GPT-2 has other parts; Qwen3 has more, and says something else."""
    for shape, expected in (("llama", True), ("qwen2", True), ("gpt2", False)):
        assert tiny_drafter(tmp_path, shape)[0]._is_llama is expected, shape
    sizes = tiny_config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes = {n: sizes[n] for n in (*names, "num_attention_heads", "num_key_value_heads")}
    Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=4)).save_pretrained(tmp_path / "qwen3")
    store_of(tmp_path / "store-qwen3", tmp_path / "qwen3")
    assert tiny_drafter(tmp_path, "qwen3")[0]._is_llama is False


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_points_learn_what_each_learns_alone(shape: str, tmp_path: Path) -> None:
    """KL(p || q) of every step behind every point, from prefixes that end there; the loss.

    So no step has seen a later token or another point's rows, and p is the backbone's own.
    """
    student, store = tiny_drafter(tmp_path, shape, model__backbone__num_starts=100)
    batch, num_steps = a_batch(store), student.settings.backbone.num_proposed
    output = student.loss(batch)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    tokens = batch.tokens
    log_p = plain(tokens).logits[..., :VOCAB].log_softmax(dim=-1)
    wanted, losses = torch.zeros(tokens.shape), []
    for point in range(1, LENGTH - num_steps):
        states, cache = student.read(tokens[:, :point])
        rows = student.first_rows(tokens[:, point : point + 1], states[:, -1:])
        for step in range(num_steps):
            place = point + step
            seen = torch.ones(len(tokens), 1, place + 1, dtype=torch.bool)
            positions = torch.full((len(tokens), 1), place)
            drafted = student.runner()(rows, positions, seen, cache)
            p, log_q = log_p[:, place].exp(), student.logits(drafted)[:, 0].log_softmax(dim=-1)
            kl = (p * (log_p[:, place] - log_q)).sum(dim=-1)
            wanted[:, place + 1] += kl
            tv = (p - log_q.exp()).abs().sum(dim=-1) / 2
            losses.append(0.85**step * (0.5 * kl + tv).mean())
            rows = student.next_rows(tokens[:, place + 1 : place + 2], drafted)
    assert torch.allclose(output.token_nlls, wanted, atol=1e-3)
    assert torch.isclose(output.loss, torch.stack(losses).mean(), atol=1e-4)
    assert output.num_tokens == len(losses) * len(tokens)


def test_starting_points_are_keyed_by_seed_epoch_and_row(tmp_path: Path) -> None:
    """A row's loss does not depend on its companions; another seed looks elsewhere."""
    student, store = tiny_drafter(tmp_path, model__backbone__num_starts=2)
    batch = a_batch(store, 8)
    whole, part = student.loss(batch), student.loss(batch.rows(slice(2, 4)))
    assert torch.allclose(whole.token_nlls[2:4], part.token_nlls, atol=1e-4)
    other = student.loss(a_batch(store, 8, seed=1))
    assert not torch.equal(whole.token_nlls > 0, other.token_nlls > 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_training_changes_the_drafter_and_no_bit_of_the_backbone(
    shape: str, tmp_path: Path
) -> None:
    student, store = tiny_drafter(tmp_path, shape, scale=0.0)
    network = student.language_model.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        output = student.loss(a_batch(store, 16))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_resumed_runs_equal_uninterrupted_ones(tmp_path: Path) -> None:
    """Bit for bit, from any store; the folder loads without the shards, and drafts the same."""
    backbone = write_backbone(tmp_path / "backbone")
    store = store_of(tmp_path / "store", backbone, codec_name="seeded")
    config = backbone_run(backbone, "drafter")
    assert train(config, store, tmp_path / "whole")
    again = tmp_path / "again"
    assert not run_with_signal(config, store, again, 4)
    assert train(config, store, again)
    assert_same_run(tmp_path / "whole", again)
    ours, theirs = load_student(tmp_path / "whole"), load_student(again)
    tokens = torch.arange(8).view(2, 4)
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)
    assert ours(tokens).logits.shape == (2, 2, VOCAB)
    size = sum(parameter.numel() for parameter in ours.parameters())
    file = tmp_path / "whole" / "model" / "model.safetensors"
    assert file.stat().st_size < 4 * size + 8000, "the backbone is not in the folder"


def test_bf16_backbones_train(tmp_path: Path) -> None:
    for shape in SHAPES:
        student, store = tiny_drafter(tmp_path, shape, 0.1, model__backbone__dtype="bfloat16")
        assert student.language_model.network.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            output = student.loss(a_batch(store))
        output.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters())
        assert all(p.dtype == torch.float32 for p in student.parameters())


def test_mistakes_are_named(tmp_path: Path) -> None:
    backbone = write_backbone(tmp_path / "backbone")
    store = store_of(tmp_path / "store", backbone)

    def run(**changes: Any) -> None:
        train(backbone_run(backbone, "drafter", **changes), store, tmp_path / "run")

    with pytest.raises(UsageError, match="rows too short for the drafter's steps"):
        run(model__backbone__num_proposed=7)
    with pytest.raises(UsageError, match=r"reads no noise.*got gumbel; expected none"):
        run(model__conditioning="gumbel")
    with pytest.raises(UsageError, match="own_noise"):
        run(model__backbone__own_noise="seen")
    run()
    other = write_backbone(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"another backbone.*weights_sha256"):
        load_student(tmp_path / "run", backbone=str(other))
    torch.manual_seed(0)
    shape = MambaConfig(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(shape).save_pretrained(tmp_path / "mamba")
    recurrent = store_of(tmp_path / "recurrent", tmp_path / "mamba")
    with pytest.raises(UsageError, match="no drafter can stand on this backbone"):
        build_student(backbone_run(tmp_path / "mamba", "drafter"), ShardStore.open(recurrent), None)


def test_drafters_of_slots_are_refused_in_one_line(tmp_path: Path) -> None:
    """The folder of an earlier version, by what its config says."""
    student, _ = tiny_drafter(tmp_path)
    student.save_pretrained(tmp_path / "old")
    file = tmp_path / "old" / "config.json"
    config = json.loads(file.read_text())
    config["backbone"]["lora_rank"] = 16
    file.write_text(json.dumps(config))
    load_student(tmp_path / "old", backbone=str(tmp_path / "llama"))  # all students named the rank
    config["frozen"] = {**config["frozen"], "linear_layers": {"layers.0.mlp.up_proj": [16, 24]}}
    file.write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"slots, which are no more.*commit 2090fb1.*reads it"):
        load_student(tmp_path / "old")
