"""Write one tiny store per codec, with what it must be read as: run by hand when a format changes.

    python tests/shards/old_stores/write_old_stores.py tests/shards/old_stores/NAME

Never over what an older version wrote: a new folder, named for what is new.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.codec.protocol import TeacherOutput, codec_parameters, make_codec
from shards.noise.embedding import dense_arrivals
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter
from shards.tools.conversion import stored_noise

VOCAB, LENGTH, HIDDEN, SEED = 11, 5, 3, 5
SPLITS = {"train": 5, "validation": 2}
CODECS: dict[str, dict[str, Any]] = {
    "full": {},
    "quantized": {},
    "topk": {"num_entries": 4},
    "seeded": {},
    "posterior": {"num_entries": 4},
    "hidden": {"dtype": "float16"},
}


def teacher(split: str) -> tuple[TeacherOutput, dict[str, torch.Tensor]]:
    draw = np.random.default_rng([7, sorted(SPLITS).index(split)])
    head = torch.from_numpy(np.random.default_rng(9).normal(size=(VOCAB, HIDDEN))).float()
    shape = (SPLITS[split], LENGTH - 1)
    hidden = torch.from_numpy(draw.normal(size=(*shape, HIDDEN))).half().float()
    log_probs = (hidden @ head.T).log_softmax(-1)
    tokens = torch.from_numpy(draw.integers(0, VOCAB, shape))
    unigram = torch.full((VOCAB,), -float(np.log(VOCAB)))
    known = {"lm_head": head, "lm_head_bias": torch.zeros(VOCAB), "unigram_log_probs": unigram}
    return TeacherOutput(log_probs, tokens, torch.arange(shape[0]), hidden), known


def write(folder: Path, name: str, format_version: int) -> ShardStore:
    codec = make_codec(name, **CODECS[name])
    manifest = Manifest(
        codec={"name": name, "parameters": codec_parameters(codec)},
        arrays=codec.array_specs(VOCAB, HIDDEN),
        vocab_size=VOCAB,
        row_length=LENGTH,
        splits=SPLITS,
        rows_per_shard=4,
        rows_per_chunk=2,
        teacher={"id": "made up"},
        tokenizer={"id": "none"},
        tokens={"fingerprint": "ef" * 32},
        seed=SEED,
        versions={},
        format_version=format_version,
    )
    known = {key: value for key, value in teacher("train")[1].items() if key in codec.resource_names}
    resources = {key: value.numpy() for key, value in known.items()}
    files = {"tokenizer/tokenizer.json": b"{}"}
    writer = ShardWriter.create_or_resume(folder, manifest, resources, files)
    for split in SPLITS:
        output, _ = teacher(split)
        encoded = codec.encode(output, manifest.noise_seed(split), known)
        own = {"token_log_probs": output.token_log_probs, "tokens": output.tokens}
        values = {**encoded, **own}
        for shard in writer.manifest.shards(split):
            arrays = {
                key: np.zeros((shard.num_rows, LENGTH, *spec.trailing_shape), spec.dtype)
                for key, spec in manifest.all_arrays.items()
            }
            for key, value in values.items():
                arrays[key][:, 1:] = value[shard.start : shard.stop].numpy()
            writer.write(shard, arrays)
    return ShardStore.open(folder)


def decoded(store: ShardStore, split: str) -> np.ndarray:
    """-xi of every position and entry, [rows (L-1), V] float32, draw 0."""
    rows = store.split(split).read_rows(0, store.manifest.splits[split])
    return dense_arrivals(stored_noise(store, split, 0, rows)).log().numpy()


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main(folder: Path, format_version: int) -> None:
    folder.mkdir(parents=True)
    for name in CODECS:
        with tempfile.TemporaryDirectory() as place:
            store = write(Path(place, "store"), name, format_version)
            arrays = {split: decoded(store, split) for split in SPLITS}
            np.savez_compressed(Path(place, "expected.npz"), **arrays)  # type: ignore[arg-type]
            with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for path in sorted(Path(place).rglob("*")):
                    if path.is_file():
                        archive.add(path, path.relative_to(place).as_posix(), filter=anonymous)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2)
