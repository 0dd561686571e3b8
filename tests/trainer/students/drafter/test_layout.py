"""What slots see: by hand, packed against alone, dense against FlexAttention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from shards.errors import UsageError
from tests.trainer.backbone_cases import store_of, write_backbone
from tests.trainer.students.drafter.drafter_cases import a_batch, a_noise_table, tiny_drafter
from trainer.students import bd3lm as attention
from trainer.students.drafter import layout as kernel
from trainer.students.drafter.layout import EMPTY, SlotLayout, flex_slot_mask, slot_mask

FLEX = {"model__attention": "flex", "model__hidden_size": 32}
BY_HAND = """
1.........
11........
111.......
1111......
11..1.....
11..11....
111...1...
111...11..
111.....1.
111.....11
"""


def test_the_pattern_by_hand() -> None:
    """Four tokens, starting points behind two, three and three of them, two slots each."""
    layout = SlotLayout(torch.tensor([[2, 3, 3]]), 2, 4)
    seen = slot_mask(layout, torch.arange(4)[None], 4)[0, 0]
    drawn = ["".join("1" if cell else "." for cell in row) for row in seen.tolist()]
    assert drawn == BY_HAND.split()
    assert layout.places.tolist() == [[2, 3, 3, 4, 3, 4]]
    assert layout.positions.tolist() == [[1, 2, 2, 3, 2, 3]], "past the row's end they stay in it"
    cached = slot_mask(layout, torch.arange(4)[None], 1)[0, 0]
    assert torch.equal(cached, seen[3:]), "tokens in the cache ask nothing"


def test_empty_keys_are_seen_by_nobody_else() -> None:
    """A row of two tokens beside a row of three: its first key is no token."""
    places = torch.tensor([[EMPTY, 0, 1], [0, 1, 2]])
    seen = slot_mask(SlotLayout(torch.tensor([[2], [3]]), 1, 8), places, 3)[:, 0]
    assert seen[0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]]
    assert seen[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("num_read", [0, 3, 10])
def test_flex_attention_gives_the_same_numbers(num_read: int) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = SlotLayout(torch.tensor([[1, 4, 9], [2, 3, 10]]), 4, 14)
    places = torch.arange(10).repeat(2, 1)
    places[1, :3] = EMPTY
    queries, keys = num_read + 12, 22
    query = torch.randn(2, 3, queries, 16, generator=generator)
    key, value = torch.randn(2, 2, 3, keys, 16, generator=generator)
    dense = scaled_dot_product_attention(query, key, value, slot_mask(layout, places, num_read))
    block_mask = flex_slot_mask(layout, places, num_read)
    found = flex_attention(query, key, value, block_mask=block_mask)
    assert isinstance(found, torch.Tensor)
    assert torch.allclose(found, dense, atol=1e-5)


@pytest.mark.parametrize("recipe", ["hidden", "waiting"])
@pytest.mark.parametrize("shape", ["llama", "qwen2", "gpt2"])
@torch.no_grad()
def test_packed_starting_points_read_as_if_alone(shape: str, recipe: str, tmp_path: Path) -> None:
    """Against the row cut off before each starting point, whose slots stand behind it."""
    student, _ = tiny_drafter(tmp_path, shape, recipe)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (2, 8), generator=generator)
    starts = torch.tensor([[1, 3, 5], [2, 2, 4]])
    layout = SlotLayout(starts, student.num_slots, 8)
    table = a_noise_table(student, 2, 8)
    together = student.slot_states(tokens, layout, student.slot_inputs(tokens, layout, table))
    together = together.unflatten(1, (3, student.num_slots))
    for row in range(2):
        for point, start in enumerate(starts[row].tolist()):
            lone = SlotLayout(torch.tensor([[start]]), student.num_slots, 8)
            inputs = student.slot_inputs(tokens[row : row + 1], lone, table[row : row + 1])
            alone = student.slot_states(tokens[row : row + 1, :start], lone, inputs)
            assert torch.allclose(together[row, point], alone[0], atol=1e-4)


def test_slots_read_the_same_through_flex_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole network, forward and backward: grouped queries, a cache in front of the slots.

    PyTorch refuses gradients of FlexAttention on the CPU, where it has no kernel for them; without
    its refusal the uncompiled formula has some. ``force_eager`` leaves out the C++ compiler.
    """
    backbone = write_backbone(tmp_path / "llama", hidden_size=64, intermediate_size=48)
    store_of(tmp_path / "store-llama", backbone)
    student, shards = tiny_drafter(tmp_path, model__backbone__num_starts=3)
    flex, _ = tiny_drafter(tmp_path, model__backbone__num_starts=3, **FLEX)
    batch, weights = a_batch(shards), list(student.parameters())
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(kernel, "flex_obstacle", lambda device: "")
    wanted = student.loss(batch).loss
    with torch.compiler.set_stance("force_eager"):
        found = flex.loss(batch).loss
        ours = torch.autograd.grad(found, list(flex.parameters()))
    assert torch.isclose(found, wanted, atol=1e-4)
    for mine, own in zip(ours, torch.autograd.grad(wanted, weights), strict=True):
        assert (mine - own).norm() <= 1e-3 * own.norm()
    assert flex.language_model.network.config._attn_implementation == "sdpa", "for slots alone"


def test_what_keeps_slots_from_flex_attention_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for, an error; left to itself, one line on the first GPU step."""
    for shape, obstacle in (("llama", "heads of width 4"), ("gpt2", "has none in transformers")):
        student, shards = tiny_drafter(tmp_path, shape, **FLEX)
        with pytest.raises(UsageError, match=rf"{obstacle}.*model\.attention=auto"):
            student.loss(a_batch(shards))
    write_backbone(tmp_path / "wide", hidden_size=64)
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    assert kernel.training_kernel(wide, "auto", cpu) == "sdpa"
    with pytest.raises(UsageError, match="no gradient on cpu"):
        kernel.training_kernel(wide, "flex", cpu)

    def broken(*_: object) -> None:
        raise RuntimeError("no gcc")

    monkeypatch.setattr(attention, "flex_training_attention", broken)
    attention.flex_obstacle.cache_clear()
    assert [kernel.training_kernel(wide, "auto", gpu) for _ in range(2)] == ["sdpa", "sdpa"]
    assert capsys.readouterr().err.count("no FlexAttention for slots: no gcc") == 1
    monkeypatch.setattr(kernel, "flex_obstacle", lambda device: "")
    assert kernel.training_kernel(wide, "auto", gpu) == "flex_attention"
    assert kernel.training_kernel(wide, "sdpa", gpu) == "sdpa"
    attention.flex_obstacle.cache_clear()
