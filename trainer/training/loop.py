"""One training loop for all students, on one process or many.

    store --stream--> rows --BatchMaker--> batch --student.loss--> gradients --AdamW--> weights, EMA

Every draw is keyed by (seed, epoch, row) or (seed, step), and the place in the data is counted when
a batch is consumed, so a resumed run repeats the uninterrupted one bit for bit on the CPU, and any
number of processes sees the same global batches with the same corruption.

``metrics.jsonl`` has one JSON object per line: ``kind`` (``train`` or ``validation``), ``step``,
``num_steps`` and the figures. ``loss`` is the training objective with its own weights; ``nll_nats``
of a validation is a likelihood (a bound for diffusion students). A resumed run has the same figures
but for ``seconds`` and ``tokens_per_second``.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shards.atomic import exclusive, open_itself, sha256_file, whole_lines, write_bytes_atomic, write_json_atomic
from shards.console import Bar, progress_bar, stderr
from shards.errors import GdistillError, IntegrityError, Stopped, StopRequest, UsageError, first_line
from shards.noise.philox import noise_kernel, use_noise_kernel
from shards.settings import derive_seed, to_mapping
from shards.store.store import ShardStore, SplitReader
from shards.stream.stream import RowBatch, ShardStream
from trainer.initial_weights import read_config
from trainer.objective.batch import Batch, BatchMaker
from trainer.objective.clips import MAX_BATCHES, best_clips, candidates
from trainer.objective.corruption import FULL, Clips, require_reachable
from trainer.students.folder import export_model
from trainer.students.registry import LossOutput, Student
from trainer.training.checkpoint import (
    CheckpointFolder,
    ExponentialMovingAverage,
    Trainee,
    clip_gradients,
    make_optimizer,
    run_identity,
)
from trainer.training.parallel import (
    TrainingStep,
    cannot_write,
    gather_full,
    on_main_process,
    open_accelerator,
    parallelize,
    sum_over_processes,
    without_sync,
)
from trainer.training.settings import (
    CHECKPOINTS,
    CONFIG_FILE,
    METRICS_FILE,
    MODEL,
    STATE_FILE,
    RunConfig,
    build_student,
)

MAX_NAMED_ROWS = 16
VALIDATION = "validation"


def train(config: RunConfig, store: str | Path, out: Path, *, init_from: Path | None = None) -> Path:
    """Train, or go on training, and write ``out/model``.

    Args:
        config: The run.
        store: Path or URL of a finished store, or of the run that wrote it.
        out: Folder of this run; the same command again resumes it.
        init_from: Model (or finished run) whose weights the student starts from.

    Raises:
        GdistillError: See the parts; nothing is written over the last good checkpoint.
        Stopped: After a SIGTERM, when the checkpoint is saved.
        KeyboardInterrupt: After a Ctrl-C, when the checkpoint is saved.
    """
    trainer = Trainer(config, ShardStore.find(store), Path(out).expanduser(), init_from)
    with ExitStack() as stack:
        # The lock is the main process's; where it is taken, all of them must hear of it.
        on_main_process(lambda: stack.enter_context(exclusive(trainer.out)), trainer.accelerator)
        return trainer.run()


class Trainer:
    """One run: its parts, and the loop over steps. See :func:`train`."""

    def __init__(self, config: RunConfig, store: ShardStore, out: Path, init_from: Path | None = None) -> None:
        self.config, self.store, self.out = config, store, out
        training, optimization = config.training, config.optimization
        self.accelerator = open_accelerator(training, out / "tensorboard")
        device = self.accelerator.device
        if obstacle := use_noise_kernel(training.noise_kernel, device):
            self._say(f"noise kernel: eager on {device}; {obstacle}")
        self.identity = run_identity(config, store.manifest, init_from)
        self.checkpoints = CheckpointFolder(out / CHECKPOINTS, training.keep_last, training.keep_every_steps)
        begun = bool(self.checkpoints.steps())  # then the first weights need not be there any more
        self.student = build_student(config, store, None if begun else init_from)
        with_noise = self.student.reads_codec
        self.make_batch = BatchMaker(store, "train", config.seed, device, with_noise, training.num_noise_draws)
        self.stream = ShardStream(
            store.split("train", self.make_batch.arrays),
            seed=config.seed,
            global_batch_size=training.global_batch_size,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            num_workers=training.num_workers,
        )
        self.num_steps = training.steps_over(store.manifest.splits["train"])
        self.tokens_per_step = training.global_batch_size * store.manifest.row_length
        self.module = parallelize(TrainingStep(self.student, training.precision), self.accelerator, training.sharding)
        self.parameters = list(self.student.parameters())
        self.optimizer = make_optimizer(self.parameters, optimization)
        self.ema = ExponentialMovingAverage(self.student, optimization.ema_decay)
        self.trainee = Trainee(self.student, self.optimizer, self.ema)
        self.validator = None
        if store.manifest.splits.get(VALIDATION, 0) > 0:
            self.validator = Validator(config, store, self.accelerator, with_noise)
        elif config.model.diffusion.search_schedule:
            what, where = "the search for clips needs validation rows", "model.diffusion.search_schedule"
            remedy = "extract some, or set model.diffusion.min_time and model.diffusion.max_time"
            raise UsageError(what, where=where, got="a store without a validation split", remedy=remedy)
        self._source = self._rows()
        self._coming: tuple[Batch, dict[str, Any]] | None = None
        self.window = StepWindow()
        self.metrics: MetricsFile | None = None
        self.stop = StopRequest(signal.SIGTERM, signal.SIGINT)
        self.step, self.makes_ahead = 0, device.type == "cuda"
        self.validation: dict[str, Any] | None = None

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            stderr.print(text, markup=False, soft_wrap=True)

    def run(self) -> Path:
        self._resume()
        on_main_process(self._start_metrics, self.accelerator)
        trained = sum(p.numel() for p in self.parameters if p.requires_grad)
        begin = f", from step {self.step:,} on" if self.step else ""
        self._say(
            f"{self.config.student}, conditioning {self.config.model.conditioning}, {trained:,} parameters; "
            f"{self.num_steps:,} steps of {self.config.training.global_batch_size:,} rows of "
            f"{self.store.manifest.row_length:,} tokens, {self.num_steps * self.tokens_per_step:,} tokens in all{begin}"
        )
        try:
            with self.stop.listening():
                self._loop()
        finally:
            if self.metrics is not None:
                self.metrics.close()
            for tracker in self.accelerator.trackers:  # the process group stays: export needs it
                tracker.finish()
        if self.step < self.num_steps:
            if self.stop.signal_number == signal.SIGINT:
                raise KeyboardInterrupt
            got, remedy = f"step {self.step:,} of {self.num_steps:,}", "the same command goes on from there"
            raise Stopped("stopped by SIGTERM; a checkpoint is saved", where=self.out, got=got, remedy=remedy)
        # The averaged weights, with the buffers as they are.
        weights = gather_full({**self.student.state_dict(), **self.ema.shadows}, self.accelerator)
        record = {"format_version": 1, "step": self.step, "run": self.identity, "validation": self.validation}
        model = self.out / MODEL
        on_main_process(lambda: export_model(model, self.student, weights, record, self.store), self.accelerator)
        return model

    def _loop(self) -> None:
        with progress_bar(
            f"train {self.config.student}",
            self.num_steps * self.tokens_per_step,
            done=self.step * self.tokens_per_step,
            main_process=self.accelerator.is_main_process,
        ) as bar:
            self.window.restart_clock()
            stopping = False
            while self.step < self.num_steps and not stopping:
                batch, self._coming = self._coming[0] if self._coming else self.make_batch(next(self._source)), None
                stopping = self.advance(batch)
                self._report(bar, batch.epoch)
                if stopping or self._is_due(self.config.training.checkpoint_every_steps):
                    self._save()
        self._source.close()

    def _rows(self) -> Generator[RowBatch, None, None]:
        while True:
            yield from self.stream

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.num_steps

    def advance(self, batch: Batch) -> bool:
        """One optimiser step; returns whether any process was asked to stop."""
        config = self.config.optimization
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(self.step, self.num_steps)
        losses = self._backward(batch)
        if self.makes_ahead and self.step + 1 < self.num_steps:
            # The next batch is made while the device is still at this one; a checkpoint begins with it.
            place = self.stream.state_dict()
            self._coming = self.make_batch(next(self._source)), place
        clipped = clip_gradients(self.parameters, config.max_grad_norm)
        scalars = [clipped.float(), *(output.loss.detach().float() for _, output, _ in losses)]
        norm, *parts = torch.stack(scalars).tolist()  # the only time that the host waits
        local_loss = sum(part * share for part, (_, _, share) in zip(parts, losses, strict=True))
        num_masked = sum(output.num_masked for _, output, _ in losses)
        values = [local_loss, float(num_masked), float(self.stop.signal_number is not None)]
        loss_sum, all_masked, stops = sum_over_processes(values, self.accelerator)
        loss = loss_sum / self.accelerator.num_processes
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(loss, norm, losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update()
        self.step += 1
        num_tokens = batch.global_batch_size * self.store.manifest.row_length
        self.window.add(loss, norm, num_tokens, int(all_masked))
        return stops > 0

    def _backward(self, batch: Batch) -> list[tuple[Tensor, LossOutput, float]]:
        """Gradients of the batch's mean loss; returns micro-batches' row ids, outputs, shares."""
        if self.config.model.dropout:
            rank = self.accelerator.process_index
            torch.manual_seed(derive_seed(self.config.seed, "dropout", self.step, rank))
        outputs, parts = [], batch.micro_batches(self.config.training.micro_batch_size)
        for part in parts:
            share = part.num_rows / batch.num_rows
            with without_sync(self.module, self.accelerator, part is parts[-1]):
                output = self.module(part.to(self.accelerator.device))
                (output.loss * share).backward()
            outputs.append((part.row_ids, output, share))
        return outputs

    def _diverged(self, loss: float, norm: float, losses: list[tuple[Tensor, LossOutput, float]]) -> GdistillError:
        """The error to raise, the same one on every process; all of them must call this."""
        ids = torch.cat([row_ids for row_ids, _, _ in losses]).cpu()
        finite = torch.cat([output.row_nlls for _, output, _ in losses]).isfinite().cpu()
        bad = gather_object(ids[~finite].tolist())
        rows = sorted(bad or gather_object(ids.tolist()))
        named = ", ".join(map(str, rows[:MAX_NAMED_ROWS]))
        more = f" and {len(rows) - MAX_NAMED_ROWS} more" if len(rows) > MAX_NAMED_ROWS else ""
        last = f"; the last good checkpoint is step {steps[-1]}" if (steps := self.checkpoints.steps()) else ""
        return GdistillError(
            f"the {'loss' if bad else 'gradient'} is not finite",
            where=f"step {self.step + 1}",
            got=f"loss {loss}, gradient norm {norm}, rows {named}{more}",
            remedy=f"look at these rows of the train split, or lower the learning rate{last}",
        )

    def _report(self, bar: Bar, epoch: int) -> None:
        """Progress, a line of metrics when one is due, validation when it is due."""
        training = self.config.training
        bar.advance(self.tokens_per_step)
        if self.step == 1 or self._is_due(training.log_every_steps):
            values = self.window.close()
            values["learning_rate"] = self.optimizer.param_groups[0]["lr"]
            values["num_tokens"] = self.step * self.tokens_per_step
            values["epoch"] = epoch
            values["noise_kernel"] = noise_kernel(self.accelerator.device)
            self._write("train", values)
            note = f"weighted loss {values['loss']:.3f}"
            if self.validation is not None:
                note += f"; validation {self.validation['nll_nats']:.3f} nats/token"
            bar.note(note)
        if self.validator is not None and self._is_due(training.validate_every_steps):
            with self.window.paused():
                self._validate(self.validator)

    def _start_metrics(self) -> None:
        """Config, metrics and trackers; Weights & Biases knows a run by an id that is kept here."""
        if (self.out / CONFIG_FILE).exists() and "training" not in read_config(self.out):
            what, remedy = "another's config lies there", "give another --out: it would be lost"
            raise UsageError(what, where=self.out / CONFIG_FILE, remedy=remedy)
        write_json_atomic(self.out / CONFIG_FILE, to_mapping(self.config))
        self.metrics = MetricsFile(self.out / METRICS_FILE, self.step)
        options: dict[str, Any] = {"tensorboard": {"purge_step": self.step + 1}}
        if "wandb" in self.config.training.trackers:
            run_id = self.out / "wandb-run-id"
            if not run_id.exists():
                write_bytes_atomic(run_id, secrets.token_hex(8).encode())
            same = {"id": run_id.read_text().strip(), "resume": "allow"}
            options["wandb"] = {"dir": str(self.out), "name": self.out.resolve().name, **same}
        try:
            self.accelerator.init_trackers("gdistill", init_kwargs=options)
        except Exception as error:  # of the trackers' own libraries
            what, where = "a tracker does not start", "training.trackers"
            remedy = "log in to it (wandb login), set WANDB_MODE=offline, or leave it out"
            raise GdistillError(what, where=where, got=first_line(error), remedy=remedy) from error

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self.metrics is None:
            return
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        try:
            self.metrics.write(kind, self.step, self.num_steps, values)
            self.accelerator.log(numbers, step=self.step)
        except OSError as error:
            raise cannot_write(error, self.out / METRICS_FILE) from error

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
        self._write(VALIDATION, values)

    def _save(self) -> None:
        if self.metrics is not None:
            self.metrics.sync()
        place = self._coming[1] if self._coming else self.stream.state_dict()
        state = {"run": self.identity, "stream": place, "validation": self.validation}
        state["window"] = self.window.state_dict()
        with self.window.paused():
            self.checkpoints.save(self.step, self.trainee, state, self.accelerator)

    def _resume(self) -> None:
        step = max(self.checkpoints.steps(), default=None)
        folder = None if step is None else self.checkpoints.path(step)
        seals = gather_object([folder and sha256_file(folder / STATE_FILE)])
        if len(set(seals)) > 1:
            what, got = "the processes do not see the same checkpoint", f"step {step} here"
            remedy = "give an --out on storage that all of them share"
            raise UsageError(what, where=self.checkpoints.directory, got=got, remedy=remedy)
        if folder is None:
            return
        from trainer.training.resume import resumed

        state = resumed(folder, self.config, self.identity, self.trainee)
        self.identity, self.validation = state.run, state.validation
        self.stream.load_state_dict(state.stream)
        self.window = StepWindow(**state.window)  # type: ignore[arg-type]
        self.step = state.step
        if self.step > self.num_steps:
            got, expected, remedy = f"{self.num_steps} steps", f"at least the {self.step} made", "give another --out"
            raise UsageError("the run is longer already", where="training", got=got, expected=expected, remedy=remedy)


class FirstRows:
    """The first rows of a split, as a stream reads them."""

    def __init__(self, reader: SplitReader, num_rows: int) -> None:
        self.num_rows, self.rows_per_chunk = num_rows, reader.rows_per_chunk
        self.chunk_bytes, self.read_chunk = reader.chunk_bytes, reader.read_chunk
        self.fingerprint = f"{reader.fingerprint}, first {num_rows}"


class Validator:
    """Scores the averaged weights on the validation split: every row once, the same corruption.

    Corruption and noise are keyed by the run seed and the row alone, so every validation of a run
    meets the same ones, and times cover (1e-3, 1) whatever clips training uses.
    """

    def __init__(self, config: RunConfig, store: ShardStore, accelerator: Accelerator, with_noise: bool) -> None:
        self._config, self._accelerator = config.training, accelerator
        seed = derive_seed(config.seed, VALIDATION)
        self._make_batch = BatchMaker(store, VALIDATION, seed, accelerator.device, with_noise)
        reader = store.split(VALIDATION, self._make_batch.arrays)
        num_rows = min(reader.num_rows, self._config.num_validation_rows or reader.num_rows)
        if num_rows < accelerator.num_processes:
            what, where = "too few validation rows for the processes", "training.num_validation_rows"
            raise UsageError(what, where=where, got=num_rows, expected=f"at least {accelerator.num_processes}")
        self._stream = ShardStream(
            FirstRows(reader, num_rows),
            seed=seed,
            global_batch_size=self._config.global_batch_size,
            rank=accelerator.process_index,
            world_size=accelerator.num_processes,
            num_workers=self._config.num_workers,
            shuffle=False,
        )

    @torch.no_grad()
    def score(self, module: nn.Module, student: Student) -> dict[str, Any]:
        """NLL per token in nats (a bound for diffusion students), position 0 not counted."""
        nll_sum, num_tokens = 0.0, 0
        for batch in self._batches():
            outputs = self._outputs(module, batch, FULL)
            for value in torch.stack([output.nll_sum for output in outputs]).tolist():
                nll_sum += value
            num_tokens += sum(output.num_tokens for output in outputs)
        total, count = sum_over_processes([nll_sum, float(num_tokens)], self._accelerator)
        nll = total / count
        if not math.isfinite(nll):
            what, got = "the validation loss is not finite", f"{nll} nats per token"
            remedy = "lower the learning rate and go on from the last good checkpoint"
            raise GdistillError(what, where=VALIDATION, got=got, remedy=remedy)
        return {
            "nll_nats": nll,
            "perplexity": math.exp(min(nll, 700.0)),
            "num_tokens": int(count),
            "conditional": student.is_conditioned,
        }

    @torch.no_grad()
    def search_clips(self, module: nn.Module, student: Student) -> Clips:
        """The clips of t under which the block losses vary least (var_min)."""
        losses = {}
        for clips in candidates():
            try:
                if student.settings.diffusion.resample:
                    require_reachable(clips, student.config.tokens_per_block)
            except UsageError:
                continue
            losses[clips] = []
            for batch in islice(self._batches(), MAX_BATCHES):
                outputs = self._outputs(module, batch, clips)
                own = torch.cat([output.block_nlls.float().cpu() for output in outputs])
                losses[clips].append(torch.cat(gather_object([own])))  # of all processes' blocks
        return best_clips(losses)

    def _batches(self) -> Iterator[Batch]:
        return map(self._make_batch, self._stream.one_pass())

    def _outputs(self, module: nn.Module, batch: Batch, clips: Clips) -> list[LossOutput]:
        """Of micro-batches, as many on every process: a sharded forward pass is collective.

        A process's share of the last batch may be a row short, or empty.
        """
        device, size = self._accelerator.device, self._config.micro_batch_size
        parts = batch.micro_batches(size)
        largest_share = -(-batch.global_batch_size // self._accelerator.num_processes)
        wanted = 1 if size is None else -(-largest_share // size)
        parts += [batch.rows(slice(0))] * (wanted - len(parts))
        outputs = [module(part.to(device), clips) for part in parts]
        if isinstance(module, FSDPModule):
            module.reshard()  # else the next forward would reuse these gathered weights
        return outputs


class MetricsFile:
    """Appends lines to metrics.jsonl, visible at once to whoever reads it.

    Lines behind ``last_step``, which an interrupted run wrote behind its last checkpoint, are
    dropped, and so is a half-written last line.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        lines, kept = whole_lines(path), []
        for number, line in enumerate(lines, 1):
            try:
                kept += [line] if json.loads(line)["step"] <= last_step else []
            except (ValueError, KeyError, TypeError) as error:
                remedy = "move the file away; the run starts a new one"
                raise IntegrityError("not a line of metrics", where=f"{path}:{number}", remedy=remedy) from error
        if len(kept) < len(lines):
            write_bytes_atomic(path, b"".join(line + b"\n" for line in kept))
        self._file = open(path, "ab", buffering=0, opener=open_itself)  # noqa: SIM115

    def write(self, kind: str, step: int, num_steps: int, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, "step": step, "num_steps": num_steps, **values}
        self._file.write(json.dumps(line).encode() + b"\n")

    def sync(self) -> None:
        """Make every line so far survive a power cut."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


@dataclass
class StepWindow:
    """Averages over the steps since the last line; the sums are saved with a checkpoint."""

    num_steps: int = 0
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    num_tokens: int = 0
    num_masked: int = 0
    _started: float = field(default_factory=lambda: time.monotonic())
    _timed_tokens: int = 0

    def add(self, loss: float, norm: float, num_tokens: int, num_masked: int) -> None:
        self.num_steps += 1
        self.loss_sum += loss
        self.norm_sum += norm
        self.num_tokens += num_tokens
        self.num_masked += num_masked
        self._timed_tokens += num_tokens

    def close(self) -> dict[str, Any]:
        """The figures of the window, which starts anew; rates are of the steps that were made here."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        values = {
            "loss": self.loss_sum / self.num_steps,
            "grad_norm": self.norm_sum / self.num_steps,
            "masked_fraction": self.num_masked / self.num_tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(self._timed_tokens / seconds, 1),
        }
        self.__init__()  # type: ignore[misc]
        return values

    def restart_clock(self) -> None:
        self._started = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Work within the context is not training: its time is left out of the rates."""
        began = time.monotonic()
        yield
        self._started += time.monotonic() - began

    def state_dict(self) -> dict[str, Any]:
        """The sums; the clock starts anew in a resumed run."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}
