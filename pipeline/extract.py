"""Stage 2: rows -> teacher -> codec -> store, shard by shard.

::

    this thread     claim shard -> read rows -> forward pass k+1 ...
    "encode"        log-softmax, codec, copy to the host of batch k -> the shard's arrays
    "store"         compress and write the shard before -> release its claim

Where a batch begins and ends is fixed within a shard, so the bytes do not depend on who computes it
or what was interrupted. Processes share nothing but the ledger and the claims of shards: each begins
with its own share, then takes up what nobody is working on, and stays until every shard is finished
or, its holder dead, can be taken over. One that ends without an error leaves a complete store.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.settings import ExtractSettings, Worker
from pipeline.teacher import RawLogits, Teacher, automatic_batch_size, check_output, rows_tensor
from pipeline.tokens.dataset import unmarked
from shards.codec.protocol import Codec, TeacherOutput
from shards.console import Bar, progress_bar, stderr
from shards.errors import Stopped, StopRequest, UsageError
from shards.language_model.forward import BatchSize, in_batches, is_out_of_memory, largest_batch, require_indexable
from shards.noise.philox import noise_kernel
from shards.store.manifest import Manifest, ShardRange, read_ways, record_ways
from shards.store.store import ShardWriter

Note = Callable[[str], None]
ReadRows = Callable[[str, int, int, Note], np.ndarray]
"""(split, start, stop, note) -> rows start..stop-1, [n, L] int32: a pure function of the three.
``note`` hears how far a slow source has come."""
Process = Callable[[TeacherOutput], TeacherOutput]
Arrays = dict[str, np.ndarray]
Tasks = deque[Future[None]]
"""Handed to a thread of their own; torch and compressors release the interpreter lock."""
LIVE_BATCHES_CPU, LIVE_BATCHES_GPU, LIVE_SHARDS = 2, 3, 2
"""Batches that wait to be encoded, and shards to be written, at a time."""
CPU_PART_ELEMENTS = 1 << 19
POLL_SECONDS = 1.0
ROUNDING_NATS = 2e-4
"""Twice the most that log p of a token moved between CPU kernels, threads and rows per pass in
float32: 9.3e-5, with stories260K on 65,536 tokens of text, log p down to -32."""


@dataclass(kw_only=True)
class ShardWork(ABC):
    """Writes the shards of a store that no other process writes; ``resources`` lie where the codec encodes."""

    writer: ShardWriter
    codec: Codec
    resources: Mapping[str, Tensor]
    stop: StopRequest = field(default_factory=lambda: StopRequest(signal.SIGTERM))
    num_extracted_tokens: int = 0
    seconds: float = 0.0
    """Of work on shards; waiting for others is none."""
    seconds_waiting: float = 0.0

    def write_all(self, worker: Worker, stage: str) -> None:
        """Do the pending shards behind a progress bar; returns when all are done by somebody."""
        writer, manifest, pending = self.writer, self.writer.manifest, self.writer.all_pending()
        total = sum(manifest.splits.values()) * manifest.row_length
        done = total - sum(map(self.num_tokens, pending))
        bar = progress_bar(stage, total, done=done, main_process=worker.is_main)
        started = time.monotonic()
        with self.stop.listening(), bar as shown:
            try:
                self.run(pending, worker, shown)
            except Stopped as error:
                got, remedy = f"{len(writer.all_pending())} shards still to do", "run the same command again to finish"
                raise Stopped(error.what, where=writer.location.url, got=got, remedy=remedy) from error
        self.seconds = time.monotonic() - started - self.seconds_waiting

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        """Write every shard that no other process finishes; free ones in this worker's order."""
        held = worker.order(shards)
        while held := [shard for shard in held if not self._take(shard, bar)]:
            self.settle()
            names = str(held[0]) + (f" and {len(held) - 1} more" if len(held) > 1 else "")
            bar.note(f"waiting for {names}")
            if not self.seconds_waiting:  # workers without a bar say it too, once
                stderr.print(
                    f"waiting for {names}: another process is at it; "
                    "if it dies, the shard is done here; stop this process whenever you like"
                )
            self.stop.pause(POLL_SECONDS)
            self.seconds_waiting += POLL_SECONDS

    def _take(self, shard: ShardRange, bar: Bar) -> bool:
        """Whether the shard is done or in work here now; another process holds it if not."""
        self.stop.check()
        claim = ExitStack()
        if claim.enter_context(self.writer.claim(shard)):
            bar.note(str(shard))
            self.extract(shard, claim, bar)
            return True
        claim.close()
        if is_done := self.writer.is_done(shard):
            bar.advance(self.num_tokens(shard))
        return is_done

    @abstractmethod
    def extract(self, shard: ShardRange, claim: ExitStack, bar: Bar) -> None:
        """Write a shard, now or soon; close the claim when it is written or has failed."""

    def settle(self) -> None:  # noqa: B027 - work without failures of its own has nothing to settle
        """What failed here must end this process before it waits: others may wait for it."""

    def num_tokens(self, shard: ShardRange) -> int:
        return shard.num_rows * self.writer.manifest.row_length

    def write(self, shard: ShardRange, arrays: dict[str, np.ndarray]) -> None:
        self.writer.write(shard, arrays)
        self.num_extracted_tokens += self.num_tokens(shard)


def finish(tasks: Tasks, but: int = 0) -> None:
    """Wait until at most ``but`` of the tasks are unfinished; raises the error of one that failed."""
    while len(tasks) > but:
        tasks.popleft().result()


def to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on the CPU, complete when this returns; kernels of the next batch run meanwhile."""
    device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
    if device is None:
        return dict(tensors)
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


def resources_on(device: torch.device, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A store's resources where the codec encodes."""
    return {name: torch.from_numpy(np.ascontiguousarray(a)).to(device) for name, a in arrays.items()}


@dataclass(kw_only=True)
class Extractor(ShardWork):
    """Asks a teacher that runs here; ``process`` is its temperature and nucleus, before anything is stored."""

    teacher: Teacher
    read_rows: ReadRows
    batch_size: BatchSize
    process: Process | None = None
    _claims: dict[ShardRange, ExitStack] = field(default_factory=dict)
    _batches: Tasks = field(default_factory=deque)
    _shards: Tasks = field(default_factory=deque)
    _encoded: BatchSize | None = None
    _buffer: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, shards: list[ShardRange], worker: Worker, bar: Bar) -> None:
        try:  # leaving the pools finishes what was handed over
            with ThreadPoolExecutor(1, "store") as self._storage, ThreadPoolExecutor(1, "encode") as self._encoder:
                super().run(shards, worker, bar)
                self.settle()
        finally:
            for claim in self._claims.values():
                claim.close()
            self._claims.clear()

    @property
    def _on_gpu(self) -> bool:
        return self.teacher.device.type == "cuda"

    def settle(self) -> None:
        finish(self._batches)
        finish(self._shards)

    def extract(self, shard: ShardRange, claim: ExitStack, bar: Bar) -> None:
        self._claims[shard] = claim
        finish(self._shards, but=LIVE_SHARDS)
        rows = self.read_rows(shard.split, shard.start, shard.stop, bar.note)
        bar.note(str(shard))
        manifest = self.writer.manifest
        shape, specs = (shard.num_rows, manifest.row_length), manifest.all_arrays.items()
        # Filled from position 1 on: position 0 stays zero.
        arrays = {n: np.zeros((*shape, *s.trailing_shape), np.dtype(s.dtype)) for n, s in specs}
        rows, counted = unmarked(rows)
        arrays["tokens"][:] = rows
        if "counted" in manifest.arrays:
            arrays["counted"][:] = counted
        tokens, encoded = rows_tensor(rows), list[Future[None]]()

        def forward(part: slice) -> None:
            self.stop.check()
            finish(self._batches, but=(LIVE_BATCHES_GPU if self._on_gpu else LIVE_BATCHES_CPU) - 1)
            row_ids = torch.arange(part.start, part.stop) + shard.start
            try:
                raw = [self.teacher.forward(tokens[part], row_ids, self.codec.needs_hidden)]
            except Exception as error:
                if is_out_of_memory(error):
                    finish(self._batches)  # those hold memory that half of these rows may need
                raise
            encoded.append(self._encoder.submit(self._encode, raw, part.start, shard, arrays, bar))
            self._batches.append(encoded[-1])

        in_batches(forward, shard.num_rows, self.batch_size)
        self._shards.append(self._storage.submit(self._write, shard, arrays, encoded))

    @torch.inference_mode()
    def _encode(self, batch: list[RawLogits], first: int, shard: ShardRange, arrays: Arrays, bar: Bar) -> None:
        raw = batch.pop()  # it must be gone before there is room for the next one

        def work(part: slice) -> None:
            rows = raw.rows(part)
            memory = None if self._on_gpu else self._buffer
            if memory is not None and memory.numel() < rows.logits.numel():
                # Kept from part to part: fresh pages cost a CPU more than the log-softmax itself,
                # 0.1 ms a token at V = 50,257.
                memory = self._buffer = torch.empty(rows.logits.numel())
            output = rows.normalise(self.teacher.vocab_size, memory)
            output = self.process(output) if self.process else output
            seed = self.writer.manifest.noise_seed(shard.split)
            encoded: dict[str, Tensor] = dict(self.codec.encode(output, seed, self.resources))
            encoded["token_log_probs"] = output.token_log_probs
            encoded = to_host(encoded)
            if not torch.isfinite(encoded["token_log_probs"]).all():
                check_output(output, shard.split)
            here = slice(first + part.start, first + part.stop)
            for name, tensor in encoded.items():
                arrays[name][here, 1:] = tensor.numpy()

        if self._encoded is None:  # on a CPU few enough for their temporaries to stay in its cache
            elements = raw.logits[0].numel()
            most = largest_batch(elements, raw.logits.device)
            self._encoded = BatchSize(most if raw.logits.is_cuda else max(1, CPU_PART_ELEMENTS // elements))
        in_batches(work, len(raw.logits), self._encoded)
        bar.advance(raw.tokens.shape[0] * (raw.tokens.shape[1] + 1))

    def _write(self, shard: ShardRange, arrays: Arrays, encoded: list[Future[None]]) -> None:
        for batch in encoded:
            batch.result()
        if "counted" in arrays:  # noise and log p of the assistant's tokens alone
            idle = arrays["counted"] == 0
            for name in arrays.keys() - {"tokens", "counted"}:
                arrays[name][idle] = 0
        self.write(shard, arrays)
        self._claims.pop(shard).close()


# How this process computes.


@dataclass(frozen=True)
class ComputeEnvironment:
    """What decides the last bits of a forward pass.

    The first worker's is recorded, and others take over threads (0 on a GPU) and rows of a pass. The
    rest they can only have or not; one that differs there says so.
    """

    device: str
    threads: int
    rows_per_pass: int
    kernels: str
    attention: str
    compiled: bool
    torch: str
    transformers: str

    def difference(self, other: Mapping[str, Any]) -> str:
        """``name value (was value)`` of every field that differs; empty if none does."""
        pairs = ((name, value, other.get(name)) for name, value in asdict(self).items())
        return ", ".join(f"{name} {value} (was {was})" for name, value, was in pairs if value != was)


def settle_environment(writer: ShardWriter, settings: ExtractSettings, teacher: Teacher) -> ComputeEnvironment:
    """Fix how this process computes, like the store's first worker where it can, and record it."""
    what = "this process computes differently from the store's first worker"
    with writer.location.claim("way", wait=True):  # two that begin at once agree on who is first
        known = read_ways(writer.location)
        first = known[0] if known else {}
        own = _own_environment(writer.manifest, settings, teacher, first)
        difference = own.difference(first) if first else ""
        if difference and settings.strict:
            remedy = "run it on the same hardware and software, or without --strict"
            raise UsageError(what, where=writer.location.url, got=difference, remedy=remedy)
        record_ways(writer.location, [asdict(own)])
    if difference:
        agree = f"log-probabilities agree within rounding ({ROUNDING_NATS:g} nats in float32)"
        stderr.print(f"{what}: {difference}; {agree}")
    return own


def _own_environment(
    manifest: Manifest, settings: ExtractSettings, teacher: Teacher, first: Mapping[str, Any]
) -> ComputeEnvironment:
    on_gpu = teacher.device.type == "cuda"
    device = torch.cuda.get_device_name(teacher.device) if on_gpu else "cpu"
    if teacher.num_devices > 1:
        device = f"{teacher.num_devices} x {device}"
    followed = first if str(first.get("device")).endswith("cpu") != on_gpu else {}
    threads = 0
    if not on_gpu:
        threads = settings.threads or followed.get("threads") or torch.get_num_threads()
        torch.set_num_threads(threads)
    rows = settings.batch_size or followed.get("rows_per_pass")
    length, width = manifest.row_length, teacher.files.num_logits
    if not rows:
        weight_bytes = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
        rows = automatic_batch_size(length, width, weight_bytes, teacher.device)
    require_indexable(length * width, teacher.device, "extract shorter rows: --row-length")
    return ComputeEnvironment(
        device=device,
        threads=threads,
        rows_per_pass=min(rows, largest_batch(length * width, teacher.device)),
        kernels=_kernels(on_gpu),
        attention=str(getattr(teacher.model.config, "_attn_implementation", None)),
        compiled=settings.teacher.compiled,
        torch=torch.__version__,
        transformers=importlib.metadata.version("transformers"),
    )


def _kernels(on_gpu: bool) -> str:
    if on_gpu:
        products = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "float32"
        return products + ("" if noise_kernel("cuda") == "compiled" else ", eager noise")
    kept = os.environ.get("MKL_CBWR")
    return torch.backends.cpu.get_cpu_capability() + (f" MKL_CBWR={kept}" if kept else "")
