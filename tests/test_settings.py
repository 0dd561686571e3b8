"""What commands say of themselves: every setting as it is, and without waiting for torch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np
import pytest
import typer

from pipeline.cli import SETTINGS as EXTRACT
from shards.codec.protocol import CODECS
from shards.console import INTERRUPTED, command_app, run_command
from shards.errors import IntegrityError, UsageError
from shards.settings import check_bounds, derive_seed, flatten, generator, read_toml, resolve, setting, to_mapping
from shards.settings_table import Section, setting_lines, settings_app, table_lines
from tests.commands import python
from trainer.cli import SETTINGS as TRAIN
from trainer.sample_cli import SETTINGS as SAMPLE
from trainer.sampling.registry import SAMPLERS

SECTIONS = [*EXTRACT, *TRAIN, *SAMPLE]


@dataclass(frozen=True)
class Inner:
    share: float = setting(0.5, "A share.", within="(0, 1]")
    rows: int | None = setting(None, within="[1, 9)")

    def __post_init__(self) -> None:
        check_bounds(self, "inner")


@dataclass(frozen=True)
class Outer:
    """Settings whose meanings stand in the docstring.

    Attributes:
        name, other: Both ``words``.
        place: Where,
            over two lines.
    """

    name: Literal["a", "b", 2]
    other: str = "x"
    place: str | None = None
    sizes: tuple[int, ...] = (1, 2)
    on: bool = False
    inner: Inner = field(default_factory=Inner)
    mixed: int | str = 3
    either: int | float | None = None


def test_one_declaration_is_the_table() -> None:
    assert dict(setting_lines(Outer, "top")) == {
        "top.name": ["top.name    (a | b | 2, required)", "    Both words."],
        "top.other": ['top.other = "x"    (str)', "    Both words."],
        "top.place": ["top.place = none    (str | none)", "    Where, over two lines."],
        "top.sizes": ["top.sizes = [1, 2]    (list of int)"],
        "top.on": ["top.on = false    (bool)"],
        "top.mixed": ["top.mixed = 3    (int | str)"],
        "top.either": ["top.either = none    (int | float | none)"],
        "top.inner.share": ["top.inner.share = 0.5    (float in (0, 1])", "    A share."],
        "top.inner.rows": ["top.inner.rows = none    (int | none in [1, 9))"],
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.share=0", r"out of range \[inner.share\].*0.0.*in \(0, 1\]"),
        ("inner.shore=1", r"\[inner.shore\].*did you mean 'share'"),
        ("name=c", r"unknown value \[name\].*one of"),
        *((f"inner.{o}", "out of range") for o in ("share=1.5", "share=nan", "rows=0", "rows=9")),
        ("name=2.0", "unknown value"),
        ("zzzz=1", "known keys: .*'sizes'"),
        *((o, "wrong type") for o in ("inner.rows=2.5", "inner.rows=true", "inner.share=true")),
        *((o, "wrong type") for o in ("sizes=3", "inner=3", "mixed=2.5", "either=a")),
        *((o, "malformed override") for o in ("inner..share=1", ".rows=3", "rows.=3", "name")),
    ],
)
def test_a_bad_value_is_one_line(override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        resolve(Outer, {"name": "a"}, overrides=[override])
    assert "\n" not in str(refused.value)


def test_values_are_read_as_toml_and_later_ones_win() -> None:
    words = ["inner.share=1", " sizes = [3]", "place=a/b", "other=b = c"]
    made = resolve(Outer, {"name": "a", "inner": {"rows": 1}}, {"name": "b"}, overrides=words)
    assert made == Outer("b", "b = c", "a/b", (3,), False, Inner(1.0, 1))
    plain = json.loads(json.dumps(to_mapping(made)))
    assert resolve(Outer, plain) == made
    assert resolve(Outer, plain, overrides=["inner.rows=none"]).inner == Inner(1.0)
    for text, mixed, either in (("none", "none", None), ("x", "x", None), ("4", 4, 4)):  # every type of a union
        found = resolve(Outer, plain, overrides=[f"mixed={text}", f"either={either or 'none'}"])
        assert (found.mixed, found.either) == (mixed, either)
    assert resolve(Outer, plain, overrides=["either=0.5"]).either == 0.5
    with pytest.raises(UsageError, match=r"incomplete config.*name"):
        resolve(Outer)  # what is required is asked for
    assert flatten({"a": {"b": 1, "c": {}}, "d": {}}) == {"a.b": 1, "a.c": {}, "d": {}}, "an empty table is a value"


def test_a_seed_knows_where_its_parts_end_and_of_what_type_they_are() -> None:
    parts: list[tuple[int | str, ...]] = [("a", "bc"), ("ab", "c"), ("abc",), ("1",), (1,), ("1", "int:1"), (1, 1)]
    assert len({derive_seed(*each) for each in parts}) == len(parts)
    assert derive_seed(7, "noise", "train") == 8192547404644105121 == derive_seed(np.int64(7), "noise", "train")
    assert generator(1, "a").initial_seed() == derive_seed(1, "a")


def test_a_config_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    for data in (b"a =", b"a = '\xff'"):
        (tmp_path / "run.toml").write_bytes(data)
        with pytest.raises(UsageError, match="is not TOML"):
            read_toml(tmp_path / "run.toml")
    with pytest.raises(UsageError, match=r"cannot read.*none\.toml"):
        read_toml(tmp_path / "none.toml")


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_every_setting_of_a_command_has_a_default_and_a_meaning(section: Section) -> None:
    lines = dict(setting_lines(section.config_class, section.prefix))
    silent = [key for key, shown in lines.items() if len(shown) < 2]
    assert not silent or section in SAMPLE
    assert all(key.startswith(section.prefix) for key in lines)
    assert all(len(line) <= 100 for shown in lines.values() for line in shown[1:])
    boundless = [key for key, shown in lines.items() if re.search(r"\((int|float)( \| none)?\)$", shown[0])]
    assert section in SAMPLE or all(key.endswith(("_id", "seed")) for key in boundless)


def test_no_codec_and_no_sampler_is_left_out() -> None:
    codecs = [section.config_class for section in EXTRACT if section.prefix == "codec"]
    assert set(codecs) == {codec.load() for codec in CODECS.values()}
    named = {section.title.split()[-1]: section.config_class for section in SAMPLE}
    assert named == {name: resolve_name(target) for name, target in SAMPLERS.items()}
    meant = dict(setting_lines(named["medusa"]))["max_lookahead"][1]
    assert meant.endswith("None is as many as the student proposes."), "its own words, not those of what it stands on"


def test_every_setting_begins_as_it_is_written_down() -> None:
    """A default that moves changes everybody's runs and samples; a bound, what is refused."""
    rows = {each.title: [shown[0] for _, shown in setting_lines(each.config_class, each.prefix)] for each in SECTIONS}
    assert rows == json.loads(Path(__file__).with_name("settings.json").read_text())


def test_a_part_of_the_table() -> None:
    lines = table_lines(EXTRACT, "packing")
    choices = "(concat | wrap | pad | chat | prompts)"
    assert lines[:2] == ["# --corpus", f'corpus.packing = "concat"    {choices}']
    assert all("corpus.packing" in line or line.startswith(("#", "    ")) for line in lines)
    assert table_lines(EXTRACT, "posterior")[0] == "# --codec posterior"
    assert table_lines(EXTRACT, "no such word") == []
    whole = table_lines(EXTRACT)
    assert "posterior, seeded" in whole[-1]
    assert all(before == "" for before, line in pairwise(whole) if line.startswith("# --"))


@pytest.fixture
def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """The exit code of a command that refuses its words, and what it says."""

    def call(app: Any, words: list[str], **others: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gdistill", *words])
        with pytest.raises(SystemExit) as leave:
            run_command(app, **others)
        out, err = capsys.readouterr()
        assert out == ""
        return int(leave.value.code or 0), err

    return call


def test_a_wrong_option_takes_one_line(error_of: Callable) -> None:
    wrong = {
        "pipeline.cli": [["--out", "a", "--corpuss", "x"], ["--corpus", "owt"]],
        "evaluation.cli": [["a", "--xyz"]],
        "shards.cli": [["infoo"], ["info"]],
        "trainer.cli": [["run"], ["run", "--store"]],
        "trainer.sample_cli": [[], ["a", "--num", "many"]],
    }
    for module, cases in wrong.items():
        for words in cases:
            code, err = error_of(import_module(module).app, words)
            assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    refusal = "error: no such option: --xyz; see gdistill settings --help\n"
    assert error_of(command_app(), ["settings", "--xyz"], settings=settings_app(EXTRACT)) == (2, refusal)
    code, err = error_of(import_module("shards.cli").app, [])
    assert code == 2 and "convert" in err, "without a word all of them are told"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ending(), (130, f"{INTERRUPTED}\n")) for ending in (KeyboardInterrupt, typer.Abort)]
    + [(typer.Exit(3), (3, "")), (OSError(28, "full", "a"), (1, "error: cannot read or write [a]; got full\n"))],
)
def test_a_command_that_is_interrupted_or_leaves_has_its_exit_code(
    error_of: Callable, error: BaseException, expected: tuple[int, str]
) -> None:
    def work() -> None:
        raise error

    app = command_app()
    app.command()(work)
    assert error_of(app, []) == expected
    if isinstance(error, KeyboardInterrupt):  # also of a command that is no app
        assert error_of(work, []) == expected


def test_only_the_first_of_many_processes_speaks(monkeypatch: pytest.MonkeyPatch, error_of: Callable) -> None:
    """Of what was asked; what one of them alone has met is told by it."""

    def spoilt() -> None:
        raise IntegrityError("altered")

    monkeypatch.setenv("RANK", "1")
    assert error_of(spoilt, []) == (1, "error: altered\n")
    settings = settings_app(EXTRACT)
    assert error_of(settings, ["settings", "zzz"], settings=settings) == (2, "")
    assert error_of(settings, ["--xyz"]) == (2, "")
    monkeypatch.setenv("GDISTILL_TRACEBACK", "1")
    with pytest.raises(UsageError, match="no setting is called that"):
        error_of(settings, ["settings", "zzz"], settings=settings)


HELP = """
import sys, importlib
for module, words in (
    ("pipeline.cli", ["--help"]), ("pipeline.cli", ["settings"]),
    ("pipeline.cli", ["references", "--help"]), ("pipeline.cli", ["--out", "x", "--rats"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owtt"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owt", "--rate", "3"]),
    ("pipeline.cli", ["--out", "x", "--corpus", "owt", "--set", "store.row=3"]),
    ("trainer.cli", ["run", "--help"]), ("trainer.cli", ["settings"]),
    ("trainer.cli", ["status", "/nowhere"]),
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
    done = python("-c", HELP, cwd=Path("/"))
    assert done.returncode == 0, done.stderr[-2000:]
