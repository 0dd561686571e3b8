"""The model card: what the student is, what it was trained on, how well, how to use it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from trainer.students.registry import Student

NAMES = {
    "mdlm": "MDLM",
    "bd3lm": "BD3-LM",
    "ar": "Autoregressive baseline",
    "medusa": "Medusa",
    "drafter": "Drafter",
}
NOISES = {"none": "", "gumbel": " + Gumbel", "uniform": " + one uniform per token"}

FOLDERS = re.compile(r"(?<![\w.:/])(?:file://)?~?/(?:[^/\s]+/)*|(?<=:)~?/(?!/)(?:[^/\s]+/)*")
"""The folders of an absolute path, bare or behind a scheme's colon; a URL keeps its places."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

TEMPLATE = """\
---
{metadata}
---
# {title}

{sentence}

| | |
|---|---|
| parameters | {parameters:,} |
| row length | {row_length} tokens |
| vocabulary | {vocab_size} and the mask, id {mask_id} |
| corpus | {corpus} |
| teacher | {teacher} |
| codec | {codec} |
| training | {steps:,} steps of {batch} rows, seed {seed} |

## Scores

{scores}

## Use

```sh
gdistill-sample PATH-TO-THIS-FOLDER --num 16 --out samples/
gdistill-eval samples/
```

```python
import trainer

student = trainer.load_student("PATH-TO-THIS-FOLDER")
rows = student.generate(num_samples=4, seed=0)
```

The model's code is that of gdistill, which must be installed; there is none in this folder. For
transformers' own classes one import comes first, or they say that they do not know the model type
`{model_type}`:

```python
import trainer.loading  # registers the model type; AutoModel and {auto_class} then load it
from transformers import AutoModel

student = AutoModel.from_pretrained("PATH-TO-THIS-FOLDER")
```

`student.json` holds the full
configuration and the identity of the shards. The license is not chosen: whoever publishes the model
sets it, with regard to those of the teacher and the corpus.
"""


def without_places(value: Any) -> Any:
    """A record for others to read: absolute paths in it become the names at their ends."""
    if isinstance(value, Mapping):
        return {key: without_places(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(entry) for entry in value]
    return FOLDERS.sub("", value) if isinstance(value, str) else value


def _metadata(name: str, store: Mapping[str, Any]) -> str:
    """The front matter that the Hugging Face hub reads, as YAML."""
    teacher, corpus = str(store["teacher"].get("id", "")), str(store["tokens"].get("corpus", ""))
    scheme, _, rest = corpus.partition(":")
    data = ModelCardData(
        library_name="transformers",
        license="unknown",
        base_model=teacher if HUB_ID.fullmatch(teacher) else None,
        datasets=[rest.split(":")[0]] if scheme == "hf" else None,
        tags=["gdistill", "diffusion-language-model", name],
    )
    return data.to_yaml()


def model_card(record: Mapping[str, Any], student: Student) -> str:
    """Markdown with the front matter that the Hugging Face hub reads.

    Args:
        record: Content of ``student.json``.
        student: The model.
    """
    run, store = record["run"]["config"], record["run"]["store"]
    name = str(run["student"])
    conditioned = student.is_conditioned
    title = NAMES.get(name, name) + NOISES[student.settings.conditioning]
    return TEMPLATE.format(
        metadata=_metadata(name, store),
        title=title,
        sentence=_sentence(conditioned)
        + _backbone(student.config.frozen)
        + _decoder(student.settings.language_model),
        model_type=student.config.model_type,
        auto_class="AutoModelForCausalLM" if name == "ar" else "AutoModelForMaskedLM",
        parameters=student.num_parameters(),
        row_length=store["row_length"],
        vocab_size=store["vocab_size"],
        mask_id=store["mask_id"],
        corpus=_describe(store["tokens"].get("corpus", "not recorded")),
        teacher=_describe(store["teacher"]),
        codec=_describe(store["codec"]),
        steps=record["step"],
        batch=run["training"]["global_batch_size"],
        seed=run["seed"],
        scores=_scores(record.get("validation")),
    )


def _sentence(conditioned: bool) -> str:
    if not conditioned:
        return "A student trained on token rows, without the teacher's noise, as a baseline."
    return (
        "A parallel decoder trained by Gumbel distillation: masked positions see the posterior "
        "Gumbel noise under which the autoregressive teacher produces the text."
    )


def _backbone(frozen: Mapping[str, Any] | None) -> str:
    """Which language model a student needs that stands on one."""
    if frozen is None:
        return ""
    name = without_places(frozen["name"])
    return (
        f" It stands on the language model {name}, which is not in this folder and which it cannot "
        f"do without: the one of weights_sha256 `{frozen['weights_sha256']}`; another is refused."
    )


def _decoder(decoder: Mapping[str, Any] | None) -> str:
    """Whose layers a student has that is no DiT."""
    if decoder is None:
        return ""
    return f" Its layers are those of a {decoder['model_type']} language model of transformers."


def _describe(value: Any) -> str:
    """A value for a table cell; nested mappings as ``key value`` lists."""
    if isinstance(value, Mapping):
        parts = [f"{key} {_describe(entry)}" for key, entry in value.items() if entry not in ({},)]
        return ", ".join(parts) or "-"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _scores(validation: Mapping[str, Any] | None) -> str:
    if not validation:
        return "No validation split."
    kind = "given the noise" if validation["conditional"] else "bound"
    return (
        f"Validation, averaged weights: {validation['nll_nats']:.4f} nats per token ({kind}), "
        f"perplexity {validation['perplexity']:.3f}, {validation['num_tokens']:,} tokens."
    )
