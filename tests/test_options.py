"""Options are a contract: what people type keeps its name and its default."""

from __future__ import annotations

import difflib

import typer

from tests.options_contract import CONTRACT, command_lines, contract, key_lines
from trainer.training.settings import RunConfig


def test_commands_options_and_defaults_are_the_reviewed_ones() -> None:
    reviewed, found = CONTRACT.read_text(encoding="utf-8"), contract()
    changes = list(difflib.unified_diff(reviewed.splitlines(), found.splitlines(), lineterm=""))
    assert not changes, "\n".join(
        [*changes, "if this is meant: python -m tests.options_contract, and say so in CHANGELOG.md"]
    )


def test_the_list_sees_names_defaults_and_nested_keys() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def run(model: str, steps: int = 3) -> None: ...

    assert list(command_lines("x", typer.main.get_command(app))) == [
        "x",
        "  MODEL  str  required",
        "  --steps  int  = 3",
    ]
    keys = list(key_lines(RunConfig))
    assert any(line.startswith("  optimization.learning_rate  float  = ") for line in keys)
