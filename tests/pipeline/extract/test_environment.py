"""The workers of one store compute alike, and whoever does not is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipeline import extract
from shards.errors import UsageError
from shards.store.location import open_location
from shards.store.manifest import COMPUTED_FILE, read_ways, record_ways
from shards.store.verification import verify
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import contents, run


@pytest.fixture(autouse=True)
def threads_of_others() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What extraction says."""
    lines: list[str] = []
    monkeypatch.setattr(extract.stderr, "print", lambda line, **_: lines.append(line))
    return lines


def half_done(out: Path) -> None:
    """Forget half of the shards."""
    for record in sorted((out / "store" / "ledger").rglob("*.json"))[::2]:
        record.unlink()


def test_later_workers_compute_as_the_first(tmp_path: Path, asked: Asked, said: list[str]) -> None:
    run(tmp_path, asked(threads=2, batch_size=3))
    whole = contents(tmp_path / "store")
    (way,) = json.loads(whole[COMPUTED_FILE])["ways"]
    assert (way["device"], way["threads"], way["rows_per_pass"]) == ("cpu", 2, 3)
    assert way["torch"] == torch.__version__ and way["compiled"] is False
    half_done(tmp_path)
    torch.set_num_threads(1)
    run(tmp_path, asked(batch_size=None, threads=None, strict=True))
    assert torch.get_num_threads() == 2 and said == []
    assert contents(tmp_path / "store") == whole
    assert verify(tmp_path / "store") == []
    # A store without the record goes on.
    half_done(tmp_path)
    (tmp_path / "store" / COMPUTED_FILE).unlink()
    run(tmp_path, asked(threads=2, batch_size=3, strict=True))
    assert contents(tmp_path / "store") == whole
    half_done(tmp_path)
    run(tmp_path, asked(batch_size=3, threads=1))
    assert len(said) == 1 and "threads 1 (was 2)" in said[0]
    # A GPU's rows of a pass are none of a CPU's.
    half_done(tmp_path)
    (tmp_path / "store" / COMPUTED_FILE).unlink()
    on_gpu = {"device": "NVIDIA H100", "threads": 0, "rows_per_pass": 1 << 20}
    record_ways(open_location(tmp_path / "store"), [on_gpu])
    own = read_ways(run(tmp_path, asked(batch_size=None, threads=None)).location)[-1]
    assert own["rows_per_pass"] < 1 << 20 and own["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("obstacle", ["", "no Triton here"])
def test_extraction_asks_for_the_compiled_noise_kernel_and_says_why_it_has_none(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, said: list[str], obstacle: str
) -> None:
    """Before the environment is settled, which records it; on the device that the teacher is on."""
    calls: list[object] = []

    def use(kernel: str, device: torch.device) -> str:
        calls.append((kernel, device.type))
        return obstacle

    settle = extract.settle_environment
    monkeypatch.setattr("pipeline.run.use_noise_kernel", use)
    monkeypatch.setattr("pipeline.run.settle_environment", lambda *given: (calls.append("way"), settle(*given))[1])
    run(tmp_path, asked())
    assert calls == [("auto", "cpu"), "way"]
    assert said == ["noise kernel: eager on cpu; no Triton here"] * bool(obstacle)


@pytest.mark.parametrize("kernel", ["compiled", "eager"])
def test_a_gpu_says_where_its_noise_is_eager(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    monkeypatch.setattr(extract, "noise_kernel", lambda device: kernel)
    assert extract._kernels(True).endswith(", eager noise") == (kernel == "eager")


def test_who_computes_differently_is_told_and_with_strict_refused(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    given = asked(threads=1)
    run(tmp_path, given)
    half_done(tmp_path)
    monkeypatch.setattr(extract, "_kernels", lambda on_gpu: "OTHER")
    before = contents(tmp_path / "store")
    with pytest.raises(UsageError, match=r"computes differently.*OTHER \(was .*--strict"):
        run(tmp_path, {**given, "strict": True})
    assert contents(tmp_path / "store") == before and said == []
    store = run(tmp_path, given)
    (line,) = said
    rounding = f"{extract.ROUNDING_NATS:g}"
    assert "kernels OTHER" in line and "threads" not in line and rounding in line
    assert [way["kernels"] == "OTHER" for way in read_ways(store.location)] == [False, True]
    assert store.unfinished() == [] and verify(tmp_path / "store") == []
