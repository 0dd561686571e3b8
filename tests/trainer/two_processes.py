"""What test_world_size runs in two processes: the same run under DDP and under FSDP.

torchrun --standalone --nproc_per_node 2 tests/trainer/two_processes.py STORE OUT
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from shards.errors import UsageError
from shards.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.loop import Trainer, train


def record_batches(trainer: Trainer, path: Path) -> None:
    """Write each batch's rows, slots and masks of this rank."""
    make_batch, lines = trainer.make_batch, []

    def recorded(rows, step):
        batch = make_batch(rows, step)
        if trainer.student.training:
            mask = trainer.student.corrupt(batch).mask.int().tolist()
            lines.append([step, batch.row_ids.tolist(), batch.slots.tolist(), mask])
            path.write_text(json.dumps(lines))
        return batch

    trainer.make_batch = recorded


def main(store: Path, out: Path) -> None:
    """DDP with recorded batches, FSDP with an interruption, a batch that does not divide."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    trainer = Trainer(tiny_run(), ShardStore.open(store), out / "ddp")
    record_batches(trainer, out / f"batches-{rank}.json")
    assert trainer.run()
    sharded = {"training__sharding": "fsdp", "training__micro_batch_size": 3}
    assert not interrupted(sharded, store, out)
    assert train(tiny_run(**sharded), store, out / "fsdp")
    try:
        train(tiny_run(training__global_batch_size=7), store, out / "odd")
    except UsageError as error:
        (out / f"odd-{rank}.txt").write_text(str(error))


def interrupted(settings: dict[str, object], store: Path, out: Path) -> bool:
    """Stop after six steps, as a SIGTERM to one of the processes does."""
    trainer = Trainer(tiny_run(**settings), ShardStore.open(store), out / "fsdp")
    if os.environ["RANK"] == "1":
        advance = trainer._advance

        def advance_and_stop(batch):
            if trainer.step == 5:
                trainer.stop.signal_number = 15
            return advance(batch)

        trainer._advance = advance_and_stop
    return trainer.run()


def differ_in_string_hashes() -> None:
    """Start over with one hash seed per process, so that no two agree on the order of a set.

    A collective inside a loop over a set would otherwise pass or fail by chance.
    """
    seed = os.environ["RANK"]
    if os.environ.get("PYTHONHASHSEED") != seed:
        os.environ["PYTHONHASHSEED"] = seed
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    differ_in_string_hashes()
    main(Path(sys.argv[1]), Path(sys.argv[2]))
