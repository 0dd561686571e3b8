"""SIGTERM and Ctrl-C as a request to stop at the next step."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from shards import open_store
from shards.atomic import exclusive, write_json_atomic
from shards.console import Bar, progress_bar, stderr
from shards.errors import UsageError
from shards.noise.philox import noise_kernel, use_noise_kernel
from shards.provenance import derive_seed
from shards.settings import to_mapping
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch, ShardStream
from trainer.initial_weights import noise_parameters
from trainer.objective.batch import Batch, BatchMaker, CopiesAhead
from trainer.students.folder import export_model
from trainer.students.registry import LossOutput
from trainer.training.checkpoint import (
    CHECKPOINTS,
    CONFIG_FILE,
    METRICS_FILE,
    MODEL,
    CheckpointFolder,
    Trainee,
    operational_fields,
    require_same_run,
    run_identity,
)
from trainer.training.construction import (
    blocks_in_use,
    build_student,
    compile_blocks,
)
from trainer.training.metrics import (
    MetricsLog,
    StepWindow,
    diverged,
    peak_flops_per_second,
    training_flops,
)
from trainer.training.optimization import (
    ExponentialMovingAverage,
    clip_gradients,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from trainer.training.parallel import (
    TrainingStep,
    gather_full,
    on_main_process,
    open_accelerator,
    parallelize,
    require_agreement,
    sum_over_processes,
    without_sync,
)
from trainer.training.settings import RunConfig
from trainer.training.validation import Validator, has_validation_rows


class StopRequest:
    """Turns the first SIGTERM or SIGINT into a flag; a second SIGINT interrupts at once.

    Attributes:
        signal_number: The signal received; None while there is none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def is_pending(self) -> bool:
        """Whether this process was asked to stop."""
        return self.signal_number is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_number = number

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Signals are caught within the context (of the main thread; elsewhere nothing is)."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = {number: signal.signal(number, self._receive) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


# One training loop for all students.
#
#     store --stream--> rows --BatchMaker--> batch --student.loss--> gradients --AdamW--> weights,
#     EMA
#
# Every draw is keyed by (seed, epoch, row) or (seed, step), and the place in the data is counted
# when a batch is consumed, so a resumed run repeats the uninterrupted one bit for bit on the CPU,
# and any number of processes sees the same global batches with the same corruption.


def train(
    config: RunConfig, store: str | Path, out: Path, *, init_from: Path | None = None
) -> bool:
    """Train, or go on training, and write ``out/model``.

    Args:
        config: The run.
        store: Path or URL of a finished store, or of the run that wrote it.
        out: Folder of this run; the same command again resumes it.
        init_from: Model (or finished run) whose weights the student starts from.

    Returns:
        Whether the run is finished; False when a SIGTERM stopped it (a checkpoint is saved).

    Raises:
        GdistillError: See the parts; nothing is written over the last good checkpoint.
        KeyboardInterrupt: After a Ctrl-C, when the checkpoint is saved.
    """
    trainer = Trainer(config, open_store(store), Path(out), init_from)
    with ExitStack() as stack:
        # The lock is the main process's; where it is taken, all of them must hear of it.
        lock = exclusive(trainer.out)
        on_main_process(lambda: stack.enter_context(lock), trainer.accelerator)
        return trainer.run()


class Trainer:
    """One run: its parts, and the loop over steps."""

    def __init__(
        self, config: RunConfig, store: ShardStore, out: Path, init_from: Path | None = None
    ) -> None:
        self.config, self.store, self.out = config, store, out
        training = config.training
        self.accelerator = open_accelerator(training, out / "tensorboard")
        obstacle = use_noise_kernel(training.noise_kernel, self.accelerator.device)
        self._tell("noise kernel", obstacle)
        self.identity = run_identity(config, store.manifest, init_from)
        self.checkpoints = CheckpointFolder(
            out / CHECKPOINTS, training.keep_last, training.keep_every_steps
        )
        begun = bool(self.checkpoints.steps())  # then the first weights need not be there any more
        self.student = build_student(config, store, None if begun else init_from)
        obstacle = compile_blocks(self.student, config, self.accelerator.device)
        self._tell("transformer blocks", obstacle)
        reads_codec, device = self.student.reads_codec, self.accelerator.device
        self.make_batch = BatchMaker(
            store, "train", config.seed, device, reads_codec, training.num_noise_draws
        )
        self.stream = ShardStream(
            store.split("train", self.make_batch.arrays),
            seed=config.seed,
            global_batch_size=training.global_batch_size,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            num_workers=training.num_workers,
        )
        self.num_steps = training.steps_over(store.manifest.splits["train"])
        self.module = parallelize(
            TrainingStep(self.student, training.precision), self.accelerator, training.sharding
        )
        self.parameters = list(self.student.parameters())
        noise = noise_parameters(self.student).values()
        self.optimizer = make_optimizer(self.parameters, config.optimization, noise)
        self.ema = ExponentialMovingAverage(self.student, config.optimization.ema_decay)
        self.trainee = Trainee(self.student, self.optimizer, self.ema)
        self.validator = None
        if has_validation_rows(store.manifest.splits):
            self.validator = Validator(config, store, self.accelerator, reads_codec)
        elif config.model.diffusion.search_schedule:
            raise UsageError(
                "the search for clips needs validation rows",
                where="model.diffusion.search_schedule",
                got="a store without a validation split",
                remedy="extract one, or set model.diffusion.min_time and model.diffusion.max_time",
            )
        self.copies = CopiesAhead(device, training.micro_batch_size)
        self._source: Iterator[RowBatch] | None = None
        self._coming: tuple[Batch, dict[str, Any]] | None = None
        self.window = StepWindow()
        self.stop = StopRequest()
        self.step, self.saved_step = 0, -1
        self.validation: dict[str, Any] | None = None
        self.peak_flops = peak_flops_per_second(
            training.peak_flops_per_second, self.accelerator.device, self.accelerator.num_processes
        )

    def _tell(self, part: str, obstacle: str) -> None:
        """Say once what runs uncompiled, and why."""
        if obstacle and self.accelerator.is_main_process:
            stderr.print(f"{part}: eager on {self.accelerator.device}; {obstacle}", markup=False)

    def run(self) -> bool:
        """Resume if there is something to resume, train, export; see :func:`train`."""
        self._resume()
        config = to_mapping(self.config)
        on_main_process(lambda: write_json_atomic(self.out / CONFIG_FILE, config), self.accelerator)
        self.metrics = MetricsLog(self.out / METRICS_FILE, self.accelerator, self.step)
        try:
            with self.stop.listening():
                finished = self._loop()
        finally:
            self.metrics.close()
        if finished:
            self._export()
        elif self.stop.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        return finished

    def _loop(self) -> bool:
        tokens = self.config.training.global_batch_size * self.store.manifest.row_length
        with progress_bar(
            f"train {self.config.student}",
            self.num_steps * tokens,
            done=self.step * tokens,
            main_process=self.accelerator.is_main_process,
        ) as bar:
            self.window.restart_clock()
            self._source = self._rows()
            while (batch := self._following()) is not None:
                stopping = self.advance(batch)
                self._report(bar, tokens, batch.epoch)
                if stopping or self._is_due(self.config.training.checkpoint_every_steps):
                    self._save()
                if stopping:
                    return self.step == self.num_steps
        return True

    def _rows(self) -> Iterator[RowBatch]:
        while self.step < self.num_steps:
            for rows in self.stream:
                yield rows
                if self.step >= self.num_steps:
                    return

    def _following(self) -> Batch | None:
        """The batch of this step, which may be on its way already; None after the last."""
        if self._coming is not None:
            (batch, _), self._coming = self._coming, None
            return batch
        assert self._source is not None
        rows = next(self._source, None)
        return None if rows is None else self.make_batch(rows, self.step)

    def _look_ahead(self) -> None:
        """Send the next step's batch on its way, while the device is still at this one's."""
        if self._source is None or not self.copies.looks_ahead or self.step + 1 >= self.num_steps:
            return
        place = self.stream.state_dict()  # a checkpoint of this step begins with that batch
        batch = self.make_batch(next(self._source), self.step + 1)
        self.copies.announce(batch)
        self._coming = batch, place

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.num_steps

    def advance(self, batch: Batch) -> bool:
        """One optimiser step; returns whether any process was asked to stop."""
        config = self.config.optimization
        rate = learning_rate(config, self.step, self.num_steps)
        set_learning_rate(self.optimizer, rate)
        losses = self._backward(batch)
        self._look_ahead()
        clipped = clip_gradients(self.parameters, config.max_grad_norm)
        scalars = [clipped.float(), *(output.loss.detach().float() for _, output, _ in losses)]
        norm, *parts = torch.stack(scalars).tolist()  # the only time that the host waits
        local_loss = sum(part * share for part, (_, _, share) in zip(parts, losses, strict=True))
        num_masked = sum(output.num_masked for _, output, _ in losses)
        values = [local_loss, float(num_masked), float(self.stop.is_pending)]
        loss_sum, all_masked, stops = sum_over_processes(values, self.accelerator)
        loss = loss_sum / self.accelerator.num_processes
        if not (math.isfinite(loss) and math.isfinite(norm)):
            rows = [(row_ids, output.row_nlls) for row_ids, output, _ in losses]
            raise diverged(self.step + 1, loss, norm, rows, self.checkpoints.steps())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update()
        self.step += 1
        num_rows = batch.global_batch_size
        flops = training_flops(self.student, num_rows, int(all_masked))
        num_tokens = num_rows * self.store.manifest.row_length
        self.window.add(loss, norm, num_tokens, int(all_masked), flops)
        return stops > 0

    def _backward(self, batch: Batch) -> list[tuple[Tensor, LossOutput, float]]:
        """Gradients of the batch's mean loss; returns micro-batches' row ids, outputs, shares."""
        if self.config.model.dropout:
            rank = self.accelerator.process_index
            torch.manual_seed(derive_seed(self.config.seed, "dropout", self.step, rank))
        outputs = []
        for part, is_last in self.copies.of(batch):
            share = part.num_rows / batch.num_rows
            with without_sync(self.module, self.accelerator, is_last):
                output = self.module(part)
                (output.loss * share).backward()
            outputs.append((part.row_ids, output, share))
        return outputs

    def _report(self, bar: Bar, num_tokens: int, epoch: int) -> None:
        """Progress, a line of metrics when one is due, validation when it is due."""
        training = self.config.training
        bar.advance(num_tokens)
        if self.step == 1 or self._is_due(training.log_every_steps):
            values = self.window.close(self.peak_flops)
            values["learning_rate"] = self.optimizer.param_groups[0]["lr"]
            values["num_tokens"] = self.step * num_tokens
            values["epoch"] = epoch
            values["noise_kernel"] = noise_kernel(self.accelerator.device)
            values["blocks"] = blocks_in_use(self.student)
            self.metrics.write("train", self.step, self.num_steps, values)
            note, figures = f"loss {values['loss']:.3f}", {"loss": values["loss"]}
            if self.validation is not None:
                figures["validation_nll_nats"] = self.validation["nll_nats"]
                note += f", validation {figures['validation_nll_nats']:.3f}"
            bar.note(note, step=self.step, **figures)
        if self.validator is not None and self._is_due(training.validate_every_steps):
            with self.window.paused():
                self._validate(self.validator)

    def _validate(self, validator: Validator) -> None:
        self.student.eval()
        with self.ema.applied():
            values = validator.score(self.module, self.student)
            if self.config.model.diffusion.search_schedule:
                clips = validator.search_clips(self.module, self.student)
                self.student.time_bounds.copy_(torch.tensor(clips))  # type: ignore[operator]
                values["min_time"], values["max_time"] = clips
        self.student.train()
        self.validation = values
        self.metrics.write("validation", self.step, self.num_steps, values)

    def _save(self) -> None:
        if self.step == self.saved_step:
            return
        self.metrics.sync()
        state = {
            "run": self.identity,
            "stream": self._coming[1] if self._coming else self.stream.state_dict(),
            "window": self.window.state_dict(),
            "validation": self.validation,
        }
        with self.window.paused():
            self.checkpoints.save(self.step, self.trainee, state, self.accelerator)
        self.saved_step = self.step

    def _resume(self) -> None:
        steps = self.checkpoints.steps()
        seal = self.checkpoints.seal(steps[-1]) if steps else "none"
        alike = UsageError(
            "the processes do not see the same checkpoint",
            where=self.checkpoints.directory,
            got=f"step {steps[-1]} here" if steps else "none here",
            remedy="give an --out on storage that all of them share",
        )
        require_agreement(seal, self.accelerator, alike)
        if not steps:
            return
        state = self.checkpoints.read_state(steps[-1])
        free = operational_fields(self.config)
        self.identity = require_same_run(state["run"], self.identity, free)
        self.trainee.restore(self.checkpoints.path(steps[-1]), state["ema_num_updates"])
        self.stream.load_state_dict(state["stream"])
        self.window.load_state_dict(state["window"])
        self.validation = state["validation"]
        self.step = self.saved_step = state["step"]

    def _export(self) -> None:
        """Write the averaged weights, with the buffers as they are."""
        weights = gather_full({**self.student.state_dict(), **self.ema.shadows}, self.accelerator)
        record = {
            "format_version": 1,
            "step": self.step,
            "run": self.identity,
            "validation": self.validation,
        }
        on_main_process(
            lambda: export_model(self.out / MODEL, self.student, weights, record, self.store),
            self.accelerator,
        )
