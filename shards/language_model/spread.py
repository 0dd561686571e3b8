"""A model that is too large for one device, spread over several by transformers and Accelerate.

Two ways. ``device_map`` puts whole layers on different devices, in one process; a row passes them
one after the other. ``tensor_parallel`` cuts every layer over the processes that ``torchrun``
started, one GPU each; all of them compute every row together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shards.errors import UsageError, first_line
from shards.language_model.forward import resolve_device

AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Spread:
    """Where the parts of a model lie.

    Attributes:
        device_map: One of ``auto``, ``balanced``, ``balanced_low_0``, ``sequential``, a device, or
            module name -> device ("" names the whole model); None for one device.
        tensor_parallel: Over how many processes layers are cut; 1 for none.

    Raises:
        UsageError: For a device that is not there, or both at once.
    """

    device_map: str | Mapping[str, Any] | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.device_map is None:
            return
        if self.tensor_parallel > 1:
            raise UsageError(
                "a device map and tensor parallelism exclude each other",
                where="device_map",
                got=self.device_map,
                remedy="leave one of the two out",
            )
        places = self.device_map
        named = [places] if isinstance(places, str) else list(places.values())
        if not named:
            raise self._bad("an empty map")
        for place in named:
            self._check(place, whole=isinstance(places, str))

    def _check(self, place: Any, whole: bool) -> None:
        if whole and place in AUTOMATIC:
            return
        if isinstance(place, bool) or not isinstance(place, str | int):
            raise self._bad(place)
        try:
            resolve_device(f"cuda:{place}" if isinstance(place, int) else place)
        except UsageError as error:
            raise self._bad(f"{place!r} ({error.what})") from error

    def _bad(self, got: object) -> UsageError:
        return UsageError(
            "no such place for a model",
            where="device_map",
            got=got,
            expected=f"{', '.join(AUTOMATIC)}, a device that is here, or module name -> device",
        )

    def load_options(self) -> dict[str, Any]:
        """What ``from_pretrained`` is told."""
        if self.tensor_parallel > 1:
            return {"distributed_config": _tensor_parallel_config(self.tensor_parallel)}
        if isinstance(self.device_map, Mapping):
            return {"device_map": dict(self.device_map)}
        return {} if self.device_map is None else {"device_map": self.device_map}

    def input_device(self, network: Any, role: str) -> torch.device:
        """Where token ids go: the device of the embedding.

        Raises:
            UsageError: If the output layer was left in no device's memory.
        """
        head = network.get_output_embeddings()
        weight = getattr(head, "weight", None)
        if weight is not None and weight.is_meta:
            raise UsageError(
                f"the {role}'s output layer is kept outside of every device",
                where="device_map",
                got=self.device_map,
                remedy="name a device for it, or use a machine with more memory",
            )
        embedding = network.get_input_embeddings().weight
        if embedding.is_meta:  # Accelerate brings it to the first device for every pass
            return torch.device(getattr(network, "device", "cpu"))
        return embedding.device

    def refused(self, role: str, error: BaseException) -> UsageError:
        """What transformers says against this spread, as one line."""
        parallel = self.tensor_parallel > 1
        return UsageError(
            f"the {role} cannot be spread like this",
            where="tensor_parallel" if parallel else "device_map",
            got=f"{self.tensor_parallel} processes" if parallel else self.device_map,
            remedy=first_line(error),
        )


ONE_DEVICE = Spread()


def _tensor_parallel_config(size: int) -> Any:
    try:
        from transformers.distributed import DistributedConfig

        return DistributedConfig(tp_size=size, tp_plan="auto")
    except (ImportError, TypeError) as error:
        raise UsageError(
            "this transformers cannot cut a model over processes",
            where="tensor_parallel",
            got=first_line(error),
            remedy="upgrade transformers, or use device_map",
        ) from error
