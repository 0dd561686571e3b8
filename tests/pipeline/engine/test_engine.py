"""Rows that an engine scores: what they must be, who is asked, and the store of our own teacher."""

from __future__ import annotations

import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.engine import Engine, StatesTeacher, run_scored, without_layers
from pipeline.scored import ScoreFiles, same_length, scored_row
from pipeline.settings import EngineSettings, Worker, resolve_request
from pipeline.tokens.dataset import PartWriter
from shards.atomic import file_claim
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import find_pretrained, load_causal_model
from shards.store.store import ShardStore
from tests.commands import call
from tests.pipeline import extract_cases
from tests.pipeline.conftest import Asked, Patch
from tests.pipeline.engine.engine_server import EngineServer, last_norm
from tests.pipeline.extract_cases import ROW_LENGTH, VOCAB_SIZE, contents, run, write_lines

DIALECTS = ["prompt_logprobs", "sglang"]
NOBODY = "http://127.0.0.1:9"

# Scored rows in files.

HALF, QUARTER = math.log(0.5), math.log(0.25)
RECORD: dict[str, Any] = {
    "token_ids": [0, 3, 5],
    "token_log_probs": [None, HALF, QUARTER],
    "top_ids": [[], [3, 1], [1]],
    "top_log_probs": [[], [HALF, QUARTER], [HALF]],
}


def read_one(path: Path) -> Any:
    return ScoreFiles.open([path], vocab_size=8, num_top=2).read(0, 1)[0]


def test_a_row_is_laid_out_likeliest_first() -> None:
    tops = [None, {1: QUARTER, 3: HALF, 2: math.log(0.1)}, {4: QUARTER, 1: QUARTER}]
    row = scored_row([0, 3, 5], [None, HALF, QUARTER], tops, vocab_size=8, num_top=2, where="here")
    assert row.top_ids.tolist() == [[-1, -1], [3, 1], [1, 4]]
    np.testing.assert_allclose(row.top_log_probs[1], [HALF, QUARTER], rtol=1e-6)
    np.testing.assert_allclose(row.token_log_probs, [0, HALF, QUARTER], rtol=1e-6)
    rounded = scored_row([0, 3], [None, 5e-4], [None, {3: 5e-4}], vocab_size=8, num_top=2, where="here")
    assert not rounded.token_log_probs.any(), "a little above 0 is 0"
    near: dict[int, Any] = {3: HALF + 0.005, 134: math.log(0.5005)}  # in sum 1.0005; 134 is padding
    row = scored_row([0, 3], [None, HALF], [None, near], vocab_size=8, num_top=2, where="here")
    assert (row.top_ids[1, 1], row.top_log_probs[1, 1]) == (-1, -np.inf)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_the_documented_schema_are_read_by_index(tmp_path: Path, kind: str) -> None:
    records = [{**RECORD, "token_ids": [0, 3, 4 + i]} for i in range(4)]
    paths = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, part in zip(paths, (records[:2], records[2:]), strict=True):
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(part), path, row_group_size=1)
        else:
            write_lines(path, *part)
    files = ScoreFiles.open(paths[::-1], vocab_size=8, num_top=2)
    assert files.num_rows == 4
    rows = files.read(1, 3)
    assert same_length(rows, 3, "x").tolist() == [[0, 3, 5], [0, 3, 6]]
    assert rows[0].top_ids.tolist() == [[-1, -1], [3, 1], [1, -1]]
    with pytest.raises(GdistillError, match=r"different lengths.*3 tokens.*4"):
        same_length(rows, 4, "x")
    known = files.sha256
    paths[1].write_bytes(paths[0].read_bytes())
    assert ScoreFiles.open(paths, vocab_size=8, num_top=2).sha256 != known, "of all files"


def test_an_engines_batch_output_is_read(tmp_path: Path) -> None:
    tops = [None, {"3": {"logprob": HALF}, "1": {"logprob": QUARTER}}, {"5": QUARTER}]
    body = {"prompt_token_ids": [0, 3, 5], "choices": [{"prompt_logprobs": tops}]}
    other = {"prompt_logprobs": tops, "choices": [{"prompt_token_ids": [0, 3, 5]}]}
    for line in ({"response": {"body": body}}, other):
        row = read_one(write_lines(tmp_path / "a.jsonl", line))
        assert row.token_ids.tolist() == [0, 3, 5]
        np.testing.assert_allclose(row.token_log_probs, [0, HALF, QUARTER], rtol=1e-6)


TOPS: list[Any] = [None, {"3": {"logprob": HALF}}, {"5": {"logprob": QUARTER}}]
OTHER = {"input_token_logprobs": [[None, 0, None], [HALF, 3, None], [QUARTER, 6, None]]}
OTHER |= {"input_top_logprobs": [None, [[HALF, 3, None]], [[QUARTER, 6, None]]]}
SENT = {"prompt_token_ids": [0, 3, 5]}
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [0, 3, 8]}, "outside the vocabulary.*8"),
    ({"top_ids": [[], [3, 135], [1]]}, "outside the vocabulary.*135"),
    ({"token_log_probs": [None, 0.01, QUARTER]}, "not a log-probability.*0.01"),
    ({"token_log_probs": [None, None, QUARTER]}, "not a log-probability.*None"),
    ({"token_log_probs": [None, HALF]}, "lists differ in length"),
    ({"top_ids": [[], [], [1]], "top_log_probs": [[], [], [HALF]]}, "without its most probable"),
    ({"top_ids": [[], [3], [1]]}, "top_ids and top_log_probs differ"),
    ({"top_log_probs": [[], [HALF, math.log(0.52)], [HALF]]}, "more than 1.*1.02"),
    ({"top_log_probs": [[], [HALF, QUARTER], [math.log(0.8)]]}, "more than 1.*1.05"),  # with its own
    ({"top_log_probs": [[], [HALF - 0.05, QUARTER], [HALF]]}, "two log-probabilities"),
    ({"top_log_probs": None}, "a column is missing.*top_log_probs"),
    ({"token_ids": [0, -1, 5]}, "outside the vocabulary.*-1"),
    ({"token_ids": [0, 3.5, 5]}, "not token ids.*3.5"),
    ({"token_ids": [0, True, 5]}, "not token ids.*True"),
    ({"token_ids": [0, 1 << 80, 5]}, "not token ids.*1208"),
    ({"token_ids": 5}, "no list.*token_ids = 5"),
    ({"top_ids": [[], 7, [1]]}, "not token ids.*7"),
    ({"top_ids": [[], [3, 3], [1]]}, "an id is there twice.*3, 3"),
    ({"top_log_probs": [[], [HALF, QUARTER], [HALF], [HALF]]}, "top_log_probs differ.*position 3"),
    ({"top_log_probs": [[], 7, [HALF]]}, "top_ids and top_log_probs differ"),
]
BAD_ANSWERS: list[tuple[dict[str, Any], str]] = [
    ({"response": None, "error": {"code": 500}}, "without token ids.*'error'"),
    ({"choices": None, "prompt_token_ids": [1, 2]}, "not an engine's answer"),
    ({"choices": [None], "prompt_token_ids": [1, 2]}, "not an engine's answer"),
    ({"choices": "x"}, "without token ids"),
    ({"choices": [{"text": "a"}], "prompt_token_ids": [1, 2]}, "no log-probabilities of the prompt.*sglang"),
    ({"meta_info": {"finish_reason": {"type": "abort"}}, "prompt_token_ids": [1, 2]}, "of the prompt.*abort.*sglang"),
    ({"choices": [{"prompt_logprobs": TOPS}], "prompt_token_ids": "abc"}, "not token ids"),
    ({"choices": [{"prompt_logprobs": 3}], **SENT}, "another tokeniz"),
    ({"meta_info": OTHER, **SENT}, "another tokeniz.*position 2.*got 6"),
    ({"meta_info": {name: each[:2] for name, each in OTHER.items()}, **SENT}, "position 2.*no further token"),
    ({"meta_info": {**OTHER, "input_top_logprobs": [None, 3, 3]}, **SENT}, "not .log p, id, text. entries.*got 3"),
    *(
        ({"choices": [{"prompt_logprobs": [*TOPS[:2], last]}], **SENT}, message)
        for last, message in (
            ({"5": {}}, "not a log-probability.*position 2.*None"),
            ({"five": {"logprob": HALF}}, "names tokens by text.*position 2.*'five'.*sglang"),
            ([5], "not a table of most probable tokens.*position 2"),
        )
    ),
]


@pytest.mark.parametrize(("record", "message"), [*(({**RECORD, **row}, text) for row, text in BAD_ROWS), *BAD_ANSWERS])
def test_bad_rows_and_answers_name_file_row_and_reason(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", record)
    with pytest.raises(GdistillError, match=message) as caught:
        read_one(path)
    assert "a.jsonl, row 1" in str(caught.value) and "\n" not in str(caught.value)


def test_bad_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{not json}\n")
    (tmp_path / "e.jsonl").write_text("[1]\n")
    pq.write_table(pa.table({"token_ids": [[1]]}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nonsense")
    for name, message in (
        ("a.jsonl", r"not a line of JSON.*line 1"),
        ("e.jsonl", r"not a JSON object.*line 1"),
        ("b.parquet", r"a column is missing.*token_log_probs"),
        ("c.parquet", "not a Parquet file"),
    ):
        with pytest.raises(GdistillError, match=message):
            read_one(tmp_path / name)
    with pytest.raises(UsageError, match=r"no scored rows.*\.csv"):
        ScoreFiles.open([tmp_path / "d.csv"], 8, 2)


# Scores from a server: right, in order, through misbehaviour, and never of another model.

ROWS = np.random.default_rng(0).integers(2, VOCAB_SIZE, (12, ROW_LENGTH)).tolist()
NAMES = [f"row {i}" for i in range(len(ROWS))]


@pytest.fixture
def server(teacher: Path) -> EngineServer:
    return EngineServer(teacher)


def engine(url: str, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"num_top": 5, "in_flight": 4, "max_tries": 4, **changes}
    return Engine(EngineSettings(url=url, **settings), VOCAB_SIZE)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_scores_are_the_models_own_in_the_order_of_the_rows(teacher: Path, dialect: str) -> None:
    server = EngineServer(teacher, dialect)
    with server.running() as url:
        rows = list(engine(url, dialect=dialect, in_flight=4).score(ROWS, NAMES))
    assert 2 <= server.most_in_flight <= 4
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


def test_what_a_server_refuses_for_every_row_is_known_from_a_few_ids(
    server: EngineServer, asked: Asked, tmp_path: Path
) -> None:
    with server.running() as url:
        with pytest.raises(UsageError, match=r"cannot be used.*greater than.*--max-logprobs 21"):
            engine(url, num_top=21).try_out()
        with pytest.raises(UsageError, match=r"cannot be used.*404"):
            engine(url, dialect="sglang").try_out()
        server.most_top = NUM_TOP - 1
        with pytest.raises(UsageError, match=rf"cannot be used.*greater than.*--max-logprobs {NUM_TOP}"):
            run(tmp_path, scores(asked, url))
    assert not (tmp_path / "tokens").exists(), "before stage 1"


def test_a_dead_address_is_known_at_once() -> None:
    """Eight tries are for a server that stumbles; who is not there is asked three times."""
    asked = engine(NOBODY, max_tries=8)
    retries = asked._session.get_adapter(NOBODY).max_retries
    assert (retries.total, retries.connect) == (7, 2)
    with pytest.raises(GdistillError, match=r"does not answer.*refused"):
        asked.identity()


@pytest.mark.parametrize("misdeeds", [[429, 502, 504], [500, "cut", 503], ["cut"]])
def test_a_server_that_stumbles_is_asked_again(server: EngineServer, misdeeds: list[Any]) -> None:
    server.misdeeds.extend(misdeeds)
    with server.running() as url:
        rows = list(engine(url, in_flight=1).score(ROWS, NAMES))
    assert [row.token_ids.tolist() for row in rows] == ROWS
    assert server.num_scored == len(ROWS) + len(misdeeds)


def test_what_cannot_be_mended_ends_in_one_line(server: EngineServer) -> None:
    cases: list[tuple[list[Any], str]] = [
        ([500] * 2, "does not answer.*500"),
        ([400], "does not answer.*400"),
        (["text"], "no JSON:"),
        (["list"], "no JSON object"),
        (["drop_top"], "without its most probable.*row 0, position 2"),
        (["other_tokens"], "another tokenization"),
    ]
    with server.running() as url:
        for misdeeds, message in cases:
            server.misdeeds.extend(misdeeds)
            with pytest.raises(GdistillError, match=message) as caught:
                list(engine(url, in_flight=1, max_tries=2).score(ROWS, NAMES))
            assert "\n" not in str(caught.value) and url in str(caught.value)
            assert not server.misdeeds
        server.misdeeds.append("wait")
        with pytest.raises(GdistillError, match=r"not answer.*timed out"):
            list(engine(url, max_tries=1, timeout_seconds=1.0).score(ROWS[:1], NAMES[:1]))
        half_way = engine(url, in_flight=1).score(ROWS, NAMES)
        next(half_way)
        server.name = "another"
        with pytest.raises(GdistillError, match=r"model changed.*another.*tiny"):
            list(half_way)


def test_who_is_asked(server: EngineServer, monkeypatch: Patch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_SERVER", "secret")
    known = {"id": "tiny", "engine_version": "0.0.test", "num_top": 5, "temperature": 1.0}
    with server.running() as url:
        assert engine(url).identity() == known
        assert engine(f"{url}/v1/", api_key_variable="KEY_OF_THIS_SERVER").model == "tiny"
        assert server.authorization == "Bearer secret"
        server.says_version = False
        assert engine(url).version == "unknown"
        with pytest.raises(UsageError, match=r"does not serve.*other.*tiny"):
            _ = engine(url, model="other").model
        server.others = ["huge"]
        assert engine(url, model="tiny").model == "tiny"
        with pytest.raises(UsageError, match=r"no model is named.*tiny.*huge.*engine\.model"):
            _ = engine(url).model


# Stores from an engine: what our own extraction of the same rows writes, to rounding.

NUM_TOP = 8
HIDDEN = {"name": "hidden", "dtype": "float16"}
STATES: dict[str, dict[str, Any]] = {
    "hidden": HIDDEN,
    "full": {"name": "full"},
    "posterior": {"name": "posterior", "num_entries": 9},
}


def scores(asked: Asked, url: str, **changes: Any) -> dict[str, Any]:
    """A request for scores: the engine has the teacher, and only the tokenizer lies here."""
    given = asked(codec={"num_entries": NUM_TOP}, **changes)
    given["teacher"] = {"tokenizer": given["teacher"]["location"]}
    given["engine"] = {"url": url, "num_top": NUM_TOP, "in_flight": 2, "max_tries": 3}
    server_knows = ("device", "batch_size", "threads")
    return {name: value for name, value in given.items() if name not in server_knows}


def states(asked: Asked, url: str, codec: dict[str, Any] = HIDDEN) -> dict[str, Any]:
    """A request for the states behind the last layer; norm and output layer lie here."""
    return asked(codec=codec, engine={"url": url, "max_tries": 2, "in_flight": 3})


@pytest.fixture
def with_states(server: EngineServer, tmp_path: Path) -> EngineServer:
    server.states = tmp_path / "states"
    server.states.mkdir()
    return server


def probabilities(store: ShardStore) -> torch.Tensor:
    """What the store says of the training rows, [n, V]."""
    read = store.split("train").read_rows(0, store.manifest.splits["train"])
    flat = {name: torch.from_numpy(value[:, 1:]).flatten(0, 1) for name, value in read.items()}
    tokens, own = flat.pop("tokens").long(), flat.pop("token_log_probs")
    found = store.codec.distribution(flat, tokens, own, store.resources)  # type: ignore[attr-defined]
    return found.tile(0, VOCAB_SIZE)


def require_same(own: ShardStore, found: ShardStore, log_error: float, error: float) -> None:
    """The rows of two stores are the same, and what they say of them is, to rounding."""
    for split, rows in own.manifest.splits.items():
        ours, theirs = (store.split(split).read_rows(0, rows) for store in (own, found))
        np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
        logs = ours["token_log_probs"], theirs["token_log_probs"]
        np.testing.assert_allclose(*logs, rtol=0, atol=log_error)
    if own.codec.name == "full":  # the noise itself: the same where the distribution is
        ours, theirs = (store.split("train").read_rows(0, 16) for store in (own, found))
        for array in own.manifest.arrays:
            np.testing.assert_allclose(ours[array], theirs[array], rtol=1e-2, atol=1e-2)
    else:
        torch.testing.assert_close(probabilities(found), probabilities(own), rtol=0, atol=error)


def test_scores_give_the_store_that_the_model_itself_gives(
    asked: Asked, tmp_path: Path, server: EngineServer, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("pipeline.engine.ROWS_AT_ONCE", 5)
    own = run(tmp_path / "own", asked(codec={"num_entries": NUM_TOP}))
    with server.running() as url:
        found = run(tmp_path / "out", scores(asked, url))
    require_same(own, found, log_error=1e-3, error=0.03)  # a step of the codec is 1/64 nats
    teacher = found.manifest.teacher
    assert (teacher["id"], teacher["engine_version"]) == ("tiny", "0.0.test")


@pytest.mark.parametrize("codec", STATES.values(), ids=STATES)
def test_states_give_the_store_that_the_model_itself_gives(
    asked: Asked, tmp_path: Path, with_states: EngineServer, codec: dict[str, Any]
) -> None:
    own = run(tmp_path / "own", asked(codec=codec))
    with with_states.running() as url:
        found = run(tmp_path / "out", states(asked, url, codec))
    require_same(own, found, log_error=1e-4, error=2e-3)
    assert found.manifest.teacher["states"] == "engine"
    assert not list((tmp_path / "states").iterdir()), "files are deleted"
    assert with_states.most_in_flight > 1


def test_a_killed_run_goes_on_where_the_ledger_ends_and_with_the_same_model(
    asked: Asked, tmp_path: Path, server: EngineServer
) -> None:
    with server.running() as url:
        given = scores(asked, url)
        run(tmp_path / "whole", given)
        all_scored = server.num_scored
        server.misdeeds.extend([""] * 25 + [400])  # after the first shard
        with pytest.raises(GdistillError, match=r"does not answer.*400"):
            run(tmp_path / "broken", given)
        server.misdeeds.clear()
        server.shift_nats = 4.0
        with pytest.raises(GdistillError, match="changed under the same name"):
            run(tmp_path / "broken", given)
        server.shift_nats, server.name = 0.0, "another"
        with pytest.raises(UsageError, match=r"other inputs.*teacher.id"):
            run(tmp_path / "broken", given)
        server.name, server.num_scored = "tiny", 0
        run(tmp_path / "broken", given)
        num_scored, given["engine"]["num_top"] = server.num_scored, NUM_TOP + 1
        with pytest.raises(UsageError, match=r"other inputs.*teacher\.num_top"):
            run(tmp_path / "broken", given)
        record = tmp_path / "whole/engine.json"
        before, given["engine"]["num_top"] = record.read_text(), NUM_TOP
        for text in ("{", "[]", '{"log_probs": "x"}', '{"log_probs": [1, 2]}'):
            record.write_text(text)
            with pytest.raises(GdistillError, match=r"cannot read what the engine gave.*engine\.json.*remove"):
                run(tmp_path / "whole", given)
        record.write_text(before)
        for gone in ("tokens", "store"):
            shutil.move(tmp_path / "whole" / gone, tmp_path / gone)
        given["corpus"]["row_length"] = ROW_LENGTH - 2
        assert run(tmp_path / "whole", given), "other rows say nothing of the model"
    assert 0 < num_scored < all_scored
    assert contents(tmp_path / "store") == contents(tmp_path / "broken/store")


FAULTS = {
    "no_states": "gives no hidden states.*docs/engines.md",
    "no_file": "cannot be read.*shared_storage_path",
    "other_ids": "of other tokens",
    "bfloat16": r"another precision.*row \d+.*--dtype bfloat16",
    "shifted_states": r"does not give its own log p .*row \d+, position \d+",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_states_that_are_not_the_rows_are_refused(
    fault: str, asked: Asked, tmp_path: Path, with_states: EngineServer
) -> None:
    """In the first request, and in one among many."""
    with with_states.running() as url:
        for number in (0, 9):
            with_states.misdeeds.extend([""] * number + [fault])
            with pytest.raises(GdistillError, match=FAULTS[fault]) as caught:
                run(tmp_path / str(number), states(asked, url))
            assert "\n" not in str(caught.value)
            with_states.misdeeds.clear()
    assert (tmp_path / "9" / "tokens").exists() and not (tmp_path / "0" / "tokens").exists()


class Given:
    """Stands for an engine: log p of rows, and the states behind the last layer, given at once."""

    settings = EngineSettings(url="http://here")

    def __init__(self, model: Any, rows: torch.Tensor) -> None:
        seen: list[torch.Tensor] = []
        handle = last_norm(model).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        with torch.inference_mode():
            self.expected = model(rows).logits[:, :-1].log_softmax(-1)
        handle.remove()
        own = self.expected.gather(-1, rows[:, 1:, None])[..., 0]
        self.log_probs = torch.cat((torch.zeros(len(rows), 1), own), dim=1)
        self.behind_layers = seen[0].clone()

    def states(self, rows: torch.Tensor, names: Any, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_probs, self.behind_layers


def test_one_wrong_state_of_a_row_is_found(teacher: Path) -> None:
    """By its place, not by the row's mean."""
    rows = torch.randint(2, VOCAB_SIZE, (2, 8), generator=torch.Generator().manual_seed(0))
    behind: Any = StatesTeacher.load(teacher)
    behind.engine = Given(AutoModelForCausalLM.from_pretrained(teacher), rows)
    behind.forward(rows, torch.tensor([10, 11]))
    behind.engine.behind_layers[1, 4] = behind.engine.behind_layers[1, 3]
    with pytest.raises(GdistillError, match=r"row 11, position 5\]; got"):
        behind.forward(rows, torch.tensor([10, 11]))
    without_norm = load_causal_model(find_pretrained(teacher))
    del without_norm.network.transformer.ln_f
    with pytest.raises(UsageError, match="no norm behind its last layer"):
        StatesTeacher(without_norm, VOCAB_SIZE)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 2, "intermediate_size": 48}
OPT = {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "gpt_neox": SMALL,
    "opt": {name: size for name, size in SMALL.items() if name != "intermediate_size"} | OPT,
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_behind_the_layers_is_read_without_them(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    files = find_pretrained(tmp_path)
    before = files.config.to_dict()
    loaded = load_causal_model(without_layers(files), float32_logits=True)
    assert files.config.to_dict() == before
    networks = (model, loaded.network)
    whole, rest = ([n for n, _ in each.named_parameters() if "layers." in n or ".h." in n] for each in networks)
    assert whole and not rest
    ids = torch.randint(0, 64, (2, 9))
    teacher = StatesTeacher(loaded, 64)
    teacher.engine = given = Given(model, ids)  # type: ignore[assignment]
    found = extract_cases.scored(teacher, ids).log_probs
    torch.testing.assert_close(found, given.expected, rtol=0, atol=1e-4)


def test_a_padded_output_layer_is_cut(asked: Asked, tmp_path: Path) -> None:
    padded = extract_cases.save_teacher(tmp_path / "padded", VOCAB_SIZE + 3)
    server = EngineServer(padded)
    server.states = tmp_path
    with server.running() as url:
        given = states(asked, url) | {"teacher": {"location": str(padded)}}
        found = run(tmp_path / "out", given)
    assert found.manifest.vocab_size == VOCAB_SIZE
    total = probabilities(found).sum(1)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=5e-3)


# Files of scores.

NUM_ROWS = 30
SCORED = np.random.default_rng(1).integers(2, VOCAB_SIZE, (NUM_ROWS, 12)).tolist()


@pytest.fixture
def in_files(server: EngineServer, teacher: Path, tmp_path: Path) -> dict[str, Any]:
    """A request for a file of rows, as a server answered them."""
    answers = [server.completion({"prompt": row, "prompt_logprobs": NUM_TOP}) for row in SCORED]
    lines = [{"prompt_token_ids": row, **a} for row, a in zip(SCORED, answers, strict=True)]
    write_lines(tmp_path / "scores.jsonl", *lines)
    return {
        "corpus": {"spec": f"scores:{tmp_path}/*.jsonl", "validation_fraction": 0.1},
        "codec": {"name": "posterior", "num_entries": NUM_TOP},
        "teacher": {"tokenizer": str(teacher)},
        "store": {"rows_per_shard": 8, "rows_per_chunk": 4},
    }


def test_files_of_scores_become_a_store(tmp_path: Path, in_files: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipeline.engine.ROWS_AT_ONCE", 5)
    store = run(tmp_path / "out", in_files)
    assert store.manifest.splits == {"train": 27, "validation": 3}
    np.testing.assert_array_equal(store.split("train").read_rows(0, 27)["tokens"], SCORED[:27])
    np.testing.assert_array_equal(store.split("validation").read_rows(0, 3)["tokens"], SCORED[27:])
    assert str(tmp_path) not in store.location.read("manifest.json").decode()
    before = contents(tmp_path / "out/store")
    assert run(tmp_path / "out", in_files) and contents(tmp_path / "out/store") == before
    with pytest.raises(UsageError, match="tokens already"):
        run_scored(resolve_request(tmp_path / "out", in_files), Worker(), tokens_only=True)
    none = {**in_files, "corpus": {**in_files["corpus"], "validation_fraction": 0.0}}
    assert run(tmp_path / "none", none).manifest.splits == {"train": 30}
    read, late = ScoreFiles.read, tmp_path / "late"  # rows that are others once they are written
    with monkeypatch.context() as patch, pytest.raises(GdistillError, match="scores are of other rows"):
        patch.setattr(ScoreFiles, "read", lambda *of: read(*of)[:: -1 if (late / "tokens").exists() else 1])
        run(late, in_files)
    monkeypatch.setenv("HOME", str(tmp_path))
    moved = {**in_files, "corpus": {**in_files["corpus"], "spec": "scores:~/scores.jsonl"}}
    assert run(tmp_path / "out", moved) and contents(tmp_path / "out/store") == before
    with pytest.raises(UsageError, match=r"split otherwise.*train.*got 27; expected 30"):
        run(tmp_path / "out", none)
    lines = (tmp_path / "scores.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "scores.jsonl").write_text("".join(lines[::-1]))
    with pytest.raises(UsageError, match=r"other settings.*corpus\.sha256"):
        run(tmp_path / "out", in_files)
    (tmp_path / "scores.jsonl").write_text(lines[0])
    assert run(tmp_path / "one", in_files).manifest.splits == {"train": 1}, "to learn from"


def test_one_process_at_a_time_writes_the_rows_of_scores(
    tmp_path: Path, in_files: dict[str, Any], monkeypatch: Patch
) -> None:
    """Others wait for it, and take its rows."""
    claims, free, write = list[tuple[str, bool]](), list[bool](), PartWriter.write

    def noted(self: PartWriter, block: np.ndarray) -> None:
        with file_claim(tmp_path / "out/.tokens.lock", wait=False) as mine:
            free.append(mine)
        write(self, block)

    monkeypatch.setattr(
        "pipeline.engine.file_claim", lambda at, wait: claims.append((at.name, wait)) or file_claim(at, wait)
    )
    monkeypatch.setattr(PartWriter, "write", noted)
    run(tmp_path / "out", in_files)
    assert claims == [(".tokens.lock", True)] and free and not any(free)


# The command, and what it refuses.


@pytest.mark.usefixtures("in_files")
def test_the_command_takes_files_or_a_server(teacher: Path, corpus: Path, tmp_path: Path, server: EngineServer) -> None:
    words = ["--tokenizer", teacher, "--set", f"codec.num_entries={NUM_TOP}", "--out", tmp_path]
    assert call("gdistill-extract", "--from-logprobs", f"{tmp_path}/scores.jsonl", *words) == 0
    assert ShardStore.open(tmp_path / "store").manifest.splits["train"] == 29
    words[-1] = tmp_path / "asked"
    with server.running() as url:
        asked = ["--engine", url, "--corpus", corpus, "--row-length", "12", "--rows", "4"]
        assert call("gdistill-extract", "tokens", *asked, *words) == 0
        assert (words[-1] / "tokens").exists() and not (words[-1] / "store").exists()
        assert call("gdistill-extract", *asked, *words) == 0
    assert ShardStore.open(tmp_path / "asked/store").manifest.teacher["id"] == "tiny"


def test_the_pages_command_asks_for_states(
    teacher: Path, corpus: Path, tmp_path: Path, with_states: EngineServer, monkeypatch: Any
) -> None:
    """docs/engines.md, its second block; the tokenizer lies beside the teacher."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "engines.md").read_text()
    block = next(b for b in page.split("```bash\n") if "--codec hidden" in b).split("```")[0]
    words = shlex.split(block.replace("\\\n", " "), comments=True)
    with with_states.running() as url:
        named = {"http://127.0.0.1:8000": url, "path/or/hub-id": teacher, "stories/*.txt": corpus}
        monkeypatch.chdir(tmp_path)
        assert call(*[named.get(word, word) for word in words]) == 0
    store = ShardStore.open(tmp_path / "out/states/store")
    assert store.manifest.codec["name"] == "hidden"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rows_take_their_length_from_the_server(teacher: Path, asked: Asked, tmp_path: Path, dialect: str) -> None:
    server = EngineServer(teacher, dialect)
    server.context = 11
    with server.running() as url:
        given = scores(asked, url, store={"rows": 3}, corpus={"row_length": 11})
        given["engine"]["dialect"] = dialect
        with pytest.raises(UsageError, match=r"got 11; expected at most 10.*--row-length 10"):
            run(tmp_path, given)
        assert not (tmp_path / "tokens").exists(), "known before stage 1"
        given["corpus"] |= {"row_length": None, "validation_fraction": 1.0}  # the first row is a held-out one
        assert run(tmp_path, given).manifest.row_length == 10


FILES = {"corpus": {"spec": "scores:/nowhere/*.jsonl"}}
OF_SCORES: list[tuple[dict[str, Any], str]] = [
    ({"codec": {"name": "seeded"}}, "whole distribution.*seeded"),
    ({"teacher": {}}, "no tokenizer.*--tokenizer"),
    ({"mode": "sequential"}, "writes none"),
    ({**FILES, "engine": {}}, "no file matches"),
    (FILES, "need no engine.*--engine"),
    ({"engine": {"num_top": 5}}, "without one.*engine.num_top"),
    ({"codec": {"name": "hidden"}}, "whole distribution.*hidden.*--teacher DIR"),
    ({"codec": {"num_entries": VOCAB_SIZE}}, f"codec.num_entries.*below .*{VOCAB_SIZE}"),
    *(({name: 1}, f"runs elsewhere.*{name}") for name in ("batch_size", "threads")),
    ({"device": "cpu"}, "runs elsewhere.*device"),
    ({"strict": True}, "runs elsewhere.*strict"),
    ({"teacher": {"tokenizer": "x", "dtype": "bfloat16"}}, "elsewhere.*teacher.dtype"),
]
OF_STATES: list[tuple[dict[str, Any], str]] = [
    ({"mode": "sequential"}, "writes none.*--mode"),
    ({"engine": {"url": NOBODY, "num_top": 3}}, "elsewhere.*engine.num_top"),
    ({"engine": {"url": NOBODY, "dialect": "sglang"}}, "elsewhere.*engine.dialect"),
    ({"teacher": {"location": "x", "attention": "sdpa"}}, "elsewhere.*teacher.attention"),
    ({"teacher": {"location": "x", "compiled": True}}, "elsewhere.*teacher.compiled"),
    ({"teacher": {"location": "x", "device_map": "auto"}}, "elsewhere.*teacher.device_map"),
]


def test_requests_that_no_engine_can_meet(asked: Asked, tmp_path: Path) -> None:
    for request, cases in ((scores, OF_SCORES), (states, OF_STATES)):
        for number, (changes, message) in enumerate(cases):
            out = tmp_path / f"{request.__name__}-{number}"
            with pytest.raises(UsageError, match=message):
                run(out, {**request(asked, NOBODY), **changes})
            assert not (out / "store").exists()
            assert request is scores or not out.exists()


def test_a_store_keeps_as_many_tokens_as_the_engine_is_asked_for(tmp_path: Path) -> None:
    given: dict[str, Any] = {"corpus": {"spec": "owt"}}
    for changes, expected in (
        ({}, 64),
        ({"engine": {"url": "http://x"}, "teacher": {"location": "x"}}, 64),  # which gives states
        ({"teacher": {}}, 20),
        ({"engine": {"url": "http://x", "num_top": 5}}, 5),
        ({"codec": {"num_entries": 3}}, 3),
    ):
        given |= changes
        assert resolve_request(tmp_path, given).codec.num_entries == expected  # type: ignore[attr-defined]
