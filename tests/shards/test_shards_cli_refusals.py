"""What ``gdistill-shards`` refuses, and what it never writes into a page."""

from __future__ import annotations

import shutil
from pathlib import Path

from shards.store.store import ShardStore
from tests.shards.cli_cases import Run
from tests.shards.store_cases import write_store


def test_what_cannot_be_is_refused_before_anything_is_shown(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    url, out = posterior.location.url, tmp_path / "out"
    for arguments in (
        ("subset", url, "--out", out, "--rows", -5),
        ("subset", url, "--out", out, "--rows", 10**6),
        ("convert", url, "--out", out, "--codec", "posterior"),
        ("convert", url, "--out", out, "--codec", "nosuch"),
        ("show", url, "--draw", -1, "--out", out),
        ("show", url, "--row", -1, "--out", out),
    ):
        code, text = run(*arguments)
        assert code == 2 and text.startswith("error: ") and text.count("\n") == 1, arguments
    assert not any(tmp_path.iterdir())


def test_a_run_is_looked_into(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    assert run("info", tmp_path)[0] == 0 and run("verify", tmp_path)[0] == 0
    code, text = run("info", tmp_path / "nothing")
    assert code == 2 and "no store there" in text


def test_a_subset_is_not_taken_for_an_extraction_of_so_few_rows(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    run("subset", posterior.location.url, "--out", tmp_path / "part", "--rows", 8)
    made = ShardStore.open(tmp_path / "part").manifest
    assert made.tokens == {**posterior.manifest.tokens, "subset_of": posterior.manifest.sha256}


def test_names_are_text_on_the_page(run: Run, tmp_path: Path, posterior: ShardStore) -> None:
    harmful = tmp_path / "<script>alert(1)<"
    shutil.copytree(posterior.location.url, harmful)
    code, _ = run("show", harmful, "--out", tmp_path / "row.html")
    page = (tmp_path / "row.html").read_text()
    assert code == 0 and "<script" not in page and "&lt;script&gt;" in page
