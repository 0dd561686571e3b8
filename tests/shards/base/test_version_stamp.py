"""What files say of the code that made them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shards import provenance as version_stamp
from shards.provenance import code_version as stamp


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(version_stamp, "ROOT", tmp_path)
    stamp.cache_clear()
    yield tmp_path
    stamp.cache_clear()


def git(folder: Path, *words: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", folder, *named, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_this_checkout() -> None:
    assert (version_stamp.ROOT / "shards" / "provenance.py").samefile(version_stamp.__file__)


def test_an_installed_package_tells_its_release_alone(checkout: Path) -> None:
    assert "+" not in stamp() and stamp()


def test_a_checkout_tells_its_commit_and_whether_it_was_changed(checkout: Path) -> None:
    git(checkout, "init", "-q")
    (checkout / "a").write_text("1")
    git(checkout, "add", "a")
    git(checkout, "commit", "-qm", "one")
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    (checkout / "untracked").write_text("")
    assert stamp().endswith(f"+g{commit}")
    stamp.cache_clear()
    (checkout / "a").write_text("2")
    assert stamp().endswith(f"+g{commit}.dirty")
