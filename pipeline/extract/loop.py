"""Stage 2: rows -> teacher -> codec -> store, shard by shard.

    this thread     claim shard -> read rows -> forward pass k+1 ...
    "encode"        log-softmax, codec, copy to the host of batch k -> the shard's arrays
    "store"         compress and write the shard before -> release its claim

A shard is encoded whole, then written at once. Where a batch begins and ends is fixed within a
shard, so the bytes do not depend on who computes it or what was interrupted. Another batch size
changes nothing but the rounding of the teacher's float arithmetic.

Shards that other processes hold come last: see :mod:`pipeline.workers`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.extract.background import Background
from pipeline.extract.transfer import to_host
from pipeline.teacher import Note, RawLogits, Teacher, check_output, rows_tensor
from pipeline.workers import StopRequest, Worker
from shards.base import Bar, stderr
from shards.codec import Codec, TeacherOutput
from shards.language_model import BatchSize, in_batches, is_out_of_memory, largest_batch
from shards.store import Manifest, ShardRange, ShardWriter

ReadRows = Callable[[str, int, int, Note], np.ndarray]
"""(split, start, stop, note) -> rows start..stop-1, [n, L] int32: a pure function of the three.
``note`` is told how far a slow source has come."""
Process = Callable[[TeacherOutput], TeacherOutput]
LIVE_BATCHES_CPU, LIVE_BATCHES_GPU = 2, 3
LIVE_SHARDS = 2
CPU_PART_ELEMENTS = 1 << 19
POLL_SECONDS = 1.0


def unchanged(output: TeacherOutput) -> TeacherOutput:
    """The teacher's distribution as it is."""
    return output


class ShardArrays:
    """The arrays of one shard while it is filled, position 0 left at zero."""

    def __init__(self, manifest: Manifest, shard: ShardRange, rows: np.ndarray) -> None:
        self.shard = shard
        self.arrays = {
            name: np.zeros(
                (shard.num_rows, manifest.row_length, *spec.trailing_shape), np.dtype(spec.dtype)
            )
            for name, spec in manifest.all_arrays.items()
        }
        self.arrays["tokens"][:] = rows

    def fill(self, first: int, encoded: dict[str, Tensor]) -> None:
        """Put encoded arrays [b, L - 1, ...] at rows ``first``.. of the shard."""
        for name, tensor in encoded.items():
            self.arrays[name][first : first + len(tensor), 1:] = tensor.numpy()


@dataclass
class Extractor:
    """Runs the shards of one store; see :meth:`run`.

    Attributes:
        read_rows: Where rows come from.
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
    process: Process = unchanged
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
        try:
            with Background("store", LIVE_SHARDS) as storage:
                live = LIVE_BATCHES_GPU if self._on_gpu else LIVE_BATCHES_CPU
                with Background("encode", live) as encoder:
                    held = self._extract_free(worker.order(shards), encoder, storage, bar)
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
            if self._take(shard):
                self._extract(shard, encoder, storage, bar)
            elif self.writer.is_done(shard):
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

    def _take(self, shard: ShardRange) -> bool:
        claim = ExitStack()
        if claim.enter_context(self.writer.claim(shard)):
            self._claims[shard] = claim
            return True
        claim.close()
        return False

    def _extract(
        self, shard: ShardRange, encoder: Background, storage: Background, bar: Bar
    ) -> None:
        rows = self.read_rows(shard.split, shard.start, shard.stop, bar.note)
        bar.note(str(shard))
        arrays = ShardArrays(self.writer.manifest, shard, rows)
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
        def work(part: slice) -> None:
            rows = raw.rows(part)
            output = self.process(rows.normalise(self.teacher.vocab_size, self._memory(rows)))
            seed = self.writer.manifest.noise_seed(arrays.shard.split)
            encoded: dict[str, Tensor] = dict(self.codec.encode(output, seed, self.resources))
            encoded["token_log_probs"] = output.token_log_probs
            encoded = to_host(encoded)
            if not torch.isfinite(encoded["token_log_probs"]).all():
                check_output(output, arrays.shard.split)
            arrays.fill(first + part.start, encoded)

        if self._encoded is None:
            self._encoded = BatchSize(encoded_rows(raw.logits))
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


def encoded_rows(logits: Tensor) -> int:
    """Rows to encode at once: on a CPU few enough for their temporaries to stay in its cache."""
    row_elements = logits[0].numel()
    if logits.is_cuda:
        return largest_batch(row_elements, logits.device)
    return max(1, CPU_PART_ELEMENTS // row_elements)


def resources_on(device: torch.device, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """A store's resources where the codec encodes."""
    return {
        name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in arrays.items()
    }
