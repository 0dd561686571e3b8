"""What students on a frozen backbone share: how they are made, kept and found their backbone."""

from __future__ import annotations

import os
from abc import ABC
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from shards.base import UsageError
from shards.language_model import looks_local
from shards.store import Manifest
from trainer.students.base import Student
from trainer.students.configuration import DIFFUSION_SETTINGS, StudentSettings
from trainer.students.on_backbone.backbone import FrozenBackbone, load_backbone, require_backbone


class BackboneStudent(Student, ABC):
    """Base of the students that a frozen language model carries.

    A subclass builds what it trains in ``_build`` from ``self.config`` alone (``config.frozen``
    holds the backbone's record) and may hook into the network in ``attach``. The backbone is no
    submodule: optimiser, moving average, checkpoint and export never meet it.
    """

    foreign_settings: ClassVar[tuple[str, ...]] = DIFFUSION_SETTINGS
    _attached: FrozenBackbone | None = None

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> BackboneStudent:
        """See :class:`Student`; the backbone must be the one that scored the shards.

        Raises:
            UsageError: Without a backbone, or for another one than the shards' teacher.
        """
        if settings.backbone is None:
            raise UsageError(
                "the student stands on a language model",
                where="model.backbone",
                got="none",
                remedy="--backbone FOLDER or a hub id: the teacher of the shards",
            )
        backbone = load_backbone(settings.backbone, manifest.vocab_size, settings.backbone_dtype)
        teacher = manifest.teacher
        remedy = "self-distillation: give the teacher of the shards, or extract from this backbone"
        require_backbone(backbone, teacher.get("weights_sha256"), teacher.get("id"), remedy)
        config = cls.configure(settings, manifest)
        config.frozen = cls.describe(backbone)
        student = cls(config)
        student.attach(backbone)
        return student

    @classmethod
    def describe(cls, backbone: FrozenBackbone) -> dict[str, Any]:
        """What the config keeps of the backbone: enough to build what is trained without it."""
        return backbone.record

    def attach(self, backbone: FrozenBackbone) -> None:
        """Stand on this backbone.

        Raises:
            UsageError: If it is not the one the student was trained on, naming both hashes.
        """
        frozen = self.config.frozen or {}
        remedy = "give the backbone that the student was trained on"
        require_backbone(backbone, frozen.get("weights_sha256"), frozen.get("name"), remedy)
        self._attached = backbone

    @property
    def language_model(self) -> FrozenBackbone:
        """The backbone, on the student's device."""
        if self._attached is None:
            self.complete(Path(self.name_or_path or "."))
        assert self._attached is not None
        return self._attached.to(self.device)

    def complete(self, directory: Path, backbone: str | None = None) -> None:
        """See :class:`Student`; looks where the config says, as seen from the model's folder."""
        settings = self.settings
        place = backbone or settings.backbone or ""
        if backbone is None and (directory / place / "config.json").is_file():
            place = str(directory / place)
        try:
            found = load_backbone(place, self.config.vocab_size, settings.backbone_dtype)
        except UsageError as error:
            frozen = self.config.frozen or {}
            known = f"{frozen.get('name')}, weights_sha256 {frozen.get('weights_sha256')}"
            raise UsageError(
                "the backbone of the student cannot be loaded",
                where=place,
                got=error.what if error.got in (None, "") else f"{error.what}: {error.got}",
                expected=known,
                remedy="--backbone FOLDER or hub id",
            ) from error
        self.attach(found)

    def published(self, directory: Path) -> dict[str, Any]:
        """See :class:`Student`; a local backbone is named as seen from the model's folder."""
        place = self.settings.backbone or ""
        if not (Path(place).expanduser().exists() or looks_local(place)):
            return {}
        target = Path(place).expanduser().resolve()
        return {"backbone": os.path.relpath(target, directory.resolve())}

    @property
    def sees_own_noise(self) -> bool:
        """Whether a proposal is told the noise of its own token, which decides it."""
        return self.is_conditioned and self.settings.own_noise == "seen"

    @property
    def frozen_weights(self) -> Iterable[Tensor]:
        """See :class:`Student`."""
        return self.language_model.network.parameters()

    @property
    def flops_per_row(self) -> float:
        """2 per frozen weight and token, which has no backward pass, and 6 per trained one."""
        frozen = (self.config.frozen or {}).get("num_parameters", 0)
        return (2.0 * frozen + 6.0 * self.num_parameters()) * self.num_read_tokens

    @property
    def flops_per_masked(self) -> float:
        """The frozen output layer, forward and for the gradient of what goes in."""
        width = (self.config.frozen or {}).get("hidden_size", 0)
        return 4.0 * width * self.config.vocab_size
