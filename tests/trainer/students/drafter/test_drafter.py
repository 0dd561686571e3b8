"""The drafter: what it is at step 0, what leaks, what stays the backbone's, what it learns from."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from shards.errors import UsageError
from shards.noise.kinds import DenseProbabilities, KeyedPosterior, KeyedPrior
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import PositionKeys
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import SHAPES, backbone_run, store_of, write_backbone
from tests.trainer.run_cases import assert_same_run
from tests.trainer.students.drafter.drafter_cases import (
    RECIPES,
    a_batch,
    a_noise_table,
    tiny_drafter,
)
from tests.trainer.training.test_resume import run_with_signal
from trainer import load_student
from trainer.objective.batch import Places
from trainer.students.drafter.layout import SlotLayout
from trainer.students.drafter.student import (
    Drafter,
    Truth,
    distribution_loss,
    token_loss,
    token_uniforms,
)
from trainer.training.construction import build_student
from trainer.training.loop import train

LARGEST_KS = 1.95
"""sqrt(n) times the Kolmogorov distance is beyond this with probability 1e-3."""


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_at_step_0_slots_are_what_the_backbone_makes_of_their_inputs(
    shape: str, tmp_path: Path
) -> None:
    """The backbone alone, reading [prefix embeddings; slot inputs] at the slots' positions.

    A slot's input begins as the embedding of the last token before its point; where it is told xi,
    the mean embedding under softmax(xi) less the plain mean is added. The adapters add nothing.
    """
    student, store = tiny_drafter(tmp_path, shape, scale=0.0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    embed, width = plain.get_input_embeddings(), student.num_slots
    batch = a_batch(store)
    layout = student.draw_layout(batch)
    everywhere = torch.ones_like(batch.tokens, dtype=torch.bool)
    everywhere[:, 0] = False
    shares = batch.noise.at(everywhere).gumbels().softmax(dim=-1)
    soft = (shares @ embed.weight[:12]).view(len(batch.tokens), 7, 16)
    table = student._noise_table(batch, Places.of(everywhere))
    inputs = student.slot_inputs(batch.tokens, layout, table)
    for slot, place in enumerate(layout.places[1].tolist()):
        last = embed.weight[batch.tokens[1, place - slot % width - 1]]
        told = 0 if slot % width == 0 else soft[1, place - 2] - embed.weight[:12].mean(dim=0)
        assert torch.allclose(inputs[1, slot], last + told, atol=1e-5)
    found = student.slot_states(batch.tokens, layout, inputs)
    for row, point in ((0, 0), (1, 2), (3, 1)):
        start = int(layout.starts[row, point])
        chosen = slice(point * width, (point + 1) * width)
        read = torch.cat(
            (embed(batch.tokens[row : row + 1, :start]), inputs[row : row + 1, chosen]), 1
        )
        positions = torch.cat((torch.arange(start), layout.positions[row, chosen]))[None]
        causal = torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).tril()[None, None]
        wanted = plain.base_model(
            inputs_embeds=read, position_ids=positions, attention_mask=causal
        ).last_hidden_state
        assert torch.allclose(found[row, chosen], wanted[0, start:], atol=1e-4)


@pytest.mark.parametrize("recipe", ["seen", "hidden"])
def test_no_slot_sees_noise_that_is_not_told(recipe: str, tmp_path: Path) -> None:
    """Gradients of slot k's logits by the noise of places: before the prefix, its own, later ones.

    And by the inputs of slots: of the same point up to itself, of other points never.
    """
    student, _ = tiny_drafter(tmp_path, recipe=recipe)
    tokens = torch.randint(12, (1, 8), generator=torch.Generator().manual_seed(3))
    layout = SlotLayout(torch.tensor([[2, 4]]), 3, 8)
    table = torch.randn(1, 8, 16, requires_grad=True)
    inputs = student.slot_inputs(tokens, layout, table)
    logits = student.logits(student.slot_states(tokens, layout, inputs))
    for slot in range(6):
        start, place = int(layout.prefix_lengths[0, slot]), int(layout.places[0, slot])
        score = logits[0, slot].square().sum()
        by_table, by_input = torch.autograd.grad(score, (table, inputs), retain_graph=True)
        told = (by_table[0].abs().sum(dim=1) > 0).nonzero().flatten().tolist()
        assert told == list(range(start, place + (recipe == "seen")))
        felt = (by_input[0].abs().sum(dim=1) > 0).nonzero().flatten().tolist()
        assert felt == list(range(slot - slot % 3, slot + 1))


def add_much(student: Drafter, gate: float) -> None:
    """Let slots feel the token before them, or not."""
    for name, weight in student.readings.named_parameters():
        assert name.endswith("gate")
        torch.nn.init.constant_(weight, gate)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_waiting_slots_know_the_token_before_them_and_no_own_noise(
    shape: str, tmp_path: Path
) -> None:
    """Noise that makes another token is felt by all later slots of the points that see its place.

    Noise that makes the same one is not: the first reading asks the backbone itself for the token,
    so that what slot 2 is told can be worked out with the bare backbone.
    """
    student, _ = tiny_drafter(tmp_path, shape, "waiting", scale=0.15)
    add_much(student, 10.0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    tokens = torch.randint(12, (1, 8), generator=torch.Generator().manual_seed(3))
    layout = SlotLayout(torch.tensor([[2, 4]]), 3, 8)

    table = a_noise_table(student, 1, 8)

    def states(place: int, token: int) -> torch.Tensor:
        """Of the slots, the noise at the place leaving no other choice than the token."""
        forced = table.clone()
        forced[0, place, 16:] = torch.where(torch.arange(12) == token, 1.0, 1e-30)
        return student.slot_states(tokens, layout, student.slot_inputs(tokens, layout, forced))[0]

    before = student.slot_states(tokens, layout, student.slot_inputs(tokens, layout, table))[0]
    starts, places = layout.prefix_lengths[0].tolist(), layout.places[0].tolist()
    for place in range(1, 8):
        moved = ((states(place, 2) - states(place, 7)).abs().amax(dim=1) > 1e-4).tolist()
        assert moved == [s <= place < p for s, p in zip(starts, places, strict=True)]
    for slot, start in ((1, 2), (4, 4)):
        logits = plain(tokens[:, :start]).logits[0, -1, :12]
        token = int((logits + table[0, start, 16:].log()).argmax())
        for chosen, is_same in ((token, True), ((token + 1) % 12, False)):
            distance = float((states(start, chosen)[slot] - before[slot]).abs().max())
            assert (distance < 1e-4) is is_same


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_slots_that_wait_and_add_nothing_are_slots_that_do_not_wait(
    shape: str, tmp_path: Path
) -> None:
    """The layers in parts, one part twice, are the layers; the adapters are not zero."""
    student, _ = tiny_drafter(tmp_path, shape, "waiting", scale=0.15)
    add_much(student, 10.0)
    tokens = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(3))
    layout = SlotLayout(torch.tensor([[2, 5], [1, 4]]), 3, 8)
    inputs = student.slot_inputs(tokens, layout, a_noise_table(student, 2, 8))
    told = student.slot_states(tokens, layout, inputs)
    add_much(student, 0.0)
    found = student.slot_states(tokens, layout, inputs)
    student.config.noise = {}
    assert torch.allclose(found, student.slot_states(tokens, layout, inputs), atol=1e-4)
    assert not torch.allclose(found, told, atol=1e-2)


@torch.no_grad()
def test_slots_may_wait_deeper_each_time(tmp_path: Path) -> None:
    """The second wait begins from what the layers between the two made of the first.

    A gate that is shut for the second reading leaves what the first one alone gives.
    """
    write_backbone(tmp_path / "llama", num_hidden_layers=3)
    deeper, _ = tiny_drafter(tmp_path, "llama", "waiting", 0.15, model__noise__layers=[1, 2])
    once, _ = tiny_drafter(tmp_path, "llama", "waiting", 0.15, model__noise__layers=[1])
    add_much(deeper, 10.0)
    tokens = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(3))
    layout = SlotLayout(torch.tensor([[2, 5], [1, 4]]), 3, 8)
    inputs = deeper.slot_inputs(tokens, layout, a_noise_table(deeper, 2, 8))
    told = deeper.slot_states(tokens, layout, inputs)
    weights = deeper.state_dict()
    once.load_state_dict({name: weights[name] for name in once.state_dict()})
    torch.nn.init.zeros_(deeper.readings[1].gate)
    found = deeper.slot_states(tokens, layout, inputs)
    assert torch.allclose(found, once.slot_states(tokens, layout, inputs), atol=1e-4)
    assert not torch.allclose(found, told, atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_keys_and_values_of_tokens_are_the_backbones_own(shape: str, tmp_path: Path) -> None:
    """In one call with slots, whose adapters are not zero, as in a call of the bare backbone."""
    student, _ = tiny_drafter(tmp_path, shape)
    tokens = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(3))
    network = student.language_model.network
    layout = SlotLayout(torch.tensor([[2, 6], [3, 5]]), 3, 12)
    slots = student.slot_inputs(tokens, layout, torch.randn(2, 12, 16))
    places = torch.arange(6).expand(2, -1)
    cache, bare = DynamicCache(), DynamicCache()
    with student.adapters.on_last(slots.shape[1]):
        output = network.base_model(
            inputs_embeds=torch.cat((network.get_input_embeddings()(tokens), slots), dim=1),
            position_ids=torch.cat((places, layout.positions), dim=1),
            attention_mask=student.attention_mask(layout, places, 6),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / shape).eval()
    wanted = plain.base_model(input_ids=tokens, past_key_values=bare, use_cache=True)
    for mine, own in zip(cache.layers, bare.layers, strict=True):
        assert torch.allclose(mine.keys[:, :, :6], own.keys, atol=1e-5)
        assert torch.allclose(mine.values[:, :, :6], own.values, atol=1e-5)
    assert torch.allclose(output[:, :6], wanted.last_hidden_state, atol=1e-4)
    alone = student.slot_states(tokens, layout, slots)
    assert torch.allclose(output[:, 6:], alone, atol=1e-4)
    with student.adapters.on_last(0):
        idle = student.slot_states(tokens, layout, slots)
    assert torch.allclose(idle, alone, atol=1e-4), "slot_states says itself what is adapted"


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_changes_the_drafter_and_no_bit_of_the_backbone(
    recipe: str, tmp_path: Path
) -> None:
    student, store = tiny_drafter(tmp_path, recipe=recipe, scale=0.0)
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
    assert losses[-1] < losses[0] - 0.3
    for name, value in network.state_dict().items():
        assert "lora_" in name or torch.equal(value, before[name]), name
    assert not any("base_layer" in name or "embed" in name for name, _ in student.named_buffers())
    trained = {name.split(".")[0] for name in student.state_dict()}
    assert trained <= {"adapters", "slot_offsets", "conditioner", "readings", "time_bounds"}


def test_losses_by_hand(tmp_path: Path) -> None:
    """Mean over slots; KL and cross-entropy of two tokens; what the loss counts."""
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])
    probs = DenseProbabilities(torch.tensor([[0.25, 0.75], [1.0, 0.0]]).log())
    truth = Truth(torch.tensor([0, 1]), probs)
    assert torch.allclose(token_loss(logits, truth), torch.tensor([4.0, 2.0]).log())
    found = distribution_loss(logits, truth)
    assert torch.allclose(found, torch.tensor([1.0, 2.0]).log(), atol=1e-6)
    student, store = tiny_drafter(tmp_path, model__backbone__num_starts=3)
    output = student.loss(a_batch(store))
    assert output.num_tokens == 4 * 3 * 3
    assert torch.isclose(output.nll_sum / output.num_tokens, output.loss)


def test_starting_points_are_keyed_by_seed_epoch_and_row(tmp_path: Path) -> None:
    student, store = tiny_drafter(tmp_path, model__backbone__num_starts=3)
    batch = a_batch(store, 8)
    starts = student.draw_layout(batch).starts
    assert starts.min() >= 1 and starts.max() <= 8 - student.num_slots
    assert all(len(set(row)) == 3 for row in starts.tolist())
    assert torch.equal(student.draw_layout(batch.rows(slice(2, 4))).starts, starts[2:4])
    assert not torch.equal(student.draw_layout(a_batch(store, 8, seed=1)).starts, starts)


@pytest.mark.parametrize("recipe", RECIPES)
def test_resumed_runs_equal_uninterrupted_ones(recipe: str, tmp_path: Path) -> None:
    """Bit for bit; and the folder loads without the shards, equal to what was trained."""
    backbone = write_backbone(tmp_path / "backbone")
    store = store_of(tmp_path / "store", backbone)
    config = backbone_run(backbone, "drafter", **RECIPES[recipe])
    assert train(config, store, tmp_path / "whole")
    again = tmp_path / "again"
    assert not run_with_signal(config, store, again, 4)
    assert train(config, store, again)
    assert_same_run(tmp_path / "whole", again)
    loaded = load_student(tmp_path / "whole")
    size = sum(parameter.numel() for parameter in loaded.parameters())
    file = tmp_path / "whole" / "model" / "model.safetensors"
    assert file.stat().st_size < 4 * size + 8000, "the backbone is not in the folder"


def test_bf16_backbones_train(tmp_path: Path) -> None:
    for shape in SHAPES:
        student, store = tiny_drafter(tmp_path, shape, model__backbone__dtype="bfloat16", scale=0.1)
        assert student.language_model.network.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            output = student.loss(a_batch(store))
        output.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in student.parameters())
        assert all(p.dtype == torch.float32 for p in student.parameters())


def test_one_uniform_names_the_token() -> None:
    """F^-1(u) is the token, and over tokens drawn from p the uniforms are uniform."""
    generator = torch.Generator().manual_seed(0)
    num, size = 4000, 9
    log_probs = torch.randn(num, size, generator=generator).mul(2).log_softmax(dim=1)
    tokens = torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
    index = torch.arange(num)
    keys = PositionKeys(3, index, index % 7 + 1)
    own = log_probs.gather(1, tokens[:, None])[:, 0]
    noise = KeyedPosterior(keys, tokens, own, DenseProbabilities(log_probs))
    uniforms = token_uniforms(noise)
    cumulative = log_probs.double().exp().cumsum(dim=1)
    found = (cumulative <= uniforms[:, None]).sum(dim=1)
    assert (found == tokens).float().mean() > 0.999, "all but ties of rounding"
    for values in (uniforms, token_uniforms(KeyedPrior(keys, size))):
        place = torch.arange(1, num + 1) / num
        distance = (values.sort().values - place).abs().max()
        assert distance * math.sqrt(num) < LARGEST_KS
    with pytest.raises(UsageError, match="an engine's noise has no uniforms"):
        token_uniforms(KeyedPrior(EngineKeys(index, index % 7 + 1), size))


def test_mistakes_are_named(tmp_path: Path) -> None:
    backbone = write_backbone(tmp_path / "backbone")
    drawn = store_of(tmp_path / "drawn", backbone, codec_name="seeded")
    for recipe in ("none", "hidden", "uniform"):
        config = backbone_run(backbone, "drafter", **RECIPES[recipe])
        with pytest.raises(UsageError, match=r"distribution|probabilities"):
            train(config, drawn, tmp_path / recipe)
    assert train(backbone_run(backbone, "drafter", **RECIPES["seen"]), drawn, tmp_path / "seen")
    other = write_backbone(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"another backbone.*weights_sha256"):
        load_student(tmp_path / "seen", backbone=str(other))
    store = store_of(tmp_path / "store", backbone)
    with pytest.raises(UsageError, match="rows too short for the slots"):
        train(
            backbone_run(backbone, "drafter", model__backbone__num_proposed=7),
            store,
            tmp_path / "x",
        )
    with pytest.raises(UsageError, match="only a drafter reads one uniform"):
        train(
            backbone_run(backbone, "medusa", model__conditioning="uniform"), store, tmp_path / "y"
        )
    shards = ShardStore.open(store)
    for changes, problem in (
        ({"noise__layers": [2]}, r"got \[2\].*has 2 layers"),
        ({"noise__layers": [1], "backbone__own_noise": "seen"}, "which token the one before"),
    ):
        named = {f"model__{name}": value for name, value in changes.items()}
        config = backbone_run(backbone, "drafter", model__conditioning="gumbel", **named)
        with pytest.raises(UsageError, match=problem):
            build_student(config, shards, None)
    with pytest.raises(UsageError, match="lora_rank"):
        build_student(
            backbone_run(backbone, "medusa", model__backbone__lora_rank=8),
            ShardStore.open(store),
            None,
        )
    windowed = write_backbone(
        tmp_path / "windowed",
        "qwen2",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=0,
    )
    with pytest.raises(UsageError, match="window shorter than the rows"):
        config = backbone_run(windowed, "drafter")
        build_student(config, ShardStore.open(store_of(tmp_path / "w", windowed)), None)
