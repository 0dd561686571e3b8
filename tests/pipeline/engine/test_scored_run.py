"""Stores from an engine: what our own extraction of the same rows writes, to rounding."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.engine import run_scored as run_request
from pipeline.settings import Worker, resolve_request
from pipeline.tokens.dataset import PartWriter
from shards.errors import GdistillError, UsageError
from shards.store.store import ShardStore
from tests.commands import call
from tests.pipeline.engine.engine_server import EngineServer
from tests.pipeline.extract_cases import VOCAB_SIZE, contents, options
from tests.pipeline.extract_cases import run as run_own

NUM_TOP = 8
OWT = ("--corpus", "owt")


def engine_options(teacher: Path, corpus: Path, url: str, **changes: Any) -> dict[str, Any]:
    given = options(teacher, corpus, codec={"num_entries": NUM_TOP}, **changes)
    for name in ("device", "batch_size", "threads"):  # the server's business
        given.pop(name)
    given["teacher"] = {"tokenizer": str(teacher)}
    given["engine"] = {"url": url, "num_top": NUM_TOP, "in_flight": 2, "max_tries": 3}
    return given


def run_scored(out: Path, given: dict[str, Any]) -> ShardStore:
    run_request(resolve_request(out, given), Worker())
    return ShardStore.open(out / "store")


def distributions(store: ShardStore) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [n, V] and log p of the tokens of the training split."""
    import torch

    read = store.split("train").read_rows(0, store.manifest.splits["train"])
    flat = {name: torch.from_numpy(value[:, 1:]).flatten(0, 1) for name, value in read.items()}
    tokens, own = flat.pop("tokens").long(), flat.pop("token_log_probs")
    found = store.codec.distribution(flat, tokens, own, store.resources)  # type: ignore[attr-defined]
    return found.tile(0, VOCAB_SIZE).numpy(), own.numpy()


def test_a_server_gives_the_store_that_the_model_itself_gives(
    teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    own = run_own(tmp_path / "own", options(teacher, corpus, codec={"num_entries": NUM_TOP}))
    with EngineServer(teacher).running() as url:
        scored = run_scored(tmp_path / "scored", engine_options(teacher, corpus, url))
    for split in own.manifest.splits:
        rows = own.manifest.splits[split]
        ours, theirs = own.split(split).read_rows(0, rows), scored.split(split).read_rows(0, rows)
        np.testing.assert_array_equal(ours["tokens"], theirs["tokens"])
        np.testing.assert_allclose(
            ours["token_log_probs"], theirs["token_log_probs"], rtol=0, atol=1e-3
        )
    (ours, _), (theirs, _) = distributions(own), distributions(scored)
    assert np.abs(ours - theirs).max() < 0.03  # a step of the codec is 1/64 nats
    assert scored.manifest.teacher["id"] == "tiny"
    assert scored.manifest.teacher["engine_version"] == "0.0.test"


def test_a_killed_run_goes_on_where_the_ledger_ends(
    teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    server = EngineServer(teacher)
    with server.running() as url:
        whole = run_scored(tmp_path / "whole", engine_options(teacher, corpus, url))
        asked = server.num_scored
        given = engine_options(teacher, corpus, url)
        server.misdeeds.extend([""] * 25 + [400])  # after the first shard
        with pytest.raises(GdistillError, match=r"does not answer.*400"):
            run_scored(tmp_path / "broken", given)
        server.misdeeds.clear()
        server.num_scored = 0
        resumed = run_scored(tmp_path / "broken", given)
        assert 0 < server.num_scored < asked
    assert contents(whole.location.root) == contents(resumed.location.root)  # type: ignore[attr-defined]


def test_another_model_at_the_same_address_is_refused_on_resume(
    teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    server = EngineServer(teacher)
    with server.running() as url:
        given = engine_options(teacher, corpus, url)
        server.misdeeds.extend([""] * 20 + [400])
        with pytest.raises(GdistillError):
            run_scored(tmp_path / "run", given)
        server.misdeeds.clear()
        server.shift_nats = 4.0
        with pytest.raises(GdistillError, match="changed under the same name"):
            run_scored(tmp_path / "run", given)
        server.shift_nats, server.name = 0.0, "another"
        with pytest.raises(UsageError, match=r"other inputs.*teacher.id"):
            run_scored(tmp_path / "run", given)


@pytest.fixture
def rows() -> list[list[int]]:
    return np.random.default_rng(1).integers(2, VOCAB_SIZE, (30, 12)).tolist()


@pytest.fixture
def given(teacher: Path, tmp_path: Path, rows: list[list[int]]) -> dict[str, Any]:
    """A request for a file of those rows, as a server answered them."""
    server = EngineServer(teacher)
    answers = [server.completion({"prompt": row, "prompt_logprobs": NUM_TOP}) for row in rows]
    lines = [{"prompt_token_ids": row, **a} for row, a in zip(rows, answers, strict=True)]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "corpus": {"spec": f"scores:{tmp_path}/*.jsonl", "validation_fraction": 0.1},
        "codec": {"name": "posterior", "num_entries": NUM_TOP},
        "teacher": {"tokenizer": str(teacher)},
        "store": {"rows_per_shard": 8, "rows_per_chunk": 4},
    }


def test_files_of_scores_become_a_store(
    tmp_path: Path, given: dict[str, Any], rows: list[list[int]]
) -> None:
    store = run_scored(tmp_path / "out", given)
    assert store.manifest.splits == {"train": 27, "validation": 3}
    np.testing.assert_array_equal(store.split("train").read_rows(0, 27)["tokens"], rows[:27])
    np.testing.assert_array_equal(store.split("validation").read_rows(0, 3)["tokens"], rows[27:])
    assert str(tmp_path) not in store.location.read("manifest.json").decode()
    before = contents(tmp_path / "out/store")
    assert run_scored(tmp_path / "out", given) and contents(tmp_path / "out/store") == before
    with pytest.raises(UsageError, match="other settings"):
        given["corpus"]["spec"] = f"scores:{tmp_path}/s*.jsonl"
        run_scored(tmp_path / "out", given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codec": {"name": "seeded"}}, "whole distribution.*seeded"),
        ({"teacher": {}}, "no tokenizer.*--tokenizer"),
        ({"mode": "sequential"}, "writes none"),
        ({"corpus": {"spec": "scores:/nowhere/*.jsonl"}, "engine": {}}, "no such file"),
        ({"corpus": {"spec": "scores:/nowhere/*.jsonl"}}, "need no engine.*--engine"),
        ({"engine": {"num_top": 5}}, "without one.*engine.num_top"),
        ({"codec": {"name": "hidden"}}, "whole distribution.*hidden.*--teacher DIR"),
        ({"codec": {"num_entries": VOCAB_SIZE}}, f"codec.num_entries.*below .*{VOCAB_SIZE}"),
        ({"batch_size": 4}, "runs elsewhere.*batch_size"),
        ({"teacher": {"tokenizer": "x", "dtype": "bfloat16"}}, "elsewhere.*teacher.dtype"),
    ],
)
def test_requests_that_no_engine_can_meet(
    teacher: Path, corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = {**engine_options(teacher, corpus, "http://127.0.0.1:9"), **changes}
    with pytest.raises(UsageError, match=message):
        run_scored(tmp_path / "out", given)
    assert not os.path.exists(tmp_path / "out/store")


def test_a_server_that_is_not_there_is_told_before_stage_1(
    teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    given = engine_options(teacher, corpus, "http://127.0.0.1:9")
    given["engine"]["max_tries"] = 1
    with pytest.raises(GdistillError, match="does not answer"):
        run_scored(tmp_path / "out", given)
    assert not (tmp_path / "out/tokens").exists()


@pytest.mark.parametrize("dialect", ["prompt_logprobs", "sglang"])
def test_rows_take_their_length_from_the_server(
    teacher: Path, corpus: Path, tmp_path: Path, dialect: str
) -> None:
    server = EngineServer(teacher, dialect)
    server.context = 11
    with server.running() as url:
        given = engine_options(teacher, corpus, url, store={"rows": 3})
        given["engine"]["dialect"] = dialect
        given["corpus"]["row_length"] = 11
        with pytest.raises(UsageError, match=r"got 11; expected at most 10.*--row-length 10"):
            run_scored(tmp_path, given)
        assert not (tmp_path / "tokens").exists(), "known before stage 1"
        given["corpus"].pop("row_length")
        assert run_scored(tmp_path, given).manifest.row_length == 10


def test_two_workers_may_read_scores_at_once(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the first one's token rows, and takes them."""
    request, second, write = resolve_request(tmp_path / "out", given), [], PartWriter.write
    with ThreadPoolExecutor(1) as pool:

        def interrupted(self: PartWriter, block: np.ndarray) -> None:
            if not second:
                second.append(pool.submit(run_request, request, Worker(1, 2)))
                time.sleep(0.5)  # the other one is there, and finds a folder half-written
            write(self, block)

        monkeypatch.setattr(PartWriter, "write", interrupted)
        run_request(request, Worker(0, 2))
        second[0].result()
    assert ShardStore.open(tmp_path / "out/store").unfinished() == []


@pytest.mark.usefixtures("given")
def test_the_command_takes_files_or_a_server(teacher: Path, corpus: Path, tmp_path: Path) -> None:
    words = ["--tokenizer", str(teacher), "--set", f"codec.num_entries={NUM_TOP}"]
    files = ["--from-logprobs", f"{tmp_path}/scores.jsonl", "--out", f"{tmp_path}/files"]
    assert call("gdistill-extract", *files, *words) == 0
    assert ShardStore.open(tmp_path / "files/store").manifest.splits["train"] == 29
    with EngineServer(teacher).running() as url:
        asked = ["--engine", url, "--corpus", corpus, "--row-length", "12", "--rows", "4"]
        assert call("gdistill-extract", *asked, *words, "--out", tmp_path / "asked") == 0
    assert ShardStore.open(tmp_path / "asked/store").manifest.teacher["id"] == "tiny"


def test_what_cannot_be_planned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, server = ["--from-logprobs", "a.jsonl"], ["--engine", "http://x", *OWT]
    cases = [
        ([*source, option], f"teacher that runs here [{source[0]}]")
        for option in ("--plan", "--dry-run")
        for source in (files, server)
    ]
    for words, message in [*cases, ([*OWT, *files], "their own corpus")]:
        assert call("gdistill-extract", "--out", tmp_path, *words) == 2
        assert message in capsys.readouterr().err


def test_a_store_keeps_as_many_tokens_as_the_engine_is_asked_for(tmp_path: Path) -> None:
    given: dict[str, Any] = {"corpus": {"spec": "owt"}, "engine": {"url": "http://x"}}
    assert resolve_request(tmp_path, given).codec.num_entries == 20  # type: ignore[attr-defined]
    given["engine"]["num_top"] = 5
    assert resolve_request(tmp_path, given).codec.num_entries == 5  # type: ignore[attr-defined]
    given["codec"] = {"num_entries": 3}
    assert resolve_request(tmp_path, given).codec.num_entries == 3  # type: ignore[attr-defined]
