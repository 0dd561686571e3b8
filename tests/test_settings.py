"""What commands say of themselves: every setting as it is, and without waiting for torch."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from pipeline.cli import CODEC_SETTINGS
from pipeline.cli import SETTINGS as EXTRACT
from shards.codec.registry import CODECS
from shards.console import run_command
from shards.errors import UsageError
from shards.settings import REQUIRED, Section, resolve, settings_app, settings_of, table_lines
from trainer.cli import SETTINGS as TRAIN
from trainer.sample_cli import SETTINGS as SAMPLE
from trainer.sampling.registry import SAMPLERS

REPOSITORY = Path(__file__).resolve().parent.parent
SECTIONS = [*EXTRACT, *TRAIN, *SAMPLE]


def defaults(config_class: type[Any], prefix: str) -> dict[str, Any]:
    """Key to default of a dataclass and those in it, as Python sees them."""
    found: dict[str, Any] = {}
    hints = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        key = f"{prefix}.{field.name}" if prefix else field.name
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found |= defaults(kind, key)
        else:
            found[key] = field.default
    return found


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_the_table_is_what_the_dataclass_is(section: Section) -> None:
    module, _, name = section.target.partition(":")
    config_class = getattr(importlib.import_module(module), name)
    table = {setting.key: setting for setting in settings_of(section.target, section.prefix)}
    expected = defaults(config_class, section.prefix)
    assert set(table) == set(expected)
    for key, value in expected.items():
        shown = table[key].default
        if value is dataclasses.MISSING:
            assert shown == REQUIRED
        elif value is None or isinstance(value, bool):
            assert shown == str(value).lower()
        elif isinstance(value, tuple):
            assert json.loads(shown) == list(value)
        elif isinstance(value, str):
            assert shown == f'"{value}"'
        else:
            assert float(shown) == value


def test_every_setting_has_a_meaning() -> None:
    silent = [
        setting.key
        for section in [*EXTRACT, *TRAIN]
        for setting in settings_of(section.target, section.prefix)
        if not setting.meaning
    ]
    assert silent == []


def test_no_codec_and_no_sampler_is_left_out() -> None:
    assert set(CODEC_SETTINGS) == set(CODECS)
    for name, target in CODEC_SETTINGS.items():
        assert CODECS[name].__name__ == target.partition(":")[2]
    assert [section.title.split()[-1] for section in SAMPLE] == list(SAMPLERS)
    for section, sampler in zip(SAMPLE, SAMPLERS.values(), strict=True):
        assert section.target == f"{sampler.__module__}:{sampler.__name__}"


def test_a_part_of_the_table() -> None:
    lines = table_lines(EXTRACT, "packing")
    assert lines[:2] == ["# --corpus", 'corpus.packing = "concat"    (concat | wrap | pad)']
    assert all("corpus.packing" in line or line.startswith(("#", "    ")) for line in lines)


def error_of(monkeypatch: pytest.MonkeyPatch, app: Any, words: list[str], **others: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["gdistill", *words])
    with pytest.raises(SystemExit) as leave:
        run_command(app, **others)
    return int(leave.value.code or 0)


def test_a_wrong_option_takes_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from evaluation.cli import app as evaluate
    from pipeline.cli import app as extract
    from shards.cli import app as shards
    from trainer.cli import app as train
    from trainer.sample_cli import app as sample

    wrong = {
        extract: [["--out", "a", "--corpuss", "x"], ["--corpus", "owt"]],
        evaluate: [["a", "--xyz"]],
        shards: [["infoo"], ["info"]],
        train: [["run"], ["run", "--store"]],
        sample: [[], ["a", "--num", "many"]],
    }  # fmt: skip
    for app, cases in wrong.items():
        for words in cases:
            assert error_of(monkeypatch, app, words) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err


def test_only_the_first_of_many_processes_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    settings = settings_app(EXTRACT)
    assert error_of(monkeypatch, settings, ["settings", "zzz"], settings=settings) == 2
    assert error_of(monkeypatch, settings, ["--xyz"]) == 2
    assert capsys.readouterr().err == ""


def test_a_key_with_an_empty_part_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        rows: int = 1

    for text in ("store..rows=3", ".rows=3", "rows.=3"):
        with pytest.raises(UsageError, match="malformed override"):
            resolve(Config, overrides=[text])


HELP = """
import sys, importlib
for module, words in (
    ("pipeline.cli", ["--help"]), ("pipeline.cli", ["settings"]),
    ("pipeline.cli", ["references", "--help"]), ("pipeline.cli", ["--out", "x", "--rats"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owtt"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owt", "--rate", "3"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owt", "--set", "store.row=3"]),
    ("trainer.cli", ["run", "--help"]), ("trainer.cli", ["settings"]),
    ("trainer.sample_cli", ["--help"]), ("trainer.sample_cli", ["settings"]),
):
    sys.argv = [module, *words]
    try:
        importlib.import_module(module).main()
    except SystemExit:
        pass
    heavy = {"torch", "transformers", "datasets", "zarr"} & set(sys.modules)
    assert not heavy, (module, words, heavy)
"""


def test_help_settings_and_refusals_load_no_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", HELP], env=environment, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
