"""Stage 2: rows -> teacher -> codec -> store, shard by shard.

::

    this thread     claim shard -> read rows -> forward pass k+1 ...
    "encode"        log-softmax, codec, copy to the host of batch k -> the shard's arrays
    "store"         compress and write the shard before -> release its claim

A shard is encoded whole, then written at once. Where a batch begins and ends is fixed within a
shard, so the bytes do not depend on who computes it or what was interrupted. Another batch size
changes nothing but the rounding of the teacher's float arithmetic.

Shards that other processes hold come last: see :mod:`pipeline.workers`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pipeline.teacher import RawLogits, Teacher, check_output, rows_tensor
from pipeline.workers import Stopped, StopRequest, Worker
from shards.codec.protocol import Codec, TeacherOutput
from shards.console import Bar, progress_bar, stderr
from shards.language_model.forward import BatchSize, in_batches, is_out_of_memory, largest_batch
from shards.store.manifest import ShardRange
from shards.store.writer import ShardWriter

Note = Callable[[str], None]
ReadRows = Callable[[str, int, int, Note], np.ndarray]
"""(split, start, stop, note) -> rows start..stop-1, [n, L] int32: a pure function of the three.
``note`` hears how far a slow source has come."""
Process = Callable[[TeacherOutput], TeacherOutput]
LIVE_BATCHES_CPU, LIVE_BATCHES_GPU, LIVE_SHARDS = 2, 3, 2
CPU_PART_ELEMENTS = 1 << 19
POLL_SECONDS = 1.0


@runtime_checkable
class Work(Protocol):
    """Computes and writes shards: an extractor, or a writer of an engine's scores."""

    writer: ShardWriter
    stop: StopRequest

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Every shard that no other process does; Stopped if the process was asked to end."""
        ...


def write_all(work: Work, pending: Sequence[ShardRange], worker: Worker, stage: str) -> None:
    """Do the pending shards behind a progress bar; returns when all are done, whoever did them.

    Raises:
        Stopped: With what remains.
    """
    writer, manifest = work.writer, work.writer.manifest
    total = sum(manifest.splits.values()) * manifest.row_length
    done = total - sum(shard.num_rows for shard in pending) * manifest.row_length
    bar = progress_bar(stage, total, done=done, main_process=worker.is_main)
    with work.stop.listening(), bar as shown:
        try:
            work.run([*pending], worker, shown)
        except Stopped as error:
            raise Stopped(
                "stopped by SIGTERM",
                where=writer.location.url,
                got=f"{len(writer.all_pending())} shards still to do",
                remedy="run the same command again to finish",
            ) from error


class Background:
    """A bounded, ordered worker thread. The first error of a task is raised at the next call.

    Torch and compressors release the interpreter lock, so a thread is enough to let encoding,
    compression and writing run while the next forward pass computes. Leaving the context finishes
    what was handed over; after a task has failed, nothing more.

    Args:
        name: Of the thread.
        limit: Most unfinished tasks that were reserved.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._slots = threading.BoundedSemaphore(limit)
        self._tasks: queue.Queue[tuple[Callable[..., object], tuple[Any, ...], bool] | None]
        self._tasks = queue.Queue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tasks.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def reserve(self) -> None:
        """Wait until there is room for one more task."""
        self._slots.acquire()
        if self._error is not None:
            self._slots.release()
            self._raise()

    def cancel_reservation(self) -> None:
        """Give back room that was reserved and is not needed."""
        self._slots.release()

    def submit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Hand over a task for which room was reserved."""
        self._tasks.put((function, arguments, True))

    def append(self, function: Callable[..., object], *arguments: Any) -> None:
        """Hand over a small task that needs no reservation."""
        self._tasks.put((function, arguments, False))

    def wait(self) -> None:
        """Until every task is done."""
        done = threading.Event()
        self.append(done.set)
        while not done.wait(0.2):
            if not self._thread.is_alive() or self._error is not None:
                break
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, arguments, reserved = task
            try:
                if self._error is None:
                    function(*arguments)
            except BaseException as error:
                self._error = error
            finally:
                del task, function, arguments
                if reserved:
                    self._slots.release()


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, complete when this returns.

    On a GPU the copies go to pinned memory on a stream of their own, so that kernels of the next
    batch run meanwhile.
    """
    devices = {tensor.device for tensor in tensors.values()}
    if not any(device.type == "cuda" for device in devices):
        return dict(tensors)
    device = devices.pop()
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    host = {}
    with torch.cuda.stream(stream):
        for name, tensor in tensors.items():
            host[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host[name].copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
    stream.synchronize()
    return host


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def with_position_0(values: Tensor) -> np.ndarray:
    """Arrays [B, L - 1, ...] of a codec as a store holds them, [B, L, ...], position 0 zero."""
    array = values.numpy()
    return np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)


@dataclass(frozen=True)
class ShardArrays:
    """The arrays of one shard while they are filled, position 0 left at zero."""

    shard: ShardRange
    arrays: dict[str, np.ndarray]

    def fill(self, first: int, encoded: dict[str, Tensor]) -> None:
        """Put encoded arrays [b, L - 1, ...] at rows ``first``.. of the shard."""
        for name, tensor in encoded.items():
            self.arrays[name][first : first + len(tensor), 1:] = tensor.numpy()


@dataclass
class Extractor:
    """Runs the shards of one store; see :meth:`run`.

    Attributes:
        read_rows: Where rows come from.
        resources: The store's, where the codec encodes.
        process: Applied to the teacher's distribution before it is stored (temperature, nucleus).
        seconds_waiting: Time spent with nothing to do but wait for other processes.
    """

    teacher: Teacher
    read_rows: ReadRows
    codec: Codec
    writer: ShardWriter
    resources: dict[str, Tensor]
    batch_size: BatchSize
    stop: StopRequest
    process: Process | None = None
    num_extracted_tokens: int = 0
    seconds_waiting: float = 0.0
    _claims: dict[ShardRange, ExitStack] = field(default_factory=dict)
    _encoded: BatchSize | None = None
    _buffer: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Extract every shard that no other process finishes; free ones in this worker's order.

        Returns when all shards are done, whoever did them.

        Raises:
            Stopped: If the process was asked to end; shards not in the ledger are not begun.
            GdistillError: For rows or logits that cannot be used, or storage that fails.
        """
        live = LIVE_BATCHES_GPU if self._on_gpu else LIVE_BATCHES_CPU
        try:
            with (
                Background("store", LIVE_SHARDS) as storage,
                Background("encode", live) as encoder,
            ):
                held = worker.order(shards)
                while held := self._extract_free(held, encoder, storage, bar):
                    # What failed here must end this process before it waits: others may be
                    # waiting for the shards that it holds.
                    encoder.wait()
                    storage.wait()
                    self._wait(held, bar)
        finally:
            for claim in self._claims.values():
                claim.close()
            self._claims.clear()

    @property
    def _on_gpu(self) -> bool:
        return self.teacher.device.type == "cuda"

    def _extract_free(
        self, shards: list[ShardRange], encoder: Background, storage: Background, bar: Bar
    ) -> list[ShardRange]:
        """Extract what is free; returns what other processes hold."""
        held = []
        for shard in shards:
            self.stop.check()
            claim = ExitStack()
            if claim.enter_context(self.writer.claim(shard)):
                self._claims[shard] = claim
                self._extract(shard, encoder, storage, bar)
                continue
            claim.close()
            if self.writer.is_done(shard):
                bar.advance(self._num_tokens(shard))
            else:
                held.append(shard)
        return held

    def _wait(self, held: list[ShardRange], bar: Bar) -> None:
        """Let other processes get on with their shards for a moment, and say so."""
        shards = str(held[0]) + (f" and {len(held) - 1} more" if len(held) > 1 else "")
        bar.note(f"waiting for {shards}")
        if not self.seconds_waiting:  # workers without a bar say it too, once
            stderr.print(
                f"waiting for {shards}: another process is at it; "
                "if it dies, the shard is done here; stop this process whenever you like"
            )
        self.stop.pause(POLL_SECONDS)
        self.seconds_waiting += POLL_SECONDS

    def _num_tokens(self, shard: ShardRange) -> int:
        return shard.num_rows * self.writer.manifest.row_length

    def _extract(
        self, shard: ShardRange, encoder: Background, storage: Background, bar: Bar
    ) -> None:
        rows = self.read_rows(shard.split, shard.start, shard.stop, bar.note)
        bar.note(str(shard))
        manifest = self.writer.manifest
        shape, specs = (shard.num_rows, manifest.row_length), manifest.all_arrays.items()
        arrays = ShardArrays(
            shard, {n: np.zeros((*shape, *s.trailing_shape), np.dtype(s.dtype)) for n, s in specs}
        )
        arrays.arrays["tokens"][:] = rows
        tokens = rows_tensor(rows)
        for part in self.batch_size.parts(shard.num_rows):
            self._forward(tokens, part, arrays, encoder, bar)
        encoder.append(self._hand_over, arrays, storage)

    def _forward(
        self, tokens: Tensor, part: slice, arrays: ShardArrays, encoder: Background, bar: Bar
    ) -> None:
        """One forward pass; two of half the rows, and so on, where memory runs out."""
        self.stop.check()
        encoder.reserve()
        row_ids = torch.arange(part.start, part.stop) + arrays.shard.start
        try:
            raw = self.teacher.forward(tokens[part], row_ids, self.codec.needs_hidden)
        except Exception as error:
            encoder.cancel_reservation()
            if not is_out_of_memory(error):
                raise
            self.batch_size.halve(error)
        else:
            encoder.submit(self._encode, raw, part.start, arrays, bar)
            return
        encoder.wait()
        torch.cuda.empty_cache()  # nothing, where there is no GPU
        for smaller in self.batch_size.parts(part.stop - part.start):
            moved = slice(part.start + smaller.start, part.start + smaller.stop)
            self._forward(tokens, moved, arrays, encoder, bar)

    @torch.inference_mode()
    def _encode(self, raw: RawLogits, first: int, arrays: ShardArrays, bar: Bar) -> None:
        split = arrays.shard.split

        def work(part: slice) -> None:
            rows = raw.rows(part)
            output = rows.normalise(self.teacher.vocab_size, self._memory(rows))
            output = self.process(output) if self.process else output
            seed = self.writer.manifest.noise_seed(arrays.shard.split)
            encoded: dict[str, Tensor] = dict(self.codec.encode(output, seed, self.resources))
            encoded["token_log_probs"] = output.token_log_probs
            encoded = to_host(encoded)
            if not torch.isfinite(encoded["token_log_probs"]).all():
                check_output(output, split)
            arrays.fill(first + part.start, encoded)

        if self._encoded is None:  # on a CPU few enough for their temporaries to stay in its cache
            elements, device = raw.logits[0].numel(), raw.logits.device
            most = largest_batch(elements, device)
            self._encoded = BatchSize(
                most if raw.logits.is_cuda else max(1, CPU_PART_ELEMENTS // elements)
            )
        in_batches(work, len(raw.logits), self._encoded)
        bar.advance(raw.tokens.shape[0] * (raw.tokens.shape[1] + 1))

    def _memory(self, raw: RawLogits) -> Tensor | None:
        """Memory for log-probabilities, kept from part to part.

        Fresh pages cost a CPU more than the log-softmax itself: 0.1 ms a token at V = 50,257.
        """
        if self._on_gpu:
            return None
        if self._buffer.numel() < raw.logits.numel():
            self._buffer = torch.empty(raw.logits.numel())
        return self._buffer

    def _hand_over(self, arrays: ShardArrays, storage: Background) -> None:
        storage.reserve()
        storage.submit(self._write, arrays)

    def _write(self, arrays: ShardArrays) -> None:
        self.writer.write(arrays.shard, arrays.arrays)
        self.num_extracted_tokens += self._num_tokens(arrays.shard)
        self._claims.pop(arrays.shard).close()


def resources_on(device: torch.device, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """A store's resources where the codec encodes."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in arrays.items()
    }
