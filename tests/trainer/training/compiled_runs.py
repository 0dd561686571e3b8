"""What test_compiled_blocks runs in a process of its own: a compiler cannot trace type checks.

python tests/trainer/training/compiled_runs.py STORE OUT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from shards.errors import GdistillError
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.students.registry import AR
from trainer.training import construction, loop
from trainer.training.loop import Trainer
from trainer.training.memory_plan import _batches, plan_memory, saved_bytes
from trainer.training.parallel import TrainingStep

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


AR_RUN = {"student": "ar", "model__conditioning": "none"}
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def graphs() -> list[int]:
    """[graphs, graph breaks] so far."""
    return [counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Trainers compile with it."""
    kept = loop.compile_blocks
    loop.compile_blocks = partial(construction.compile_blocks, backend=name)
    try:
        yield
    finally:
        loop.compile_blocks = kept


def run(store: Path, out: Path, choice: str) -> dict[str, Any]:
    """Graphs of a run whose micro-batches have 3, 3 and 2 rows and whose validation has 8 and 2."""
    counters.clear()
    shape = {"model__num_layers": 3, "training__micro_batch_size": 3, "training__num_steps": 4}
    config = tiny_run(training__compile=choice, training__precision="bf16", **shape)
    trainer = Trainer(config, ShardStore.open(store), out)
    tried = graphs()
    assert trainer.run()
    made = {"tried": tried, "run": graphs()}
    batch = trainer.make_batch(next(iter(trainer.stream)), 4)
    for _ in range(2):
        trainer.module(batch.rows(slice(1))).loss.backward()
    return {**made, "one row": graphs()}


def told(work: Any) -> str:
    """The error that this ends in, or what it returns."""
    try:
        return str(work())
    except GdistillError as error:
        return f"{type(error).__name__} {error}"


def broken(graph: Any, inputs: Any) -> Any:
    """A compiler whose results are a tenth larger."""
    return lambda *values: tuple(1.1 * found for found in graph(*values))


def missing(graph: Any, inputs: Any) -> Any:
    """A compiler that is not there."""
    raise RuntimeError("no such compiler\nat all")


def sampled(store: Path, out: Path) -> dict[str, float]:
    """Largest difference that compiled blocks make with a key/value cache, and without rows."""
    trainer = Trainer(tiny_run(**AR_RUN), ShardStore.open(store), out)
    student: Any = trainer.student.eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert isinstance(student, AR)
    tokens = torch.tensor([[0, 3, 5, 2], [0, 1, 7, 9]])

    @torch.no_grad()
    def words() -> torch.Tensor:
        cache = student.start_cache(2)
        parts = [student.predict_next(tokens[:, :2], cache)]
        parts += [student.predict_next(tokens[:, i : i + 1], cache) for i in (2, 3)]
        return torch.cat(parts)

    plain, empty = words(), student(tokens[:0]).logits
    construction.compile_blocks(student, tiny_run(**AR_RUN, training__compile="on"), CPU, "eager")
    error = (words() - plain).exp().sub(1).abs()[:, :-1].max()
    assert student(tokens[:0]).logits.shape == empty.shape
    return {"error": float(error)}


def refusals(store: Path, out: Path) -> dict[str, str]:
    """What comes of compilers that fail, or lie."""
    trainer = Trainer(tiny_run(), ShardStore.open(store), out)
    student, made = trainer.student, {}
    real = construction._compile_obstacle
    # The trial itself has to stay on the CPU: there is no other device here.
    construction._compile_obstacle = lambda s, h, p, device: real(s, h, p, CPU)
    cases = {"on": missing, "auto": missing, "off": missing, "auto, broken": broken}
    for name, compiler in cases.items():
        config = tiny_run(training__compile=name.split(",")[0])
        made[name] = told(partial(construction.compile_blocks, student, config, CUDA, compiler))
    made["auto, cpu"] = construction.compile_blocks(student, tiny_run(), CPU, missing)
    made["in use"] = construction.blocks_in_use(student)
    return made


def planned(store: Path) -> dict[str, int]:
    """Bytes that two rows of compiled blocks keep: as planned, and by a backend that cuts apart."""
    kept, opened = {}, ShardStore.open(store)
    for choice in ("on", "off"):
        config = tiny_run(
            training__compile=choice, training__micro_batch_size=2, model__num_layers=3
        )
        parts = plan_memory(config, opened, device="cpu").device
        kept[choice] = next(size for name, size in parts.items() if name.startswith("kept for"))
    config = tiny_run(training__compile="on", model__num_layers=3)
    student = construction.build_student(config, opened, None).train()
    assert construction.compile_blocks(student, config, CPU, "aot_eager") == ""
    (batch,) = _batches(config, opened, student, rows=2)
    kept["aot_eager"] = saved_bytes(TrainingStep(student, config.training.precision), batch)
    return kept


def main(store: Path, out: Path) -> None:
    """Everything, as one JSON document."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with backend("aot_eager"):
        for choice in ("off", "on"):
            found[choice] = run(store, out / choice, choice)
    found["planned"] = planned(store)
    found["sampled"] = sampled(store, out / "sampled")
    found["refusals"] = refusals(store, out / "refused")
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
