"""``gdistill-eval certify`` of a server's answers: right ones pass, one altered token is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluation.served_certificate import LEAST_P, Answer, allowed, certify_answers
from tests.commands import call
from tests.trainer.sampling.test_adaptive import tiny_llama
from trainer.serving.coupling import draw

LENGTH, PROMPT = 24, [1, 2, 3]


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8.0)  # a law that is not flat
    return model.eval()


@pytest.fixture(scope="module")
def teacher(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def drawn(model: Any, seeds: range, sharpen: float = 1.0, **settings: Any) -> list[list[int]]:
    """What a right engine says for each seed; ``sharpen`` is a fault: logits that much larger."""
    temperature = settings.get("temperature", 1.0)
    rows = torch.tensor([PROMPT] * len(seeds))
    while rows.shape[1] < LENGTH:
        logits: Tensor = sharpen * model(input_ids=rows).logits[:, -1].float()
        if temperature == 0:
            found = logits.argmax(dim=-1)
        else:
            top_k, top_p = settings.get("top_k", 0), settings.get("top_p", 1.0)
            law = allowed(logits / temperature, top_k, top_p)
            places = torch.full((len(seeds),), rows.shape[1] - 1)
            found = draw(law, torch.tensor(list(seeds)), places)
        rows = torch.cat((rows, found[:, None]), dim=1)
    return rows[:, len(PROMPT) :].tolist()


def served(model: Any, seed: int, **settings: Any) -> dict[str, Any]:
    """A request and its right answer."""
    tokens = drawn(model, range(seed, seed + 1), **settings)[0]
    choice = {"index": 0, "token_ids": tokens, "prompt_token_ids": PROMPT}
    return {
        "request": {"prompt": "x", "temperature": 1.0, "seed": seed, **settings},
        "answer": {"choices": [choice]},
    }


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def certify(file: Path, teacher: Path, *options: object) -> tuple[int, dict[str, Any]]:
    code = call("gdistill-eval", "certify", file, "--teacher", teacher, *options)
    found = file.with_name("certificate.json")
    return code, json.loads(found.read_text()) if found.exists() else {}


SETTINGS = [
    {},
    {"temperature": 1.5, "top_k": 4},
    {"top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 9},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_right_answers_of_a_known_noise_pass(
    settings: dict[str, Any], model: Any, teacher: Path, tmp_path: Path
) -> None:
    records = [served(model, seed, **settings) for seed in (7, 2**40)]
    code, found = certify(write(tmp_path / "a.jsonl", records), teacher, "--noise", "murmur3")
    assert code == 0 and found["is_right"]
    for verdict in found["answers"]:
        assert verdict["num_agreeing"] + verdict["num_ties"] == LENGTH - len(PROMPT)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_altered_token_is_found(
    settings: dict[str, Any], model: Any, teacher: Path, tmp_path: Path, capsys: Any
) -> None:
    records = [served(model, seed, **settings) for seed in range(3)]
    tokens = records[2]["answer"]["choices"][0]["token_ids"]
    tokens[11] = (tokens[11] + 1) % model.config.vocab_size
    code, found = certify(write(tmp_path / "a.jsonl", records), teacher, "--noise", "murmur3")
    assert code == 1 and not found["is_right"]
    assert found["answers"][2]["first"][:2] == [11, tokens[11]]
    assert [verdict["first"] for verdict in found["answers"][:2]] == [None, None]
    told = capsys.readouterr()
    assert "token 11 is" in told.out and "does not draw from this model" in told.err


def test_another_seed_than_told_is_found(model: Any, teacher: Path, tmp_path: Path) -> None:
    record = served(model, 3)
    record["request"]["seed"] = 4
    assert certify(write(tmp_path / "a.jsonl", [record]), teacher, "--noise", "murmur3")[0] == 1


def test_the_law_passes_right_engines_and_convicts_others(model: Any) -> None:
    """Of 40 right batches 2 fail on average; 8 or more would be one chance in a thousand."""
    size = model.config.vocab_size
    answers = [Answer("", PROMPT, row) for row in drawn(model, range(160))]
    found = [certify_answers(answers[i : i + 4], model, size) for i in range(0, 160, 4)]
    assert {verdict.checked for one in found for verdict in one.verdicts} == {"law"}
    assert sum(one.p < LEAST_P for one in found) < 8
    for sharpen in (0.3, 2.0):  # both sides: too wild, and too tame
        wrong = [Answer("", PROMPT, row) for row in drawn(model, range(8), sharpen)]
        verdict = certify_answers(wrong, model, size)
        assert not verdict.is_right and (verdict.z > 0) == (sharpen < 1)


def test_a_token_that_the_request_cuts_off_convicts(
    model: Any, teacher: Path, tmp_path: Path
) -> None:
    record = served(model, 3)
    record["request"]["top_k"] = 2
    code, found = certify(write(tmp_path / "a.jsonl", [record]), teacher)
    assert code == 1 and found["answers"][0]["num_impossible"] > 0


def test_answers_that_name_their_noise_and_seed_need_no_option(
    model: Any, teacher: Path, tmp_path: Path
) -> None:
    record = served(model, 3)
    record["answer"] |= {"seed": record["request"].pop("seed"), "noise": "murmur3"}
    _, found = certify(write(tmp_path / "a.jsonl", [record]), teacher)
    assert found["answers"][0]["checked"] == "noise" and found["is_right"]


def test_each_of_several_choices_has_its_own_seed(
    model: Any, teacher: Path, tmp_path: Path
) -> None:
    choices = [served(model, 9 + i)["answer"]["choices"][0] | {"index": i} for i in range(3)]
    record = {"request": {"prompt": "x", "seed": 9, "n": 3}, "answer": {"choices": choices}}
    assert certify(write(tmp_path / "a.jsonl", [record]), teacher, "--noise", "murmur3")[0] == 0


@pytest.fixture
def url(model: Any) -> Iterator[str]:
    """A server that draws with the engine's noise."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            kept = {key: body[key] for key in ("temperature", "top_p") if key in body}
            self.reply(served(model, body["seed"], **kept)["answer"])

        def reply(self, said: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_server_is_asked_and_its_answers_are_kept(
    url: str, teacher: Path, tmp_path: Path
) -> None:
    asked = ("--num", 3, "--request", '{"temperature": 0.9, "seed": 5}', "--noise", "murmur3")
    assert (
        call("gdistill-eval", "certify", url, "--teacher", teacher, "--out", tmp_path, *asked) == 0
    )
    kept = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [record["request"]["seed"] for record in kept] == [5, 6, 7]
    again = certify(tmp_path / "answers.jsonl", teacher, "--noise", "murmur3")
    assert again[0] == 0 and len(again[1]["answers"]) == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"request": {"presence_penalty": 0.5}}, "presence_penalty"),
        ({"answer": {"noise": "mersenne"}}, "unknown noise"),
        ({"answer": {"choices": [{"text": "abc"}]}}, "return_token_ids"),
        ({"request": {"seed": None}}, "seed"),
        ({"answer": {"choices": [{"token_ids": [10**6], "prompt_token_ids": [1]}]}}, "ids below"),
        ({"answer": {"choices": [{"token_ids": [1]}]}}, "no tokenizer"),
        ({"answer": {"choices": 5}}, "not a kept answer"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_a_line(
    change: dict[str, Any], told: str, model: Any, teacher: Path, tmp_path: Path, capsys: Any
) -> None:
    record = served(model, 3)
    for part, values in change.items():
        record[part] |= values
    named = () if "noise" in change.get("answer", {}) else ("--noise", "murmur3")
    assert certify(write(tmp_path / "a.jsonl", [record]), teacher, *named)[0] != 0
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_a_server_that_is_not_there_is_said_in_a_line(
    teacher: Path, tmp_path: Path, capsys: Any
) -> None:
    nowhere = "http://127.0.0.1:9"
    assert call("gdistill-eval", "certify", nowhere, "--teacher", teacher, "--out", tmp_path) != 0
    assert "the server does not answer" in capsys.readouterr().err
