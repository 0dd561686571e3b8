"""The plugin on a stand-in of vLLM's surface: what it replaces, and what it leaves as it was."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.serving import plugin
from trainer.serving.coupling import draw

STOCK = torch.tensor([[-9]])


class Logger:
    def __init__(self) -> None:
        self.said: list[str] = []

    def info(self, text: str, *parts: object) -> None:
        return

    def warning(self, text: str, *parts: object) -> None:
        self.said.append(text % parts)

    def warning_once(self, text: str, *parts: object) -> None:
        if text % parts not in self.said:
            self.warning(text, *parts)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules by the names that the plugin imports, registered; ``log`` is what it said."""
    logger = Logger()

    class GPUModelRunner:
        def _sample(self, logits: Any, drafts: Any) -> Any:
            if logits is None:
                raise RuntimeError("stock")
            metadata = self.input_batch.sampling_metadata
            self.seen = metadata.generators, drafts
            if drafts is not None or metadata.all_greedy:
                return logits.argmax(dim=-1)
            return TopKTopPSampler().forward(logits, metadata.generators, None, None)[0]

        def propose_draft_token_ids(self, *given: Any) -> Any:
            return self.drafter.propose()

    class TopKTopPSampler:
        logprobs_mode = "raw_logprobs"

        def __init__(self) -> None:
            self.forward = lambda logits, generators, k, p: (logits.argmax(dim=-1) * 0 - 7, None)

    def rejection_sample(
        *,
        num_draft_tokens: Any,
        sampling_metadata: Any,
        target_logits: Any,
        draft_token_ids: Any,
        bonus_token_ids: Any,
        max_spec_len: int,
    ) -> Any:
        return STOCK

    runner = SimpleNamespace(GPUModelRunner=GPUModelRunner)
    rejection = ModuleType("rejection_sampler")
    rejection.rejection_sample = rejection_sample  # type: ignore[attr-defined]
    rejection.expand_batch_to_tokens = None  # type: ignore[attr-defined]
    ops = SimpleNamespace(
        TopKTopPSampler=TopKTopPSampler, apply_top_k_top_p=lambda logits, k, p: logits
    )
    modules: dict[str, Any] = {
        "vllm": SimpleNamespace(__version__="0.32.0+cpu"),
        "vllm.logger": SimpleNamespace(init_logger=lambda name: logger),
        "vllm.v1": SimpleNamespace(),
        "vllm.v1.sample": SimpleNamespace(rejection_sampler=rejection),
        "vllm.v1.sample.rejection_sampler": rejection,
        "vllm.v1.sample.ops.topk_topp_sampler": ops,
        "vllm.v1.worker.gpu_model_runner": runner,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "is_registered", False)
    plugin.register()
    return SimpleNamespace(runner=GPUModelRunner, rejection=rejection, log=logger, modules=modules)


def step(engine: SimpleNamespace, seeds: list[int | None], **metadata: Any) -> Any:
    """A runner whose requests a, b, .. have so many tokens: 5, 6, .."""
    ids = [chr(ord("a") + i) for i in range(len(seeds))]
    runner = engine.runner()
    cut = {"all_greedy": False, "all_random": True, "temperature": torch.ones(len(ids))}
    runner.input_batch = SimpleNamespace(
        req_ids=ids,
        generators={0: "moves on"},
        sampling_metadata=SimpleNamespace(**{**cut, "generators": {0: "moves on"}, **metadata}),
        vocab_size=50,
    )
    runner.requests = {
        name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed))
        for name, seed in zip(ids, seeds, strict=True)
    }
    runner.seq_lens = torch.arange(5, 5 + 2 * len(ids), dtype=torch.int32)  # longer than the batch
    runner.sampler = SimpleNamespace(use_fp64_gumbel=False)
    return runner


def test_tokens_are_drawn_with_the_noise_of_seed_and_position(engine: SimpleNamespace) -> None:
    runner, logits = step(engine, [3, 4, None]), torch.randn(3, 50)
    found = runner._sample(logits.clone(), None)
    seeds = torch.tensor([3, 4, plugin.seed_of("c", None)])
    assert found.tolist() == draw(logits.clone(), seeds, torch.tensor([4, 5, 6])).tolist()
    assert runner.input_batch.sampling_metadata.generators == {0: "moves on"}
    assert not runner.input_batch.generators, "none is moved on"
    # Row by row, in another order: the same tokens.
    alone = step(engine, [4])
    alone.seq_lens += 1
    assert alone._sample(logits[1:2].clone(), None).tolist() == found[1:2].tolist()


def test_what_fails_leaves_the_metadata_as_it_was(engine: SimpleNamespace) -> None:
    runner = step(engine, [1])
    with pytest.raises(RuntimeError, match="stock"):
        runner._sample(None, None)
    assert runner.input_batch.sampling_metadata.generators == {0: "moves on"}


def test_greedy_steps_are_the_stock_ones(engine: SimpleNamespace) -> None:
    runner = step(engine, [1], all_greedy=True)
    none = SimpleNamespace(num_draft_tokens=[0])
    assert runner._sample(torch.eye(50)[:1], none).tolist() == [0]
    assert runner.seen == ({0: "moves on"}, None), "no drafts are none"


def test_drafts_are_kept_while_they_equal_the_targets_draw(engine: SimpleNamespace) -> None:
    counts, logits = [2, 0, 1], torch.randn(6, 50)
    runner = step(engine, [7, 8, 9])
    runner.positions = torch.tensor([4, 5, 6, 5, 6, 7])
    drafts = SimpleNamespace(
        num_draft_tokens=counts,
        logits_indices=torch.arange(6),
        bonus_logits_indices=torch.tensor([2, 3, 5]),
        target_logits_indices=torch.tensor([0, 1, 4]),
    )
    runner._sample(logits, drafts)
    keyed = runner.seen[0]
    own = draw(logits.clone(), torch.tensor([7, 7, 7, 8, 9, 9]), runner.positions)
    proposed = own[[0, 1, 4]].clone()
    proposed[1] = (proposed[1] + 1) % 50
    metadata = runner.input_batch.sampling_metadata
    metadata.generators = keyed
    asked: dict[str, Any] = {
        "num_draft_tokens": counts,
        "sampling_metadata": metadata,
        "draft_token_ids": proposed.int(),
        "bonus_token_ids": own[[2, 3, 5]][:, None].int(),
        "max_spec_len": 2,
    }
    found = engine.rejection.rejection_sample(**asked, target_logits=logits[[0, 1, 4]].clone())
    one, two, _, four, five, six = own.tolist()
    assert found.tolist() == [[one, two, -1], [four, -1, -1], [five, six, -1]]
    metadata.generators = {}
    assert engine.rejection.rejection_sample(**asked, target_logits=logits[:3]) is STOCK


def test_values_of_requests_become_values_of_their_drafts(engine: SimpleNamespace) -> None:
    values, cumulative = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6])
    found = engine.rejection.expand_batch_to_tokens(values, cumulative, 6, 0.0, 1.0)
    assert found.tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_no_failure_of_a_drafter_reaches_a_request(engine: SimpleNamespace) -> None:
    runner, told = step(engine, [1, 2]), []
    given = (None, None, "states", None, "verified")

    def fail() -> Any:
        raise ValueError("broken\nin two lines")

    runner.drafter = SimpleNamespace(propose=fail)
    for _ in range(2):
        assert runner.propose_draft_token_ids("step", [[1], [2]], *given) == [[], []]
    runner.drafter = SimpleNamespace(
        propose=lambda: [[3, 50, 4], [-1]], look=lambda *asked: told.append(asked)
    )
    assert runner.propose_draft_token_ids("step", [[1], [2]], *given) == [[3], []]
    assert len(engine.log.said) == 3 and "ValueError: broken" in engine.log.said[0]
    assert told[0][0].seeds.tolist() == [1, 2] and told[0][1:] == ("states", "verified")


def test_a_second_registration_and_another_version(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.runner._sample
    plugin.register()
    assert engine.runner._sample is before and not engine.log.said
    engine.modules["vllm"].__version__ = "0.99.0"
    monkeypatch.setattr(plugin, "is_registered", False)
    plugin.register()
    assert [line.split("; ")[1] for line in engine.log.said] == [
        "this is 0.99.0: certify what it serves"
    ]


def test_seeds_are_the_requests_own() -> None:
    assert plugin.seed_of("a", 0) == 0
    drawn = {plugin.seed_of(name, None) for name in "abc"}
    assert len(drawn) == 3 and all(0 <= seed < 1 << 63 for seed in drawn)
    assert importlib.reload(plugin).seed_of("a", None) in drawn, "alike in every process"
