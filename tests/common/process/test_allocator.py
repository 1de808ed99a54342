"""How many heaps the C library keeps for the threads of a process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

THREADS = """
import ctypes, sys, threading
from common.process.garbage import one_arena

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fopen.restype = libc.fdopen.restype = ctypes.c_void_p
if sys.argv[1] == "one":
    one_arena()
together = threading.Barrier(8)

def allocate():
    together.wait()
    libc.malloc(5000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
out = libc.fdopen(1, b"w")
libc.malloc_info(0, ctypes.c_void_p(out))
libc.fflush(ctypes.c_void_p(out))
"""


def heaps(which: str, **variables: str) -> int:
    """Return the heaps of a process in which eight threads have allocated at the same time."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"} | variables
    asked = [sys.executable, "-c", THREADS, which]
    found = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return found.stdout.count("<heap ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps for threads are glibc's")
def test_all_threads_of_a_service_share_one_heap() -> None:
    assert heaps("many") > 1
    assert heaps("one") == 1


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps for threads are glibc's")
def test_an_operators_number_of_heaps_counts() -> None:
    assert heaps("one", MALLOC_ARENA_MAX="3") == 3
