"""``gdistill-shards``: what it says, what it makes, what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shards import cli
from shards.codec.registry import make_codec
from shards.errors import IntegrityError, UsageError
from shards.store.store import ShardStore
from shards.tools.row_view import view_row
from tests.shards.cli_cases import LENGTH, Run, teacher_rows, write_encoded
from tests.shards.store.fault_trials import flipped
from tests.shards.store_cases import file_bytes, make_arrays, open_writer, write_store


def test_info_says_what_is_there(run: Run, tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    code, text = run("info", tmp_path)
    assert code == 0 and "0 of 5 shards" in text
    write_store(tmp_path)
    code, text = run("info", tmp_path, "--json")
    value = json.loads(text)
    assert code == 0 and value["num_tokens"] == (28 + 5) * 6
    assert value["manifest_sha256"] == writer.manifest.sha256
    sizes = {n: len(data) for n, data in file_bytes(tmp_path).items()}
    assert value["num_bytes"] == sum(sizes.values())
    files = [name for name in sizes if name.startswith(("train/", "validation/")) and "/c/" in name]
    shards = sum(sizes[name] for name in files)
    assert value["bytes_per_token"] == pytest.approx(shards / value["num_tokens"])
    assert value["fp16_vector_bytes_per_token"] == 100


def test_info_tells_the_pace_of_a_store_at_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = open_writer(tmp_path)
    assert "0 shards in work" in run("info", tmp_path)[1]
    shards = [*writer.pending("train"), *writer.pending("validation")]
    for index, shard in enumerate(shards[:3]):  # 8 rows of 6 tokens each; 12 + 5 rows are left
        with writer.claim(shard):
            writer.write(shard, make_arrays(writer.manifest, shard))
        os.utime(tmp_path / "ledger" / "train" / f"{shard.index:06d}.json", (0, 1000 + 10 * index))
    monkeypatch.setattr("shards.cli.time.time", lambda: 1024.0)
    with writer.claim(shards[3]):
        _, text = run("info", tmp_path)
        pace = json.loads(run("info", tmp_path, "--json")[1])["pace"]
    # 96 tokens in the 24 seconds since the first one was there: 4 a second; 9 rows of 6 to go.
    assert pace == {
        "tokens_per_second": 4.0,
        "num_shards": 2,
        "seconds": 24.0,
        "eta_seconds": pytest.approx(13.5),
        "seconds_since_shard": 4.0,
        "num_claimed": 1,
    }
    assert "3 of 5 shards, 144 tokens (72.7%)" in text
    assert "1 shards in work, last one finished 0:00:04 ago, 4 tok/s (2 shards in 0:00:24)" in text
    write_store(tmp_path)
    _, text = run("info", tmp_path, "--json")
    assert json.loads(text)["pace"] is None and "running" not in run("info", tmp_path)[1]


def remedy_in(text: str) -> list[str]:
    """The arguments of the one command that a message says to run."""
    commands = set(re.findall("`gdistill-shards ([^`]*)`", text))
    assert len(commands) == 1, text
    return shlex.split(commands.pop())


def test_the_printed_remedy_heals_a_store(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "a store"
    write_store(root)
    reference = file_bytes(root)
    for name in ("train/entry_gumbels/c/1/0/0", "tokenizer/tokenizer.json"):
        (root / name).write_bytes(flipped((root / name).read_bytes(), 20))
    assert open_writer(tmp_path / "a store").pending("train") == [], "sizes alone tell nothing"
    (root / "tokenizer/tokenizer.json").write_bytes(b"altered")
    code, text = run("verify", root)
    assert code == 1 and "2 problems" in text
    assert "train/entry_gumbels/c/1/0/0 of train shard 1" in text
    with pytest.raises(IntegrityError) as caught:
        ShardStore.open(root).split("train").read_rows(8, 16)
    assert remedy_in(str(caught.value)) == remedy_in(text)
    code, text = run(*remedy_in(text))
    assert code == 1 and "forgotten: train shard 1" in text
    write_store(root)
    assert file_bytes(root) == reference
    assert run("verify", root)[0] == 0


def test_a_converted_store_names_its_source_and_is_resumed(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    out, codec = tmp_path / "out", ("--codec", "seeded", "--set", "tolerance_nats=0.02")
    arguments = ("convert", posterior.location.url, *codec, "--out", out)
    code, text = run(*arguments)
    assert code == 0, text
    made = ShardStore.open(out)
    assert made.codec == make_codec("seeded", tolerance_nats=0.02)
    assert made.manifest.teacher["converted_from"]["store"] == posterior.manifest.sha256
    before = file_bytes(out)
    assert run(*arguments)[0] == 0 and file_bytes(out) == before, "a second run finds it finished"


def test_what_cannot_be_made_or_shown_is_one_line_and_nothing_is_written(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    frozen = write_encoded(tmp_path / "frozen", make_codec("full")).location.url
    url, out = posterior.location.url, tmp_path / "out"
    write_store(tmp_path / "a")
    write_store(tmp_path / "b", seed=8)
    (tmp_path / "folder.html").mkdir()
    for arguments, words in (
        (("convert", frozen, "--codec", "topk"), "does not tell the distribution"),
        (("convert", url, "--codec", "hidden"), "a frozen draw"),
        (("convert", url, "--codec", "posterior"), "a frozen draw"),
        (("convert", url, "--codec", "seedd"), "did you mean 'seeded'"),
        (("convert", url, "--codec", "seeded", "--set", "name=x"), "key [codec seeded.name]"),
        (("subset", url, "--rows", 99), "cannot keep so many rows"),
        (("subset", url, "--rows", -5), "cannot keep so many rows"),
        (("subset", url, "--splits", "train,tset"), "got tset; expected train, validation"),
        (("subset", url, "--splits", "validation", "--rows", 2), "[--rows]"),
        (("subset", url, "--rows", 0, "--validation-rows", 0), "no rows left"),
        (("merge", tmp_path / "a", tmp_path / "b"), "b: seed]; got 8; expected 7"),
        (("show", url, "--draw", -1), "no such draw"),
        (("show", url, "--row", -1), "no such row"),
        (("info", tmp_path / "nothing"), "no store there"),
    ):
        placed = () if arguments[0] == "info" else ("--out", out)
        code, text = run(*arguments, *placed)
        assert code == 2 and words in text and text.count("\n") == 1, (arguments, text)
        assert not list(tmp_path.glob("out*")), arguments
    for place in ("/proc/row.html", "/", "folder"):
        code, text = run("show", url, "--out", tmp_path / place)
        assert code == 2 and text.count("\n") == 1, place
    for place in (tmp_path / "a", f"file://{tmp_path}/a", tmp_path / "b" / ".." / "a"):
        code, text = run("merge", tmp_path / "a", "--out", place)
        assert code == 2 and "its own source" in text, place


def test_a_subset_has_the_first_rows(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    options = ("--rows", 11, "--validation-rows", 0, "--out", tmp_path / "out")
    assert run("subset", posterior.location.url, *options)[0] == 0
    made = ShardStore.open(tmp_path / "out")
    assert dict(made.manifest.splits) == {"train": 11}
    before, after = (s.split("train").read_rows(0, 11) for s in (posterior, made))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    part = ("--splits", "validation", "--out", tmp_path / "part")
    assert run("subset", posterior.location.url, *part)[0] == 0
    assert dict(ShardStore.open(tmp_path / "part").manifest.splits) == {"validation": 3}


def test_merged_parts_are_the_whole(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "whole")
    for part, keep in (("a", {0, 2}), ("b", {1, 2, 3})):
        writer = write_store(tmp_path / part)
        for shard in writer.shards("train"):
            if shard.index not in keep:
                writer.location.delete(f"ledger/train/{shard.index:06d}.json")
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    code, text = run("merge", a, "--out", out)
    assert code == 1 and "2 shards in none of the stores, the first is train shard 1" in text
    assert run("merge", a, b, "--out", out)[0] == 0
    assert file_bytes(out) == file_bytes(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["shard missing", "record damaged", "record missing"])
def test_merging_mends_what_is_there(run: Run, tmp_path: Path, damage: str) -> None:
    write_store(tmp_path / "a")
    out = tmp_path / "out"
    assert run("merge", tmp_path / "a", "--out", out)[0] == 0
    record = out / "ledger/train/000001.json"
    if damage == "shard missing":
        (out / "train/entry_gumbels/c/1/0/0").unlink()
    elif damage == "record damaged":
        record.write_bytes(b"{}")
    else:
        record.unlink()
    code, text = run("merge", tmp_path / "a", "--out", out)
    assert code == 0, text
    assert file_bytes(out) == file_bytes(tmp_path / "a")


def test_merging_leaves_a_claimed_shard_alone(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "a")
    out = tmp_path / "out"
    writer = open_writer(out)
    with writer.claim(writer.pending("train")[1]) as mine:
        assert mine
        code, text = run("merge", tmp_path / "a", "--out", out)
        assert code == 1 and "held by another process" in text
        assert not (out / "train/entry_gumbels/c/1").exists()
    assert run("merge", tmp_path / "a", "--out", out)[0] == 0
    assert file_bytes(out) == file_bytes(tmp_path / "a")


def test_a_damaged_part_is_not_merged_unless_another_has_it(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "a")
    write_store(tmp_path / "b")
    (tmp_path / "a/train/entry_gumbels/c/1/0/0").write_bytes(b"damaged")
    code, text = run("merge", tmp_path / "a", "--out", tmp_path / "out")
    assert code == 1 and "train/entry_gumbels/c/1/0/0: train shard 1" in text
    assert run("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")[0] == 0
    assert file_bytes(tmp_path / "out") == file_bytes(tmp_path / "b")


def test_the_view_of_a_row(posterior: ShardStore) -> None:
    _, views = view_row(posterior, "train", 9)
    output, _ = teacher_rows("train")
    for view, log_probs, token in zip(views, output.log_probs[9], output.tokens[9], strict=True):
        probs = log_probs.exp()
        assert view.text == f"#{int(token)}"
        assert view.probability == pytest.approx(float(probs[token]), rel=1e-5)
        others = [a.probability for a in view.alternatives]
        expected = sorted((float(p) for i, p in enumerate(probs) if i != token), reverse=True)[:4]
        assert others == pytest.approx(expected, rel=2e-3)
        # The token wins the race: no alternative has the larger logit + xi.
        won = math.log(view.probability) + view.gumbel
        assert all(math.log(a.probability or 0) + a.gumbel <= won + 1e-3 for a in view.alternatives)
    with pytest.raises(UsageError, match="no such row"):
        view_row(posterior, "train", 20)


@pytest.mark.parametrize("text", ["$$", "#$#$", "a\x1b[2Jb", "\\frac{"])
def test_show_of_any_text_in_any_codec(
    run: Run, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's own xi is shown also where the student is not shown it."""
    store = write_encoded(tmp_path / "store", make_codec("topk", num_entries=4))
    monkeypatch.setattr("shards.tools.row_view.words_of", lambda _: lambda _: text)
    out = tmp_path / "a$b$.html"
    assert run("show", store.location.url, "--out", out)[0] == 0
    assert out.read_text().count("<tr><td>") == LENGTH - 1
    _, views = view_row(store, "train", 0)
    own = store.split("train").read_rows(0, 1)["token_gumbels"][0, 1:]
    assert [view.gumbel for view in views] == own.tolist()


def test_half_written_shards_do_not_count(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path)
    whole = json.loads(run("info", tmp_path, "--json")[1])
    (tmp_path / "ledger" / "train" / "000000.json").unlink()
    part = json.loads(run("info", tmp_path, "--json")[1])
    assert part["num_tokens"] == whole["num_tokens"] - 8 * 6
    topk = make_codec("topk", num_entries=3).array_specs(50, None)
    files = [tmp_path / "train" / name / "c" for name in topk]
    files += [tmp_path / "train" / name / "c" for name in ("tokens", "token_log_probs")]
    dropped = sum(f.stat().st_size for c in files for f in (c / "0").rglob("*") if f.is_file())
    dropped += sum((c / "0").stat().st_size for c in files if (c / "0").is_file())
    before = whole["bytes_per_token"] * whole["num_tokens"]
    assert dropped > 0
    assert part["bytes_per_token"] * part["num_tokens"] == pytest.approx(before - dropped)


@pytest.mark.parametrize("name", ["row.png", "row.html", "row"])
def test_the_page_and_the_picture_never_share_a_name(
    run: Run, posterior: ShardStore, tmp_path: Path, name: str
) -> None:
    code, text = run("show", posterior.location.url, "--out", tmp_path / name)
    assert code == 0, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["row.html", "row.png"]
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "row.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<tr><td>") == LENGTH - 1


def test_verify_counts_every_byte_it_will_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_store(tmp_path)
    read: list[int] = []
    totals: list[int] = []

    @contextmanager
    def counted(_: str, total: int, **__: object) -> Iterator[Any]:
        totals.append(total)
        yield SimpleNamespace(advance=read.append)

    monkeypatch.setattr(cli, "progress_bar", counted)
    assert run("verify", tmp_path)[0] == 0
    assert totals == [sum(read)]


def test_info_says_what_shuffling_keeps_in_memory(run: Run, tmp_path: Path) -> None:
    """Rows times the decoded bytes of each: a small split is shuffled whole, chunk by chunk."""
    manifest = write_store(tmp_path).manifest
    row_bytes = manifest.row_length * sum(
        math.prod(spec.trailing_shape) * np.dtype(spec.dtype).itemsize
        for spec in manifest.all_arrays.values()
    )
    code, text = run("info", tmp_path, "--json")
    chunk = manifest.rows_per_chunk
    told = json.loads(text)["shuffling"]
    assert code == 0
    for split, rows in manifest.splits.items():
        assert told[split]["window_bytes"] == -(-rows // chunk) * chunk * row_bytes
        assert told[split]["batch_bytes"] == rows * row_bytes
        assert told[split]["shared_rows"] == 1 - -(-rows // chunk) / rows
    assert "75% of its rows are of a chunk already met in it" in run("info", tmp_path)[1]


def test_a_run_is_looked_into(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    assert run("info", tmp_path)[0] == 0 and run("verify", tmp_path)[0] == 0


def test_names_are_text_on_the_page(run: Run, tmp_path: Path, posterior: ShardStore) -> None:
    harmful = tmp_path / "<script>alert(1)<"
    shutil.copytree(posterior.location.url, harmful)
    code, _ = run("show", harmful, "--out", tmp_path / "row.html")
    page = (tmp_path / "row.html").read_text()
    assert code == 0 and "<script" not in page and "&lt;script&gt;" in page
