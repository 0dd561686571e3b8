"""Every setting of an extraction decides what is stored, or is known not to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from pipeline.run import run_extraction
from pipeline.settings import ExtractRequest, Worker, resolve_request
from shards.errors import GdistillError
from tests.changed_settings import changed
from tests.pipeline.conftest import Asked
from tests.pipeline.extract_cases import contents

VALUES = {
    "corpus.bos_id": 5, "corpus.detokenizer": "ptb", "corpus.document_separator": "blank_line",
    "corpus.eos_id": 5, "corpus.on_bad_utf8": "skip", "corpus.packing": "wrap",
    "corpus.row_length": 10, "corpus.separator_id": 5, "corpus.validation_documents": 7,
    "device": "cpu:0", "store.rows": 20, "store.rows_per_chunk": 4, "store.rows_per_shard": 8,
    "store.validation_rows": 1, "teacher.attention": "eager", "teacher.device_map": None,
}  # fmt: skip
HOW_IT_RUNS = {
    "batch_size", "device", "strict", "threads", "teacher.attention", "sequential.batch_size",
}  # fmt: skip
"""The store may go on under another of these: a store is told from another by what it holds."""
ELSEWHERE = {
    *("corpus.source", "corpus.validation_source", "store.location", "teacher.location"),
    *("teacher.tokenizer", "teacher.revision", "teacher.device_map", "teacher.preset"),
    *("teacher.trust_remote_code", "teacher.compiled", "mode", "corpus.seed"),
}
"""Places, hub revisions and what only a maze or another device reads: other tests have them."""
WRITTEN = {"sequential.temperature", "sequential.nucleus_p"}
"""They decide rows that the teacher writes."""


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_a_store_goes_on_under_no_other_setting(tmp_path: Path, asked: Asked, mode: str) -> None:
    """Each setting changed alone: refused, or the store of the first run is left as it was."""
    base = resolve_request(tmp_path, asked(mode=mode))
    run_extraction(base, Worker())
    before = contents(tmp_path / "store")
    free = set()
    for part in ("settings", "corpus", "codec"):
        prefix = "" if part == "settings" else f"{part}."
        for name, other in changed(getattr(base, part), VALUES, prefix):
            if name in ELSEWHERE or name.startswith("engine."):
                continue
            try:
                assert other is not None, name
                request: ExtractRequest = dataclasses.replace(base, **{part: other})
                run_extraction(request, Worker())
                free.add(name)
            except GdistillError as error:
                assert re.search("with other (inputs|settings)", str(error)), (name, error)
            assert contents(tmp_path / "store") == before, name
    assert free == HOW_IT_RUNS | (WRITTEN if mode == "parallel" else set())
