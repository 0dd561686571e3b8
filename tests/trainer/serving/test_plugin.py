"""What an engine serves: seeds that answers say, drafts that are kept, and the plugin's hold.

The plugin stands on a stand-in of vLLM's surface: what it replaces, what it leaves as it was.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.serving import coupling, plugin
from trainer.serving.asgi import SeededAnswers
from trainer.serving.coupling import NOTHING, draw, keep_agreeing

STOCK = torch.tensor([[-9]])


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules by the names that the plugin imports, registered; ``said`` are its warnings."""
    said: list[str] = []

    def warn(text: str, *parts: object) -> None:
        said.append(text % parts)

    def warn_once(text: str, *parts: object) -> None:
        if text % parts not in said:
            warn(text, *parts)

    logger = SimpleNamespace(info=lambda *_: None, warning=warn, warning_once=warn_once)

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
        synthetic_mode: bool = False,
    ) -> Any:
        return STOCK

    rejection: Any = ModuleType("rejection_sampler")
    rejection.rejection_sample, rejection.expand_batch_to_tokens = rejection_sample, None
    ops = SimpleNamespace(
        TopKTopPSampler=TopKTopPSampler,
        apply_top_k_top_p=lambda logits, k, p: logits if k is None else cut_at(logits, int(k)),
    )
    modules: dict[str, Any] = {
        "vllm": SimpleNamespace(__version__="0.32.0+cpu"),
        "vllm.logger": SimpleNamespace(init_logger=lambda name: logger),
        "vllm.v1": SimpleNamespace(),
        "vllm.v1.sample": SimpleNamespace(rejection_sampler=rejection),
        "vllm.v1.sample.rejection_sampler": rejection,
        "vllm.v1.sample.ops.topk_topp_sampler": ops,
        "vllm.v1.worker.gpu_model_runner": SimpleNamespace(GPUModelRunner=GPUModelRunner),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "is_registered", False)
    plugin.register()
    made = {"runner": GPUModelRunner, "sampler": TopKTopPSampler, "rejection": rejection}
    return SimpleNamespace(**made, said=said, modules=modules)


def cut_at(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Without the ids from ``size`` on."""
    return logits.masked_fill(torch.arange(logits.shape[1]) >= size, -torch.inf)


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
        name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed)) for name, seed in zip(ids, seeds, strict=True)
    }
    runner.seq_lens = torch.arange(5, 5 + 2 * len(ids), dtype=torch.int32)  # longer than the batch
    runner.sampler = SimpleNamespace(use_fp64_gumbel=False)
    return runner


def test_tokens_are_drawn_with_the_noise_of_seed_and_position(engine: SimpleNamespace) -> None:
    runner, logits = step(engine, [3, 4, None, 2**63]), torch.randn(4, 50)  # the last: of n = 2, seed 2^63 - 1
    found = runner._sample(logits.clone(), None)
    seeds = torch.tensor([3, 4, plugin.seed_of("c", None), -(2**63)])
    assert found.tolist() == draw(logits.clone(), seeds, torch.tensor([4, 5, 6, 7])).tolist()
    assert runner.input_batch.sampling_metadata.generators == {0: "moves on"}
    assert not runner.input_batch.generators, "none is moved on"
    # Row by row, in another order: the same tokens.
    alone = step(engine, [4])
    alone.seq_lens += 1
    assert alone._sample(logits[1:2].clone(), None).tolist() == found[1:2].tolist()
    alone.sampler.use_fp64_gumbel = True
    wide = draw(logits[1:2].clone(), torch.tensor([4]), torch.tensor([5]), torch.float64)
    assert alone._sample(logits[1:2].clone(), None).tolist() == wide.tolist()
    assert alone.seen[0].drawn.dtype == torch.float64


def test_draws_are_of_what_is_left_by_the_engine_which_is_said(engine: SimpleNamespace) -> None:
    keys = plugin.Keys(torch.tensor([3, 4]), torch.tensor([4, 5]), torch.float32)
    logits = torch.randn(2, 50)
    left = cut_at(logits, 7)
    for mode, expected in (
        ("raw_logprobs", None),
        ("processed_logits", left),
        ("processed_logprobs", left.log_softmax(dim=-1)),
    ):
        sampler = engine.sampler()
        sampler.logprobs_mode = mode
        drawn, said = sampler.forward(logits.clone(), plugin.KeyedRows(keys, None), torch.tensor(7), None)
        assert torch.equal(drawn, draw(left.clone(), keys.seeds, keys.positions))
        assert said is None if expected is None else torch.equal(said, expected)


def test_greedy_and_failing_steps_are_the_stock_ones(engine: SimpleNamespace) -> None:
    runner = step(engine, [1], all_greedy=True)
    none = SimpleNamespace(num_draft_tokens=[0])
    assert runner._sample(torch.eye(50)[:1], none).tolist() == [0]
    assert runner.seen == ({0: "moves on"}, None), "no drafts are none"
    runner = step(engine, [1])
    with pytest.raises(RuntimeError, match="stock"):
        runner._sample(None, None)
    assert runner.input_batch.sampling_metadata.generators == {0: "moves on"}


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
    own = draw(logits.clone(), torch.tensor([7, 7, 7, 8, 9, 9]), runner.positions)
    proposed = own[[0, 1, 4]].clone()
    proposed[1] = (proposed[1] + 1) % 50
    metadata = runner.input_batch.sampling_metadata
    metadata.generators, _ = runner.seen
    asked: dict[str, Any] = {
        "num_draft_tokens": counts,
        "sampling_metadata": metadata,
        "draft_token_ids": proposed.int(),
        "bonus_token_ids": own[[2, 3, 5]][:, None].int(),
        "max_spec_len": 2,
    }
    found = engine.rejection.rejection_sample(**asked, target_logits=logits[[0, 1, 4]].clone())
    one, two, three, four, five, six = own.tolist()
    assert found.tolist() == [[one, two, -1], [four, -1, -1], [five, six, -1]]
    best = logits.argmax(dim=-1).tolist()
    asked["draft_token_ids"] = torch.tensor([best[0], best[1], (five + 1) % 50])
    metadata.all_random, metadata.temperature = False, torch.tensor([0.0, 1.0, 1.0])
    found = engine.rejection.rejection_sample(**asked, target_logits=logits[[0, 1, 4]].clone())
    assert found[0].tolist() == [best[0], best[1], three] and found[2].tolist() == [five, -1, -1]
    metadata.all_greedy, asked["draft_token_ids"][2] = True, best[4]
    found = engine.rejection.rejection_sample(**asked, target_logits=logits[[0, 1, 4]].clone())
    assert found[2].tolist() == [best[4], six, -1]
    assert engine.rejection.rejection_sample(**asked, target_logits=logits[:3], synthetic_mode=True) is STOCK
    runner.sampler.use_fp64_gumbel = True
    runner._sample(logits, drafts)
    assert (runner.seen[0].drawn.dtype, runner.seen[0].drafted.dtype) == (torch.float64, torch.float64)
    metadata.generators = {}
    assert engine.rejection.rejection_sample(**asked, target_logits=logits[:3]) is STOCK
    values = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6])  # of requests, for each of their drafts
    assert engine.rejection.expand_batch_to_tokens(*values, 6, 0.0, 1.0).tolist() == [0.5, 0.5, 1.0, 2.0, 2.0, 2.0]


def test_no_failure_of_a_drafter_reaches_a_request(engine: SimpleNamespace) -> None:
    runner, told = step(engine, [1, 2], temperature=None), []
    asked = ("step", [[1], [2]], None, None, "states", None, "verified")

    def fail() -> Any:
        raise ValueError("broken\nin two lines")

    runner.drafter = SimpleNamespace(propose=fail)
    for _ in range(2):
        assert runner.propose_draft_token_ids(*asked) == [[], []]
    runner.drafter = SimpleNamespace(propose=lambda: [[3, 50, 4], [-1]], look=lambda *seen: told.append(seen))
    assert runner.propose_draft_token_ids(*asked) == [[3], []]
    assert len(engine.said) == 3 and engine.said[0].endswith("ValueError: broken")
    assert engine.said[1].endswith("got 50; expected 0 to 49")
    assert told[0][0].seeds.tolist() == [1, 2] and told[0][1:] == ("states", "verified")
    assert told[0][0].temperatures.tolist() == [0, 0], "a step of greedy requests alone says none"
    runner.drafter.propose = lambda: "kept on the device"
    assert runner.propose_draft_token_ids(*asked[:-1], None) == "kept on the device"
    assert told[1][1:] == ("states", None), "also where no drafts were verified"


def test_a_second_registration_and_another_version(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine.runner._sample
    plugin.register()
    assert engine.runner._sample is before and not engine.said
    engine.modules["vllm"].__version__ = "0.99.0"
    second = type("GPUModelRunner", (), {"__init__": lambda self, vllm_config, device: None})
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.model_runner", SimpleNamespace(GPUModelRunner=second))
    monkeypatch.setattr(plugin, "is_registered", False)
    plugin.register()
    second("config", device="cpu")
    line, other = engine.said
    assert line.split("; ")[1] == "this is 0.99.0: certify what it serves" and "VLLM_USE_V2_MODEL_RUNNER=0" in other
    drawn = {plugin.seed_of(name, None) for name in "abc"}
    assert plugin.seed_of("a", 0) == 0 and len(drawn) == 3 and all(0 <= seed < 1 << 63 for seed in drawn)
    assert importlib.reload(plugin).seed_of("a", None) in drawn, "alike in every process"


def test_states_are_written_in_the_order_of_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens in blocks of two, the fourth, first and second; another rank leaves it to the engine."""
    written: list[Any] = []
    own = {
        "_submit_async_write": lambda self, pending: written.append("stock"),
        "_write_tensors": lambda self, *given: written.append(given),
        "_on_write_done": lambda self, *given: written.append(given),
    }
    stock = SimpleNamespace(ExampleHiddenStatesConnector=type("Stock", (), own))
    place = "vllm.distributed.kv_transfer.kv_connector.v1"
    monkeypatch.setitem(sys.modules, place, SimpleNamespace(example_hidden_states_connector=stock))
    monkeypatch.delitem(sys.modules, "trainer.serving.states", raising=False)
    made = importlib.import_module("trainer.serving.states").StatesConnector()
    del sys.modules["trainer.serving.states"]
    cache, threads = torch.randn(4, 1, 2, 3), ThreadPoolExecutor(1)
    parts = {"kv_cache": cache, "block_size": 2, "is_tp_rank_zero": True, "executor": threads, "lock_fds": {"r": 5}}
    vars(made).update({f"_{name}": part for name, part in (parts | {"req_copy_events": {}, "req_futures": {}}).items()})
    pending = SimpleNamespace(req_id="r", filename="f", token_ids=torch.arange(5), block_ids=[3, 0, 1])
    assert made._submit_async_write(pending) is None
    threads.shutdown()
    (tensors, copied, *where), done = written
    assert torch.equal(tensors["hidden_states"], cache[[3, 3, 0, 0, 1], :, [0, 1, 0, 1, 0]])
    assert torch.equal(tensors["token_ids"], pending.token_ids) and where == ["f", 5] and copied.query()
    assert made._req_copy_events == {"r": copied} and done == ("r", made._req_futures["r"]) and not made._lock_fds
    made._is_tp_rank_zero = False
    made._submit_async_write(pending)
    assert written[2:] == ["stock"]


# The rule that keeps drafts: whatever is drafted, the text is the target's own.

ids = st.integers(0, 3)
request = st.lists(st.tuples(ids, ids), max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(request, ids), min_size=1, max_size=4))
def test_kept_are_the_drafts_before_the_first_that_differs_and_one_more(
    batch: list[tuple[list[tuple[int, int]], int]],
) -> None:
    pairs = [pair for drafted, _ in batch for pair in drafted]
    drafts, targets = (torch.tensor([p[i] for p in pairs], dtype=torch.int64) for i in (0, 1))
    counts = torch.tensor([len(drafted) for drafted, _ in batch])
    bonus = torch.tensor([last for _, last in batch])
    found = keep_agreeing(drafts, targets, counts, bonus, int(counts.max()))
    assert found.dtype == torch.int32
    for (drafted, last), row in zip(batch, found.tolist(), strict=True):
        expected = []
        for draft, target in drafted:
            expected.append(target)
            if draft != target:
                break
        else:
            expected.append(last)
        assert row == expected + [NOTHING] * (len(row) - len(expected))


def test_a_loop_of_few_logarithms_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's kernel as plain Python, where no numba is: rows flat and steep, cut, and greedy."""
    numba = SimpleNamespace(njit=lambda **_: lambda function: function, uint32=np.uint32)
    monkeypatch.setitem(sys.modules, "numba", numba)
    monkeypatch.delitem(sys.modules, "trainer.serving.fast_draw", raising=False)
    monkeypatch.setattr(coupling, "_cpu_kernel", coupling._cpu_kernel.__wrapped__)
    generator, rows = torch.Generator().manual_seed(0), torch.arange(60)
    logits = torch.randn(60, 80, generator=generator) * torch.tensor([0.0, 1.0, 3.0, 9.0]).repeat(15)[:, None]
    logits[20:, ::3] = -torch.inf
    seeds, is_greedy = 2**40 * rows + 7, rows % 5 == 0
    with np.errstate(over="ignore"):
        found = draw(logits.clone(), seeds, 3 * rows, is_greedy=is_greedy)
    score = sys.modules.pop("trainer.serving.fast_draw")._score
    for h in (0, 2**16, 2**30 - 1, 2**31, 2**32 - 1):  # of u at the smallest, in the series, behind it, at the largest
        u = min((h + 0.5) * 2.0**-32, 1 - 2.0**-24)
        assert float(score(np.float32(0), np.uint32(h))) == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-4)
    monkeypatch.setattr(coupling, "_cpu_kernel", lambda: None)
    assert torch.equal(found, draw(logits.clone(), seeds, 3 * rows, is_greedy=is_greedy))
    monkeypatch.setattr(coupling, "_cpu_kernel", lambda: pytest.fail)
    draw(logits, seeds, rows, torch.float64)  # is not for the kernel


def test_draws_follow_the_law() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20_000, 4)
    found = draw(logits, torch.arange(20_000), torch.full((20_000,), 5))
    share = torch.bincount(found, minlength=4) / 20_000
    expected = logits[0].softmax(dim=-1)
    deviation = (expected * (1 - expected) / 20_000).sqrt()
    assert bool(((share - expected).abs() < 4.5 * deviation).all())
    rows = torch.arange(40)
    greedy = draw(logits[:40].clone(), rows, rows, is_greedy=rows % 2 == 0)
    assert not greedy[::2].any() and torch.equal(greedy[1::2], draw(logits[1:40:2].clone(), rows[1::2], rows[1::2]))
    assert greedy.any(), "the others take noise"


# Requests without a seed get one, and answers say it.

SAID = (b'{"choices": [', b'{"text": "x"}]}')
JSON = b"application/json; charset=utf-8"


def call(
    body: bytes, path: str = "/v1/completions", kind: bytes = JSON, parts: tuple[bytes, ...] = SAID, status: int = 200
) -> tuple[bytes, dict[bytes, bytes], bytes]:
    """What the engine was asked, and the headers and body that came back."""
    asked, sent = [], []
    coming = iter(
        [
            {"type": "http.request", "body": body[:3], "more_body": True},
            {"type": "http.request", "body": body[3:], "more_body": False},
            {"type": "http.disconnect"},
        ]
    )

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        whole, message = b"", {"more_body": True}
        while message["more_body"]:
            message = await receive()
            whole += message["body"]
        asked.append(whole)
        told = sorted((name.lower(), value) for name, value in scope["headers"])
        assert told == [(b"content-length", str(len(whole)).encode()), (b"x-own", b"kept")]
        assert (await receive())["type"] == "http.disconnect", "the caller's leaving is seen"
        headers = [(b"content-type", kind), (b"Content-Length", b"9")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, part in enumerate(parts, 1):
            more = number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})

    async def receive() -> Any:
        return next(coming)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"Content-Length", str(len(body)).encode()), (b"x-own", b"kept")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(SeededAnswers(engine)(scope, receive, send))
    answer = b"".join(message["body"] for message in sent[1:])
    lengths = [value for name, value in sent[0]["headers"] if name.lower() == b"content-length"]
    assert lengths in ([b"9"], [str(len(answer)).encode()])
    return asked[0], dict(sent[0]["headers"]), answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_missing_seed_is_drawn_and_returned(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the noise is named where it is drawn; a given seed is kept."""
    asked, headers, answer = call(b'{"prompt": "a"}', path=path)
    request, said = json.loads(asked), json.loads(answer)
    assert said == {"choices": [{"text": "x"}], "seed": request["seed"]} and request["prompt"] == "a"
    assert 0 <= int(headers[b"x-seed"]) == request["seed"] < 2**53, "every language reads it as it is"
    for none in (b"null", b"-1"):
        assert json.loads(call(b'{"seed": %s}' % none)[0])["seed"] not in (None, -1, request["seed"])
    monkeypatch.setattr(plugin, "is_registered", True)
    asked, _, answer = call(b'{"prompt": "a", "seed": 7}')
    assert json.loads(asked)["seed"] == json.loads(answer)["seed"] == 7
    assert json.loads(answer)["noise"] == "murmur3"


def test_what_is_no_finished_answer_passes_as_it_comes() -> None:
    """A stream, which says its seed in a header, an error, no request, and another path."""
    parts = (b"data: {}\n\n", b"data: [DONE]\n\n")
    _, headers, answer = call(b"{}", kind=b"text/event-stream", parts=parts)
    assert answer == b"".join(parts) and int(headers[b"x-seed"]) >= 0
    for said, status in ((b'{"error": "too long"}', 400), (b"[1]", 200)):
        assert call(b"{}", parts=(said,), status=status)[2] == said
    passed: list[Any] = []

    async def engine(*given: Any) -> None:
        passed.append(given)

    for scope in ({"type": "lifespan"}, {"type": "http", "method": "GET", "path": "/v1/completions"}):
        asyncio.run(SeededAnswers(engine)(scope, *"rs"))
        assert passed.pop() == (scope, "r", "s"), "as it came"
    for body, path in ((b"not JSON", "/v1/completions"), (b"[1, 2]", "/v1/completions"), (b"{}", "/v1/embeddings")):
        asked, headers, _ = call(body, path=path)
        assert asked == body and b"x-seed" not in headers
