"""The priority of one thread, and of no other."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from common.process.priority import stand_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def test_a_thread_stands_back_by_so_many_levels_and_never_below_the_last() -> None:
    own, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def work() -> None:
        for _ in range(2):
            stand_back(7)
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        stand_back(40)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, own + 7), min(19, own + 14), 19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
