"""Whether token rows belong to the corpus, settings and tokenizer at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.corpus import CorpusConfig, open_source
from pipeline.corpus.sources import looks_unchanged
from pipeline.tokens.tokenizer import special_ids, tokenizer_sha256
from shards.base import GdistillError, UsageError, to_mapping

NAMES_ONLY = ("source", "validation_source", "seed")
"""Settings that say where content is; the content itself is compared."""


def corpus_identity(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides the rows: settings, special ids, tokenizer and source content.

    Args:
        known: An earlier identity. Files whose path, size and modification time are as noted
            there are not hashed again.
    """
    settings = {key: value for key, value in to_mapping(config).items() if key not in NAMES_ONLY}
    known_files = {
        file["path"]: file
        for files in (known or {}).get("sources", {}).values()
        for file in files
        if "path" in file
    }
    sources: dict[str, Any] = {}
    for split in ("train", "validation"):
        source = open_source(config, split)
        if source is not None:
            sources[split] = source.identity(known_files)
    return {
        "corpus": settings,
        "special_ids": {
            split: vars(special_ids(tokenizer, config, split)) for split in ("train", "validation")
        },
        "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)},
        "sources": sources,
    }


def check_identity(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Refuse rows of another identity, naming the first difference.

    Raises:
        UsageError: For other settings or another tokenizer.
        GdistillError: For other source content.
    """
    remedy = f"choose another output folder, or remove {where}"
    for part in ("corpus", "special_ids", "tokenizer"):
        for key in sorted(set(found.get(part, {})) | set(wanted[part])):
            old, new = found.get(part, {}).get(key), wanted[part].get(key)
            if old != new:
                raise UsageError(
                    "the token rows here were made with other settings",
                    where=f"{where}: {part}.{key}",
                    got=old,
                    expected=new,
                    remedy=remedy,
                )
    for split in sorted(set(found["sources"]) | set(wanted["sources"])):
        old, new = found["sources"].get(split, []), wanted["sources"].get(split, [])
        if _contents(old) != _contents(new):
            raise GdistillError(
                "the corpus is not the one that was tokenized",
                where=f"{where}: {split}: {_first_difference(old, new)}",
                got=f"content {_digests(new)}",
                expected=f"content {_digests(old)}",
                remedy=remedy,
            )


def sources_unchanged(identity: dict[str, Any]) -> bool:
    """Whether every source file still has its noted size and modification time."""
    files = [file for files in identity["sources"].values() for file in files]
    return all(looks_unchanged(file) for file in files if "path" in file)


def _contents(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files by their content; other sources by all they tell."""
    return [{"sha256": file["sha256"]} if "path" in file else file for file in files]


def _first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    for before, after in zip(old, new, strict=False):
        if _contents([before]) != _contents([after]):
            return str(after.get("path") or after.get("name"))
    return f"{len(new)} files instead of {len(old)}"


def _digests(files: list[dict[str, Any]]) -> str:
    """Short forms of the content, of what has one."""
    digests = [file.get("sha256") or file.get("fingerprint") for file in files]
    return ", ".join(str(digest)[:12] for digest in digests if digest) or "none"
