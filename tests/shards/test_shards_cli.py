"""``gdistill-shards``: what it says, what it makes, what it refuses, and stores on the hub."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import torch

from shards.codec.protocol import PART_ELEMENTS, make_codec
from shards.console import Bar
from shards.errors import IntegrityError
from shards.noise.embedding import dense_arrivals
from shards.store.manifest import read_ways, record_ways
from shards.store.store import ShardStore
from shards.store.verification import Description, verify
from shards.tools.conversion import convert, count_unigram, stored_noise
from shards.tools.row_view import view_row, words_of
from tests.shards.store_cases import (
    LENGTH,
    SPLITS,
    VOCAB,
    Run,
    file_bytes,
    flipped,
    open_writer,
    teacher_rows,
    write_encoded,
    write_store,
)

REVISION = "a" * 40
PUSH_AND_READ = """
import shards, sys
from tests.commands import call
store, target = sys.argv[1:]
commands = ("push", store, "s3://bucket/name"), ("info", "hf://datasets/me/other")
commands += (("push", store, target, "--license", "mit", "--private"),)
print([call("gdistill-shards", *words) for words in commands])
opened = shards.open_store(target)
rows = opened.split("train").read_rows(0, 28)
print("read", int(rows["tokens"].sum()), opened.manifest.sha256)
"""


class Hub(BaseHTTPRequestHandler):
    """One data set, ``me/store``: the routes that pushing and reading ask for."""

    files: dict[str, bytes]
    made: list[str]

    def log_message(self, *_: object) -> None: ...

    def answer(self, value: Any = None, status: int = 200, data: bytes | None = None) -> None:
        body = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", REVISION)
        if data is not None:
            self.send_header("ETag", hashlib.sha1(data).hexdigest())
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if self.made else "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not self.made:
            return self.answer({"error": "Repository not found"}, 404)
        if "/resolve/" in path:
            name = path.partition("/resolve/")[2].partition("/")[2]
            if name not in self.files:
                return self.answer({"error": "Entry not found"}, 404)
            return self.answer(data=self.files[name])
        if "/tree/" in path:
            below = path.partition("/tree/")[2].partition("/")[2]
            found = {n: data for n, data in sorted(self.files.items()) if not below or n.startswith(f"{below}/")}
            entries = [{"type": "file", "path": n, "size": len(data), "oid": "0" * 40} for n, data in found.items()]
            return self.answer(entries) if found else self.answer({"error": "no"}, 404)
        return self.answer({"id": "me/store", "sha": REVISION, "siblings": [], "private": False})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path, here = urlsplit(self.path).path, f"http://{self.headers['Host']}"
        if path.endswith("/validate-yaml"):
            return self.answer({"errors": [], "warnings": []})
        if path.endswith("/repos/create"):
            wanted = json.loads(body)
            self.made.append(f"{wanted['visibility']} {wanted['name']}")
            return self.answer({"url": f"{here}/datasets/me/store", "name": "me/store"})
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return self.answer({"files": modes})
        if "/commit/" in path:
            for record in map(json.loads, body.splitlines()):
                if record["key"] == "file":
                    self.files[record["value"]["path"]] = base64.b64decode(record["value"]["content"])
            url = f"{here}/datasets/me/store/commit/{REVISION}"
            done = {"commitUrl": url, "commitOid": REVISION, "hookOutput": "", "success": True}
            return self.answer(done)
        return self.answer({"error": f"no route {path}"}, 500)


@pytest.fixture
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("OneHub", (Hub,), {"files": {}, "made": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def call(endpoint: str, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the hub's address is read when its library is imported."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_none"}
    environment |= {"GDISTILL_CACHE": str(cache), "HF_HOME": str(cache / "hf")}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_pushed_store_is_read_from_the_hub_and_mistakes_are_one_line(
    tmp_path: Path, sound: Path, hub: tuple[str, type[Hub]]
) -> None:
    endpoint, held = hub
    target = "hf://datasets/me/store"
    done = call(endpoint, tmp_path, "-c", PUSH_AND_READ, str(sound), target)
    assert done.returncode == 0 and "[2, 2, 0]" in done.stdout, done.stderr[-2000:]
    assert "hf://datasets/OWNER/NAME" in done.stderr and "no store there" in done.stderr
    local = ShardStore.open(sound)
    assert held.made == ["private store"]
    assert held.files.keys() == {*local.location.sizes(), "README.md"}
    card = held.files["README.md"].decode()
    size = f"198 tokens, {Description.of(local).shard_bytes / 198:.1f} bytes each"
    shape = ("| codec | topk |", "| rows | 28 train, 5 validation of 6 tokens |", "| vocabulary | 50 |")
    names = (
        "license: mit",
        "pretty_name: store",
        "- codec:topk",
        "| teacher | tiny |",
        "| corpus | {'name': 'text'} |",
    )
    for word in (*shape, *names, size, target, f"| identity | sha256 {local.manifest.sha256} |"):
        assert word in card
    tokens = local.split("train").read_rows(0, 28)["tokens"]
    read = done.stdout.rpartition("read ")[2].split()
    assert read == [str(int(np.sum(tokens))), local.manifest.sha256]
    push = ("-m", "shards.cli", "push", str(sound), target)
    nobody = call("http://127.0.0.1:9", tmp_path, *push)
    assert nobody.returncode == 1 and "the hub does not take the store" in nobody.stderr
    assert "Traceback" not in done.stderr + nobody.stderr


def test_info_says_what_is_there(run: Run, sound: Path, tmp_path: Path) -> None:
    writer = open_writer(tmp_path / "run" / "store")
    code, text = run("info", tmp_path / "run")
    assert code == 0 and "0 of 5 shards" in text, "a run is looked into"
    tokens = {"fingerprint": "ef" * 32, "corpus": {"source": "owt", "rows": 3}}
    open_writer(tmp_path / "empty", splits={"train": 8, "validation": 0}, tokens=tokens)
    code, text = run("info", tmp_path / "empty")
    assert code == 0 and " owt (fingerprint efefefefefef)" in text
    code, text = run("info", sound, "--json")
    value = json.loads(text)
    assert code == 0 and value["num_tokens"] == (28 + 5) * 6
    assert value["manifest_sha256"] == writer.manifest.sha256 and value["location"] == str(sound)
    said = ("codec", "teacher", "tokenizer", "tokens", "splits", "vocab_size", "row_length")
    assert {name: value[name] for name in said} == {name: writer.manifest.to_json()[name] for name in said}
    sizes = {name: len(data) for name, data in file_bytes(sound).items()}
    assert value["num_bytes"] == sum(sizes.values())
    shards = {n: sizes[n] for n in sizes if n.startswith(("train/", "validation/")) and "/c/" in n}
    assert value["bytes_per_token"] == pytest.approx(sum(shards.values()) / value["num_tokens"])
    assert value["fp16_vector_bytes_per_token"] == 100
    # Half-written shards do not count.
    shutil.copytree(sound, tmp_path / "part")
    (tmp_path / "part" / "ledger" / "train" / "000000.json").unlink()
    part = json.loads(run("info", tmp_path / "part", "--json")[1])
    assert part["num_tokens"] == value["num_tokens"] - 8 * 6
    assert (part["num_shards"], part["num_finished_shards"]) == (5, 4)
    assert run("verify", tmp_path / "part")[1].count("is not finished") == 1
    for words in (("push", tmp_path / "part", "hf://datasets/a/b"), ("convert", tmp_path / "part", "--codec", "full")):
        code, text = run(*words, *(("--out", tmp_path / "out") if words[0] == "convert" else ()))
        assert code == 1 and "not complete" in text
    first = [f"train/{name}/c/0/" for name in writer.manifest.all_arrays]
    left = sum(shards[name] for name in shards if not name.startswith(tuple(first)))
    assert left < sum(shards.values())
    assert part["bytes_per_token"] * part["num_tokens"] == pytest.approx(left)
    size = value["bytes_per_token"]
    assert run("info", sound)[1].splitlines() == [
        f"store        {sound}",
        f"identity     {writer.manifest.sha256[:16]}",
        "codec        topk num_entries=3",
        "noise        one draw",
        "teacher      tiny (sha256 abababababab)",
        "tokenizer    tiny (sha256 cdcdcdcdcdcd), V = 50",
        "corpus       {'name': 'text'} (fingerprint efefefefefef)",
        "rows         train 28, validation 5 of 6 tokens",
        "complete     5 of 5 shards, 198 tokens",
        f"bytes        {value['num_bytes']:,}",
        f"bytes/token  {size:.1f}; fp16 vectors 100: {100 / size:.1f} x this store",
    ]


def remedy_in(text: str) -> list[str]:
    """The arguments of the one command that a message says to run."""
    commands = set(re.findall("`gdistill-shards ([^`]*)`", text))
    assert len(commands) == 1, text
    return shlex.split(commands.pop())


def test_the_printed_remedy_heals_a_store(run: Run, sound: Path, tmp_path: Path) -> None:
    root = shutil.copytree(sound, tmp_path / "a store")
    damaged = root / "train/entry_gumbels/c/1/0/0"
    damaged.write_bytes(flipped(damaged.read_bytes(), 20))
    assert open_writer(root).pending("train") == [], "sizes alone tell nothing"
    (root / "tokenizer/tokenizer.json").write_bytes(b"altered")
    code, text = run("verify", tmp_path / "a store")
    assert code == 1 and "2 problems" in text
    assert "train/entry_gumbels/c/1/0/0 of train shard 1" in text
    with pytest.raises(IntegrityError) as caught:
        ShardStore.open(root).split("train").read_rows(8, 16)
    assert remedy_in(str(caught.value)) == remedy_in(text)
    code, text = run(*remedy_in(text))
    assert code == 1 and "forgotten: train shard 1" in text
    write_store(root)
    assert file_bytes(root) == file_bytes(sound)
    for place in (root, sound.parent):  # a run is looked into
        assert run("verify", place)[0] == 0


def test_a_converted_store_names_its_source_and_is_resumed(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    out, codec = tmp_path / "out", ("--codec", "seeded", "--set", "tolerance_nats=0.02")
    arguments = ("convert", posterior.location.url, *codec, "--out", out)
    code, text = run(*arguments)
    assert code == 0, text
    made = ShardStore.open(out)
    assert made.codec == make_codec("seeded", tolerance_nats=0.02)
    assert made.manifest.teacher["converted_from"]["store"] == posterior.manifest.sha256
    before = file_bytes(out)
    assert run(*arguments)[0] == 0 and file_bytes(out) == before, "a second run finds it finished"
    (out / "ledger/train/000001.json").unlink()
    with made.location.claim("train-000001", wait=False):
        code, text = run(*arguments)
        assert code == 1 and "shards are held by another process" in text
    assert run(*arguments)[0] == 0 and file_bytes(out) == before


def test_what_cannot_be_made_or_shown_is_one_line_and_nothing_is_written(
    run: Run, posterior: ShardStore, sound: Path, tmp_path: Path
) -> None:
    frozen = write_encoded(tmp_path / "frozen", make_codec("full")).location.url
    url, out = posterior.location.url, tmp_path / "out"
    (tmp_path / "folder.html").mkdir()
    for arguments, words in (
        (("convert", frozen, "--codec", "topk"), "does not tell the distribution"),
        (("convert", url, "--codec", "hidden"), "a frozen draw"),
        (("convert", url, "--codec", "posterior"), "a frozen draw"),
        (("convert", url, "--codec", "seedd"), "did you mean 'seeded'"),
        (("convert", url, "--codec", "seeded", "--set", "name=x"), "key [codec seeded.name]"),
        (("show", url, "--draw", -1), "no such draw"),
        (("show", url, "--row", -1), "no such row"),
        (("show", url, "--split", "validation", "--row", 5), "[split validation]"),
        (("info", tmp_path / "nothing"), "no store there"),
        (("push", url, "hf://datasets/a/b/c"), "not a data set"),
        (("push", write_store("memory://pushed").location.url, "hf://datasets/a/b"), "not in a folder"),
    ):
        placed = () if arguments[0] in ("info", "push") else ("--out", out)
        code, text = run(*arguments, *placed)
        assert code == 2 and words in text and text.count("\n") == 1, (arguments, text)
        assert not list(tmp_path.glob("out*")), arguments
    for place in ("/proc/row.html", "/", "folder"):
        code, text = run("show", url, "--out", tmp_path / place)
        assert code == 2 and text.count("\n") == 1, place
    for place in (url, f"file://{url}", f"{url}/../store", f"{url}/full"):
        code, text = run("convert", url, "--codec", "full", "--out", place)
        assert code == 2 and "its own source" in text, place


def test_the_view_of_a_row(posterior: ShardStore) -> None:
    first, views = view_row(posterior, "train", 9)
    output, _ = teacher_rows("train")
    assert first == "#0" and [view.position for view in views] == [*range(1, LENGTH)]
    rows = posterior.split("train").read_rows(9, 10)
    gumbels = stored_noise(posterior, "train", 9, rows).gumbels()
    for view, xi, log_probs, token in zip(views, gumbels, output.log_probs[9], output.tokens[9], strict=True):
        probs = log_probs.exp()
        assert view.text == f"#{int(token)}" and view.gumbel == float(xi[token])
        assert view.gumbel_rank == 1 + sorted(xi, reverse=True).index(xi[token])
        assert view.probability == pytest.approx(float(probs[token]), rel=1e-5)
        others = [a.probability for a in view.alternatives]
        expected = sorted((float(p) for i, p in enumerate(probs) if i != token), reverse=True)[:4]
        assert others == pytest.approx(expected, rel=2e-3)
        # The token wins the race: no alternative has the larger logit + xi.
        won = math.log(view.probability) + view.gumbel
        assert all(math.log(a.probability or 0) + a.gumbel <= won + 1e-3 for a in view.alternatives)
    _, others = view_row(posterior, "train", 9, draw=1)
    assert all(view.gumbel != other.gumbel for view, other in zip(views, others, strict=True))


def test_tokens_are_shown_by_the_stores_tokenizer(posterior: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ["Ġa", "▁b", "c", "\n", None]
    text = {"convert_tokens_to_string": lambda given: given[0].replace("Ġ", " ").replace("▁", " ")}
    tokenizer = SimpleNamespace(convert_ids_to_tokens=pieces.__getitem__, **text)
    monkeypatch.setattr("shards.tools.row_view.find_tokenizer", lambda *_, **__: tokenizer)
    monkeypatch.setattr(ShardStore, "copy_files", lambda *_: [Path("tokenizer.json")])
    assert [*map(words_of(posterior), range(5))] == ["␣a", "␣b", "c", "\\n", "#4"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("row.png", "$$"), ("row.html", "#$#$"), ("row.htm", "a\x1b[2Jb"), ("row", "\\frac{"), ("row.html", "<b>x")],
)
def test_show_of_any_text_in_any_codec_is_a_page_and_a_picture(
    run: Run, tmp_path: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's own xi is shown also where the student is not shown it; names are text on the page, and no markup."""
    out = tmp_path / "new" / "o$u$t"
    store = write_encoded(tmp_path / "<script>$\\frac{$<", make_codec("topk", num_entries=4))
    monkeypatch.setattr("shards.tools.row_view.words_of", lambda _: lambda _: text)
    Path(store.location.url, "ledger/train/000000.json").unlink()
    for row, expected in ((8, 0), (7, 1)):  # of a store that is not finished what is there is shown
        assert run("show", store.location.url, "--row", row, "--out", out / name)[0] == expected
    assert sorted(path.name for path in out.iterdir()) == ["row.html", "row.png"]
    assert (out / "row.png").read_bytes().startswith(b"\x89PNG")
    page, views, rows = (
        (out / "row.html").read_text(),
        view_row(store, "train", 8)[1],
        store.split("train").read_rows(8, 9),
    )
    assert page.startswith("<!doctype html>") and page.count("<tr><td>") == LENGTH - 1
    assert "<b>" not in page and "<script" not in page and "&lt;script&gt;" in page
    for view in views:
        assert f"<td>{view.probability:.3g}<td>{view.gumbel:.2f}<td>{view.gumbel_rank}<td" in page
    assert [view.gumbel for view in views] == rows["token_gumbels"][0, 1:].tolist()
    gumbels = stored_noise(store, "train", 8, rows).gumbels()
    for view, xi, own in zip(views, gumbels, rows["tokens"][0, 1:], strict=True):
        others = [float(value) for token, value in enumerate(xi) if token != own]
        assert [(a.gumbel, a.probability) for a in view.alternatives] == [(g, None) for g in sorted(others)[:-5:-1]]


SOURCES = {"hidden": make_codec("hidden", dtype="float16"), "posterior": make_codec("posterior", num_entries=VOCAB)}
TARGETS = {
    "seeded": (make_codec("seeded"), 0.03),
    "topk": (make_codec("topk", num_entries=VOCAB), 0.03),
    "quantized": (make_codec("quantized"), 0.6),
    "full": (make_codec("full"), 0.03),
}


@pytest.fixture(scope="module", params=sorted(SOURCES))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    return write_encoded(tmp_path_factory.mktemp("source") / "store", SOURCES[request.param])


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_was_converted_decodes_to_the_same_draw(
    source: ShardStore, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The noise of a next to impossible token is exact, where it is stored apart. Of a row three positions are
    decoded at a time."""
    monkeypatch.setattr("shards.tools.conversion.POSITIONS_AT_ONCE", 3 * VOCAB)
    monkeypatch.setitem(PART_ELEMENTS, "cpu", 3 * VOCAB)
    kind = type(stored_noise(source, "train", 0, source.split("train").read_rows(0, 1)).probabilities)
    sizes, tile = set[int](), kind.tile
    monkeypatch.setattr(kind, "tile", lambda own, *ids: sizes.add(own.num_positions) or tile(own, *ids))
    codec, max_error_nats = TARGETS[name]
    record_ways(source.location, [{"device": "cpu"}])
    advances = list[float]()
    monkeypatch.setattr(Bar, "advance", lambda _, amount: advances.append(amount))
    convert(source, str(tmp_path / "out"), codec, Bar())
    assert sum(advances) == sum(SPLITS.values()) * LENGTH and max(sizes) == 3
    made = ShardStore.open(tmp_path / "out")
    assert verify(tmp_path / "out") == [] and read_ways(made.location) == [{"device": "cpu"}]
    assert made.files("corpus") == source.files("corpus") != {}
    assert set(codec.resource_names) <= set(made.resources)
    if "unigram_log_probs" in source.resources:
        kept = made.resources["unigram_log_probs"]
        assert torch.equal(kept, source.resources["unigram_log_probs"])
    for split, rows in SPLITS.items():
        before, after = (s.split(split).read_rows(0, rows) for s in (source, made))
        assert np.array_equal(before["token_log_probs"], after["token_log_probs"])
        exact, noise = (stored_noise(source, split, 0, before), stored_noise(made, split, 0, after))
        ours, theirs = dense_arrivals(exact).log(), dense_arrivals(noise).log()
        assert bool(theirs.isfinite().all())
        assert float((ours - theirs).abs().max()) < max_error_nats
        assert before["tokens"][1, 3] == 3 and before["token_log_probs"][1, 3] < -103
        if name != "seeded":
            stored = after["token_gumbels"][:, 1:]
            assert np.isfinite(stored).all()
            own = exact.token_gumbels.reshape(rows, LENGTH - 1).numpy()
            np.testing.assert_allclose(stored, own, rtol=1e-6)


@pytest.mark.parametrize("counted_shards", [4, 2])
def test_the_counted_unigram_is_that_of_training_tokens_of_evenly_spread_shards(
    source: ShardStore, monkeypatch: pytest.MonkeyPatch, counted_shards: int, tmp_path: Path
) -> None:
    monkeypatch.setattr("shards.codec.ids.UNIGRAM_TOKENS", counted_shards * 8 * LENGTH)
    tokens = source.split("train").read_rows(0, 28)["tokens"]
    counted = tokens if counted_shards == 4 else np.concatenate([tokens[:8], tokens[24:]])
    write_store(tmp_path, splits={"test": 8, "validation": 5})  # without a train split the last one's
    store = ShardStore.open(tmp_path)
    for made, tokens in ((source, counted), (store, store.split("validation").read_rows(0, 5)["tokens"])):
        counts = np.bincount(tokens[:, 1:].reshape(-1), minlength=VOCAB) + 0.5
        np.testing.assert_allclose(np.exp(count_unigram(made)), counts / counts.sum(), rtol=1e-6)
