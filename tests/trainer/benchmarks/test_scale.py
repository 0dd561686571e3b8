"""What grows with the corpus, on simulated stores small enough for a test."""

from __future__ import annotations

import fsspec
import pytest

from benchmarks.listing_server import ListingServer
from benchmarks.scale import MAX_SLOPE, TASKS, slope
from benchmarks.simulated_store import ROWS_PER_SHARD, SimulatedLocation, simulated_manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_runs_on_a_small_corpus(task: str) -> None:
    TASKS[task](4 * ROWS_PER_SHARD)()


def test_a_simulated_store_is_a_store() -> None:
    manifest = simulated_manifest(10 * ROWS_PER_SHARD)
    assert ShardStore.open(SimulatedLocation(manifest)).manifest == manifest
    half = SimulatedLocation(manifest, share_done=0.5)
    pending = [shard.index for shard in ShardWriter(half, manifest).pending("train")]
    assert pending == [5, 6, 7, 8, 9]


def test_listings_come_in_pages() -> None:
    server = ListingServer(2500, latency_seconds=0.0)
    with server as endpoint:
        files = fsspec.filesystem("s3", key="k", secret="s", endpoint_url=endpoint)
        assert len(files.find("bucket/ledger")) == 2500
    assert server.num_requests == 3


def test_slope_of_a_power_law() -> None:
    found = {n: {"seconds": 1e-6 * n**1.5} for n in (10**6, 10**7, 10**8)}
    assert slope(found, "seconds") == pytest.approx(1.5) and MAX_SLOPE < 1.5
