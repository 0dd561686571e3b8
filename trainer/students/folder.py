"""A model folder: how it is written, described and read back.

::

    model/
        config.json, model.safetensors      averaged weights
        tokenizer files, corpus/            as the store carries them
        student.json                        run config, store essentials, last validation
        README.md                           model card
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModel

from shards.atomic import publish_folder, sha256_file, write_json_atomic
from shards.console import without_library_bars
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import find_tokenizer
from shards.store.store import ShardStore
from trainer.students.registry import Student, StudentConfig

STUDENT_FILE = "student.json"
CARD = Path(__file__).resolve().parent.parent / "presets" / "model_card.md"
NAMES = {"mdlm": "MDLM", "bd3lm": "BD3-LM", "ar": "Autoregressive baseline", "medusa": "Medusa", "drafter": "Drafter"}
FOLDERS = re.compile(r"(?<![\w.:/])(?:file://)?~?/(?:[^/\s]+/)*|(?<=:)~?/(?!/)(?:[^/\s]+/)*")
"""The folders of an absolute path, bare or behind a scheme's colon; a URL keeps its places."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
NEAREST: dict[str, dict[str, Any]] = {
    "mdlm": {"sampler": "confidence", "decision": "categorical", "tau": 1.0, "temperature": 0.7},
    "bd3lm": {"sampler": "block", "inner": "confidence", "decision": "argmax", "tau": 1.0},
}
"""How students that read their noise in later layers too are nearest the text, as ``make sample``
draws them; all others are drawn as the sampler's defaults say."""
HERE: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def export_model(
    directory: Path, student: Student, weights: Mapping[str, Tensor], record: Mapping[str, Any], store: ShardStore
) -> None:
    """Write the model so that ``directory`` is either the old one, absent, or whole.

    ``student`` gives class and config, ``weights`` the whole tensors, ``store`` the files of the
    tokenizer and the corpus. ``record`` goes to ``student.json``; absolute paths in it become names.
    """
    record = without_places(record)
    temporary = directory.with_name(f".writing-{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config = copy.deepcopy(student.config)
    for name, value in student.published(directory).items():
        setattr(config, name, value)
    whole = type(student)(config)
    whole.load_state_dict(dict(weights))
    with without_library_bars():
        whole.save_pretrained(temporary)
    store.copy_files("tokenizer", temporary)
    store.copy_files("corpus", temporary / "corpus")
    write_json_atomic(temporary / STUDENT_FILE, record)
    (temporary / "README.md").write_text(model_card(record, whole), encoding="utf-8")
    publish_folder(temporary, directory)


def without_places(value: Any) -> Any:
    """A record for others to read: absolute paths in it become the names at their ends."""
    if isinstance(value, Mapping):
        return {key: without_places(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(entry) for entry in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def model_card(record: Mapping[str, Any], student: Student) -> str:
    """What the student is, what it was trained on (``student.json``), how well, how to use it: Markdown."""
    run, store = record["run"]["config"], record["run"]["store"]
    name, teacher = str(run["student"]), str(store["teacher"].get("id", ""))
    scheme, _, rest = str(store["tokens"].get("corpus", "")).partition(":")
    metadata = ModelCardData(
        library_name="transformers",
        license="unknown",
        base_model=teacher if HUB_ID.fullmatch(teacher) else None,
        datasets=[rest.split(":")[0]] if scheme == "hf" else None,
        tags=["gdistill", "diffusion-language-model", name],
    )
    sampling = NEAREST.get(name, {}) if student.settings.noise.layers else {}
    return ModelCard.from_template(
        metadata,
        template_path=str(CARD),
        name=name,
        names=NAMES,
        student=student,
        frozen=without_places(student.config.frozen),
        store=store,
        batch=run["training"]["global_batch_size"],
        seed=run["seed"],
        step=record["step"],
        validation=record.get("validation"),
        cell=_cell,
        repr=repr,
        sampling=sampling if name in ("ar", "medusa", "drafter") else {"nfe": 16, **sampling},
        flags=("sampler", "nfe", "decision", "tau"),
    ).content


def _cell(value: Any) -> str:
    """A value for a table cell; nested mappings as ``key value`` lists."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(each)}" for key, each in value.items() if each != {}) or "-"
    return str(value).replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True)
class ModelFolder:
    """A student (in evaluation mode, on its device) and what lies beside its weights.

    Attributes:
        tokenizer: The corpus' tokenizer; None when the folder has none.
        record: Content of ``student.json``; empty for a model that was not trained here.
    """

    directory: Path
    student: Student
    tokenizer: Any = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Mapping[str, Any]:
        """What the model remembers of the store it was trained on."""
        return self.record.get("run", {}).get("store", {})

    @property
    def weights_sha256(self) -> str:
        return weights_sha256(self.directory)


def weights_sha256(directory: Path) -> str:
    """Hash of the weights: of the file, or of the files' hashes where there are several."""
    return "+".join(sha256_file(path) for path in sorted(directory.glob("*.safetensors")))


def open_model(path: Path, device: torch.device | str = "cpu", backbone: str | None = None) -> ModelFolder:
    """Read a student, from a model folder or a finished run's, with its tokenizer and its record.

    ``backbone`` says where the language model is that it stands on, if not where its config says.

    Raises:
        UsageError: For no student of ours, a broken one, another backbone or none, a damaged tokenizer.
        GdistillError: For a damaged record.
    """
    directory = find_model(path.expanduser())
    student = read_model(directory)
    student.complete(directory, backbone)
    student = student.to(device).eval()  # type: ignore[arg-type]
    model = ModelFolder(directory, student, load_tokenizer(directory), _read_record(directory))
    if student.is_conditioned and student.config.codec is None:
        # Models exported before the config named the codec have it in their record.
        student.config.codec = model.store.get("codec")
    _ = student.codec  # a bad one is found here, not in the first batch
    return model


def find_model(path: Path) -> Path:
    """``path``, or its ``model/`` folder when it is the output of a training run; a UsageError for no model."""
    for candidate in (path / "model", path):
        if is_model(candidate):
            return candidate
    got = "no config.json of a model"
    remedy = "give a run's --out folder or the model/ folder in it"
    if path.is_dir() and any((path / "checkpoints").glob("*")):
        got = "an unfinished training run"
        remedy = "finish the run with the same gdistill-train command"
    raise UsageError("no model there", where=path, got=got, remedy=remedy)


def is_model(directory: Path) -> bool:
    """True for a model's config.json; that of a training run names no model type."""
    try:
        return "model_type" in json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def read_model(directory: Path) -> Student:
    """The student in a folder, float32, on the CPU.

    Raises:
        UsageError: For no student of ours, or a weight that is missing, left over or of another
            shape: the library would put a random one in its place.
    """
    try:
        config = AutoConfig.from_pretrained(directory, **HERE)
        if not isinstance(config, StudentConfig):
            remedy = "train one with gdistill-train, or convert with gdistill-train import"
            got = config.model_type
            raise UsageError("not a gdistill student", where=directory, got=got, remedy=remedy)
        options = {**HERE, "dtype": torch.float32, "output_loading_info": True}
        with without_library_bars():
            student, found = AutoModel.from_pretrained(directory, **options)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError("the model cannot be loaded", where=directory, got=error) from error
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        listed = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items())
        remedy = "copy the folder again, or finish the run that writes it"
        raise UsageError("the weights do not fit", where=directory, got=listed, remedy=remedy)
    return student


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a model folder, or a finished run's; None where the student was trained without one.

    Raises:
        UsageError: When there is no such folder, or its tokenizer is damaged.
    """
    directory = Path(path).expanduser()
    directory = directory / "model" if is_model(directory / "model") else directory
    if not directory.is_dir():
        raise UsageError("no model there", where=path, got="no such folder")
    if not any((directory / f"{name}.json").is_file() for name in ("tokenizer", "tokenizer_config")):
        return None
    return find_tokenizer(directory)


def _read_record(directory: Path) -> dict[str, Any]:
    """Content of ``student.json``; of a model that was not trained here, nothing."""
    if not (file := directory / STUDENT_FILE).is_file():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        is_whole = isinstance(record.get("run", {}).get("store", {}), Mapping)
    except (ValueError, AttributeError):  # no JSON; a list or a text where an object stands
        is_whole = False
    if not is_whole:
        raise GdistillError("damaged record", where=file, expected="a JSON object with run.store")
    return record
