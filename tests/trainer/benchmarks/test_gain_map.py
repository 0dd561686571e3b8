"""The map of where noise pays: which plain student is read against, and what is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality import gain_map, stories
from benchmarks.quality.ahead import Fills
from benchmarks.quality.gain_map import best_gain, map_gains, named_runs, table
from shards.base import UsageError
from tests.trainer.run_cases import tiny_run, write_store
from trainer.training.loop import train

ROWS, WIDTH = 400, 2


def fill(rate: float, slope: float, shift: float = 0.0, equal: float = 0.5) -> Fills:
    """Fills on the line NLL = slope H + shift; ``equal`` of them as the teacher's."""
    repeated = (torch.arange(ROWS) < rate * ROWS)[:, None].expand(-1, WIDTH)
    nll = torch.full((ROWS, WIDTH), slope * -math.log(rate) + shift)
    return Fills(nll, (torch.arange(ROWS) < equal * ROWS)[:, None].expand(-1, WIDTH), repeated)


def curves(slope: float, rates: tuple[float, ...] = (0.3, 0.5, 0.95)) -> dict[float, Fills]:
    return {p: fill(rate, slope) for p, rate in zip((1.0, 0.9, 0.5), rates, strict=True)}


def test_the_plain_student_to_beat_is_the_best_at_that_entropy() -> None:
    """Two that reach its entropy, and one that would be better and does not."""
    near, far = curves(3.0), curves(2.0)
    name, gain = best_gain({"near": near, "far": far}, {0.0: fill(0.7, 2.0, -0.5)}, 2)
    assert name == "far" and gain is not None
    assert gain.value == pytest.approx(-0.5, abs=0.02)
    unread = curves(0.1, (0.9, 0.92, 0.95))
    assert best_gain({"unread": unread, "far": far}, {0.0: fill(0.7, 2.0)}, 2)[0] == "far"
    assert best_gain({"unread": unread}, {0.0: fill(0.7, 2.0)}, 2) == (None, None)


def test_agreement_is_that_of_the_last_token_and_of_the_best_without_noise() -> None:
    plain = {"a": {1.0: fill(0.3, 2.0, equal=0.2)}, "b": {1.0: fill(0.3, 2.0, equal=0.3)}}
    noisy = fill(0.7, 2.0)
    equal = torch.stack((torch.ones(ROWS), torch.arange(ROWS) % 4 == 0), dim=1).bool()
    cells = map_gains(plain, {"noisy": {0.0: Fills(noisy.nll, equal, noisy.repeated)}})
    assert [(cell.num_ahead, cell.agreement) for cell in cells] == [(1, 1.0), (2, 0.25)]
    assert [cell.plain_agreement for cell in cells] == [pytest.approx(0.3)] * 2
    assert "entropy not reached without noise; 25 against 30" in table(cells)


@pytest.mark.parametrize("words", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_students_without_a_name_of_their_own_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="name of its own"):
        named_runs(words)


def test_the_map_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trained students of a store: every distance that its rows have, agreement in [0, 1]."""
    monkeypatch.setattr(stories, "STARTS", (2, 3))
    for module in (stories, gain_map):
        monkeypatch.setattr(module, "DISTANCES", (1, 2, 4))
    store = write_store(tmp_path / "store")
    for conditioning in ("none", "gumbel"):
        config = tiny_run(model__conditioning=conditioning, training__num_steps=1)
        assert train(config, store, tmp_path / conditioning)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    runs = [f"plain={tmp_path / 'none'}", f"noisy={tmp_path / 'gumbel'}"]
    with pytest.raises(UsageError, match="plain and conditioned"):
        gain_map.gain_map(runs[:1], store, str(tmp_path / "teacher"), tmp_path / "out")
    gain_map.gain_map(runs, store, str(tmp_path / "teacher"), tmp_path / "out")
    cells = json.loads((tmp_path / "out/gain-map.json").read_text())["cells"]
    assert [(cell["student"], cell["num_ahead"]) for cell in cells] == [
        ("noisy", 1),
        ("noisy", 2),
        ("noisy", 4),
    ]
    assert all(0 <= cell["agreement"] <= 1 for cell in cells)
    assert "| noisy |" in (tmp_path / "out/gain-map.md").read_text()
    assert (tmp_path / "out/gain-map.png").stat().st_size > 10_000
