"""What a student starts from: another student of ours, or a language model of transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from shards.base import UsageError
from shards.language_model import PretrainedFiles, find_pretrained, looks_local
from trainer.students import Student, find_model, weights_sha256

OWN_TYPES = "gdistill-"
"""What model types of ours begin with."""
NO_PART_OF_THE_NETWORK = (
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "use_cache",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where first weights are.

    Attributes:
        folder: The model's folder.
        language_model: Its files; None for a student of ours.
    """

    folder: Path
    language_model: PretrainedFiles | None = None

    @property
    def weights_sha256(self) -> str:
        """Hash of the weights."""
        model = self.language_model
        return weights_sha256(self.folder) if model is None else model.weights_sha256


def find_source(place: str | Path) -> Source:
    """A student's folder, the ``--out`` of its run, or a language model's folder or hub id.

    Raises:
        UsageError: When there is none of these.
    """
    path = Path(place).expanduser()
    if not (path.exists() or looks_local(str(place))):
        return Source(path, find_pretrained(str(place), role="source"))
    folder = find_model(path)
    if str(_read_config(folder).get("model_type")).startswith(OWN_TYPES):
        return Source(folder)
    return Source(folder, find_pretrained(folder, role="source"))


def is_language_model(place: str | Path) -> bool:
    """Whether that is a language model of transformers; see :func:`find_source`."""
    return find_source(place).language_model is not None


def network_settings(
    place: str | Path | None, kind: type[Student], run_folder: Path | None = None
) -> dict[str, Any]:
    """Settings of a student that starts there, as a source of ``compose_run``.

    Args:
        place: ``--init-from``.
        kind: The student; one that can lets states predict the next token, as in the model.
        run_folder: Of the run; once begun, it knows the network without its source.

    Returns:
        Network and widths of a language model, which go before those of presets; else nothing.

    Raises:
        UsageError: When nothing is there, or it is no student and no language model.
    """
    if place is None:
        return {}
    try:
        source = find_source(place)
    except UsageError:
        begun = {} if run_folder is None else _read_config(run_folder)
        if not begun:
            raise
        found = begun.get("model", {})
    else:
        found = _read_config(source.folder)
        if source.language_model is not None:
            shifts = "predicts_next" not in kind.foreign_settings
            network = _network_config(source.language_model)
            found = {"language_model": network, "predicts_next": shifts}
    if found.get("language_model") is None:
        return {}
    return {"model": _sizes(found["language_model"], found["predicts_next"])}


def _sizes(network: dict[str, Any], predicts_next: bool) -> dict[str, Any]:
    values = dict(network)
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    return {
        "language_model": network,
        "predicts_next": predicts_next,
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_hidden_layers,
        "num_heads": shape.num_attention_heads,
    }


def _network_config(files: PretrainedFiles) -> dict[str, Any]:
    values = json.loads(files.text_config.to_json_string())
    values["model_type"] = files.text_config.model_type
    return {name: value for name, value in values.items() if name not in NO_PART_OF_THE_NETWORK}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
