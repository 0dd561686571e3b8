"""Scores from a server: right, in order, through misbehaviour, and never of another model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.engine import Engine
from pipeline.settings import EngineSettings
from shards.errors import GdistillError, UsageError
from tests.pipeline.engine.engine_server import EngineServer
from tests.pipeline.extract_cases import ROW_LENGTH, VOCAB_SIZE

ROWS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (12, ROW_LENGTH)).tolist()
NAMES = [f"row {i}" for i in range(len(ROWS))]


@pytest.fixture
def server(teacher: Path) -> EngineServer:
    return EngineServer(teacher)


def engine(url: str, **changes: object) -> Engine:
    settings = {"num_top": 5, "in_flight": 4, "max_tries": 4, **changes}
    return Engine(EngineSettings(url=url, **settings), VOCAB_SIZE)  # type: ignore[arg-type]


@pytest.mark.parametrize("dialect", ["prompt_logprobs", "sglang"])
def test_scores_are_the_models_own_in_the_order_of_the_rows(teacher: Path, dialect: str) -> None:
    with EngineServer(teacher, dialect).running() as url:
        rows = list(engine(url, dialect=dialect).score(ROWS, NAMES))
    model = AutoModelForCausalLM.from_pretrained(teacher).eval()
    with torch.inference_mode():
        log_probs = model(torch.tensor(ROWS)).logits[:, :-1].log_softmax(-1)
    for row, sent, expected in zip(rows, ROWS, log_probs, strict=True):
        assert row.token_ids.tolist() == sent
        own = expected.gather(1, torch.tensor(sent[1:])[:, None])[:, 0]
        np.testing.assert_allclose(row.token_log_probs[1:], own, atol=1e-4)
        values, ids = expected.topk(5)
        np.testing.assert_allclose(row.top_log_probs[1:], values, atol=1e-4)
        assert (row.top_ids[1:] == ids.numpy()).mean() > 0.95  # ties may be listed otherwise
    assert np.all(rows[0].top_ids[0] == -1) and rows[0].token_log_probs[0] == 0


@pytest.mark.parametrize("dialect", ["prompt_logprobs", "sglang"])
def test_ids_of_no_token_are_left_out(teacher: Path, dialect: str) -> None:
    """A model padded beyond its tokenizer: padding may be most probable, and is no entry."""
    server = EngineServer(teacher, dialect)
    server.padding = 3
    with server.running() as url:
        (row,) = engine(url, dialect=dialect).score(ROWS[:1], NAMES[:1])
    assert row.top_ids.max() < VOCAB_SIZE
    assert ((row.top_ids[1:] >= 0).sum(1) >= 1).all() and (row.top_ids[1:] == -1).any()


def test_rows_as_long_as_the_context_are_refused_before_they_are_made(server: EngineServer) -> None:
    server.context = ROW_LENGTH + 1
    with server.running() as url:
        assert engine(url).row_limit == ROW_LENGTH
        engine(url).try_out()
    server.context = None
    with server.running() as url:
        assert engine(url).row_limit is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_top": 21}, r"cannot be used.*greater than max allowed.*--max-logprobs 21"),
        ({"dialect": "sglang"}, r"cannot be used.*404"),
    ],
)
def test_what_a_server_refuses_for_every_row_is_known_from_a_dozen_ids(
    server: EngineServer, changes: dict[str, object], message: str
) -> None:
    with server.running() as url, pytest.raises(UsageError, match=message):
        engine(url, **changes).try_out()


def test_a_server_without_log_probabilities_of_prompts_is_named(teacher: Path) -> None:
    from pipeline.scored import row_of_response

    for answer in (
        {"choices": [{"text": "a", "prompt_logprobs": None, "logprobs": None}]},
        {"meta_info": {"finish_reason": {"type": "abort", "message": "too long"}}},
    ):
        with pytest.raises(GdistillError, match=r"no log-probabilities of the prompt.*sglang"):
            row_of_response(answer, [1, 2], vocab_size=8, num_top=2, where="here")


def test_a_dead_address_is_known_at_once(server: EngineServer) -> None:
    """Eight tries are for a server that stumbles; who is there is asked three times."""
    asked = engine("http://127.0.0.1:9", max_tries=8)
    adapter = asked._session.get_adapter("http://127.0.0.1:9/v1/models")
    assert adapter.max_retries.total == 2
    assert asked._session.get_adapter("http://127.0.0.1:9/v1/completions").max_retries.total == 7
    with pytest.raises(GdistillError, match=r"does not answer.*refused"):
        asked.identity()


def test_requests_overlap(server: EngineServer) -> None:
    with server.running() as url:
        list(engine(url, in_flight=4).score(ROWS * 4, NAMES * 4))
    assert 2 <= server.most_in_flight <= 4


@pytest.mark.parametrize("misdeeds", [[429, 429], [500, "cut", 503], ["cut"]])
def test_a_server_that_stumbles_is_asked_again(
    server: EngineServer, misdeeds: list[str | int]
) -> None:
    server.misdeeds.extend(misdeeds)
    with server.running() as url:
        rows = list(engine(url, in_flight=1).score(ROWS, NAMES))
    assert [row.token_ids.tolist() for row in rows] == ROWS
    assert server.num_scored == len(ROWS) + len(misdeeds)


@pytest.mark.parametrize(
    ("misdeeds", "message"),
    [
        ([500] * 4, "does not answer.*500"),
        ([400], "does not answer.*400"),
        (["text"], "no JSON"),
        (["drop_top"], "without its most probable.*row 0, position 2"),
        (["other_tokens"], "another tokenization"),
    ],
)
def test_what_cannot_be_mended_ends_in_one_line(
    server: EngineServer, misdeeds: list[str | int], message: str
) -> None:
    server.misdeeds.extend(misdeeds)
    with server.running() as url, pytest.raises(GdistillError, match=message) as caught:
        list(engine(url, in_flight=1).score(ROWS, NAMES))
    assert "\n" not in str(caught.value) and url in str(caught.value)


def test_a_model_of_another_name_is_refused_half_way(server: EngineServer) -> None:
    with server.running() as url:
        asked = engine(url, in_flight=1)
        scores = asked.score(ROWS, NAMES)
        next(scores)
        server.name = "another"
        with pytest.raises(GdistillError, match=r"model changed.*another.*tiny"):
            list(scores)


def test_another_model_under_the_same_name_is_refused(server: EngineServer) -> None:
    with server.running() as url:
        asked = engine(url)
        (first,) = asked.score(ROWS[:1], NAMES[:1])
        asked.require_unchanged(ROWS[0], first.token_log_probs)
        server.shift_nats = 4.0
        with pytest.raises(GdistillError, match="changed under the same name"):
            asked.require_unchanged(ROWS[0], first.token_log_probs)


def test_who_is_asked(server: EngineServer) -> None:
    with server.running() as url:
        assert engine(url).identity() == {
            "id": "tiny",
            "engine_version": "0.0.test",
            "num_top": 5,
            "temperature": 1.0,
        }
        assert engine(f"{url}/v1/").model == "tiny"
        with pytest.raises(UsageError, match=r"does not serve.*other.*tiny"):
            _ = engine(url, model="other").model


def test_settings_out_of_range_are_refused() -> None:
    for name, value in (("num_top", 0), ("in_flight", 0), ("url", "localhost:8000")):
        with pytest.raises(UsageError, match=f"engine.{name}"):
            EngineSettings(**{name: value})  # type: ignore[arg-type]
