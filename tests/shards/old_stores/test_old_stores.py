"""What earlier versions wrote is read as they read it; see write_old_stores.py."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from shards.store.store import ShardStore, ShardWriter
from shards.store.verification import verify
from tests.shards.old_stores.write_old_stores import CODECS, SPLITS, decoded, teacher

STORES = sorted(Path(__file__).parent.glob("*/*.tar.xz"))


@pytest.fixture(params=STORES, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}")
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_every_codec_is_there() -> None:
    for folder in ("format_2_before_tails", "format_2"):
        names = {path.name.split(".")[0] for path in STORES if path.parent.name == folder}
        assert names == set(CODECS)
    assert any(path.parent.name == "format_1" for path in STORES)


def test_noise_and_tokens_are_those_of_the_version_that_wrote_them(old: Path) -> None:
    store = ShardStore.open(old / "store")
    assert verify(old / "store") == [] and ShardWriter(store.location, store.manifest).is_complete()
    expected = np.load(old / "expected.npz")
    for split, num_rows in SPLITS.items():
        rows = store.split(split).read_rows(0, num_rows)
        np.testing.assert_array_equal(rows["tokens"][:, 1:], teacher(split)[0].tokens.numpy())
        # Arrival times in logarithm: what exp, log and products round differs by kernel.
        np.testing.assert_allclose(decoded(store, split), expected[split], atol=2e-3, rtol=1e-4)
