"""A store under any sequence of events against a model of it: what is done, what is spoilt."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shards.errors import IntegrityError
from shards.store.manifest import ShardRange
from shards.store.store import ShardStore
from shards.store.verification import forget, verify
from tests.shards import store_cases as cases
from tests.shards.store_cases import flipped

SHARDS = cases.make_manifest().all_shards()
shards = st.sampled_from(SHARDS)


class StoreMachine(RuleBasedStateMachine):
    """The model: shards that are whole, shards whose files a fault has spoilt, claims held."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.root = self.folder / "store"
        cases.write_store(self.folder / "reference")
        self.reference = cases.file_bytes(self.folder / "reference")
        self.writer = cases.open_writer(self.root)
        self.whole: set[ShardRange] = set()
        self.spoilt: set[ShardRange] = set()
        self.held: dict[ShardRange, ExitStack] = {}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            for claim in self.held.values():
                claim.close()
            shutil.rmtree(self.folder)

    @rule(shard=shards)
    def write(self, shard: ShardRange) -> None:
        """By any writer; a shard that looks done is left alone, a claimed one to its holder."""
        with cases.open_writer(self.root).claim(shard) as mine:
            assert mine == (shard not in self.whole | self.spoilt and shard not in self.held)
            if mine:
                self.writer = cases.open_writer(self.root)
        if mine:
            self.writer.write(shard, cases.make_arrays(self.writer.manifest, shard))
            self.whole.add(shard)

    @rule(shard=shards, files=st.integers(1, 4))
    def killed(self, shard: ShardRange, files: int) -> None:
        """A writer that got so far: files without a record, and the temporary one it was at."""
        if shard in self.whole | self.spoilt | set(self.held):
            return
        for name in sorted(cases.make_manifest().shard_files(shard).values())[:files]:
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.reference[name])
        half = path.with_name(f".{path.name}.{'0' * 32}.tmp")
        half.write_bytes(self.reference[name][:10])

    @rule(shard=shards)
    def claim(self, shard: ShardRange) -> None:
        if shard in self.held:
            self.held.pop(shard).close()
            return
        stack = ExitStack()
        mine = stack.enter_context(self.writer.claim(shard))
        assert mine == (shard not in self.whole | self.spoilt)
        if mine:
            self.held[shard] = stack

    @rule(shard=shards, bit=st.integers(0, 300))
    def flip(self, shard: ShardRange, bit: int) -> None:
        """In a chunk's bytes: its file keeps its size and tail, so only readers find out."""
        if shard in self.whole:
            path = self.root / f"{shard.split}/token_gumbels/c/{shard.index}/0"
            path.write_bytes(flipped(path.read_bytes(), bit % 64))
            self.whole.discard(shard)
            self.spoilt.add(shard)

    @rule()
    def forget(self) -> None:
        gone = forget(self.root, verify(self.root))
        assert set(gone) == self.spoilt
        self.spoilt.clear()

    @rule()
    def finish(self) -> None:
        """Resume to the end; byte for byte the store of one undisturbed writer."""
        for claim in self.held.values():
            claim.close()
        self.held.clear()
        forget(self.root, verify(self.root))
        cases.write_pending(cases.open_writer(self.root))
        self.whole, self.spoilt = set(SHARDS), set()
        assert cases.file_bytes(self.root) == self.reference

    @invariant()
    def reads_as_the_model(self) -> None:
        store = ShardStore.open(self.root, allow_incomplete=True)
        assert set(store.unfinished()) == set(SHARDS) - self.whole - self.spoilt
        for shard in SHARDS:
            try:
                rows = store.split(shard.split).read_rows(shard.start, shard.stop)
            except IntegrityError:
                assert shard not in self.whole
                continue
            assert shard in self.whole
            for name, values in cases.make_arrays(store.manifest, shard).items():
                np.testing.assert_array_equal(rows[name], values)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
