"""What the pretended device must count and refuse, checked in a process that has the guard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from tests.rehearsal.pretend_cuda import WATCH, pretend_cuda


def kinds(work: Callable[[], object]) -> list[str]:
    WATCH.clear()
    work()
    return [kind for (kind, _), count in WATCH.syncs.items() for _ in range(count)]


def refused(work: Callable[[], object], why: str = "one device") -> bool:
    try:
        work()
    except RuntimeError as error:
        return why in str(error)
    return False


def early(work: Callable[[], object]) -> bool:
    return refused(work, "another stream")


def self_check() -> Counter[tuple[str, str]]:
    with pretend_cuda():
        x = torch.arange(6.0, device="cuda").view(2, 3)
        host, mask = torch.ones(2, 3), x > 2
        assert x.is_cuda and x.device == torch.device("cuda:0") and (x + 1).is_cuda
        assert refused(lambda: x + host) and not refused(lambda: x + torch.tensor(2.0))
        assert kinds(lambda: x.sum().item()) == ["item"]
        assert kinds(lambda: x.tolist()) == ["tolist"]
        assert kinds(lambda: x.cpu()) == ["copy to the host"]
        assert kinds(lambda: x.to("cpu", non_blocking=True)) == []
        assert kinds(lambda: host.to("cuda")) == ["copy to the device"]
        assert kinds(lambda: host.to("cuda", non_blocking=True)) == []
        assert kinds(lambda: mask.nonzero()) == ["nonzero"]
        assert kinds(lambda: x[mask]) == ["indexing by a mask"]
        assert kinds(lambda: x.masked_fill(mask, 0.0)) == []
        assert kinds(lambda: x[torch.tensor([0])]) == ["index from the host"]
        assert kinds(lambda: x.softmax(-1).argmax(-1)) == []
        with torch.inference_mode():
            assert kinds(lambda: torch.where(mask, x, 0.0).cumsum(0)) == []
        weight = torch.ones(3, device="cuda", requires_grad=True)
        (x * weight).sum().backward()
        assert weight.grad is not None and weight.grad.is_cuda
        assert weight.grad.tolist() == [3.0, 5.0, 7.0]
    assert not torch.zeros(1).is_cuda
    with pretend_cuda():  # reading too early, and memory that would be given away too early
        side, use = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            x = torch.ones(5, 3).to("cuda", non_blocking=True)
            copied = side.record_event()
            later = x + 1
        assert early(lambda: x.view(-1) * 2)
        use.wait_event(copied)
        assert not early(lambda: x.view(-1) * 2) and early(lambda: later * 2)
        use.wait_stream(side)
        assert not early(lambda: later * 2)
        x.record_stream(use)
        later.record_stream(use)
        x.add_(1)
        with torch.cuda.stream(side):
            assert early(lambda: x * 2)

    def lent() -> None:
        with pretend_cuda():
            y = torch.zeros(7, device="cuda")
            side.wait_stream(use)
            with torch.cuda.stream(side):
                y.sum()

    assert refused(lent, "not recorded"), "memory was lent without a record"
    return Counter()
