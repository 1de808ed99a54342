"""The machine that figures belong to: its processor, and how fast its memory can be read."""

from __future__ import annotations

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

_READ_BYTES: Final = 256 << 20
_REPEATS: Final = 5


def machine() -> dict[str, str | int]:
    """Return the machine's properties that the figures depend on: processor, cores, Python and (if loaded) torch."""
    torch = sys.modules.get("torch")
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": str(torch.__version__) if torch is not None else "",
        "system": platform.system(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor()


def read_rate(threads: int, size: int = _READ_BYTES) -> float:
    """Return the bytes a second at which so many threads read memory that no cache holds: the fastest of a few sums."""
    parts = [np.ones(max(1, size // 8 // threads), dtype=np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        fastest = min(_seconds(pool, parts) for _ in range(_REPEATS))
    return sum(each.nbytes for each in parts) / fastest


def _seconds(pool: ThreadPoolExecutor, parts: list[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> float:
    began = time.perf_counter()
    list(pool.map(np.add.reduce, parts))  # numpy sums without the GIL
    return time.perf_counter() - began
