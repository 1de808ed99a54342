"""The peak rates of this machine, measured on request: matrix products, and reading of memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

_ORDER = 4096
_READ_BYTES = 1 << 29
_REPEATS = 8


def fastest_in_turns(*works: Callable[[], object], repeats: int = _REPEATS) -> list[float]:
    """Return the seconds of the fastest run of each function; they take turns, after one warm-up run each."""
    best = [float("inf")] * len(works)
    for turn in range(repeats + 1):
        for place, work in enumerate(works):
            began = time.perf_counter()
            work()
            if turn:
                best[place] = min(best[place], time.perf_counter() - began)
    return best


def matmul_rate(dtype: torch.dtype, threads: int, order: int = _ORDER) -> float:
    """Return FLOP/s of the product of two square matrices, by the faster of torch's ways."""
    torch.set_num_threads(threads)
    left, right = (torch.randn(order, order).to(dtype) for _ in range(2))
    with torch.inference_mode():
        seconds = min(fastest_in_turns(lambda: left @ right, lambda: functional.linear(left, right)))
    return 2.0 * order**3 / seconds


def read_rate(threads: int, size: int = _READ_BYTES) -> float:
    """Return bytes a second of a sum over `size` bytes of memory that no cache holds."""
    torch.set_num_threads(threads)
    numbers = torch.ones(size // 4, dtype=torch.float32)
    return size / fastest_in_turns(numbers.sum)[0]
