"""A folder of results appears under its name whole, and stays whole after a power cut."""

from __future__ import annotations

from pathlib import Path

from shards.base import fsync_path


def publish(work: Path, final: Path) -> None:
    """Rename a finished folder, with everything in it on disk before its name is.

    Libraries that write into it (``save_pretrained``) leave their files to the page cache.
    """
    for path in sorted(work.rglob("*"), reverse=True):  # files before the folders that name them
        fsync_path(path)
    fsync_path(work)
    work.rename(final)
    fsync_path(final.parent)
