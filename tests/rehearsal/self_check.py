"""What the pretended device must count and refuse, checked in a process that has the guard."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.rehearsal import pretend_cuda as pretend


def kinds(work: Callable[[], object]) -> list[str]:
    pretend.WATCH.clear()
    work()
    return [kind for (kind, _), count in pretend.WATCH.syncs.items() for _ in range(count)]


def refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except RuntimeError as error:
        return "one device" in str(error)
    return False


def main() -> None:
    with pretend.pretend_cuda():
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


if __name__ == "__main__":
    main()
