"""Tensors that say cuda:0 and are computed on the CPU, so that device paths run where no GPU is.

    with pretend_cuda() as watch:
        ...                      # code that moves models and batches to "cuda"
    watch.syncs                  # Counter of (kind, "file:line"): where the host waited

An operation that mixes devices raises as on CUDA: only a 0-dim CPU tensor may join, and a CPU
index may index a device tensor (which copies it, and waits). Counted as waiting: ``item``,
``tolist``, copies between devices that are not ``non_blocking``, and whatever gives a result whose
size depends on data (``nonzero``, indexing by a mask, ``masked_select``, ``unique``,
``repeat_interleave``).

Streams order what is computed at once anyway: reading what another stream may still be writing
raises, and so does memory used by a stream that it was not recorded for, when the context ends.

Not pretended: pinned memory, the amount of memory, Triton, FlexAttention, NCCL, the kernels' own
support of dtypes. Needs ``guard.cpp`` preloaded: :mod:`tests.rehearsal.run` does that.
"""

from __future__ import annotations

import sys
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

from tests.rehearsal import streams

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


class Watch:
    """How often the host waited, by what for and where."""

    def __init__(self) -> None:
        self.syncs: Counter[tuple[str, str]] = Counter()

    def clear(self) -> None:
        self.syncs.clear()

    def wait(self, kind: str) -> None:
        """Note one wait of the host at the innermost line of the product on the stack."""
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(REPOSITORY) and path.relative_to(REPOSITORY).parts[0] in PRODUCT:
                self.syncs[kind, f"{path.relative_to(REPOSITORY)}:{frame.f_lineno}"] += 1
                return
            frame = frame.f_back  # type: ignore[assignment]
        self.syncs[kind, "autograd"] += 1


WATCH = Watch()
LEDGER = streams.Ledger()


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
        WATCH.wait("tolist")
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
        WATCH.wait("copy to the device")
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
            WATCH.wait("index from the host")
            return
    if strangers:
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        shapes = [f"{'cuda:0' if _is_pretended(x) else 'cpu'} {list(x.shape)}" for x in tensors]
        raise RuntimeError(f"expected all tensors on one device: {func} of {', '.join(shapes)}")


def _count_waits(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    if name in SIZE_DEPENDS_ON_DATA:
        WATCH.wait(name)
    elif name == "_local_scalar_dense":
        WATCH.wait("item")
    elif name == "repeat_interleave" and kwargs.get("output_size") is None:
        repeats = args[1] if len(args) > 1 else args[0]
        if isinstance(repeats, torch.Tensor):
            WATCH.wait(name)
    elif name in GATHERS | SCATTERS and not _is_masked_fill(name, args):
        masks = [i for i in args[1] if isinstance(i, torch.Tensor) and i.dtype in MASKS]
        if masks:
            WATCH.wait("indexing by a mask")
    elif name == "_to_copy":
        target = kwargs.get("device")
        if target is not None and not _is_device(target) and not kwargs.get("non_blocking"):
            WATCH.wait("copy to the host")
    elif name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
        to_device, from_device = map(_is_pretended, args[:2])
        if to_device != from_device:
            WATCH.wait("copy to the device" if to_device else "copy to the host")


def _is_masked_fill(name: str, args: Any) -> bool:
    """``x[mask] = one value``, which the device does without asking how many."""
    if name not in SCATTERS:
        return False
    masks = [index for index in args[1] if index is not None]
    return len(masks) == 1 and args[2].numel() == 1 and not (len(args) > 3 and args[3])


def _compute(
    func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[Any], wrap: bool
) -> Any:
    bare_args, bare_kwargs = tree_map(_bare, (args, kwargs))
    if _is_device(bare_kwargs.get("device")):
        bare_kwargs["device"] = torch.device("cpu")
    if bare_kwargs.get("pin_memory"):
        bare_kwargs["pin_memory"] = False
    if name == "_to_copy":
        bare_kwargs.pop("non_blocking", None)
    result = func(*bare_args, **bare_kwargs)
    if wrap or any(map(_is_pretended, given)):
        made = [x for x in tree_leaves(result) if wrap and isinstance(x, torch.Tensor)]
        LEDGER.run(name, [x.on_host for x in given if _is_pretended(x)], made)
    wrapped = {id(_bare(x)): x for x in given if isinstance(x, torch.Tensor)}

    def dress(value: Any) -> Any:
        if not _is_host_tensor(value):
            return value
        if id(value) in wrapped:
            return wrapped[id(value)]
        return PretendTensor(value) if wrap else value

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


def _record_stream(tensor: torch.Tensor, user: streams.Stream) -> None:
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
    answers = {
        "_lazy_init": None,
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "get_device_name": "a pretended GPU",
        "get_device_properties": PROPERTIES,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "mem_get_info": (60 << 30, 80 << 30),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
    }
    return [
        *((torch.cuda, name, lambda *_, said=said, **__: said) for name, said in answers.items()),
        (torch.cuda, "synchronize", lambda device=None: WATCH.wait("synchronize")),
        (torch.cuda, "Stream", streams.Stream),
        (torch.cuda, "current_stream", streams.current_stream),
        (torch.cuda, "stream", streams.stream),
        (streams.Stream, "waited", staticmethod(WATCH.wait)),
        (torch, "tensor", _tensor(torch.tensor)),
        (torch.Tensor, "record_stream", _record_stream),
        (torch.Tensor, "pin_memory", lambda self, *_: self),
    ]


@contextmanager
def pretend_cuda() -> Iterator[Watch]:
    """A process with one device cuda:0 while the context lasts; counts from zero."""
    torch._C._ensureCUDADeviceGuardSet()
    WATCH.clear()
    with ExitStack() as stack:
        for owner, name, value in _patches():
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(PlainNames())
        stack.enter_context(DispatchToHost())
        yield WATCH
    lent, LEDGER.lent = LEDGER.lent, {}
    if lent:
        raise RuntimeError(f"memory used by a stream it was not recorded for: {set(lent.values())}")
