"""A store on the hub: one commit of a data set's repository, with a card."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, DatasetCardData, HfApi

from shards.errors import GdistillError, UsageError, first_line
from shards.store.store import ShardStore
from shards.store.verification import Description

PLACE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/?")
CARD = Path(__file__).with_name("store_card.md")


def push(store: ShardStore, target: str, *, license: str | None, private: bool) -> str:
    """Write a finished store to ``hf://datasets/OWNER/NAME``, whole or not at all.

    Args:
        store: In a local folder.
        target: The data set; made if it is not there.
        license: For the card, as the hub names licences (``apache-2.0``).
        private: Whether a data set that is made is private.

    Returns:
        The commit's address.

    Raises:
        UsageError: For another kind of target, or a store that is not in a folder.
        GdistillError: If the hub refuses.
    """
    found = PLACE.fullmatch(target)
    if found is None:
        raise UsageError("not a data set", got=target, expected="hf://datasets/OWNER/NAME")
    folder = Path(store.location.url)
    if not folder.is_dir():
        raise UsageError("the store is not in a folder", where=folder, remedy="copy it first")
    api, name = HfApi(), found[1]
    files = {file: str(folder / file) for file in store.location.sizes()}
    contents = {**files, "README.md": card(store, name, license).encode()}
    operations = [CommitOperationAdd(file, content) for file, content in sorted(contents.items())]
    try:
        api.create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        message = "Add the store"
        commit = api.create_commit(name, operations, commit_message=message, repo_type="dataset")
    except Exception as error:  # of the hub, or of whichever HTTP client its library has
        remedy = "see that you are logged in (hf auth login) and may write there; then push again"
        what, got = "the hub does not take the store", first_line(error)
        raise GdistillError(what, where=target, got=got, remedy=remedy) from error
    return commit.commit_url


def card(store: ShardStore, name: str, license: str | None) -> str:
    """The data set's README.md."""
    manifest, figures = store.manifest, Description.of(store)
    tags = ["gdistill", "distillation", f"codec:{manifest.codec['name']}"]
    title = name.partition("/")[2]
    metadata = DatasetCardData(license=license, pretty_name=title, tags=tags)
    rows = ", ".join(f"{rows:,} {split}" for split, rows in manifest.splits.items())
    values = {"name": name, "metadata": metadata.to_yaml(), "manifest": manifest, "rows": rows}
    values |= {"tokens": figures.num_tokens, "corpus": manifest.tokens.get("corpus", "unknown")}
    values |= {"per_token": figures.shard_bytes / max(1, figures.num_tokens)}
    return CARD.read_text(encoding="utf-8").format(**values)
