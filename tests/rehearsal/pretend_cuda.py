"""Tensors that say cuda:0 and are computed on the CPU, so that device paths run where no GPU is.

    with pretend_cuda():
        ...                      # code that moves models and batches to "cuda"
    WAITS                        # Counter of (kind, "file:line"): where the host waited

An operation that mixes devices raises as on CUDA: only a 0-dim CPU tensor may join, and a CPU
index may index a device tensor (which copies it, and waits). Counted as waiting: ``item``,
``tolist``, copies between devices that are not ``non_blocking``, and whatever gives a result whose
size depends on data (``nonzero``, indexing by a mask, ``masked_select``, ``unique``,
``repeat_interleave``).

Every operation is computed at once, so nothing is ever late here. Of streams the order is kept that
a GPU would be told of: an operation may read what its own stream wrote, and of another stream what
it has waited for, else it raises; memory that one stream took and another uses must be recorded for
the other, or it would be given away while that one still reads: that raises when the context ends.

Not pretended: pinned memory, the amount of memory, Triton, FlexAttention, NCCL, the kernels' own
support of dtypes. Needs ``guard.cpp`` preloaded: :mod:`tests.rehearsal.run` does that.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = ("shards", "pipeline", "trainer", "evaluation")
CUDA = torch.device("cuda", 0)
SIZE_DEPENDS_ON_DATA = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
}  # fmt: skip
MASKS = (torch.bool, torch.uint8)
GATHERS = {"index", "_unsafe_index"}
SCATTERS = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}
PROPERTIES = SimpleNamespace(name="a pretended GPU", total_memory=80 << 30, L2_cache_size=50 << 20)
COMPOSITE = "CompositeImplicitAutograd"
CROSSES_DEVICES = {"_to_copy", "copy_", "_local_scalar_dense"}


WAITS: Counter[tuple[str, str]] = Counter()


def wait(kind: str) -> None:
    """Note one wait of the host at the innermost line of the product on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and path.relative_to(REPOSITORY).parts[0] in PRODUCT:
            WAITS[kind, f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back  # type: ignore[assignment]
    WAITS[kind, "autograd"] += 1


class Stream:
    """Operations in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: dict[int, int] = {id(self): 0}

    def record_event(self, *_: Any) -> dict[int, int]:
        """All that it has done and seen at this moment."""
        return dict(self.seen)

    def wait_event(self, event: dict[int, int]) -> None:
        for stream, time in event.items():
            self.seen[stream] = max(time, self.seen.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        wait("stream")


DEFAULT = Stream()
_local = threading.local()


def current_stream(*_: Any) -> Stream:
    return getattr(_local, "stream", DEFAULT)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), chosen
    try:
        yield
    finally:
        _local.stream = before


class Ledger:
    """Which stream took and last wrote each storage, and for whom it is kept."""

    def __init__(self) -> None:
        self.owners: dict[int, Stream] = {}
        self.written: dict[int, tuple[Stream, int]] = {}
        self.recorded: set[tuple[int, int]] = set()
        self.lent: dict[tuple[int, int], str] = {}

    def run(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """An operation on the current stream.

        Raises:
            RuntimeError: If it reads what another stream may still be writing.
        """
        now = current_stream()
        now.seen[id(now)] += 1
        read = {_place(tensor) for tensor in inputs}
        for place in read - {0}:
            writer, time = self.written.get(place, (now, 0))
            if writer is not now and now.seen.get(id(writer), 0) < time:
                raise RuntimeError(f"{name} reads what another stream may still be writing")
            if self.owners.get(place, now) is not now and (place, id(now)) not in self.recorded:
                self.lent[place, id(now)] = name
        in_place = name.endswith("_")
        for place in {_place(tensor) for tensor in outputs} - {0}:
            if place not in read:
                self.owners[place] = now
                self.recorded = {kept for kept in self.recorded if kept[0] != place}
            if place not in read or in_place:
                self.written[place] = now, now.seen[id(now)]

    def record(self, tensor: torch.Tensor, user: Stream) -> None:
        """``tensor.record_stream(user)``."""
        key = _place(tensor), id(user)
        self.recorded.add(key)
        self.lent.pop(key, None)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LEDGER = Ledger()


class PretendTensor(torch.Tensor):
    """A CPU tensor behind a wrapper that says cuda:0."""

    on_host: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, real: torch.Tensor) -> PretendTensor:
        same = {name: getattr(real, name) for name in ("dtype", "layout", "requires_grad")}
        place = {"strides": real.stride(), "storage_offset": real.storage_offset(), "device": CUDA}
        made = torch.Tensor._make_wrapper_subclass(cls, real.size(), **same, **place)
        made.on_host = real  # type: ignore[attr-defined]
        return made  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["on_host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], *_: Any) -> PretendTensor:
        return PretendTensor(inner["on_host"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PretendTensor({self.on_host!r})"

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        wait("tolist")
        return self.on_host.tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a cuda:0 tensor to numpy; copy it to the host first")

    def __array__(self, *_: Any) -> Any:  # type: ignore[override]
        return self.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _is_device(value: Any) -> bool:
    return value is not None and torch.device(value).type == "cuda"


def _is_pretended(value: Any) -> bool:
    return isinstance(value, PretendTensor)


def _is_host_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _is_pretended(value)


def _bare(value: Any) -> Any:
    return value.on_host if _is_pretended(value) else value


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One ATen operation: checked, counted, computed on the host, wrapped again."""
    is_overload = isinstance(func, torch._ops.OpOverload)
    if is_overload and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), COMPOSITE):
        with DispatchToHost():  # under inference mode these arrive whole
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    name = func._schema.name.split("::")[1]
    given = tree_leaves((args, kwargs))
    target, on_device = kwargs.get("device"), any(map(_is_pretended, given))
    if on_device:
        _refuse_mixed(name, func, args, given)
        _count_waits(name, args, kwargs)
    elif name == "_to_copy" and _is_device(target) and not kwargs.get("non_blocking"):
        wait("copy to the device")
    lands_on_device = _is_device(target) if target is not None else on_device
    if name == "copy_":
        lands_on_device = _is_pretended(args[0])
    return _compute(func, name, args, kwargs, given, lands_on_device)


def _refuse_mixed(name: str, func: Any, args: Any, given: list[Any]) -> None:
    if name in CROSSES_DEVICES:
        return
    strangers = [x for x in given if _is_host_tensor(x) and x.dim() > 0]
    if strangers and name in GATHERS | SCATTERS and _is_pretended(args[0]):
        indices = [x for x in args[1] if x is not None]
        if all(any(x is index for index in indices) for x in strangers):
            wait("index from the host")
            return
    if strangers:
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        shapes = [f"{'cuda:0' if _is_pretended(x) else 'cpu'} {list(x.shape)}" for x in tensors]
        raise RuntimeError(f"expected all tensors on one device: {func} of {', '.join(shapes)}")


def _count_waits(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    if name in SIZE_DEPENDS_ON_DATA:
        wait(name)
    elif name == "_local_scalar_dense":
        wait("item")
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        if isinstance(args[1] if len(args) > 1 else args[0], torch.Tensor):
            wait(name)
    elif name in GATHERS | SCATTERS and not _is_masked_fill(name, args):
        if any(isinstance(i, torch.Tensor) and i.dtype in MASKS for i in args[1]):
            wait("indexing by a mask")
    elif name == "_to_copy":
        target = kwargs.get("device")
        if target is not None and not _is_device(target) and not kwargs.get("non_blocking"):
            wait("copy to the host")
    elif name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
        to_device, from_device = map(_is_pretended, args[:2])
        if to_device != from_device:
            wait("copy to the device" if to_device else "copy to the host")


def _is_masked_fill(name: str, args: Any) -> bool:
    """``x[mask] = one value``, which the device does without asking how many."""
    if name not in SCATTERS:
        return False
    masks = [index for index in args[1] if index is not None]
    return len(masks) == 1 and args[2].numel() == 1 and not (len(args) > 3 and args[3])


def _compute(func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Any], wrap: bool) -> Any:
    bare_args, bare_kwargs = tree_map(_bare, (args, kwargs))
    bare_kwargs.pop("pin_memory", None)
    if _is_device(bare_kwargs.get("device")):
        bare_kwargs["device"] = torch.device("cpu")
    if name == "_to_copy":
        bare_kwargs.pop("non_blocking", None)
    result = func(*bare_args, **bare_kwargs)
    if wrap or any(map(_is_pretended, given)):
        made = [x for x in tree_leaves(result) if wrap and isinstance(x, torch.Tensor)]
        LEDGER.run(name, [x.on_host for x in given if _is_pretended(x)], made)
    wrapped = {id(_bare(x)): x for x in given if isinstance(x, torch.Tensor)}

    def dress(value: Any) -> Any:
        if _is_host_tensor(value) and id(value) in wrapped:
            return wrapped[id(value)]
        return PretendTensor(value) if wrap and _is_host_tensor(value) else value

    dressed = tree_map(dress, result)
    if wrap and any(map(_is_pretended, given)) and not torch.is_inference_mode_enabled():
        return return_and_correct_aliasing(func, args, kwargs, dressed)
    return dressed


class DispatchToHost(TorchDispatchMode):
    """Sees operations without pretended arguments too: factories on "cuda", uploads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class PlainNames(TorchFunctionMode):
    """``cuda`` is cuda:0; pinning and streams do nothing; Python lists go by the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_numbered, (tuple(args), kwargs or {}))
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.record_stream:
            return _record_stream(*args)
        if func is torch.Tensor.tolist and _is_pretended(args[0]):
            return args[0].tolist()
        uploads = func is torch.as_tensor and _is_device(kwargs.get("device"))
        if uploads and not isinstance(args[0], torch.Tensor):
            return func(*args, **{**kwargs, "device": "cpu"}).to(CUDA)
        return func(*args, **kwargs)


def _numbered(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda" and value.index is None:
        return CUDA
    return CUDA if isinstance(value, str) and value == "cuda" else value


def _record_stream(tensor: torch.Tensor, user: Stream) -> None:
    if _is_pretended(tensor):
        LEDGER.record(_bare(tensor), user)


def _tensor(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def tensor(data: Any, **options: Any) -> torch.Tensor:
        """``torch.tensor`` onto the device on autograd's threads, which see no function mode."""
        if _is_device(options.get("device")) and not isinstance(data, torch.Tensor):
            return made(data, **{**options, "device": "cpu"}).to(CUDA)
        return made(data, **options)

    return tensor


def _patches() -> list[tuple[Any, str, Any]]:
    silent = ("_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats")
    empty = ("current_device", "memory_allocated", "max_memory_allocated")
    answers = dict.fromkeys(silent) | dict.fromkeys(empty, 0)
    answers |= {"is_available": True, "device_count": 1, "is_bf16_supported": True}
    answers |= {"get_device_name": PROPERTIES.name, "get_device_properties": PROPERTIES}
    answers |= {"get_device_capability": (9, 0), "mem_get_info": (60 << 30, 80 << 30)}
    return [
        *((torch.cuda, name, lambda *_, said=said, **__: said) for name, said in answers.items()),
        (torch.cuda, "synchronize", lambda device=None: wait("synchronize")),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "stream", stream),
        (torch, "tensor", _tensor(torch.tensor)),
        (torch.Tensor, "record_stream", _record_stream),
        (torch.Tensor, "pin_memory", lambda self, *_: self),
    ]


@contextmanager
def pretend_cuda() -> Iterator[None]:
    """A process with one device cuda:0 while the context lasts; counts from zero."""
    torch._C._ensureCUDADeviceGuardSet()
    WAITS.clear()
    # At its first use torch's device context keeps a list of all that makes tensors. It must not
    # find our ``torch.tensor``: transformers would not see its meta device, and would load a model
    # with rotary frequencies that nobody wrote.
    with torch.device("meta"):
        assert torch.tensor([]).is_meta
    with ExitStack() as stack:
        for owner, name, value in _patches():
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(PlainNames())
        stack.enter_context(DispatchToHost())
        yield
    lent, LEDGER.lent = LEDGER.lent, {}
    if lent:
        raise RuntimeError(f"memory used by a stream it was not recorded for: {set(lent.values())}")
