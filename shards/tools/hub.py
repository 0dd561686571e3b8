"""A store on the hub: one commit of a data set's repository, with a card."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, DatasetCardData, HfApi

from shards.errors import GdistillError, UsageError, first_line
from shards.store.store import Description, ShardStore

PLACE = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)/?")
CARD = """\
---
{metadata}
---
# {name}

Next-token distributions of a teacher over a tokenized corpus, or noise drawn from them, for
distillation without the teacher: a store of [gdistill](https://pypi.org/project/gdistill/).

| | |
|---|---|
| teacher | {teacher} |
| corpus | {corpus} |
| codec | {codec} |
| rows | {rows} of {length} tokens |
| size | {tokens:,} tokens, {per_token:.1f} bytes each |
| vocabulary | {vocab:,} |
| identity | sha256 {sha256} |

The licences of the teacher and of the corpus bind what is made of them.

```python
import shards
from torch.utils.data import DataLoader

rows = shards.open_store("hf://datasets/{name}").stream(batch_size=8, seed=0)
for batch in DataLoader(rows, batch_size=None):
    tokens = batch["tokens"]  # [8, {length}]; then rows.distribution, rows.noise
```
"""


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
    files = {file: str(folder / file) for file in store.location.sizes() if file != "README.md"}
    contents = {**files, "README.md": card(store, name, license).encode()}
    operations = [CommitOperationAdd(file, content) for file, content in sorted(contents.items())]
    try:
        api.create_repo(name, repo_type="dataset", private=private, exist_ok=True)
        commit = api.create_commit(
            name, operations, commit_message="Add the store", repo_type="dataset"
        )
    except Exception as error:  # of the hub, or of whichever HTTP client its library has
        remedy = "see that you are logged in (hf auth login) and may write there; then push again"
        raise GdistillError(
            "the hub does not take the store", where=target, got=first_line(error), remedy=remedy
        ) from error
    return commit.commit_url


def card(store: ShardStore, name: str, license: str | None) -> str:
    """The data set's README.md."""
    manifest, figures = store.manifest, Description.of(store)
    metadata = DatasetCardData(
        license=license,
        pretty_name=name.partition("/")[2],
        tags=["gdistill", "distillation", f"codec:{manifest.codec['name']}"],
    )
    return CARD.format(
        metadata=metadata.to_yaml(),
        name=name,
        teacher=manifest.teacher["id"],
        corpus=manifest.tokens.get("corpus", "unknown"),
        codec=manifest.codec["name"],
        rows=", ".join(f"{rows:,} {split}" for split, rows in manifest.splits.items()),
        length=manifest.row_length,
        tokens=figures.num_tokens,
        per_token=figures.shard_bytes / max(1, figures.num_tokens),
        vocab=manifest.vocab_size,
        sha256=manifest.sha256,
    )
