"""The memory of host frames gets its pages ahead of its use, and keeps what was written meanwhile."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import resource
import sys
import threading
import time

import pytest
import torch

from gpuworker.memory import warming
from gpuworker.memory.devices import unwritten
from gpuworker.memory.warming import pieces, warm_memory

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")


def test_pieces_are_whole_pages_and_end_where_huge_pages_do() -> None:
    assert pieces(6 * MIB, 5 * MIB) == [(6 * MIB, 2 * MIB), (8 * MIB, 2 * MIB), (10 * MIB, MIB)]
    assert pieces(5 * MIB + 1, 2 * MIB) == [(5 * MIB + PAGE, MIB - PAGE), (6 * MIB, MIB)]
    assert pieces(5 * MIB + 1, PAGE) == []
    assert pieces(5 * MIB, 0) == []


@LINUX
def test_pages_are_there_afterwards_and_hold_what_was_written() -> None:
    memory = unwritten((4096, 4096))
    memory[7].fill_(3)
    thread = warm_memory(memory)
    assert thread is not None
    thread.join(60.0)
    if not _populates():
        pytest.skip("this kernel brings no pages ahead")
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[:, ::512] += 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 64, "of 4096 pages"
    assert int(memory.sum()) == 4096 * 3 + 4096 * 8


@LINUX
def test_the_thread_stands_back() -> None:
    found: list[int] = []

    def populate(address: int, size: int) -> int:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))
        return errno.EINVAL

    memory = unwritten((4096,))
    thread = threading.Thread(target=warming._bring, args=(memory, populate))
    thread.start()
    thread.join(60.0)
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, 0) != 19


@pytest.mark.parametrize(("failed", "lines"), [(errno.EINVAL, 0), (errno.ENOMEM, 1)])
def test_what_the_kernel_refuses_comes_with_its_first_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failed: int, lines: int
) -> None:
    monkeypatch.setattr(warming, "stand_back", lambda _: None)
    calls: list[int] = []

    def populate(address: int, size: int) -> int:
        calls.append(size)
        return failed

    with caplog.at_level(logging.WARNING):
        warming._bring(unwritten((8192, 4096)), populate)
    assert (len(calls), len(caplog.messages)) == (1, lines)


def test_it_takes_half_of_the_time_and_tries_again_what_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "stand_back", lambda _: None)
    ticks = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    answers, slept = iter([0, errno.EINTR, 0]), list[float]()
    warming._bring(_two_pieces(), lambda *_: next(answers), slept.append)
    assert slept == [1.0, 1.0, 2.0]


def test_nothing_is_warmed_where_there_is_nothing_or_no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_memory(torch.zeros((0, 4096), dtype=torch.uint8)) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert warm_memory(unwritten((1, 4096))) is None


def _two_pieces() -> torch.Tensor:
    memory = unwritten((4 * MIB,))
    border = -memory.data_ptr() % (2 * MIB) or 2 * MIB
    return memory[border - PAGE : border + PAGE]


def _populates() -> bool:
    try:
        mmap.mmap(-1, PAGE).madvise(23)
    except OSError:
        return False
    return True
