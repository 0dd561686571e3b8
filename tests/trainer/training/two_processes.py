"""What test_world_size runs in several processes: the same run under DDP and under FSDP.

torchrun --standalone --nproc_per_node 2 tests/trainer/training/two_processes.py STORE OUT whole
"""

from __future__ import annotations

import json
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from shards.errors import GdistillError
from shards.interrupts import Stopped
from shards.store.store import ShardStore
from tests.trainer.backbone_cases import backbone_run
from tests.trainer.run_cases import tiny_run
from trainer.initial_weights import network_settings
from trainer.students.registry import MDLM
from trainer.training.checkpoint import Trainee
from trainer.training.loop import Trainer, train
from trainer.training.settings import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


SMOOTH = partial(torch.optim.AdamW, eps=1.0)
"""AdamW whose weights are as exact as its gradients.

Measured with the usual eps of 1e-8, against one process: gradients differ by at most 1.1e-6 in any
step (their largest entries are 0.3), but one weight of 1,024 by 2.9e-5 from step 3 on, under FSDP
with micro-batches of 3; by 8.6e-6 under DDP; and by 1.2e-5 in one process with micro-batches of 3.
It is the same one each time: its gradient is exactly 0 in steps 1 and 2 (a gate starts at 0), and
2.335e-9 in step 3, where the runs find 2.365e-9 and 2.436e-9. Below eps AdamW divides by eps: a
rounding of 1e-10 becomes 1e-2 x 0.37 x 1e-10 / 1e-8 = 3.7e-5 of weight. With eps = 1 a step passes
on at most learning rate x difference of gradients (measured: 2.8e-9 after ten).
"""
CROSS_ATTENTION = {"model__noise__layers": "[1]"}
"""A student with noise cross-attention."""


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


@contextmanager
def counted_whole_tensors(path: Path) -> Iterator[None]:
    """Write the bytes that this process gathered for its last checkpoint, and the most that was
    alive at a time of tensors put together from all processes."""
    alive: dict[int, int] = {}
    counts = {"kept": 0, "alive": 0}
    full_tensor, gather = DTensor.full_tensor, Trainee.gather

    def counted(tensor: DTensor, **options):
        whole = full_tensor(tensor, **options)
        alive[id(whole)] = whole.nbytes
        weakref.finalize(whole, alive.pop, id(whole), None)
        counts["alive"] = max(counts["alive"], sum(alive.values()))
        return whole

    def gathered(trainee: Trainee, accelerator):
        found = gather(trainee, accelerator)
        counts["kept"] = sum(t.nbytes for tensors in found.values() for t in tensors.values())
        return found

    DTensor.full_tensor, Trainee.gather = counted, gathered
    try:
        yield
    finally:
        DTensor.full_tensor, Trainee.gather = full_tensor, gather
        path.write_text(json.dumps(counts))


def main(store: Path, out: Path) -> None:
    """DDP with recorded batches, FSDP with an interruption, a batch that does not divide."""
    rank = os.environ["RANK"]
    trainer = Trainer(tiny_run(**CROSS_ATTENTION), ShardStore.open(store), out / "ddp")
    record_batches(trainer, out / f"batches-{rank}.json")
    assert trainer.run()
    sharded = {**CROSS_ATTENTION, "training__sharding": "fsdp", "training__micro_batch_size": 3}
    assert not interrupted(sharded, store, out)
    with counted_whole_tensors(out / f"held-{rank}.json"):
        assert train(tiny_run(**sharded), store, out / "fsdp")
    refused(lambda: train(tiny_run(training__global_batch_size=7), store, out / "odd"), "odd", out)
    validate_unevenly(store, out)
    resume_apart(store, out)
    (out / f"taken-{rank}").touch()
    refused(lambda: train(tiny_run(), store, out / "taken-0"), "taken", out)
    (out / f"finished-{rank}.txt").write_text(str(finish_interrupted(store, out / "late")))


def run_both(store: Path, out: Path) -> None:
    """Under DDP and under FSDP, nothing else."""
    for sharding in ("ddp", "fsdp"):
        assert train(
            tiny_run(**CROSS_ATTENTION, training__sharding=sharding), store, out / sharding
        )


def on_backbone(student: str, backbone: Path, **changes: object) -> RunConfig:
    """Four steps of what learns noise, with a last validation batch of one row."""
    few = {"training__num_steps": 4, "training__num_validation_rows": 9}
    return backbone_run(backbone, student, **few, **changes)


def begun_as(model: Path, **changes: object) -> RunConfig:
    """The same of a student that begins as that model, trains all of it, and reads noise again."""
    few = {"training__num_steps": 4, "training__num_validation_rows": 9}
    noise = {"model__noise__injection": "add", "model__noise__layers": "[1]"}
    return tiny_run(network_settings(model, MDLM), **few, **noise, **changes)


def run_on_backbone(store: Path, out: Path) -> None:
    """What stands on a language model beside the store, and what is one, under DDP and FSDP."""
    model = store.with_name("backbone")
    for sharding, rows in (("ddp", 4), ("fsdp", 3)):
        changes = {"training__sharding": sharding, "training__micro_batch_size": rows}
        for student in ("medusa", "drafter"):
            config = on_backbone(student, model, **changes)
            assert train(config, store, out / f"{student}-{sharding}")
        assert train(begun_as(model, **changes), store, out / f"mdlm-{sharding}", init_from=model)


def refused(run: Callable[[], object], name: str, out: Path) -> None:
    """Write the error that this process meets to ``NAME-RANK.txt``."""
    try:
        run()
    except GdistillError as error:
        (out / f"{name}-{os.environ['RANK']}.txt").write_text(str(error))


def validate_unevenly(store: Path, out: Path) -> None:
    """Last validation batches of which a process gets a row fewer, or none at all."""
    for rows in (7, 9):
        for sharding in ("ddp", "fsdp"):
            changes = {"training__sharding": sharding, "training__micro_batch_size": 3}
            config = tiny_run(training__num_steps=1, training__num_validation_rows=rows, **changes)
            train(config, store, out / f"uneven-{rows}-{sharding}")


def resume_apart(store: Path, out: Path) -> None:
    """The processes write to, and read from, disks of their own."""
    own = out / f"apart-{os.environ['RANK']}"
    train(tiny_run(training__num_steps=2, optimization__schedule="constant"), store, own)
    longer = tiny_run(training__num_steps=4, optimization__schedule="constant")
    refused(lambda: train(longer, store, own), "apart", out)


def finish_interrupted(store: Path, out: Path) -> bool:
    """A Ctrl-C reaches one process when the last step is done."""
    trainer = Trainer(tiny_run(training__num_steps=2), ShardStore.open(store), out)
    report = trainer._report

    def report_and_interrupt(*arguments):
        if os.environ["RANK"] == "1" and trainer.step == 2:
            trainer.stop.signal_number = signal.SIGINT
        report(*arguments)

    trainer._report = report_and_interrupt
    try:
        return bool(trainer.run())
    except Stopped:
        return False


def interrupted(settings: dict[str, object], store: Path, out: Path) -> bool:
    """Stop after six steps, as a SIGTERM to one of the processes does."""
    trainer = Trainer(tiny_run(**settings), ShardStore.open(store), out / "fsdp")
    if os.environ["RANK"] == "1":
        advance = trainer.advance

        def advance_and_stop(batch):
            if trainer.step == 5:
                trainer.stop.signal_number = 15
            return advance(batch)

        trainer.advance = advance_and_stop
    try:
        return bool(trainer.run())
    except Stopped:
        return False


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
    torch.optim.AdamW = SMOOTH  # type: ignore[misc]
    torch.set_num_threads(1)
    parts = {"whole": main, "plain": run_both, "backbone": run_on_backbone}
    parts[sys.argv[3]](Path(sys.argv[1]), Path(sys.argv[2]))
