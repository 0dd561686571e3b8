"""The paper's overhead table, and what noise costs at other vocabularies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from shards.errors import UsageError
from shards.noise.kinds import KeyedPrior
from shards.noise.philox import PositionKeys
from trainer.cli import app
from trainer.students.configuration import NoiseSettings
from trainer.students.registry import MDLM, MDLMConfig, StudentSettings
from trainer.training.overhead import (
    MODELS,
    Scale,
    kept_bytes,
    noise_cost,
    overhead_table,
    read_bytes,
)

PAPER = {
    "GPT-2 Small": ("38.6M", "33.0%"),
    "GPT-2 Large": ("64.3M", "8.3%"),
    "LLaMA-7B": ("131.1M", "1.9%"),
    "LLaMA-13B": ("163.8M", "1.3%"),
    "Qwen-7B": ("622.6M", "8.9%"),
}


@pytest.mark.parametrize("model", list(PAPER))
def test_rows_are_the_papers(model: str) -> None:
    line = next(line for line in overhead_table().splitlines() if line.startswith(model))
    assert tuple(line.split()[-2:]) == PAPER[model]


def test_a_students_own_overhead_is_v_times_h() -> None:
    plain = StudentSettings(hidden_size=16, num_layers=1, num_heads=2, condition_size=8)
    gumbel = StudentSettings(
        hidden_size=16, num_layers=1, num_heads=2, condition_size=8, conditioning="gumbel"
    )
    sizes = [
        sum(p.numel() for p in MDLM(MDLMConfig.build(s, vocab_size=50, row_length=8)).parameters())
        for s in (plain, gumbel)
    ]
    assert sizes[1] - sizes[0] == 50 * 16
    assert len(MODELS) == len(PAPER)


SMALL = StudentSettings(
    hidden_size=16, num_layers=1, num_heads=2, condition_size=8, dropout=0.0, conditioning="gumbel"
)
KINDS = {
    "whole": (SMALL, 50 * 16),
    "low rank": (replace(SMALL, noise=NoiseSettings(rank=4)), 50 * 4 + 4 * 16),
    "tied": (replace(SMALL, noise=NoiseSettings(projection="tied")), 16 * 16),
}


@contextmanager
def counted(student: MDLM) -> Iterator[dict[int, int]]:
    """Place -> bytes of what autograd keeps meanwhile, but for the student's weights."""
    given = {p.untyped_storage().data_ptr() for p in student.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


@pytest.mark.parametrize("kind", list(KINDS))
def test_costs_are_those_of_a_student_with_values(kind: str) -> None:
    """Parameters by hand; what autograd keeps of the conditioner, counted."""
    settings, added = KINDS[kind]
    scale = Scale(settings, row_length=8, num_rows=5, masked_share=1.0, device="cpu")
    cost = noise_cost(scale, 50)
    assert cost.parameters == added and cost.state_bytes == 20 * added
    student = MDLM(MDLMConfig.build(settings, vocab_size=50, row_length=8))
    positions = torch.arange(40)
    with counted(student) as kept:
        embedded = student.embed_noise(KeyedPrior(PositionKeys(0, positions, positions), 50))
    assert embedded.shape == (40, 16)
    assert sum(kept.values()) == kept_bytes(scale) and read_bytes(scale, 50) == 0
    assert cost.working_bytes - kept_bytes(scale) == 4 * 4 * 40 * 50
    assert cost.dense_bytes == 4 * 40 * 50


def test_operations_of_the_projection_by_hand() -> None:
    """4 D V a masked position; 4 r V + 6 r D of low rank; tied 4 D V + 6 D^2."""
    expected = {"whole": 4 * 16 * 51, "low rank": 4 * 4 * 51 + 6 * 4 * 16}
    expected["tied"] = 4 * 16 * 51 + 6 * 16 * 16
    for kind, (settings, _) in KINDS.items():
        scale = Scale(settings, row_length=8, num_rows=5, masked_share=0.5, device="cpu")
        assert noise_cost(scale, 50).gflops_per_step * 1e9 == pytest.approx(20 * expected[kind])


@pytest.mark.parametrize("count", [0, 20])
def test_readings_cost_what_a_student_with_values_keeps(count: int) -> None:
    """Parameters and operations by hand; what autograd keeps of two readings, within a fifth."""
    settings = replace(
        SMALL, num_layers=2, noise=NoiseSettings(layers=(1, 2), top_k=count), hidden_size=64
    )
    scale = Scale(settings, row_length=40, num_rows=5, masked_share=1.0, device="cpu")
    plain = replace(scale, settings=replace(settings, noise=NoiseSettings()))
    costs, without = noise_cost(scale, 50), noise_cost(plain, 50)
    assert costs.parameters - without.parameters == 2 * (50 * 64 + 64 + 1)
    added = (costs.gflops_per_step - without.gflops_per_step) * 1e9
    assert added == pytest.approx(200 * 2 * 12 * 64 * (count or 50))
    kept = [_kept_of_predicting(each.settings, count) for each in (scale, plain)]
    assert read_bytes(scale, 50) == pytest.approx(kept[0] - kept[1], rel=0.2)


def _kept_of_predicting(settings: StudentSettings, count: int) -> int:
    """Bytes that autograd keeps of the layers of 5 rows of 40, the noise given."""
    student = MDLM(MDLMConfig.build(settings, vocab_size=50, row_length=40))
    positions = torch.arange(200)
    embedded = student.embed_noise(KeyedPrior(PositionKeys(0, positions, positions), 50)).detach()
    tokens = torch.full((5, 40), 50)
    with counted(student) as kept:
        states, _ = student.sampling_states(tokens, embedded.unflatten(0, (5, 40)))
    assert states.requires_grad
    return sum(kept.values())


def test_the_command_and_its_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["overhead", "--preset", "tiny", "--row-length", "8", "--rows", "2", "--device", "cpu"]
    app([*words, "--vocab-size", "30,60", "--measure", "--json"], standalone_mode=False)
    costs = json.loads(capsys.readouterr().out)
    assert [cost["parameters"] for cost in costs] == [30 * 64, 60 * 64]
    assert all(0 <= cost["time_share"] < 1 for cost in costs)
    app([*words, "--vocab-size", "30"], standalone_mode=False)
    assert "GPT-2 Small" in (text := capsys.readouterr().out) and "GFLOP" in text
    for mistake in (
        ["--vocab-size", "30,many"],
        ["--vocab-size", "1"],
        ["--masked", "0"],
        ["--rows", "0"],
        ["--row-length", "1"],
        ["--device", "tpu"],
        ["--set", "model.noise.rank=0"],
        ["--set", "model.noise.rank=4", "--set", "model.noise.projection=tied"],
    ):
        with pytest.raises(UsageError):
            app([*words, *mistake], standalone_mode=False)
