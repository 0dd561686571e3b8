"""What decides the content of a store, as its manifest, and the environment that computes it.

The workers of one store compute alike: the first one's environment is recorded, and others follow
it. Two things a worker can choose are taken over from the first, threads and rows of a forward
pass. The rest it can only have or not: the device, the kernels of its CPU, the versions of
libraries. A worker that differs there computes the same log-probabilities within rounding, so it
says so, and is refused only where the user is strict.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.corpus.config import CorpusConfig, scheme_of, split_field
from pipeline.settings import ExtractRequest, ExtractSettings, StoreSettings
from pipeline.teacher import Teacher, automatic_batch_size
from pipeline.tokens.dataset import TokenDataset, rows_per_group
from shards.codec.ids import unigram_log_probs
from shards.codec.protocol import ArraySpec
from shards.codec.registry import codec_parameters
from shards.console import stderr
from shards.errors import UsageError
from shards.language_model.forward import largest_batch, require_indexable
from shards.language_model.loading import PretrainedFiles, looks_local
from shards.noise.philox import noise_kernel
from shards.store.manifest import STORE_ARRAYS, Manifest, read_ways, record_ways
from shards.store.writer import ShardWriter
from shards.stream.stream import MIXED_CHUNK_BYTES

ROUNDING_NATS = 2e-4
"""Twice the most that log p of a token moved between CPU kernels, threads and rows per pass in
float32: 9.3e-5, with stories260K on 65,536 tokens of text, log p down to -32."""
CHUNK_TOKENS = 1 << 12
SHARD_TOKENS, SHARD_BYTES = 1 << 18, 256 << 20


@dataclass(frozen=True)
class ComputeEnvironment:
    """What decides the last bits of a forward pass.

    Attributes:
        device: ``cpu``, or the GPU's name; ``4 x`` before it where the teacher lies on several.
        threads: CPU threads of a forward pass; 0 on a GPU.
        rows_per_pass: Rows of a forward pass.
        kernels: Instruction set of the CPU's kernels; on a GPU, whether TF32 is allowed, and where
            the noise kernel could not be compiled.
        attention: Attention kernel by transformers' name.
        compiled: Whether the model runs through ``torch.compile``.
        torch: Version.
        transformers: Version.
    """

    device: str
    threads: int
    rows_per_pass: int
    kernels: str
    attention: str
    compiled: bool
    torch: str
    transformers: str

    def difference(self, other: dict[str, Any]) -> str:
        """``name value, was value`` of every field that differs; empty if none does."""
        differing = [(name, v) for name, v in asdict(self).items() if v != other.get(name)]
        return ", ".join(f"{name} {value} (was {other.get(name)})" for name, value in differing)


def settle_environment(
    writer: ShardWriter, settings: ExtractSettings, teacher: Teacher
) -> ComputeEnvironment:
    """Fix how this process computes, like the store's first worker where it can, and record it.

    Raises:
        UsageError: If it computes differently and the settings are strict.
    """
    with writer.location.claim("way", wait=True):  # two that begin at once agree on who is first
        known = read_ways(writer.location)
        first = known[0] if known else {}
        own = _own_environment(writer.manifest, settings, teacher, first)
        difference = own.difference(first) if first else ""
        if difference and settings.strict:
            raise UsageError(
                "this process computes differently from the store's first worker",
                where=writer.location.url,
                got=difference,
                remedy="run it on the same hardware and software, or without --strict",
            )
        record_ways(writer.location, [asdict(own)])
    if difference:
        stderr.print(
            f"this process computes differently from the store's first worker: {difference}; "
            f"log-probabilities agree within rounding ({ROUNDING_NATS:g} nats in float32)"
        )
    return own


def _own_environment(
    manifest: Manifest, settings: ExtractSettings, teacher: Teacher, first: dict[str, Any]
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
    if not rows:
        weight_bytes = sum(p.numel() * p.element_size() for p in teacher.model.parameters())
        sizes = manifest.row_length, teacher.files.num_logits
        rows = automatic_batch_size(*sizes, weight_bytes, teacher.device)
    row_elements = manifest.row_length * teacher.files.num_logits
    require_indexable(row_elements, teacher.device, "extract shorter rows: --row-length")
    return ComputeEnvironment(
        device=device,
        threads=threads,
        rows_per_pass=min(rows, largest_batch(row_elements, teacher.device)),
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


def corpus_unigram(dataset: TokenDataset) -> np.ndarray:
    """Log-probability of each token in the training rows; [V] float32, nats."""
    split = "train" if dataset.num_rows("train") else dataset.splits[-1]
    return unigram_log_probs(
        lambda start, stop: dataset.read_rows(split, start, stop),
        dataset.num_rows(split),
        dataset.row_length,
        dataset.vocab_size,
        rows_per_group(dataset.row_length),
    )


def bytes_per_token(arrays: dict[str, ArraySpec]) -> int:
    """Bytes of one token before compression, its id and log-probability included."""
    specs = [*STORE_ARRAYS.values(), *arrays.values()]
    return sum(np.dtype(s.dtype).itemsize * int(np.prod(s.trailing_shape)) for s in specs)


def rows_per_unit(
    row_length: int, arrays: dict[str, ArraySpec], settings: StoreSettings
) -> tuple[int, int]:
    """Rows of a chunk and of a shard: a few thousand and 2^18 tokens, bounded in bytes, or as set.

    Raises:
        UsageError: If a shard of the rows set is no whole number of chunks.
    """
    row_bytes = row_length * bytes_per_token(arrays)
    fitting = max(1, min(CHUNK_TOKENS // row_length, MIXED_CHUNK_BYTES // row_bytes))
    chunk = settings.rows_per_chunk or fitting
    if settings.rows_per_chunk is None and settings.rows_per_shard is not None:
        chunk = next(c for c in range(chunk, 0, -1) if settings.rows_per_shard % c == 0)
    wanted = min(SHARD_TOKENS // row_length, SHARD_BYTES // row_bytes)
    shard = settings.rows_per_shard or max(1, wanted // chunk) * chunk
    if shard % chunk:
        raise UsageError(
            "a shard is not a whole number of chunks",
            where="store.rows_per_shard",
            got=shard,
            expected=f"a multiple of {chunk}, store.rows_per_chunk",
        )
    return chunk, shard


def teacher_identity(files: PretrainedFiles, dtype: str) -> dict[str, object]:
    """A teacher that runs here, by its files."""
    return {
        "id": files.name,
        "weights_sha256": files.weights_sha256,
        "config_sha256": files.config_sha256,
        "dtype": dtype,
    }


def build_manifest(
    request: ExtractRequest,
    dataset: TokenDataset,
    teacher: Mapping[str, object],
    hidden_size: int | None = None,
) -> Manifest:
    """The identity of the store that this request makes.

    Args:
        request: With its row length settled.
        dataset: The token rows.
        teacher: Who scored them.
        hidden_size: D of a teacher that runs here.
    """
    settings, codec, record = request.settings, request.codec, dataset.record
    arrays = codec.array_specs(dataset.vocab_size, hidden_size)
    chunk, shard = rows_per_unit(dataset.row_length, arrays, settings.store)
    rows = {split: request.stored_rows(split, dataset.num_rows(split)) for split in dataset.splits}
    tokens: dict[str, object] = {
        "corpus": public_source(record["corpus"]["source"]),
        "fingerprint": dataset.fingerprint,
        "mode": settings.mode,
    }
    if settings.mode == "sequential":
        tokens["temperature"] = settings.sequential.temperature
        tokens["nucleus_p"] = settings.sequential.nucleus_p
    tokenizer = record["tokenizer"]
    name = Path(tokenizer["id"]).name if looks_local(tokenizer["id"]) else tokenizer["id"]
    # Versions of what writes posteriors, tokens, metadata and compression. Those that move the
    # last bits of log-probabilities (torch, transformers) are no part of the identity.
    packages = ("gdistill", "numcodecs", "tokenizers", "zarr")
    return Manifest(
        codec={"name": codec.name, "parameters": codec_parameters(codec)},
        arrays=arrays,
        vocab_size=dataset.vocab_size,
        row_length=dataset.row_length,
        splits={split: count for split, count in rows.items() if count},
        rows_per_shard=shard,
        rows_per_chunk=chunk,
        teacher=dict(teacher),
        tokenizer={"id": name, "sha256": tokenizer["sha256"]},
        tokens=tokens,
        seed=settings.seed,
        versions={package: importlib.metadata.version(package) for package in packages},
        bos_id=dataset.bos_id,
        eos_id=dataset.eos_id,
    )


def public_source(source: str) -> str:
    """A corpus by name: a store may be published, and where its files lay is nobody's business.

    What was read is in the fingerprint of the token rows.
    """
    scheme, rest = scheme_of(source)
    place, field = split_field(rest)
    if scheme != "hf" or looks_local(place):
        place = Path(place).name
    return f"{scheme}:{place}{f'#{field}' if field else ''}" if rest else source


def side_files(
    corpus: CorpusConfig, dataset: TokenDataset, teacher: Path | None = None
) -> dict[str, bytes]:
    """Files that make the store self-contained: the tokenizer, and what scores need of a corpus."""
    files = {
        f"tokenizer/{path.relative_to(dataset.tokenizer_path).as_posix()}": path.read_bytes()
        for path in sorted(dataset.tokenizer_path.rglob("*"))
        if path.is_file()
    }
    scheme, layout = scheme_of(corpus.source)
    if scheme == "maze" and teacher is not None:
        from pipeline.maze import load_maze

        record = teacher / "maze.json"  # with the path probabilities of a teacher trained here
        artifact = {**load_maze(layout or "k4").artifact(), "seed": corpus.seed}
        text = json.dumps(artifact, indent=2, sort_keys=True).encode() + b"\n"
        files["corpus/maze.json"] = record.read_bytes() if record.is_file() else text
    return files
