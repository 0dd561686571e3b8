"""``gdistill-shards``: what it says, what it makes, what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
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
from shards.noise.kinds import dense_arrivals
from shards.store.store import ShardStore
from shards.tools.rewriting import stored_noise
from shards.tools.row_view import view_row
from tests.shards.cli_cases import LENGTH, SPLITS, Run, teacher_output, write_encoded
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


def test_verify_names_bad_files(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path)
    assert run("verify", tmp_path)[0] == 0
    file = tmp_path / "train" / "entry_gumbels" / "c" / "1" / "0" / "0"
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(bytes(data))
    code, text = run("verify", tmp_path)
    assert code == 1 and "train/entry_gumbels/c/1/0/0 of train shard 1" in text
    assert f"run `gdistill-shards verify {tmp_path} --forget`" in text


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
    with pytest.raises(IntegrityError) as caught:
        ShardStore.open(root).split("train").read_rows(8, 16)
    assert remedy_in(str(caught.value)) == remedy_in(text)
    code, text = run(*remedy_in(text))
    assert code == 1 and "forgotten: train shard 1" in text
    write_store(root)
    assert file_bytes(root) == reference
    assert run("verify", root)[0] == 0


@pytest.mark.parametrize(
    ("name", "settings", "max_error_nats"),
    [
        ("full", (), 0.02),
        ("seeded", ("tolerance_nats=0.01",), 0.03),
        ("quantized", ("bits=8",), 0.2),
    ],
)
def test_a_converted_store_holds_the_draw_of_its_source(
    run: Run,
    posterior: ShardStore,
    tmp_path: Path,
    name: str,
    settings: tuple[str, ...],
    max_error_nats: float,
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    arguments = ("convert", posterior.location.url, "--codec", name, "--out", tmp_path / "out")
    code, text = run(*arguments, *options)
    assert code == 0, text
    made = ShardStore.open(tmp_path / "out")
    assert made.codec.name == name and not made.codec.is_fresh
    assert made.manifest.teacher["converted_from"]["store"] == posterior.manifest.sha256
    for split, rows in SPLITS.items():
        before, after = (s.split(split).read_rows(0, rows) for s in (posterior, made))
        assert np.array_equal(before["tokens"], after["tokens"])
        assert np.array_equal(before["token_log_probs"], after["token_log_probs"])
        ours = dense_arrivals(stored_noise(posterior, split, 0, before)).log()
        theirs = dense_arrivals(stored_noise(made, split, 0, after)).log()
        assert float((ours - theirs).abs().max()) < max_error_nats
    digest = made.manifest.sha256
    assert run(*arguments, *options)[0] == 0, "a second run finds it finished"
    assert ShardStore.open(tmp_path / "out").manifest.sha256 == digest


def test_a_topk_conversion_keeps_the_largest(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ("convert", posterior.location.url, "--codec", "topk", "--set", "num_entries=3")
    assert run(*arguments, "--out", out)[0] == 0
    rows = posterior.split("train").read_rows(0, 4)
    dense = dense_arrivals(stored_noise(posterior, "train", 0, rows))
    made = ShardStore.open(out)
    kept = dense_arrivals(stored_noise(made, "train", 0, made.split("train").read_rows(0, 4)))
    for ours, theirs in zip(dense, kept, strict=True):
        largest = set(ours.topk(3, largest=False).indices.tolist())
        assert largest <= set(theirs.isfinite().nonzero().flatten().tolist())


def test_conversion_goes_one_way_and_says_why(
    run: Run, posterior: ShardStore, tmp_path: Path
) -> None:
    frozen = write_encoded(tmp_path / "frozen", make_codec("full"))
    code, text = run("convert", frozen.location.url, "--codec", "topk", "--out", tmp_path / "x")
    assert code == 2 and "does not tell the distribution" in text
    code, text = run(
        "convert", posterior.location.url, "--codec", "hidden", "--out", tmp_path / "x"
    )
    assert code == 2 and "a frozen draw" in text
    code, text = run("convert", posterior.location.url, "--codec", "seedd", "--out", tmp_path / "x")
    assert code == 2 and "did you mean 'seeded'" in text
    url = posterior.location.url
    arguments = ("convert", url, "--codec", "seeded", "--set", "name=x", "--out", tmp_path / "x")
    code, text = run(*arguments)
    assert code == 2 and "unknown config key [codec seeded.name]" in text
    code, text = run("convert", url, "--codec", "seeded", "--out", url)
    assert code == 2 and "its own source" in text
    assert not (tmp_path / "x").exists()


def test_a_subset_has_the_first_rows(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    options = ("--rows", 11, "--validation-rows", 0, "--out", tmp_path / "out")
    assert run("subset", posterior.location.url, *options)[0] == 0
    made = ShardStore.open(tmp_path / "out")
    assert dict(made.manifest.splits) == {"train": 11}
    before, after = (s.split("train").read_rows(0, 11) for s in (posterior, made))
    assert all(np.array_equal(before[name], after[name]) for name in before)
    code, text = run("subset", posterior.location.url, "--rows", 99, "--out", tmp_path / "x")
    assert code == 2 and "cannot keep so many rows" in text


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


def test_strangers_are_not_merged(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "a")
    write_store(tmp_path / "b", seed=8)
    code, text = run("merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert code == 2 and "b: seed]; got 8; expected 7" in text
    assert not (tmp_path / "out").exists()


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
    output = teacher_output("train", 9, 10)
    for view, log_probs, token in zip(views, output.log_probs[0], output.tokens[0], strict=True):
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


def test_show_writes_a_page_and_a_picture(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    out = tmp_path / "row.html"
    assert run("show", posterior.location.url, "--row", 2, "--out", out)[0] == 0
    assert out.read_text().count("<tr><td>") == LENGTH - 1
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["$$", "#$#$", "a\x1b[2Jb", "\\frac{"])
def test_show_of_any_text_in_any_codec(
    run: Run, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's own xi is shown also where the student is not shown it."""
    store = write_encoded(tmp_path / "store", make_codec("topk", num_entries=4))
    monkeypatch.setattr("shards.tools.row_view._Words.__getitem__", lambda *_: text)
    out = tmp_path / "a$b$.html"
    assert run("show", store.location.url, "--out", out)[0] == 0
    assert out.read_text().count("<tr><td>") == LENGTH - 1
    _, views = view_row(store, "train", 0)
    own = store.split("train").read_rows(0, 1)["token_gumbels"][0, 1:]
    assert [view.gumbel for view in views] == own.tolist()


@pytest.mark.parametrize("out", ["/proc/row.html", "/", "folder"])
def test_show_where_nothing_can_be_written_is_one_line(
    run: Run, posterior: ShardStore, tmp_path: Path, out: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    code, text = run("show", posterior.location.url, "--out", tmp_path / out)
    assert code == 2 and text.count("\n") == 1


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


def test_a_subset_of_some_splits(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    url, out = posterior.location.url, tmp_path / "out"
    assert run("subset", url, "--splits", "validation", "--out", out)[0] == 0
    assert dict(ShardStore.open(out).manifest.splits) == {"validation": 3}
    code, text = run("subset", url, "--splits", "train,tset", "--out", tmp_path / "x")
    assert code == 2 and "tset" in text and "validation" in text
    code, text = run("subset", url, "--splits", "validation", "--rows", 2, "--out", tmp_path / "x")
    assert code == 2 and "--rows" in text


def test_an_empty_subset_is_refused(run: Run, posterior: ShardStore, tmp_path: Path) -> None:
    options = ("--rows", 0, "--validation-rows", 0, "--out", tmp_path / "x")
    code, text = run("subset", posterior.location.url, *options)
    assert code == 2 and "no rows" in text
    assert not (tmp_path / "x").exists()


def test_another_name_of_a_store_is_still_its_source(run: Run, tmp_path: Path) -> None:
    write_store(tmp_path / "a")
    for other in (f"file://{tmp_path}/a", tmp_path / "b" / ".." / "a"):
        code, text = run("merge", tmp_path / "a", "--out", other)
        assert code == 2 and "its own source" in text


@pytest.mark.parametrize("name", ["row.png", "row.html", "row"])
def test_the_page_and_the_picture_never_share_a_name(
    run: Run, posterior: ShardStore, tmp_path: Path, name: str
) -> None:
    code, text = run("show", posterior.location.url, "--out", tmp_path / name)
    assert code == 0, text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["row.html", "row.png"]
    assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "row.html").read_text().startswith("<!doctype html>")


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
