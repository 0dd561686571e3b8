"""Stores on the hub: pushed to, and read from, a stand-in of its API."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from shards.store.store import ShardStore
from shards.store.verification import Description

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
        if self.command != "HEAD":
            self.wfile.write(body)

    def entry(self, path: str) -> dict[str, Any]:
        data = self.files[path]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid}

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
            found = [n for n in sorted(self.files) if not below or n.startswith(f"{below}/")]
            entries = [self.entry(name) for name in found]
            return self.answer(entries) if found else self.answer({"error": "no"}, 404)
        return self.answer({"id": "me/store", "sha": REVISION, "siblings": [], "private": False})

    do_HEAD = do_GET

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
        if "/paths-info/" in path:
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            return self.answer([self.entry(name) for name in wanted if name in self.files])
        if "/commit/" in path:
            for line in body.splitlines():
                record = json.loads(line)
                if record["key"] == "file":
                    value = record["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
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
    for word in ("license: mit", "| teacher | tiny |", "topk", "28 train", size, target):
        assert word in card
    tokens = local.split("train").read_rows(0, 28)["tokens"]
    read = done.stdout.rpartition("read ")[2].split()
    assert read == [str(int(np.sum(tokens))), local.manifest.sha256]
    push = ("-m", "shards.cli", "push", str(sound), target)
    nobody = call("http://127.0.0.1:9", tmp_path, *push)
    assert nobody.returncode == 1 and "the hub does not take the store" in nobody.stderr
    assert "Traceback" not in done.stderr + nobody.stderr
