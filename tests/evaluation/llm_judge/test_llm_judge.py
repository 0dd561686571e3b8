"""The judge against a real HTTP server on loopback that misbehaves on purpose."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.llm_judge import AnswerFile, Endpoint, estimate_cost, parse_ratings, rate_samples
from shards.errors import GdistillError, UsageError

RATINGS = {"clarity": 7, "grammaticality": 8, "factuality": 5, "style": 6, "creativity": 4}
GOOD = f"It reads well.\n{json.dumps(RATINGS)}"
Misdeed = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Does the server's next misdeed, or answers."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Server = self.server  # type: ignore[assignment]
        server.seen.append((self.path, self.headers.get("Authorization"), body))
        misdeeds = server.misdeeds
        (misdeeds.pop(0) if misdeeds else answer(GOOD))(self)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """Remembers what it was sent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, str | None, dict]] = []
        self.misdeeds: list[Misdeed] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


def send(status: int, body: bytes, **headers: str) -> Misdeed:
    def act(handler: Handler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return act


def answer(text: str) -> Misdeed:
    return send(200, json.dumps({"choices": [{"message": {"content": text}}]}).encode())


def cut(handler: Handler) -> None:
    """Promises more than it sends and hangs up."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def slow(handler: Handler) -> None:
    time.sleep(1.5)


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def endpoint(server: Server, waited: list[float] | None = None, **changes: object) -> Endpoint:
    noted = [] if waited is None else waited
    return Endpoint(server.url, "m", "secret", sleep=noted.append, **changes)  # type: ignore[arg-type]


def test_every_misdeed_is_survived_counted_and_waited_for(server: Server) -> None:
    server.misdeeds += [
        send(429, b"slow down", Retry_After="7"),
        send(500, b"oops"),
        slow,
        send(200, b"{not json"),
        cut,
        send(200, b'{"choices": []}'),
    ]
    waited: list[float] = []
    asked = endpoint(server, waited, timeout_seconds=0.5, max_tries=8)
    assert asked.ask([{"role": "user", "content": "x"}]) == GOOD
    assert sum(asked.faults.values()) == 6 and asked.faults["broken answer"] >= 2
    assert (asked.faults["http 429"], asked.faults["http 500"], asked.faults["timeout"]) == (
        1,
        1,
        1,
    )
    assert len(waited) == 6 and waited[0] == 7.0  # as told
    assert all(2**n * 0.5 <= wait <= 2**n for n, wait in enumerate(waited) if n)
    path, key, body = server.seen[-1]
    assert path == "/v1/chat/completions" and key == "Bearer secret" and body["model"] == "m"


def test_what_a_retry_cannot_mend_is_told_at_once(server: Server) -> None:
    server.misdeeds.append(send(401, b'{"error": "bad key"}'))
    waited: list[float] = []
    with pytest.raises(GdistillError, match=r"no answer.*http 401.*bad key"):
        endpoint(server, waited).ask([])
    assert not waited and len(server.seen) == 1
    server.misdeeds += [send(503, b"down")] * 3
    with pytest.raises(GdistillError, match="http 503"):
        endpoint(server, max_tries=3).ask([])
    assert len(server.seen) == 4
    other = Server()
    server.misdeeds.append(send(307, b"", Location=f"{other.url}/chat/completions"))
    with pytest.raises(GdistillError, match="http 307"):
        endpoint(server).ask([])  # texts and key never follow a redirect elsewhere
    other.server_close()


def test_questions_keep_their_distance(server: Server) -> None:
    waited: list[float] = []
    asked = endpoint(server, waited, per_minute=30.0)
    for _ in range(3):
        asked.ask([])
    assert len(waited) == 2 and 0 < waited[0] <= 2 < waited[1] <= 4  # nothing really slept


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no ratings", "no JSON object"),
        (json.dumps(RATINGS | {"style": 11}), "style is 11"),
        (json.dumps(RATINGS | {"style": 7.5}), "style is 7.5"),
        (json.dumps(RATINGS | {"style": True}), "style is True"),
        (json.dumps({"clarity": 3}), "no JSON object"),
    ],
)
def test_answers_without_ratings(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_ratings(text)


def test_the_last_object_counts() -> None:
    first = json.dumps(RATINGS | {"clarity": 1})
    assert parse_ratings(f"{{odd {first} then\n```json\n{json.dumps(RATINGS)}\n```") == RATINGS


def test_an_interrupted_run_asks_only_what_is_open(tmp_path: Path, server: Server) -> None:
    asked = endpoint(server, max_tries=1)
    answers = AnswerFile(tmp_path / "answers.judge")
    server.misdeeds += [answer(GOOD), answer("I would rather not."), send(500, b"gone")]
    with pytest.raises(GdistillError):
        rate_samples(asked, ["one", "two", "three"], answers)
    with open(tmp_path / "answers.judge", "ab") as torn:
        torn.write(b'{"question')
    again = AnswerFile(tmp_path / "answers.judge")
    assert estimate_cost(asked, ["one", "two", "three"], again).num_questions == 1
    ratings = rate_samples(asked, ["one", "two", "three"], again)
    assert ratings == [RATINGS, None, RATINGS] and asked.faults["unreadable ratings"] == 1
    assert len(server.seen) == 4  # the unreadable one is not asked until it obeys
    priced = estimate_cost(asked, ["four" * 100], again, (1.0, 2.0))
    assert priced.price == pytest.approx((priced.input_tokens + 2 * 400) / 1e6)


def test_the_command_scores_and_hides_no_failure(
    tmp_path: Path, server: Server, cache: Path
) -> None:
    lines = [{"index": i, "tokens": [i], "text": f"text {i}"} for i in range(4)]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["judge", str(file), "--url", server.url, "--model", "m", "--prices", "1,2"]
    planned = CliRunner().invoke(app, [*words, "--plan"])
    assert not planned.exception and "4 questions" in planned.output and not server.seen
    other = json.dumps(RATINGS | {"clarity": 9})
    server.misdeeds += [answer(GOOD), answer("no"), answer(other), answer(GOOD)]
    done = CliRunner().invoke(app, words)
    if done.exception:
        raise done.exception
    assert "1 of 4 answers could not be read" in done.output
    assert "unreadable ratings: 1" in done.output
    (part,) = json.loads((tmp_path / "judge" / "results.json").read_text()).values()
    clarity = part["scores"][0]
    assert clarity["name"] == "judged_clarity" and clarity["value"] == pytest.approx(23 / 3)
    assert clarity["per_sample"]["indices"] == [0, 2, 3]
    sent = {message["content"] for _, _, body in server.seen for message in body["messages"]}
    assert "BEGIN\ntext 2\nEND" in sent
    again = [*words, "--plan"]
    assert CliRunner().invoke(app, again).output.startswith("0 questions")
    (kept,) = cache.rglob("answers.judge")
    kept.rename(tmp_path / "judge" / "answers.judge")  # as who hands over samples may plant it
    assert CliRunner().invoke(app, again).output.startswith("4 questions")


@pytest.mark.parametrize(
    ("option", "value"), [("--url", "ftp://x"), ("--tries", "0"), ("--prices", "cheap")]
)
def test_bad_options_send_nothing(tmp_path: Path, server: Server, option: str, value: str) -> None:
    (tmp_path / "samples.jsonl").write_text('{"tokens": [1], "text": "a"}\n')
    words = ["judge", str(tmp_path), "--url", server.url, "--model", "m", option, value]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError) and option in done.exception.where
    assert not server.seen
