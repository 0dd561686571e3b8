"""Write one tiny store per codec, with what it must be read as: run by hand when a format changes.

    python -m tests.shards.old_stores.write_old_stores tests/shards/old_stores/NAME

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

from shards.codec.protocol import TeacherOutput, make_codec
from shards.noise.embedding import dense_arrivals
from shards.store.store import ShardStore
from shards.tools.conversion import stored_noise
from tests.shards.store_cases import write_encoded

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
            sizes = {"vocab_size": VOCAB, "row_length": LENGTH, "splits": SPLITS, "rows_per_shard": 4}
            sizes |= {"rows_per_chunk": 2, "seed": SEED, "format_version": format_version}
            store = write_encoded(Path(place, "store"), make_codec(name, **CODECS[name]), teacher, **sizes)
            arrays = {split: decoded(store, split) for split in SPLITS}
            np.savez_compressed(Path(place, "expected.npz"), **arrays)  # type: ignore[arg-type]
            with tarfile.open(folder / f"{name}.tar.xz", "w:xz", preset=9) as archive:
                for path in sorted(Path(place).rglob("*")):
                    if path.is_file():
                        archive.add(path, path.relative_to(place).as_posix(), filter=anonymous)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2)
