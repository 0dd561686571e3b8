"""Shape-checked imports, few threads, and the optional reference data beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests import checked_imports

checked_imports.install()

import pytest  # noqa: E402  (the hook must come first)
import torch  # noqa: E402

# As make says: at tiny shapes a second thread costs more than it gives, the more so on a busy machine.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
# Waiting for the disk is half of a writer's time; tests of the order of syncs count them.
os.fsync = lambda descriptor: None

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data; tests that need it skip when it is absent.

    With GDISTILL_REQUIRE_SHARED=1 its absence fails instead, so that CI cannot pass by skipping.
    """
    path = Path(os.environ.get("GDISTILL_SHARED", REPOSITORY.parent / "shared"))
    if path.is_dir():
        return path
    message = f"reference data not found at {path}"
    if os.environ.get("GDISTILL_REQUIRE_SHARED") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def golden(shared: Path) -> Path:
    """The authors' numbers."""
    return shared / "golden"
